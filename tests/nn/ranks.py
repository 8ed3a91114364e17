"""What the tests of layers on two ranks share; `conftest.py` has the ranks."""

from __future__ import annotations

import datetime

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, BATCH, LENGTH = 256, 4, 16

BF16_ERROR = 2**-8

SECONDS = 60
"""Until a rank that waits for another is an error."""

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def data(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the gradient of y."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator).bfloat16().to(dtype)
    return x, dy


def trained(
    model: nn.Module, x: torch.Tensor, dy: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """y, dx and the gradient of each parameter, which the optimizer takes, and which are then forgotten."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    if optimizer is not None:
        optimizer.step()
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


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank sends to be gathered, and notes their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.dtypes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.num_bytes += args[1].nbytes
            self.dtypes.add(args[1].dtype)
        return func(*args, **kwargs or {})
