"""Rows and reports of a benchmark, made up."""

from __future__ import annotations

from tools.gpu_check.bench_cases import FAMILIES, OURS


def row(m: int, *, family="matmul", layer="o", groups=0, weight_bytes=4.3e7, **device_us) -> dict:
    return {
        "family": family, "layer": layer, "m": m, "n": 64, "k": 32, "groups": groups,
        "config": "sm90:x", "decided_by": "exact", "errors": {OURS: 1e-3},
        "weight_bytes": weight_bytes, "num_bytes": weight_bytes + 64 * m, "no_figure": {},
        "device_us": {
            name: {"median_us": us, "spread_us": 0.1} for name, us in device_us.items()
        },
    }  # fmt: skip


def wrong(m: int, family="matmul") -> dict:
    result = row(m, family=family)
    del result["device_us"]
    return {**result, "errors": {}, "no_figure": {OURS: "relative error 0.5"}}


ROWS = [
    row(1, stoneware=10.0, torch_row=20.0, torch_tensor=40.0, family="scaled_mm"),
    row(128, stoneware=10.0, torch_row=80.0, torch_tensor=5.0, family="scaled_mm"),
    row(512, stoneware=20.0, torch_row=10.0, family="scaled_mm", layer="down"),
    wrong(16, family="scaled_mm"),
    row(1024, stoneware=20.0, torch_grouped=30.0, family="grouped_mm", groups=16),
]


def report(**changes) -> dict:
    run = {
        "family": "scaled_mm", "call": OURS, "package_ms": 1.0, "import_ms": 9.0,
        "first_call_ms": 4.0, "import_and_first_call_ms": 13.0, "second_call_ms": 0.04,
        "full_collections": 1,
        "outside": [], "triton_imported": False,
    }  # fmt: skip
    timing = {"median_us": 5.0, "spread_us": 0.2}
    return {
        "schema": 3, "l2": "clean", "date": "2026-01-01", "command": "bench",
        "commit": "c0ffee", "seconds": 200.0,
        "wheel_sha256": "0" * 64, "families": {name: FAMILIES[name].title for name in FAMILIES},
        "machine": {
            "gpu": "a GPU", "driver": "1", "torch": "2", "cuda_of_torch": "13", "python": "3.12",
            "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_limit_w": 700, "stoneware": "0",
        },
        "machine_after": {"sm_clock_mhz": 1950}, "installed": {"num_files": 9, "num_bytes": 2**20},
        "first_calls": [
            {**run, "first_call_ms": 4.0 + late, "import_and_first_call_ms": 13.0 + late}
            for late in (0, 2, 1)
        ],
        "host_us": {"matmul": {"out": {OURS: timing}, "allocating": {OURS: timing}}},
        "host_failures": {}, "rows": ROWS, "problems": [], **changes,
    }  # fmt: skip
