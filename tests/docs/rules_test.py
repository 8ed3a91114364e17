"""The pages of the rules say what the rules' own documentation says."""

from __future__ import annotations

import os
import pathlib

import pytest

_GENERATED = [pathlib.Path(path) for path in os.environ["STONEWARE_TEST_RULES"].split()]


@pytest.mark.parametrize("generated", _GENERATED, ids=lambda path: path.name)
def test_the_reference_is_that_of_the_rules(generated):
    committed = pathlib.Path("docs", generated.name)
    assert committed.read_text() == generated.read_text(), "update it with `./bazelw run //tools/rule_reference`"


def test_every_page_is_compared():
    assert {path.name for path in _GENERATED} == {path.name for path in pathlib.Path("docs").glob("rules*.md")}
