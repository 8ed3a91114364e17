"""The archive: sorted, dated 1980, compressed, RECORD right, metadata and tags true."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import pathlib
import re
import zipfile

from auditwheel.wheel_abi import analyze_wheel_abi
from auditwheel.wheeltools import get_wheel_architecture, get_wheel_libc

import stoneware

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE_0644 = 0o100644


def test_entries_are_sorted_with_record_last(wheel):
    names = [entry.filename for entry in wheel.entries]
    assert len(set(names)) == len(names)
    assert names[-1] == f"{wheel.info}/RECORD"
    assert names[:-1] == sorted(names[:-1])


def test_every_entry_has_the_fixed_date(wheel):
    assert {e.filename: e.date_time for e in wheel.entries if e.date_time != _ZIP_EPOCH} == {}


def test_every_entry_has_a_fixed_mode(wheel):
    modes = {entry.filename: oct(entry.external_attr >> 16) for entry in wheel.entries}
    # The package `wheel` writes RECORD itself, always with this mode.
    assert modes.pop(f"{wheel.info}/RECORD") == oct(0o100664)
    assert {n: mode for n, mode in modes.items() if mode != oct(_REGULAR_FILE_0644)} == {}


def test_every_entry_is_compressed(wheel):
    stored = [e.filename for e in wheel.entries if e.compress_type != zipfile.ZIP_DEFLATED]
    assert stored == []


def test_record_lists_every_member_with_its_hash_and_size(wheel):
    rows = list(csv.reader(io.StringIO(wheel.members[f"{wheel.info}/RECORD"].decode())))
    expected = []
    for path, data in wheel.members.items():
        if path == f"{wheel.info}/RECORD":
            expected.append([path, "", ""])
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        expected.append([path, f"sha256={digest}", str(len(data))])
    assert sorted(rows) == sorted(expected)


def test_version_is_the_packages_own(wheel):
    assert wheel.path.name.startswith(f"stoneware-{stoneware.__version__}-")
    assert wheel.header("METADATA")["Version"] == stoneware.__version__
    source = wheel.members["stoneware/__init__.py"].decode()
    assert f'__version__ = "{stoneware.__version__}"' in source


def test_metadata_has_one_line_a_header(wheel):
    """Core metadata allows folding nowhere but in a description; some readers refuse it."""
    header = wheel.members[f"{wheel.info}/METADATA"].decode().split("\n\n", 1)[0]
    lines = header.splitlines()
    assert [line for line in lines if not re.match(r"[A-Z][\w-]*: \S", line)] == []


def test_metadata_asks_for_the_python_of_the_tag(wheel):
    python, abi, _ = wheel.tag.split("-")
    major, minor = python[2], python[3:]
    expected = f">={major}.{minor}" if abi == "abi3" else f"=={major}.{minor}.*"
    assert wheel.header("METADATA")["Requires-Python"] == expected


def test_metadata_names_requirements_and_no_extras(wheel):
    assert wheel.header("METADATA").get_all("Provides-Extra") is None
    assert wheel.header("METADATA").get_all("Requires-Dist") == [
        "nvidia-ml-py>=12",
        "rich>=13.8",
        "torch>=2.11",
        "typer>=0.20",
    ]


def test_the_command_and_the_plugins_of_engines_are_the_only_entry_points(wheel):
    text = wheel.members[f"{wheel.info}/entry_points.txt"].decode()
    assert text == (
        "[console_scripts]\nstoneware = stoneware.cli.main:main\n\n"
        "[sglang.srt.plugins]\nstoneware = stoneware.integrations.sglang:plugin\n\n"
        "[vllm.general_plugins]\nstoneware = stoneware.integrations.vllm:plugin\n"
    )


def test_the_kernel_folders_of_transformers_are_complete(wheel):
    """With the names and files that the package `kernels` looks for."""
    for backend in ("cpu", "cuda"):
        folder = f"stoneware/integrations/hf_kernels/build/torch-{backend}"
        assert f"{folder}/__init__.py" in wheel.members
        assert json.loads(wheel.members[f"{folder}/metadata.json"])["backend"] == {"type": backend}


# Path in .dist-info/licenses to what its text says.
_LICENCES = {
    "LICENSE": "Apache License",
    "NOTICE": "The wheels contain",
    "third_party/cutlass.txt": "NVIDIA CORPORATION & AFFILIATES",
    "third_party/libcxx.txt": "LLVM Exceptions to the Apache 2.0 License",
    "third_party/libcxxabi.txt": "LLVM Exceptions to the Apache 2.0 License",
    "third_party/libunwind.txt": "LLVM Exceptions to the Apache 2.0 License",
    "third_party/nanobind.txt": "Wenzel Jakob",
    "third_party/robin_map.txt": "The above copyright notice and this permission notice shall be included",
    "third_party/zig.txt": "Zig contributors",
}


def test_licences_are_inside_and_named(wheel):
    assert sorted(wheel.header("METADATA").get_all("License-File")) == sorted(_LICENCES)
    texts = {path: wheel.members[f"{wheel.info}/licenses/{path}"].decode() for path in _LICENCES}
    assert {path: text for path, text in texts.items() if _LICENCES[path] not in text} == {}
    assert not any(line.startswith(("*", "/")) for line in texts["third_party/robin_map.txt"].splitlines())


def test_notice_names_each_licence_of_others(wheel):
    notice = wheel.members[f"{wheel.info}/licenses/NOTICE"].decode()
    assert [path for path in _LICENCES if "/" in path and path not in notice] == []


def test_type_checkers_find_annotations(wheel):
    assert wheel.members["stoneware/py.typed"] == b""


def test_each_native_module_has_a_stub_that_names_its_classes(wheel):
    classes = {
        path: {node.name for node in ast.parse(data).body if isinstance(node, ast.ClassDef)}
        for path, data in wheel.members.items()
        if path.endswith(".pyi")
    }
    assert classes == {
        "stoneware/ops/_call.pyi": {"FastCall", "Guard"},
        "stoneware/ops/_sm90.pyi": {"LinkedKernel", "Plan"},
        "stoneware/runtime/_driver.pyi": {"Kernel", "Plan"},
    }


def test_tag_inside_is_the_tag_of_the_name(wheel):
    assert wheel.header("WHEEL").get_all("Tag") == [wheel.tag]
    assert wheel.header("WHEEL")["Root-Is-Purelib"] == "false"


def test_extension_modules_have_the_suffix_of_the_tag(wheel):
    python, abi, _ = wheel.tag.split("-")
    assert abi == "abi3" or wheel.processor == "x86_64"
    suffix = ".abi3.so" if abi == "abi3" else f".cpython-{python[2:]}-x86_64-linux-gnu.so"
    assert wheel.modules
    assert [path for path in wheel.modules if not path.endswith(suffix)] == []


def test_auditwheel_agrees_with_the_platform_tag(wheel):
    """auditwheel's own check of symbol versions, libraries and instruction set extensions.

    It reads the wheel with pyelftools and finds the libraries through ld.so's configuration; it
    needs no patchelf (that is for `repair`) and runs no program.
    """
    name = wheel.path.name
    info = analyze_wheel_abi(
        get_wheel_libc(name),
        get_wheel_architecture(name),
        wheel.path,
        frozenset(),
        disable_isa_ext_check=False,
        allow_graft=False,
    )
    pattern = rf"manylinux_(\d+)_(\d+)_{wheel.processor}"
    claimed = re.fullmatch(pattern, wheel.tag.split("-")[2])
    proven = re.fullmatch(pattern, info.overall_policy.name)
    assert claimed, f"{wheel.tag} has no manylinux tag of PEP 600"
    assert proven, f"auditwheel finds {info.overall_policy.name}, which is not a manylinux policy"
    assert tuple(map(int, proven.groups())) <= tuple(map(int, claimed.groups()))
    assert claimed.groups() == ("2", "28")


def test_wheel_has_every_python_file_of_the_sources(wheel):
    """Also a file that no BUILD file names: the link of one source leads to the folder itself."""
    root = pathlib.Path(os.path.realpath("py/stoneware/__init__.py")).parent
    sources = {f"stoneware/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*.py")}
    assert len(sources) > 1, f"no sources below {root}"
    packed = {path: data for path, data in wheel.members.items() if path.endswith(".py")}
    assert sorted(packed) == sorted(sources)
    assert packed == sources


def test_wheels_share_everything_but_modules_and_metadata(wheel):
    folder = pathlib.Path(os.path.realpath(os.environ["STONEWARE_TEST_SITE"]))
    shared = {
        path: data
        for path, data in wheel.members.items()
        if not path.endswith(".so") and not path.startswith(wheel.info)
    }
    assert len(shared) > 100
    assert [p for p, data in shared.items() if (folder / p).read_bytes() != data] == []
