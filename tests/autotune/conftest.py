"""The fixture `package`: a small package with a table of an H200, installed for one test."""

from __future__ import annotations

import pytest
import small_package as small

from stoneware.specs import OPS
from stoneware.tuning.bake import bake


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs the small package; returns its folder."""
    samples = [
        small.sample(small.sm90(small.TINY), 10.0, m=16),
        small.sample(small.sm90(small.BIG), 14.0, m=16),
        small.sample(small.triton(), 20.0, m=16),
        small.sample(small.VENDOR, 16.0, m=16),
        small.sample(small.sm90(small.BIG), 50.0, m=512),
        small.sample(small.VENDOR, 40.0, m=512),
    ]
    files = small.write_device(tmp_path / "samples", samples)
    tables = {op: bake(op, files if op == "scaled_mm" else [], small.manifest()) for op in OPS}
    root = tmp_path / "package"
    small.install(root, tables, monkeypatch)
    yield root
    monkeypatch.undo()
    small.forget()
