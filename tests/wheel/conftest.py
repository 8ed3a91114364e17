"""The fixture `wheel`: each wheel that STONEWARE_TEST_WHEELS names, in turn."""

from __future__ import annotations

import os
import pathlib

import pytest
from built_wheel import BuiltWheel


def _wheels() -> list[BuiltWheel]:
    paths = os.environ.get("STONEWARE_TEST_WHEELS", "").split()
    if not paths:
        raise pytest.UsageError(
            "STONEWARE_TEST_WHEELS must name wheels, but is empty; run `bazel test //tests/wheel/...`"
        )
    return [BuiltWheel(path=pathlib.Path(path).resolve()) for path in paths]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wheel" in metafunc.fixturenames:
        metafunc.parametrize("wheel", _wheels(), ids=lambda wheel: wheel.tag.split("-")[1])
