"""The layers of sw.nn on two ranks, over gloo, give the values and the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import BF16_ERROR, MIXED, WIDTH, Gathered, data, error, trained
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stoneware as sw
from stoneware.nn.gathered_weight import GatheredWeight

HEAD = 64

FP8_ERROR = 2**-4

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
    """The same model on each rank, and in each call; its weights' rows have scales of their own."""
    torch.manual_seed(0)
    model = Block(**options).bfloat16()  # so that copies of each dtype have the same values
    for layer in model.children():
        layer.weight.data *= torch.linspace(0.25, 2, layer.out_features)[:, None]
    sw.nn.convert(model, recipe)
    return model.to(dtype)


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


class Mixture(nn.Module):
    """Experts with a router of a fixed choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = sw.nn.Experts(4, WIDTH, 128, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.rand(*x.shape[:-1], 4, generator=torch.Generator().manual_seed(2)).topk(2)
        return self.experts(x, chosen, weights)


def adapters() -> nn.Module:
    base = sw.nn.Float8InferenceLinear.from_linear(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
    layer = sw.nn.Lora(base, 16)
    nn.init.normal_(layer.b.weight)
    return layer


OTHERS = {
    "experts": Mixture,
    "swiglu": lambda: sw.nn.SwiGLU(WIDTH, 2 * WIDTH, recipe="rowwise", dtype=torch.bfloat16),
    "adapters": adapters,
}


def check_others(name: str) -> None:
    """The layers that no tensor parallel plan shards are also bitwise equal to those of one process."""
    torch.manual_seed(0)
    alone = OTHERS[name]()
    model = copy.deepcopy(alone)
    x, dy = (one.chunk(2) for one in data())
    if name == "adapters":
        # As FSDP's hooks do, this one has the parts of the layer called one by one.
        alone.base.register_forward_hook(lambda *arguments: None)
    both = [trained(alone, *one) for one in zip(x, dy)]
    mesh = init_device_mesh("cpu", (2,))
    if name == "adapters":
        fully_shard(model.base, mesh=mesh)  # without a policy, that would cast what is fp8
    fully_shard(model, mesh=mesh, mp_policy=MIXED)
    rank = distributed.get_rank()
    found = trained(model, x[rank], dy[rank])
    for key in ("y", "dx"):
        assert torch.equal(found.pop(key), both[rank][key]), key
    for key, gradient in found.items():
        if gradient is None:
            assert both[0][key] is None, key
        else:
            assert torch.equal(gradient, (both[0][key].float() + both[1][key].float()).bfloat16() / 2), key


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_have_the_bits_of_one_process(on_both, name):
    on_both(check_others, name)


def plan_of(layout: str) -> dict[str, ColwiseParallel | RowwiseParallel]:
    """The plan of a Block's layers. "sequence" shards inputs and outputs along the sequence, and leaves both whole."""
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


def gathered_and_not(
    recipe: str, *, is_compiled: bool = False, is_checkpointed: bool = False, policy: MixedPrecisionPolicy = MIXED
) -> list[nn.Module]:
    """A model on two ranks whose weights are gathered in fp8, and one that gathers the dtype of the policy."""
    mesh = init_device_mesh("cpu", (2,))
    models = [model_of(recipe, torch.float32, is_checkpointed=is_checkpointed) for _ in range(2)]
    assert sw.nn.gather_in_fp8(models[0]) == ["q", "k", "v", "o", "up", "down"]
    for model in models:
        for layer in model.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return [torch.compile(model, backend="aot_eager") for model in models] if is_compiled else models


