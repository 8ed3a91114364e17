"""The same contents give the same wheel: whatever the folder, order, times, modes and day; extras
and entry points are written as the specifications ask.

STONEWARE_TEST_WRITE_WHEEL names the program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement

_NAME = "small-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
_CONTENTS = {
    "small/__init__.py": b"",
    "small-1.0.dist-info/licenses/LICENSE": b"Apache License\n",
    "small/kernels/add.cubin": b"\x7fELF" + bytes(4096),
    "small/z.py": b"z = 1\n",
}


@pytest.fixture
def pack():
    """Writes a small wheel in `folder`; returns its path."""
    program = os.path.abspath(os.environ["STONEWARE_TEST_WRITE_WHEEL"])

    def run(
        folder: pathlib.Path,
        *,
        is_reversed: bool = False,
        mtime: int = 10**9,
        mode: int = 0o644,
        umask: int = 0o022,
        date: str | None = None,
        summary: str = "Small",
        flags: tuple[str, ...] = (),
        modules: dict[str, bytes] | None = None,
    ) -> pathlib.Path:
        folder.mkdir(parents=True)
        listing = {}
        for idx, (path, data) in enumerate({**_CONTENTS, **(modules or {})}.items()):
            file = folder / f"source_{idx}"
            file.write_bytes(data)
            file.chmod(mode)
            os.utime(file, (mtime, mtime))
            listing[path] = str(file)
        if is_reversed:
            listing = dict(reversed(listing.items()))
        (folder / "contents.json").write_text(json.dumps(listing))
        (folder / "README.md").write_text("# Small\n")
        environment = {**os.environ, **({"SOURCE_DATE_EPOCH": date} if date else {})}
        subprocess.run(
            [
                program,
                "--contents=contents.json",
                "--distribution=small",
                "--version=1.0",
                f"--summary={summary}",
                "--tag=cp312-abi3-manylinux_2_28_x86_64",
                "--requires_python=>=3.12",
                "--requires=torch>=2.11",
                "--license_expression=Apache-2.0",
                "--license_file=LICENSE",
                "--readme=README.md",
                f"--wheel={_NAME}",
                "--site=site",
                *flags,
            ],
            check=True,
            cwd=folder,
            env=environment,
            umask=umask,
            stderr=subprocess.PIPE,
            text=True,
        )
        return folder / _NAME

    return run


@pytest.fixture(scope="session")
def module() -> bytes:
    """An extension module that needs glibc 2.28 at most."""
    (folder,) = importlib.util.find_spec("stoneware").submodule_search_locations
    (path,) = pathlib.Path(folder, "ops").glob("_call.*.so")
    return path.read_bytes()


def member(wheel: pathlib.Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"small-1.0.dist-info/{name}").decode()


@pytest.mark.parametrize(
    "change",
    [
        {"is_reversed": True},
        {"mtime": 1},
        {"mode": 0o755},
        {"umask": 0o077},
        {"date": "1700000000"},  # stands for another day
    ],
    ids=lambda change: next(iter(change)),
)
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


def test_site_is_the_wheel_unpacked_without_record(pack, tmp_path):
    wheel = pack(tmp_path / "a")
    site = tmp_path / "a/site"
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    unpacked = {str(p.relative_to(site)): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    del packed["small-1.0.dist-info/RECORD"]
    assert unpacked == packed
    assert _CONTENTS.items() <= packed.items()


def test_a_long_summary_stays_one_line(pack, tmp_path):
    summary = "word " * 40 + "end"
    wheel = pack(tmp_path / "a", summary=summary)
    text = member(wheel, "METADATA")
    assert f"\nSummary: {summary}\n" in text
    assert text.endswith("\n\n# Small\n")


def test_extras_are_provided_and_required_under_their_marker(pack, tmp_path):
    wheel = pack(tmp_path / "a", flags=(
        "--extra=search=optuna>=4", "--extra=plot=plotly==7.1.0",
        '--extra=plot=kaleido ; python_version < "3.13" or os_name == "posix"',
    ))  # fmt: skip
    lines = member(wheel, "METADATA").split("\n\n", 1)[0].splitlines()
    start = lines.index("Requires-Dist: torch>=2.11") + 1
    assert lines[start : lines.index("Description-Content-Type: text/markdown")] == [
        "Provides-Extra: plot",
        'Requires-Dist: kaleido; (python_version < "3.13" or os_name == "posix") and extra == "plot"',
        'Requires-Dist: plotly==7.1.0; extra == "plot"',
        "Provides-Extra: search",
        'Requires-Dist: optuna>=4; extra == "search"',
    ]
    for line in lines:
        if line.startswith("Requires-Dist: "):
            Requirement(line.removeprefix("Requires-Dist: "))


def test_entry_points_are_sorted_and_spelt_one_way(pack, tmp_path):
    wheel = pack(tmp_path / "a", flags=(
        "--entry_point=small.plugins=z=small.z:Plugin.make",
        "--entry_point=small.plugins=a = small.tables",
        "--entry_point=console_scripts=small-b  =  small.z:main",
        "--entry_point=console_scripts=small = small:main",
    ))  # fmt: skip
    text = member(wheel, "entry_points.txt")
    assert text == (
        "[console_scripts]\nsmall = small:main\nsmall-b = small.z:main\n\n"
        "[small.plugins]\na = small.tables\nz = small.z:Plugin.make\n"
    )
    (found,) = metadata.distributions(path=[str(tmp_path / "a/site")])
    assert sorted(point.name for point in found.entry_points) == ["a", "small", "small-b", "z"]


@pytest.mark.parametrize("flags", [
    ("--extra=plot=a", "--extra=find=b"),
    ("--entry_point=x=b = small:b", "--entry_point=x=a = small:a", "--entry_point=w=a = small:a"),
], ids=["extras", "entry_points"])  # fmt: skip
def test_bytes_do_not_depend_on_the_order_of(pack, tmp_path, flags):
    first = pack(tmp_path / "a", flags=flags)
    second = pack(tmp_path / "b", flags=flags[::-1])
    assert first.read_bytes() == second.read_bytes()


def test_no_entry_point_means_no_file(pack, tmp_path):
    assert not (pack(tmp_path / "a").parent / "site/small-1.0.dist-info/entry_points.txt").exists()


@pytest.mark.parametrize(("flags", "words"), [
    (("--extra=Plot=plotly",), ("lower-case letters", "'Plot=plotly'", "correct `extras`")),
    (("--extra=plot=",), ("NAME=REQUIREMENT", "'plot='", "correct `extras`")),
    (("--extra=plot",), ("NAME=REQUIREMENT", "'plot'", "correct `extras`")),
    (("--entry_point=console_scripts=small",),
     ("NAME = MODULE:FUNCTION", "'console_scripts=small'", "correct `entry_points`")),
    (("--entry_point=console_scripts=small = small.main",),
     ("NAME = MODULE:FUNCTION", "small.main", "correct `entry_points`")),
    (("--entry_point=x=a = small:a", "--entry_point=x=a = small:b"),
     ("once in its group", "'a' of x", "small:a and small:b", "rename one")),
])  # fmt: skip
def test_what_is_no_extra_or_entry_point_is_refused(pack, tmp_path, flags, words):
    with pytest.raises(subprocess.CalledProcessError) as failure:
        pack(tmp_path / "a", flags=flags)
    assert [word for word in words if word not in failure.value.stderr] == []
    assert not (tmp_path / "a" / _NAME).exists()


def test_a_module_that_keeps_the_platform_tag_is_packed(pack, tmp_path, module):
    wheel = pack(tmp_path / "a", modules={"small/_native.abi3.so": module})
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("small/_native.abi3.so") == module


@pytest.mark.parametrize("processor", ["aarch64", "x86_64"])
def test_a_module_for_another_processor_than_the_tag_is_refused(pack, tmp_path, module, processor):
    machine = {"x86_64": b"\x3e", "aarch64": b"\xb7"}  # of elf.h: 62 and 183
    for name, low_byte in machine.items():
        other = module[:18] + low_byte + b"\0" + module[20:]
        flags = (f"--tag=cp312-abi3-linux_{processor}",)
        if name == processor:
            pack(tmp_path / name, modules={"small/_native.abi3.so": other}, flags=flags)
            continue
        with pytest.raises(subprocess.CalledProcessError) as failure:
            pack(tmp_path / name, modules={"small/_native.abi3.so": other}, flags=flags)
        for words in (f"linux_{processor}", f"small/_native.abi3.so is for {name};", "set `platform`"):
            assert words in failure.value.stderr


def test_a_module_that_needs_more_than_the_platform_tag_says_is_refused(pack, tmp_path, module):
    other = module.replace(b"libc.so.6\0", b"libz.so.6\0")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        pack(tmp_path / "a", modules={"small/_native.abi3.so": other})
    for words in ("manylinux_2_28_x86_64", "libz.so.6", 'platform = "linux_x86_64"'):
        assert words in failure.value.stderr
    pack(tmp_path / "b", modules={"small/_native.abi3.so": other}, flags=("--tag=cp312-abi3-linux_x86_64",))
