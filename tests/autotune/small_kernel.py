"""Samples of a decorated kernel, in addition to those of an op in small_package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import small_package as small

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.tuning.merge import file_name
from stoneware.tuning.samples import Sample

OP = "acme.kernels:softmax"
NEW, OLD = "a" * 64, "b" * 64


def kernel_config(block: int) -> KernelConfig:
    return KernelConfig(kwargs=(("BLOCK", block),))


def kernel_sample(block: int, median_us: float, *, m: int = 16, sha256: str = NEW, **changes: Any) -> Sample:
    key = KernelKey(op=OP, names=("M", "N"), values=(m, 4096), dtypes=(("x", "fp16"),))
    return Sample(
        **{
            "key": key,
            "config": kernel_config(block),
            "median_us": median_us,
            "spread_us": 0.0,
            "count": 9,
            "status": "ok",
            "kernel_sha256": sha256,
            "run": "run-1",
            **changes,
        }
    )


def write_kernel(folder: Path, samples: Iterable[Sample], **device: Any) -> list[Path]:
    return small.write_device(folder, samples, name=file_name(OP), **device)
