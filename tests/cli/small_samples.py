"""Small samples and a small installed package for tests of the commands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from h200 import H200, run

from stoneware.kernels import manifest as manifest_format
from stoneware.kernels.config import Config, KernelConfig
from stoneware.kernels.key import KernelKey, Key
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import samples as sample_format
from stoneware.tuning.samples import DeviceRecord, Run, Sample

UNKNOWN_GPU = DeviceFingerprint(
    name="NVIDIA X1", compute_capability=(9, 0), num_sms=100, l2_bytes=50000000, memory_clock_khz=2000000
)
VENDOR = Config(backend="vendor", kernel="torch._scaled_mm")
GROUPED = Config(backend="sm90", kernel="grouped_mm_sm90_bf16_bf16_bf16_64x64x128_1x1x1_persistent1x6_swap")
GROUPED_VENDOR = Config(backend="vendor", kernel="torch._grouped_mm")
SHA256 = "ab" * 32
KERNEL_OP = "mypackage.kernels:softmax"


def ours(tile: str = "64x16x256") -> Config:
    return Config(backend="sm90", kernel=f"scaled_mm_sm90_e4m3_e4m3_bf16_{tile}")


def key(m: int = 16, n: int = 4096, k: int = 4096, **changes: Any) -> Key:
    return Key(
        **{
            "op": "scaled_mm",
            "a_dtype": "e4m3",
            "b_dtype": "e4m3",
            "out_dtype": "bf16",
            "scales": "row",
            "layout": "nt",
            "n": n,
            "k": k,
            "m": m,
            **changes,
        }
    )


def sample(config: Config, median_us: float, m: int = 16, **changes: Any) -> Sample:
    sizes = {name: changes.pop(name) for name in ("n", "k", "op") if name in changes}
    is_ours = config.backend != "vendor"
    return Sample(
        **{
            "key": key(m, **sizes),
            "config": config,
            "median_us": median_us,
            "spread_us": 0.0,
            "count": 50,
            "status": "ok",
            "error": 1e-3,
            "run": "run-1",
            "kernel_sha256": sha256(cubin(config.kernel)) if is_ours else "",
            **changes,
        }
    )


def grouped_sample(config: Config, median_us: float, m: int = 16, num_groups: int = 8) -> Sample:
    """Of bf16 groups of m rows on average."""
    of_group = key(
        m, n=4096, k=14336, op="grouped_mm", a_dtype="bf16", b_dtype="bf16", scales="none", num_groups=num_groups
    )
    return sample(config, median_us, key=of_group)


def bad_sample(config: Config, status: str, m: int = 16, **changes: Any) -> Sample:
    return sample(config, 0.0, m, status=status, count=0, detail=f"it was {status} <here>", **changes)


def kernel_sample(rows: int, median_us: float, num_warps: int = 4) -> Sample:
    return Sample(
        key=KernelKey(op=KERNEL_OP, names=("COLS", "M"), values=(1024, rows), dtypes=(("x", "fp32"),)),
        config=KernelConfig(kwargs=(("BLOCK", 128),), num_warps=num_warps),
        median_us=median_us,
        spread_us=0.0,
        count=20,
        status="ok",
        kernel_sha256=SHA256,
        run="run-1",
    )


def write_folder(
    folder: Path,
    samples: Iterable[Sample],
    *,
    device: DeviceFingerprint = H200,
    runs: Iterable[Run] | None = None,
    aliases: tuple[str, ...] = ("H200",),
) -> Path:
    """Writes a device's sample folder."""
    folder.mkdir(parents=True)
    by_op: dict[str, list[Sample]] = {}
    for item in samples:
        by_op.setdefault(item.op, []).append(item)
    for op, items in by_op.items():
        sample_format.write_samples(folder / f"{op}.jsonl", items)
    sample_format.write_runs(folder / "runs.json", runs or [run(device=device)])
    sample_format.write_device(folder / "device.json", DeviceRecord(fingerprint=device, aliases=aliases))
    return folder


TRITON_ID = "scaled_mm_triton_sm90_e4m3_e4m3_bf16_64x128x128"


def kernel_files() -> dict[str, bytes]:
    """The files of the Triton kernel, by name."""
    return {f"{TRITON_ID}.cubin": b"a cubin", f"{TRITON_ID}.json": b"{}"}


def cubin(kernel_id: str) -> bytes:
    """What the native module has for a kernel of `ours`."""
    return f"cubin of {kernel_id}".encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_text() -> str:
    """A kernel_manifest.json that has the kernels of `ours` and a Triton kernel."""
    dtypes = {"a": "e4m3", "b": "e4m3", "out": "bf16"}
    kernels = [
        {
            "id": ours(tile).kernel,
            "op": "scaled_mm",
            "backend": "sm90",
            "arch": "sm_90a",
            "config": {
                **dtypes,
                "cluster": [1, 1, 1],
                "swap_ab": True,
                "tile": [int(extent) for extent in tile.split("x")],
                "schedule": "warpspecialized",
                "accumulation": "fast",
            },
            "sha256": sha256(cubin(ours(tile).kernel)),
            "size_bytes": 20000,
            "description_sha256": "",
        }
        for tile in ("64x16x256", "64x64x256")
    ]
    kernels.append(
        {
            "id": GROUPED.kernel,
            "op": "grouped_mm",
            "backend": "sm90",
            "arch": "sm_90a",
            "config": {
                "a": "bf16",
                "b": "bf16",
                "out": "bf16",
                "layout": "nt",
                "schedule": "persistent",
                "swap_ab": True,
                "tile": [64, 64, 128],
            },
            "sha256": sha256(cubin(GROUPED.kernel)),
            "size_bytes": 20000,
            "description_sha256": "",
        }
    )
    cubin_bytes, description = kernel_files().values()
    kernels.append(
        {
            "id": TRITON_ID,
            "op": "scaled_mm",
            "backend": "triton_aot",
            "arch": "sm_90",
            "config": {**dtypes, "layout": "nt", "tile": [64, 128, 128]},
            "sha256": sha256(cubin_bytes),
            "size_bytes": len(cubin_bytes),
            "description_sha256": sha256(description),
        }
    )
    document = {"schema": 1, "kernels": kernels}
    return manifest_format.text_of(document)
