"""abi3audit finds nothing in the wheel for the stable ABI; it works offline, from a list of symbols that it ships."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.fixture
def abi3audit(tmp_path):
    """Runs abi3audit; returns its exit code and its results by module."""

    def run(file: pathlib.Path, *flags: str) -> tuple[int, dict[str, dict]]:
        result = subprocess.run(
            [sys.executable, "-m", "abi3audit", "--strict", "--report", *flags, file],
            env={"HOME": str(tmp_path), "PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.stdout, result.stderr
        (spec,) = json.loads(result.stdout)["specs"].values()
        objects = spec["wheel"] if spec["kind"] == "wheel" else [spec["object"]]
        return result.returncode, {module["name"]: module["result"] for module in objects}

    return run


def test_every_module_keeps_to_the_stable_abi_of_its_tag(wheel, abi3audit):
    if "-abi3-" not in wheel.tag:
        pytest.skip("the host's wheel may use all of CPython")
    exit_code, results = abi3audit(wheel.path)
    assert sorted(results) == sorted(pathlib.PurePosixPath(path).name for path in wheel.modules)
    assert {name: result["non_abi3_symbols"] for name, result in results.items() if result["non_abi3_symbols"]} == {}
    assert {(result["baseline"], result["computed"]) for result in results.values()} == {("3.12", "3.12")}
    assert exit_code == 0


def test_a_module_that_keeps_to_no_stable_abi_is_found(wheel, abi3audit, tmp_path):
    if "-abi3-" in wheel.tag:
        pytest.skip("needs the module of the host's wheel")
    (module,) = [data for path, data in wheel.modules.items() if path.startswith("stoneware/runtime/_driver.")]
    file = tmp_path / "_driver.abi3.so"
    file.write_bytes(module)
    exit_code, results = abi3audit(file, "--assume-minimum-abi3=3.12")
    assert results["_driver.abi3.so"]["non_abi3_symbols"]
    assert exit_code == 1
