"""The program tools/bake/bake.py, as the build calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_package as small
from small_kernel import OP, kernel_sample, write_kernel

from stoneware.tuning.bake import bake

PROGRAM = Path(__file__).parents[2] / "tools" / "bake" / "bake.py"


@pytest.fixture
def manifest(tmp_path) -> Path:
    path = tmp_path / "kernel_manifest.json"
    path.write_text(small.manifest_text())
    return path


def run(manifest: Path, out: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), "--op=scaled_mm", f"--manifest={manifest}", f"--out={out}", *map(str, files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


def test_program_writes_what_bake_returns(tmp_path, manifest):
    files = small.write_device(tmp_path / "h200", [small.sample(small.VENDOR, 1.0)])
    done = run(manifest, tmp_path / "out.table", *files)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.table").read_bytes() == bake("scaled_mm", files, small.manifest())


def test_program_fails_with_the_reason_and_writes_nothing(tmp_path, manifest):
    files = small.write_device(tmp_path / "h200", [small.sample(small.sm90("gone"), 1.0)])
    done = run(manifest, tmp_path / "out.table", *files)
    assert done.returncode == 1
    assert f"{files[0]}:2: kernel " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.table").exists()


def test_program_names_an_out_that_cannot_be_written(tmp_path, manifest):
    done = run(manifest, tmp_path / "missing" / "out.table")
    assert done.returncode == 1
    assert f"--out={tmp_path}/missing/out.table must be" in done.stderr
    assert "make the folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_program_refuses_a_damaged_manifest(tmp_path, manifest):
    manifest.write_text(manifest.read_text()[:-40])
    done = run(manifest, tmp_path / "out.table")
    assert done.returncode == 1
    assert "not a kernel manifest" in done.stderr


def test_program_bakes_a_decorated_kernel(tmp_path):
    files = write_kernel(tmp_path / "h200", [kernel_sample(64, 1.0)])
    out = tmp_path / "out.table"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), f"--op={OP}", f"--out={out}", *map(str, files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == bake(OP, files)
