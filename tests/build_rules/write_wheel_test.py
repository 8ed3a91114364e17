"""The same contents give the same wheel: whatever the folder, order, times, modes and day.

STONEWARE_TEST_WRITE_WHEEL names the program.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import zipfile

import pytest

_NAME = "small-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
_CONTENTS = {
    "small/__init__.py": b"",
    "small/kernels/add.cubin": b"\x7fELF" + bytes(4096),
    "small/z.py": b"z = 1\n",
}


@pytest.fixture
def pack():
    """Writes a small wheel in `folder`; returns its path."""
    program = os.path.abspath(os.environ["STONEWARE_TEST_WRITE_WHEEL"])

    def run(
        folder: pathlib.Path, *, is_reversed: bool = False, mtime: int = 10**9, mode: int = 0o644,
        umask: int = 0o022, date: str | None = None, summary: str = "Small",
    ) -> pathlib.Path:
        folder.mkdir(parents=True)
        listing = {}
        for idx, (path, data) in enumerate(_CONTENTS.items()):
            file = folder / f"source_{idx}"
            file.write_bytes(data)
            file.chmod(mode)
            os.utime(file, (mtime, mtime))
            listing[path] = str(file)
        if is_reversed:
            listing = dict(reversed(listing.items()))
        (folder / "contents.json").write_text(json.dumps(listing))
        (folder / "LICENSE").write_text("Apache License\n")
        (folder / "README.md").write_text("# Small\n")
        environment = {**os.environ, **({"SOURCE_DATE_EPOCH": date} if date else {})}
        subprocess.run(
            [program, "--contents=contents.json", "--distribution=small", "--version=1.0",
             f"--summary={summary}", "--tag=cp312-abi3-manylinux_2_28_x86_64",
             "--requires_python=>=3.12", "--requires=torch>=2.11", "--license=LICENSE",
             "--readme=README.md", f"--wheel={_NAME}", "--site=site"],
            check=True, cwd=folder, env=environment, umask=umask,
        )
        return folder / _NAME

    return run


@pytest.mark.parametrize("change", [
    {"is_reversed": True}, {"mtime": 1}, {"mode": 0o755}, {"umask": 0o077},
    {"date": "1700000000"},  # stands for another day
], ids=lambda change: next(iter(change)))
def test_bytes_do_not_depend_on(pack, tmp_path, change):
    first = pack(tmp_path / "a")
    second = pack(tmp_path / "a_much_longer_folder_name", **change)
    assert first.read_bytes() == second.read_bytes()


def test_bytes_depend_on_the_contents(pack, tmp_path):
    first = pack(tmp_path / "a")
    second = pack(tmp_path / "b", summary="Large")
    assert first.read_bytes() != second.read_bytes()


def test_archive_is_compressed(pack, tmp_path):
    with zipfile.ZipFile(pack(tmp_path / "a")) as archive:
        entry = archive.getinfo("small/kernels/add.cubin")
    assert entry.compress_size < entry.file_size


def test_site_is_the_wheel_unpacked(pack, tmp_path):
    wheel = pack(tmp_path / "a")
    site = tmp_path / "a/site"
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    unpacked = {str(p.relative_to(site)): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    assert unpacked == packed
    assert _CONTENTS.items() <= packed.items()


def test_a_long_summary_stays_one_line(pack, tmp_path):
    summary = "word " * 40 + "end"
    wheel = pack(tmp_path / "a", summary=summary)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("small-1.0.dist-info/METADATA").decode()
    assert f"\nSummary: {summary}\n" in metadata
    assert metadata.endswith("\n\n# Small\n")
