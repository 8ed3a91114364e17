"""A small package to look things up in: a manifest, samples of an H200, and the tables baked from
them, in a folder that stands in for the installed one."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h200

from stoneware.kernels import manifest as manifest_module
from stoneware.kernels import sm90_kernels
from stoneware.kernels.config import Config
from stoneware.kernels.key import AnyKey, Key
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.runtime import native, package_files
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import policy, sources, table_file
from stoneware.tuning import samples as sample_format
from stoneware.tuning.bake import bake
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.table import DeviceTable, Table
from stoneware.tuning.table_entry import Entry

H200 = DeviceFingerprint(
    name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560, memory_clock_khz=3201000
)
H100 = DeviceFingerprint(
    name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), num_sms=132, l2_bytes=52428800, memory_clock_khz=2619000
)
L40 = DeviceFingerprint(
    name="NVIDIA L40", compute_capability=(8, 9), num_sms=142, l2_bytes=100663296, memory_clock_khz=9001000
)

BIG, TINY, SMALL = (
    "128x128x128_2x1x1_pingpong",
    "64x16x256_1x1x1_warpspecialized_swap",
    "64x64x256_1x1x1_warpspecialized_swap",
)
VENDOR = Config(backend="vendor", kernel="torch._scaled_mm")


def sm90(suffix: str, out: str = "bf16", **knobs: Any) -> Config:
    return Config(backend="sm90", kernel=f"scaled_mm_sm90_e4m3_e4m3_{out}_{suffix}", **knobs)


def triton(out: str = "bf16", arch: str = "sm90") -> Config:
    return Config(backend="triton_aot", kernel=f"scaled_mm_triton_{arch}_e4m3_e4m3_{out}_64x128x128")


def sha256(kernel: str) -> str:
    return hashlib.sha256(kernel.encode()).hexdigest()


def kernel_records() -> list[KernelRecord]:
    records = []
    for out in ("bf16", "fp16"):
        dtypes = {"a": "e4m3", "b": "e4m3", "out": out}
        for suffix in (BIG, TINY, SMALL):
            tile, cluster, schedule = [*suffix.split("_"), ""][:3]
            records.append(
                KernelRecord(
                    id=sm90(suffix, out).kernel,
                    op="scaled_mm",
                    backend="sm90",
                    arch="sm_90a",
                    sha256=sha256(sm90(suffix, out).kernel),
                    size_bytes=20000,
                    config={
                        **dtypes,
                        "tile": [int(extent) for extent in tile.split("x")],
                        "cluster": [int(extent) for extent in cluster.split("x")],
                        "schedule": schedule,
                        "swap_ab": suffix.endswith("swap"),
                        "accumulation": "fast",
                        "sum_chunk": 0,
                    },
                )
            )
        records.append(
            KernelRecord(
                id=f"scaled_mm_block_sm90_e4m3_e4m3_{out}_{BIG}",
                op="scaled_mm",
                backend="sm90",
                arch="sm_90a",
                sha256=sha256(f"scaled_mm_block_sm90_e4m3_e4m3_{out}_{BIG}"),
                size_bytes=20000,
                config={
                    **dtypes,
                    "tile": [128, 128, 128],
                    "cluster": [2, 1, 1],
                    "schedule": "pingpong",
                    "swap_ab": False,
                    "scales": "block",
                    "sum_chunk": 128,
                },
            )
        )
        for arch in ("sm90", "sm89"):
            config = triton(out, arch)
            records.append(
                KernelRecord(
                    id=config.kernel,
                    op="scaled_mm",
                    backend="triton_aot",
                    arch=arch.replace("sm", "sm_"),
                    sha256=sha256(config.kernel),
                    size_bytes=20000,
                    config={**dtypes, "layout": "nt", "tile": [64, 128, 128]},
                )
            )
    return sorted(records, key=lambda record: record.id)


@functools.cache
def manifest() -> Manifest:
    return Manifest({record.id: record for record in kernel_records()})


def manifest_text(kernels: Iterable[Mapping[str, Any]] | None = None) -> str:
    """A kernel_manifest.json with a digest that fits; by default of `kernel_records`."""
    if kernels is None:
        kernels = [vars(record) for record in kernel_records()]
    document = {"schema": 1, "kernels": list(kernels)}
    return manifest_module.text_of(document)


def run(id: str = "run-1", device: DeviceFingerprint = H200, date: str = "2026-11-21") -> Run:
    return h200.run(id, device, date)


def key(*, m: int = 16, n: int = 4096, k: int = 4096, **family: str) -> Key:
    values = {
        "op": "scaled_mm",
        "a_dtype": "e4m3",
        "b_dtype": "e4m3",
        "out_dtype": "bf16",
        "scales": "row",
        "layout": "nt",
    }
    return Key(n=n, k=k, m=m, **{**values, **family})


def sample(
    config: Config,
    median_us: float,
    *,
    m: int = 16,
    n: int = 4096,
    k: int = 4096,
    spread_us: float = 0.0,
    **changes: Any,
) -> Sample:
    is_ours = config.backend != "vendor"
    values = {
        "config": config,
        "median_us": median_us,
        "spread_us": spread_us,
        "count": 100,
        "status": "ok",
        "error": 1.7e-3,
        "kernel_sha256": sha256(config.kernel) if is_ours else "",
        "run": "run-1",
    }
    family = {name: changes.pop(name) for name in ("op", "out_dtype", "scales") if name in changes}
    return Sample(**{"key": key(m=m, n=n, k=k, **family), **values, **changes})


def write_device(
    folder: Path,
    samples: Iterable[Sample],
    device: DeviceFingerprint = H200,
    runs: Iterable[Run] | None = None,
    aliases: tuple[str, ...] = ("H200", "h200-sxm"),
    name: str = "scaled_mm.jsonl",
) -> list[Path]:
    """Writes a device's folder and returns its files."""
    folder.mkdir(parents=True, exist_ok=True)
    sample_format.write_samples(folder / name, samples)
    sample_format.write_runs(folder / "runs.json", runs or [run(device=device)])
    record = DeviceRecord(fingerprint=device, aliases=aliases)
    sample_format.write_device(folder / "device.json", record)
    return [folder / name for name in (name, "runs.json", "device.json")]


