"""A wheel that is built with --//:enable_backward=false says so, and has nothing that is for gradients alone.

Run it with that flag: `./bazelw test //tests/wheel:forward_only_test --//:enable_backward=false`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.fixture
def removed(wheel) -> list[dict]:
    return json.loads(wheel.members["stoneware/kernel_manifest.json"])["removed"]


def test_metadata_and_version_say_it(wheel):
    header = wheel.header("METADATA")
    assert header["Version"].endswith("+forward")
    assert header["Summary"].endswith("; forward only, without the kernels of gradients")


def test_removed_kernels_serve_gradients_alone(wheel, removed):
    assert {kernel["op"] for kernel in removed} == {"matmul", "quantize", "scaled_mm"}
    assert all(not any(kernel["serves"].values()) and "forward" not in kernel["serves"] for kernel in removed)
    assert all(kernel["serves"]["forward"] for kernel in wheel.manifest)
    assert not any(
        is_served for kernel in wheel.manifest for role, is_served in kernel["serves"].items() if role[1:] == "grad"
    )


def test_their_names_are_gone_from_modules_tables_and_files(wheel, removed):
    for kernel in removed:
        for path, data in wheel.members.items():
            if path != "stoneware/kernel_manifest.json":
                assert kernel["id"].encode() not in data, path
                assert kernel["id"] not in path


def test_tile_matmuls_have_the_forward_direction_alone(wheel):
    names = [path for path in wheel.members if path.startswith("stoneware/tile/matmuls/")]
    assert names
    assert [name for name in names if not name.endswith("_forward.fatbin")] == []


def test_info_says_it(removed):
    site = pathlib.Path(os.environ["STONEWARE_TEST_SITE"]).resolve()
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import stoneware
print(stoneware.info().backward)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert (
        output == f"off: forward only, {len(removed)} kernels of gradients are not built (--//:enable_backward=false)\n"
    )
