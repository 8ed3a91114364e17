"""The wheel of the small kernel set says what it is, and differs from the full one in kernels alone.

STONEWARE_TEST_SITE names the full wheel, unpacked, STONEWARE_TEST_SMALL_SITE the small one.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.fixture
def full() -> pathlib.Path:
    return pathlib.Path(os.environ["STONEWARE_TEST_SITE"]).resolve()


@pytest.fixture
def small() -> pathlib.Path:
    return pathlib.Path(os.environ["STONEWARE_TEST_SMALL_SITE"]).resolve()


def manifest(site: pathlib.Path) -> dict:
    return json.loads((site / "stoneware/kernel_manifest.json").read_text())


def output(site: pathlib.Path, program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(site)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_version_has_the_local_label_small(full, small):
    [of_full] = full.glob("*.dist-info")
    [of_small] = small.glob("*.dist-info")
    assert of_small.name == of_full.name.replace(".dist-info", "+small.dist-info")


def test_manifest_has_each_kernel_of_the_full_one_or_lists_it_as_left_out(full, small):
    of_full, of_small = manifest(full), manifest(small)
    left_out = of_small["left_out"]
    assert "left_out" not in of_full
    assert left_out
    assert of_small["kernels"] == [kernel for kernel in of_full["kernels"] if kernel["id"] not in left_out]
    assert len(of_small["kernels"]) + len(left_out) == len(of_full["kernels"])


def test_module_has_the_kernels_of_the_manifest(small):
    program = "from stoneware.ops import _sm90\nprint(*sorted(one['id'] for one in _sm90.kernels()))"
    listed = sorted(kernel["id"] for kernel in manifest(small)["kernels"] if kernel["backend"] == "sm90")
    assert output(small, program).split() == listed


def test_info_names_the_kernel_set(full, small):
    program = "import stoneware\nprint(stoneware.info().kernel_set)"
    num_all = len(manifest(full)["kernels"])
    num_small = len(manifest(small)["kernels"])
    assert output(full, program) == f"all ({num_all} kernels)\n"
    assert output(small, program) == f"small ({num_small} of {num_all} kernels)\n"