def bake_samples(folder: Path, samples: Iterable[Sample], **device: Any) -> Table:
    """The table of some samples."""
    data = bake("scaled_mm", write_device(folder, samples, **device), manifest())
    return table_file.decode(data, "scaled_mm.table", "scaled_mm")


def entry_at(baked: Table, m: int, n: int = 4096, k: int = 4096, **family: str) -> Entry:
    """The entry at a shape, as of the first device."""
    return entry_of(baked.devices[0], key(m=m, n=n, k=k, **family))


def entry_of(device: DeviceTable, key: AnyKey, kernel_sha256: str = "") -> Entry | None:
    """The entry at exactly this key."""
    block = device.block(key.kind)
    return None if block is None or key.sizes not in block else block.entry(key.sizes, kernel_sha256)


def install(root: Path, tables: Mapping[str, bytes], monkeypatch: Any) -> None:
    """Makes `root` the package's folder, with these tables and the manifest of this module."""
    (root / "tables").mkdir(parents=True, exist_ok=True)
    for op, data in tables.items():
        (root / "tables" / f"{op}.table").write_bytes(data)
    (root / "kernel_manifest.json").write_text(manifest_text())
    monkeypatch.setattr(package_files, "ROOT", root)
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(root / "user"))
    forget()


def environment(root: Path) -> dict[str, str]:
    """For a process that imports what this one does, with the package at `root`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STONEWARE_CACHE_DIR": str(root / "user")}


def forget() -> None:
    """Drops everything that was read from the package's folder, and what was kept in memory."""
    policy._memory.clear()
    manifest_module.packaged.cache_clear()
    table_file.packaged.cache_clear()
    sources.forget()
    policy.forget_plans()
    native._try_import.cache_clear()
    sm90_kernels.check_image.cache_clear()
