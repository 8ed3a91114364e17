"""The committed checks of the kernels on GPUs are of the kernels that this build makes.

If it fails: `./bazelw build //:gpu_check`, run `python3 gpu_check.pyz check --out DIR --commit COMMIT` on an H100 or
an H200, and commit DIR/check.json. A check of a few new kernels, `-- -k NAMES`, may stand next to it.
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
CHECKS = [
    f"docs/measured/{name}.json" for name in ("nvidia_h100/check", "nvidia_h100/check_matmul", "nvidia_h200/check")
]


def stale(checks: list[dict], kernels: list[KernelRecord]) -> list[str]:
    """What none of the checks shows of these kernels, of those that their GPUs run."""
    wanted = machine.digests(kernels, [gpu["compute_capability"] for check in checks for gpu in check["gpus"]])
    found = []
    for kernel, digest in wanted.items():
        checked = {check["kernels"][kernel] for check in checks if kernel in check.get("kernels", {})}
        if not checked:
            found.append(f"{kernel} was not checked")
        elif digest not in checked:
            found.append(f"{kernel} has other code now")
    return found


def test_the_committed_checks_are_of_the_kernels_of_this_build():
    checks = [json.loads((ROOT / check).read_text()) for check in CHECKS]
    found = stale(checks, list(manifest.read_manifest(MANIFEST).kernels.values()))
    remedy = f"run `gpu_check.pyz check --out DIR --commit COMMIT`, and commit its check.json as one of {CHECKS}"
    assert not found, f"the checks are stale: {len(found)} kernels, such as {'; '.join(found[:3])}; {remedy}"
    assert all(check["commit"] != "unknown" for check in checks), f"a check must name its commit; {remedy}"


@pytest.mark.parametrize("path", CHECKS)
def test_the_committed_check_passed(path):
    check = json.loads((ROOT / path).read_text())
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
    assert stale([good], KERNELS) == []
    assert stale([good], KERNELS[:1]) == [], "a kernel that was removed needs no check"
    changed = [dataclasses.replace(KERNELS[0], code_sha256="9"), *KERNELS[1:]]
    assert stale([good], changed) == ["a has other code now"]
    assert stale([good, {"gpus": H200, "kernels": {"a": "9"}}], changed) == [], "another check has it"
    assert stale([good], [*KERNELS, kernel("new", "sm_90a", "6")]) == ["new was not checked"]
    assert len(stale([{"gpus": H200}], KERNELS)) == 3


@pytest.mark.parametrize(
    ("capability", "run"), [((8, 9), {"older"}), ((9, 0), {"a", "b", "t"}), ((10, 0), {"newer"}), ((7, 0), set())]
)
def test_a_gpu_runs_the_kernels_for_itself_and_of_tritons_the_nearest(capability, run):
    assert set(machine.digests(KERNELS, [capability])) == run


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
