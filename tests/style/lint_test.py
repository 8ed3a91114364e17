"""ruff and buildifier find nothing in the source tree."""

from __future__ import annotations

import pathlib

import pytest
import style

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", style.LINTERS)
def test_linter_finds_nothing(name):
    tool = style.LINTERS[name]
    try:
        result = style.run(tool, tool.check, _ROOT)
    except style.ToolMissing as error:
        pytest.skip(str(error))
    again = f"./bazelw test //tests/style:lint_test --test_filter={name}"
    if result.returncode:
        pytest.fail(f"{result.stdout}\nmend these by hand, then: {again}", pytrace=False)
