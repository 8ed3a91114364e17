"""What tests of commands share: how one is run, a small installed package, samples, an own store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_samples as small
from small_samples import VENDOR, ours, sample

from stoneware.cli import main
from stoneware.kernels import manifest
from stoneware.runtime import native, package_files
from stoneware.specs import OPS
from stoneware.tuning import sources, table_file
from stoneware.tuning.bake import bake

SMALL, BIG = ours("64x16x256"), ours("64x64x256")


def forget() -> None:
    """Drops everything that was read from the package's folder."""
    manifest.packaged.cache_clear()
    table_file.packaged.cache_clear()
    native._try_import.cache_clear()
    sources.forget()


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch) -> Path:
    """The user's store of a test; returns its folder."""
    folder = tmp_path / "own_store"
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Installs a package with a manifest, kernel files and tables; returns its folder."""
    root = tmp_path / "package"
    (root / "tables").mkdir(parents=True)
    (root / "cubins").mkdir()
    for name, data in small.kernel_files().items():
        (root / "cubins" / name).write_bytes(data)
    (root / "kernel_manifest.json").write_text(small.manifest_text())
    monkeypatch.setattr(package_files, "ROOT", root)
    forget()
    samples = small.write_folder(
        tmp_path / "package_samples", [small.sample(small.ours(), 10.0), small.sample(small.VENDOR, 16.0)]
    )
    for op in OPS:
        data = bake(op, samples.iterdir(), manifest.packaged())
        (root / "tables" / f"{op}.table").write_bytes(data)
    forget()
    yield root
    monkeypatch.undo()
    forget()


def stoneware(capsys, *arguments) -> tuple[int, str, str]:
    code = main.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys, *arguments) -> tuple[int, dict]:
    code, out, _ = stoneware(capsys, *arguments, "--json")
    document = json.loads(out)
    assert (document["command"], document["exit_code"]) == (arguments[0], code)
    return code, document


@pytest.fixture
def h200(tmp_path):
    return small.write_folder(
        tmp_path / "h200", [sample(SMALL, 10.0), sample(BIG, 14.0), sample(VENDOR, 16.0), sample(SMALL, 20.0, m=64)]
    )
