"""The layers of sw.nn on two ranks, over gloo, give the values and the gradients of one process."""

from __future__ import annotations

import concurrent.futures
import datetime
import multiprocessing

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import stoneware as sw

WIDTH, HEAD, BATCH, LENGTH = 256, 64, 4, 16

BF16_ERROR = 2**-8

SECONDS = 60
"""Until a rank that waits for another is an error."""

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

RECIPES = ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]


class Block(nn.Module):
    """Attention and an MLP; each rank of a tensor parallel plan has some of the heads."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))


def model_of(recipe: str, dtype: torch.dtype = torch.bfloat16, **options: bool) -> Block:
    """The same model on each rank, and in each call."""
    torch.manual_seed(0)
    model = Block(**options).bfloat16()  # so that copies of each dtype have the same values
    sw.nn.convert(model, recipe)
    return model.to(dtype)


def data(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the gradient of y."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator).bfloat16().to(dtype)
    return x, dy


def trained(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, dx and the gradient of each parameter, which are then forgotten."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name.removeprefix("_orig_mod.").removeprefix("module.")] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
        parameter.grad = None
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def join(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timeout)


@pytest.fixture(scope="module")
def on_both(tmp_path_factory):
    """on_both(case, *arguments) runs case(*arguments) on two ranks, and raises what it raises."""
    spawn = multiprocessing.get_context("spawn")
    file = str(tmp_path_factory.mktemp("gloo") / "store")
    ranks = [
        concurrent.futures.ProcessPoolExecutor(1, spawn, initializer=join, initargs=(rank, file)) for rank in range(2)
    ]

    def run(case, *arguments):
        for future in [rank.submit(case, *arguments) for rank in ranks]:
            future.result(2 * SECONDS)

    yield run
    for rank in ranks:
        rank.shutdown()


def check_data_parallel(recipe: str, wrapper: str, is_compiled: bool, is_checkpointed: bool) -> None:
    """y and dx have the bits of one process that takes the ranks' batches in turn, gradients those of its mean."""
    x, dy = (one.chunk(2) for one in data())
    alone = model_of(recipe)
    first, second = (trained(alone, *one) for one in zip(x, dy))
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model_of(recipe, is_checkpointed=is_checkpointed))
        reduced_in = torch.bfloat16
    else:
        mesh = init_device_mesh("cpu", (2,))
        model = model_of(recipe, torch.float32, is_checkpointed=is_checkpointed)
        for layer in model.children():
            fully_shard(layer, mesh=mesh, mp_policy=MIXED)
        fully_shard(model, mesh=mesh, mp_policy=MIXED)
        reduced_in = torch.float32
    if is_compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    rank = distributed.get_rank()
    found = trained(model, x[rank], dy[rank])
    for name in ("y", "dx"):
        assert torch.equal(found.pop(name), (first, second)[rank][name]), name
    for name, gradient in found.items():
        halves = [one[name].to(reduced_in) / 2 for one in (first, second)]
        assert torch.equal(gradient, halves[0] + halves[1]), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_data_parallel_ranks_have_the_bits_of_one_process(on_both, recipe, wrapper):
    on_both(check_data_parallel, recipe, wrapper, False, False)


@pytest.mark.parametrize("is_compiled, is_checkpointed", [(True, False), (False, True)], ids=["compiled", "checkpoint"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_data_parallel_ranks_compile_and_recompute(on_both, wrapper, is_compiled, is_checkpointed):
    on_both(check_data_parallel, "rowwise", wrapper, is_compiled, is_checkpointed)


def plan_of(layout: str) -> dict[str, ColwiseParallel | RowwiseParallel]:
    """Of a Block's layers. "sequence" cuts what comes in and what goes out along it, and leaves both whole."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    if layout == "sequence":
        columns = ColwiseParallel(input_layouts=Shard(1))
        rows = RowwiseParallel(output_layouts=Shard(1))
    return {**dict.fromkeys("qkv", columns), "o": rows, "up": columns, "down": rows}


def check_tensor_parallel(recipe: str, layout: str, is_compiled: bool, is_checkpointed: bool) -> None:
    """All results are as near to float64's as one process's."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    exact = Block().double()
    exact.load_state_dict(model_of("bf16").state_dict())
    expected = trained(exact, *data(torch.float64))
    alone = trained(model_of(recipe), *data())
    model = model_of(recipe, is_checkpointed=is_checkpointed)
    parallelize_module(model, mesh["tensor"], plan_of(layout))
    if layout == "fsdp":
        fully_shard(model, mesh=mesh["data"])
    if is_compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    x, dy = data()
    if layout == "sequence":
        x, dy = (one.chunk(2, 1)[distributed.get_rank()] for one in (x, dy))
    found = trained(model, x, dy)
    if layout == "sequence":
        for name in ("y", "dx"):
            found[name] = DTensor.from_local(found[name], mesh["tensor"], [Shard(1)]).full_tensor()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert error(found[name], value) < 1.25 * error(alone[name], value) + BF16_ERROR, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_parallel_ranks_are_as_near_to_float64_as_one_process(on_both, recipe):
    on_both(check_tensor_parallel, recipe, "whole", False, False)


@pytest.mark.parametrize(
    "layout, is_compiled, is_checkpointed",
    [("sequence", False, False), ("fsdp", False, False), ("whole", True, False), ("whole", False, True)],
    ids=["sequence", "fsdp", "compiled", "checkpoint"],
)
def test_tensor_parallel_ranks_shard_compile_and_recompute(on_both, layout, is_compiled, is_checkpointed):
    on_both(check_tensor_parallel, "rowwise", layout, is_compiled, is_checkpointed)


def check_replicated(placement: Replicate | Shard) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, dy = data()
    expected = trained(model_of("rowwise").up, x, torch.cat([dy, dy], -1))
    layer = model_of("rowwise").up
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Replicate()])))
    whole = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [placement]).detach()
    gradient = DTensor.from_local(torch.cat([dy, dy], -1), mesh, [Replicate()]).redistribute(mesh, [placement])
    found = trained(layer, whole, gradient)
    assert found["y"].placements == (placement,)
    for name in ("y", "dx"):
        found[name] = found[name].full_tensor()
    for name, value in expected.items():
        # The sum over rows is that of two ranks.
        assert error(found[name], value) <= (0 if placement == Replicate() or name in ("y", "dx") else BF16_ERROR), name


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_a_replicated_weight_takes_x_as_it_is(on_both, placement):
    on_both(check_replicated, placement)


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, _ = data()
    small = nn.Sequential(nn.Linear(WIDTH, 128)).bfloat16()
    sw.nn.convert(small, "blockwise")
    parallelize_module(small, mesh, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="out_features=64 must be a positive multiple of 128 .* on each rank"):
        small(x)
    layer = parallelize_module(model_of("rowwise"), mesh, plan_of("whole")).up
    with pytest.raises(TypeError, match="x is a Tensor and weight a DTensor, both must be DTensors; parallelize"):
        layer.forward(x)


def test_a_shard_or_an_input_that_cannot_be_is_refused(on_both):
    on_both(check_refusals)