def check_gathered(recipe: str, is_compiled: bool, is_checkpointed: bool) -> None:
    """As near to float64 as with weights that are gathered in 16 bits, or with the bits of these; then a step more."""
    models = gathered_and_not(recipe, is_compiled=is_compiled, is_checkpointed=is_checkpointed)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    in_float64 = Block().double()
    in_float64.load_state_dict(model_of("bf16").state_dict())
    exact = trained(in_float64, *data(torch.float64))
    rank = distributed.get_rank()
    for name, value in exact.items():
        exact[name] = value.chunk(2)[rank] if name in ("y", "dx") else value / 2
    x, dy = (one.chunk(2)[rank] for one in data())
    has_same_bits = recipe in ("tensorwise", "blockwise")
    for step in range(2):
        found, expected = (trained(model, x, dy, one) for model, one in zip(models, optimizers))
        for name, value in expected.items():
            if has_same_bits or (step == 0 and name == "y"):
                assert torch.equal(found[name], value), name
            elif step == 0:
                assert error(found[name], exact[name]) < 1.25 * error(value, exact[name]) + BF16_ERROR, name
            else:
                assert error(found[name], value) < FP8_ERROR, name


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_weights_gathered_in_fp8_give_what_those_gathered_in_16_bits_give(on_both, recipe):
    on_both(check_gathered, recipe, False, False)


@pytest.mark.parametrize("is_compiled, is_checkpointed", [(True, False), (False, True)], ids=["compiled", "checkpoint"])
def test_weights_gathered_in_fp8_compile_and_recompute(on_both, is_compiled, is_checkpointed):
    on_both(check_gathered, "rowwise", is_compiled, is_checkpointed)


def test_gathering_in_fp8_twice_is_gathering_once():
    model = model_of("rowwise")
    names = sw.nn.gather_in_fp8(model)
    weight = model.q.weight
    assert sw.nn.gather_in_fp8(model) == names
    assert model.q.weight is weight and type(weight.tensor) is torch.Tensor
    assert type(model.state_dict()["q.weight"]) is torch.Tensor


def check_bytes(recipe: str) -> None:
    x, dy = (one.chunk(2)[distributed.get_rank()] for one in data())
    sent = []
    for model in gathered_and_not(recipe):
        with Gathered() as gathered:
            trained(model, x, dy)
        sent.append(gathered.num_bytes)
    assert 0.5 * sent[1] < sent[0] < 0.52 * sent[1], sent


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_half_of_the_bytes_are_gathered(on_both, recipe):
    on_both(check_bytes, recipe)


def check_dtype(recipe: str, dtype: torch.dtype | None) -> None:
    """Weights of a group travel as one dtype, but not as NaN of float16."""
    x, dy = (one.chunk(2)[distributed.get_rank()].to(dtype or torch.float32) for one in data())
    results, dtypes = [], []
    for model in gathered_and_not(recipe, policy=MixedPrecisionPolicy(param_dtype=dtype)):
        with Gathered() as gathered:
            results.append(trained(model, x, dy)["y"])
        dtypes.append(gathered.dtypes)
    assert torch.equal(*results)
    assert torch.uint8 in dtypes[0] if dtype == torch.float16 else dtypes[0] == dtypes[1], dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_weights_gathered_in_fp8_give_the_same_y_with_any_dtype_of_parameters(on_both, recipe, dtype):
    on_both(check_dtype, recipe, dtype)


