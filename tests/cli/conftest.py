"""The fixture `package`: a small installed package and an empty folder for the user's store."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_samples as small

from stoneware.kernels import manifest
from stoneware.kernels.registry import OPS
from stoneware.runtime import native, package_files
from stoneware.tuning import sources, table_file
from stoneware.tuning.bake import bake


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
