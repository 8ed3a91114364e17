"""The fixture `wheel`: each wheel of //:wheel in turn; STONEWARE_TEST_WHEELS names the files."""

from __future__ import annotations

import os
import pathlib

import pytest
from built_wheel import BuiltWheel

_NUM_WHEELS = 2


def _wheels() -> list[BuiltWheel]:
    paths = os.environ.get("STONEWARE_TEST_WHEELS", "").split()
    if len(paths) != _NUM_WHEELS:
        raise pytest.UsageError(
            f"STONEWARE_TEST_WHEELS must name {_NUM_WHEELS} wheels, but is {paths}; run `bazel test //tests/wheel/...`"
        )
    return [BuiltWheel(path=pathlib.Path(path).resolve()) for path in paths]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wheel" in metafunc.fixturenames:
        metafunc.parametrize("wheel", _wheels(), ids=lambda wheel: wheel.tag.split("-")[1])
