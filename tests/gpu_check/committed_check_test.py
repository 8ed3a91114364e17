"""The committed check of the kernels on a GPU is of the kernels that this build makes.

If it fails: `./bazelw build //:gpu_check`, run `python3 gpu_check.pyz check --out DIR --commit COMMIT` on an H200, and
commit DIR/check.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

from stoneware.kernels import manifest
from stoneware.kernels.manifest import KernelRecord
from tools.gpu_check import machine

ROOT = pathlib.Path(__file__).parents[2]
MANIFEST = ROOT / "py" / "stoneware" / "kernel_manifest.json"
CHECK = "docs/measured/nvidia_h200/check.json"


def stale(check: dict, kernels: list[KernelRecord]) -> list[str]:
    """What the check does not show of these kernels, of those that its GPUs run."""
    wanted = machine.digests(kernels, [gpu["compute_capability"] for gpu in check["gpus"]])
    checked = check.get("kernels", {})
    missing = [f"{kernel} was not checked" for kernel in wanted if kernel not in checked]
    others = [
        f"{kernel} has other code now" for kernel in wanted if checked.get(kernel, wanted[kernel]) != wanted[kernel]
    ]
    return missing + others


def test_the_committed_check_is_of_the_kernels_of_this_build():
    check = json.loads((ROOT / CHECK).read_text())
    found = stale(check, list(manifest.read_manifest(MANIFEST).kernels.values()))
    remedy = f"run `gpu_check.pyz check --out DIR --commit COMMIT` on an H200, and commit its check.json as {CHECK}"
    assert not found, f"{CHECK} is stale: {len(found)} kernels, such as {'; '.join(found[:3])}; {remedy}"
    assert check["commit"] != "unknown", f"{CHECK} must name its commit and has none; {remedy}"


def test_the_committed_check_passed():
    check = json.loads((ROOT / CHECK).read_text())
    assert (check["exit_code"], check["failures"]) == (0, [])


def kernel(name: str, arch: str, digest: str, backend: str = "sm90", op: str = "matmul") -> KernelRecord:
    return KernelRecord(id=name, op=op, backend=backend, arch=arch, config={}, sha256="f" * 64, code_sha256=digest)


KERNELS = [
    kernel("a", "sm_90a", "1"), kernel("b", "sm_90a", "2"), kernel("t", "sm_90a", "3", "triton_aot"),
    kernel("older", "sm_80", "4", "triton_aot"), kernel("newer", "sm_100a", "5", "triton_aot"),
]  # fmt: skip
H200 = [{"gpu": "NVIDIA H200", "compute_capability": [9, 0]}]


def test_a_kernel_that_changed_or_was_not_checked_is_found_and_those_of_other_gpus_are_not():
    good = {"gpus": H200, "kernels": machine.digests(KERNELS, [(9, 0)])}
    assert good["kernels"] == {"a": "1", "b": "2", "t": "3"}
    assert stale(good, KERNELS) == []
    assert stale(good, KERNELS[:1]) == [], "a kernel that was removed needs no check"
    assert stale(good, [dataclasses.replace(KERNELS[0], code_sha256="9"), *KERNELS[1:]]) == ["a has other code now"]
    assert stale(good, [*KERNELS, kernel("new", "sm_90a", "6")]) == ["new was not checked"]
    assert len(stale({"gpus": H200}, KERNELS)) == 3


@pytest.mark.parametrize(
    ("capability", "run"), [((8, 9), {"older"}), ((9, 0), {"a", "b", "t"}), ((10, 0), {"newer"}), ((7, 0), set())]
)
def test_a_gpu_runs_the_kernels_for_itself_and_of_tritons_the_nearest(capability, run):
    assert set(machine.digests(KERNELS, [capability])) == run


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
