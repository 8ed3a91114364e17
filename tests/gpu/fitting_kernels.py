"""The kernels of the installed wheel that fit this GPU, for tests that go through all of them."""

from __future__ import annotations

import torch

from stoneware.kernels import aot_kernels, manifest, split_k
from stoneware.kernels.config import SPLITS, Config
from stoneware.kernels.manifest import KernelRecord


def of(op: str) -> list[KernelRecord]:
    """Kernels of the op for the first GPU; without a GPU all of them, for tests that are
    skipped."""
    kernels = [kernel for kernel in manifest.packaged().kernels.values() if kernel.op == op]
    if not torch.cuda.is_available():
        return kernels
    capability = torch.cuda.get_device_capability(0)
    arch_by_backend = {"sm90": capability, "triton_aot": aot_kernels.built_for(op, capability)}
    return [kernel for kernel in kernels if kernel.compute_capability == arch_by_backend[kernel.backend]]


def of_row_scales(out: str) -> list[KernelRecord]:
    """Kernels of scaled_mm for e4m3 with row scales and fast accumulation, the op's
    defaults."""
    return [
        kernel
        for kernel in of("scaled_mm")
        if (kernel.config["a"], kernel.config["b"], kernel.config["out"]) == ("e4m3", "e4m3", out)
        and kernel.config.get("scales") != "block"
        and kernel.config.get("accumulation", "fast") == "fast"
    ]


def config(kernel: KernelRecord, splits: int = 1) -> Config:
    return Config(backend=kernel.backend, kernel=kernel.id, splits=splits)


def with_splits(kernels: list[KernelRecord], m: int, n: int, k: int) -> list[tuple[KernelRecord, int]]:
    """Each kernel that splits k, with each number of splits above 1 that it takes at this problem."""
    return [
        (kernel, splits)
        for kernel in kernels
        if split_k.is_split_k(kernel)
        for splits in SPLITS
        if splits > 1 and split_k.why_not(kernel, m, n, k, splits) is None
    ]


def kernel_id(kernel: KernelRecord) -> str:
    return kernel.id
