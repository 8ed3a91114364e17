"""Several GPUs: layers that are sharded among ranks over NCCL give what one GPU gives."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")

FP8_ERROR = 2**-4
"""Of products of e4m3 operands with scales of their own; see tests/nn/layers_test.py."""

PROGRAM = """
import json, os, sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import stoneware as sw

how, recipe, file = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank)
distributed.init_process_group({"cuda": "nccl", "cpu": "gloo"}[device])
mesh = init_device_mesh(device, (2,))
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(512, size) for size in (512, 256, 256))
        self.o = nn.Linear(1024, 512, bias=False)
    def forward(self, x):
        return self.o(torch.cat((self.q(x), self.k(x), self.v(x)), -1))

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(512, 1024, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(1024, 512, bias=False)
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

def model_of(dtype):
    torch.manual_seed(0)
    layers = nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512)
    model = nn.Sequential(*(Attention(), FeedForward()) if how == "fp8_nodes" else layers).bfloat16()
    sw.nn.convert(model, recipe)
    return model.to(device, dtype)

def nodes_of(y):
    nodes, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [other for other, _ in node.next_functions]
    return {type(node).__name__ for node in nodes}

def trained(model, x, dy):
    x = x.clone().requires_grad_()
    y = model(x)
    if how == "fp8_nodes" and recipe == "rowwise":
        assert nodes_of(y) >= {"_SiblingsBackward", "_SwiGLUBackward"}, nodes_of(y)
    y.backward(dy)
    gradients = {name: one.grad for name, one in model.named_parameters()}
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in gradients.items()}
    return {"y": y.detach(), "dx": x.grad, **whole}

x, dy = torch.randn(2, 256, 512, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
expected = trained(model_of(torch.bfloat16), x, dy)
if how == "tensor":
    model = model_of(torch.bfloat16)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = trained(model, x, dy)
else:
    model = model_of(torch.float32)
    if how.startswith("fp8"):
        sw.nn.gather_in_fp8(model)
    for layer in (model,) if how == "fp8_nodes" else (model[0], model[-1], model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    found = trained(model, x.chunk(2)[rank], dy.chunk(2)[rank])
    for name, value in found.items():
        if name in ("y", "dx"):
            expected[name] = expected[name].chunk(2)[rank]
        else:
            found[name] = 2 * value
errors = {
    name: ((found[name].double() - value.double()).norm() / value.double().norm()).item()
    for name, value in expected.items()
}
with open(f"{file}.{rank}", "w") as written:
    json.dump(errors, written)
distributed.destroy_process_group()
"""


RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]


@pytest.mark.parametrize(
    "how, recipe",
    [*itertools.product(["fsdp", "fp8", "fp8_nodes", "tensor"], RECIPES), ("fsdp", "bf16"), ("tensor", "bf16")],
)
def test_two_gpus_give_what_one_gives(tmp_path, how, recipe):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(program), how, recipe, str(tmp_path / "errors")],
        env={**os.environ, "STONEWARE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Scales of a rank's part round differently; two products in a row, and e5m2 in tensorwise, add up.
    bound = 2**-7 if recipe == "bf16" else 3 * FP8_ERROR
    for rank in range(2):
        for name, error in json.loads((tmp_path / f"errors.{rank}").read_text()).items():
            assert error < bound, (rank, name)