def check_inference_between(recipe: str) -> None:
    """What was reduced or quantized in inference mode also serves the next step."""
    x, dy = (one.chunk(2)[distributed.get_rank()] for one in data())
    found = []
    for model in gathered_and_not(recipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, x, dy, optimizer)
        with torch.inference_mode():
            y = model(x)
        result = trained(model, x, dy)
        assert torch.equal(result["y"], y)
        found.append(result)
    for name, value in found[1].items():
        assert error(found[0][name], value) < 0.2, name


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_a_model_trains_after_a_pass_in_inference_mode(on_both, recipe):
    on_both(check_inference_between, recipe)


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def check_norm(dtype: torch.dtype) -> None:
    model = nn.Sequential(LlamaRMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)
    assert [*sw.nn.convert(model, "bf16").blocks] == ["0"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    calls, rms_norm = [], nn.functional.rms_norm
    nn.functional.rms_norm = lambda *arguments: calls.append(1) or rms_norm(*arguments)
    try:
        trained(model, *(one.chunk(2)[distributed.get_rank()] for one in data()))
    finally:
        nn.functional.rms_norm = rms_norm
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_one_kernel_in_a_sharded_model(on_both, dtype):
    on_both(check_norm, dtype)


class Reduced(TorchDispatchMode):
    """Counts the collectives that reduce."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += func is torch.ops.c10d.allreduce_.default
        return func(*args, **kwargs or {})


def check_reductions() -> None:
    model, _ = gathered_and_not("tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, dy = (one.chunk(2)[distributed.get_rank()] for one in data())
    counts = []
    for _ in range(3):
        with Reduced() as reduced:
            trained(model, x, dy, optimizer)
        counts.append(reduced.num_calls)
    assert counts[1:] == [1, 1], counts
    # Other code writes to the memory of a weight, as torch.distributed.checkpoint does.
    for weight in (model.state_dict()["q.weight"].to_local(), model.q.weight, model.q.weight.data):
        with torch.no_grad(), Reduced() as reduced:
            weight.mul_(2)
            y = model(x)
            assert reduced.num_calls == 1
            assert torch.equal(model(x), y)
            assert reduced.num_calls == 1


def test_tensor_scales_of_all_weights_are_reduced_once_a_step(on_both):
    on_both(check_reductions)


def check_states(folder: str) -> None:
    in_fp8, in_16_bits = gathered_and_not("rowwise")
    state, expected = in_fp8.state_dict(), in_16_bits.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert type(value) is DTensor, name
        assert type(value.to_local()) is torch.Tensor, name
        assert torch.equal(value.to_local(), expected[name].to_local()), name
    file = f"{folder}/{distributed.get_rank()}.pt"
    torch.save(state, file)
    with torch.device("meta"):
        fresh = Block()
    sw.nn.convert(fresh, "rowwise")
    sw.nn.gather_in_fp8(fresh)
    fully_shard(fresh, mesh=init_device_mesh("cpu", (2,)), mp_policy=MIXED)
    fresh.to_empty(device="cpu")
    fresh.load_state_dict(torch.load(file))
    x, dy = (one.chunk(2)[distributed.get_rank()] for one in data())
    with Gathered() as gathered:
        found = trained(fresh, x, dy)
    assert gathered.num_bytes < 1.1 * sum(one.numel() for one in fresh.parameters())  # one of two halves, twice
    for name, value in trained(in_fp8, x, dy).items():
        assert torch.equal(found[name], value), name


def test_the_state_of_weights_gathered_in_fp8_is_plain_and_fills_a_model_without_memory(on_both, tmp_path):
    on_both(check_states, str(tmp_path))


def check_gather_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    small = nn.Sequential(nn.Linear(WIDTH, 128)).bfloat16()
    sw.nn.convert(small, "blockwise")
    sw.nn.gather_in_fp8(small)
    fully_shard(small, mesh=mesh)
    with pytest.raises(ValueError, match="multiple of 256 for recipe 'blockwise' on 2 ranks, to be gathered in fp8"):
        small(data()[0])
    model = parallelize_module(model_of("rowwise"), mesh, plan_of("whole"))
    with pytest.raises(ValueError, match="weight of q is a DTensor, it must be a plain tensor; call gather_in_fp8"):
        sw.nn.gather_in_fp8(model)


def test_weights_that_cannot_be_gathered_in_fp8_are_refused(on_both):
    on_both(check_gather_refusals)


def test_a_weight_that_was_gathered_in_fp8_is_for_its_layer_alone():
    weight = GatheredWeight(torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1), torch.bfloat16)
    with pytest.raises(NotImplementedError, match="of a weight that was gathered in fp8: only Float8Linear reads it"):
        torch.nn.functional.linear(torch.ones(4, 16, dtype=torch.bfloat16), weight)
    assert torch.equal(torch.zeros_like(weight), torch.zeros(16, 16, dtype=torch.bfloat16))
