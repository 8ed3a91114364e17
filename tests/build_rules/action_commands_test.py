"""Every action behind the wheels runs zig's clang, the pinned nvcc or a program of the repository.

The listings come from Bazel's own action graph (action_commands.bzl); STONEWARE_TEST_COMMANDS and
STONEWARE_TEST_QUICKSTART_COMMANDS name them.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import sys

import pytest

_TOOLS = r"bazel-out/[\w.-]+/bin/third_party/zig/"
_CLANG = _TOOLS + r"clang\+\+"
_ARCHIVER = _TOOLS + "ar"
_OBJCOPY = _TOOLS + "objcopy"
_ZIG = "external/stoneware_zig/tree/zig"
_NVCC_WRAPPER = r"bazel-out/[\w.-]+/bin/tools/build_rules/private/nvcc_wrapper"
_NVCC = "external/stoneware_cuda/tree/bin/nvcc"

# Mnemonic to the program that its actions run. Another mnemonic fails the test: add it here.
_COMPILERS = {
    "CcStrip": _OBJCOPY,
    "CppArchive": _ARCHIVER,
    "CppCompile": _CLANG,
    "CppLink": _CLANG,
    "CudaHostCompile": _CLANG,
    "ZigRuntime": "third_party/zig/build_runtime_cache",
    "ZigTool": _ZIG,
}
_PROGRAMS = {
    "CompressCubin": r"external/stoneware_cuda/tree/bin/fatbinary",
    "CudaCubin": _NVCC_WRAPPER,
    "KernelManifest": r"bazel-out/[\w.-]+/bin/tools/build_rules/private/write_manifest",
    "LinkedEpilogues": r"bazel-out/[\w.-]+/bin/tools/linked_epilogues/linked_epilogues",
    "NanobindStub": r"bazel-out/[\w.-]+/bin/external/stoneware_nanobind/stubgen",
    "OpenKernels": _NVCC_WRAPPER,
    # Offered for py_binary targets, not run: .bazelrc sets --nobuild_python_zip.
    "PythonZipper": r"external/bazel_tools/tools/zip/\S*zipper",
    "PythonWheel": r"bazel-out/[\w.-]+/bin/tools/build_rules/private/write_wheel",
    "SpdxSbom": r"bazel-out/[\w.-]+/bin/tools/release/write_sbom",
    "TileMatmul": _NVCC_WRAPPER,
    "TileMatmulSource": r"bazel-out/[\w.-]+/bin/tools/tile_matmul/tile_matmul",
    "TritonAot": r"bazel-out/[\w.-]+/bin/tools/triton_aot/triton_aot",
    "TuningTable": r"bazel-out/[\w.-]+/bin/tools/bake/bake",
}
# A genrule runs in bash and calls one program that was built here.
_GENRULE = (
    r"source \S*genrule-setup\.sh; "
    r"bazel-out/[\w.-]+/bin/third_party/nanobind/opening_comment .*"
)

_SYSTEM_TOOL = re.compile(
    r"(?:.*/)?(?:(?:[\w.]+-)*(?:gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|ld|lld|gold|bfd|as|ar|nvcc"
    r"|ptxas|objcopy|strip)(?:-\d[\d.]*)?)"
)
_PINNED_TOOL = re.compile(f"{_CLANG}|{_ARCHIVER}|{_OBJCOPY}|{_NVCC}")
_SHELL_FOLDERS = {"/bin", "/usr/bin", "/usr/local/bin"}
_NUM_CUBINS = 6
_NUM_FAMILIES = 5


def listing(variable: str) -> list[dict]:
    return json.loads(pathlib.Path(os.environ[variable]).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def actions() -> list[dict]:
    return listing("STONEWARE_TEST_COMMANDS")


@pytest.fixture(scope="module")
def commands(actions) -> list[dict]:
    return [action for action in actions if "argv" in action]


def of(commands: list[dict], *mnemonics: str) -> list[dict]:
    return [command for command in commands if command["mnemonic"] in mnemonics]


def test_listing_has_every_kind_of_compiler_action(commands):
    counts = collections.Counter(command["mnemonic"] for command in commands)
    assert set(_COMPILERS) | {"CudaCubin"} <= set(counts)
    cubins = {command["argv"][-1] for command in of(commands, "CudaCubin")}
    assert len(cubins) >= _NUM_CUBINS
    assert counts["CudaHostCompile"] >= _NUM_FAMILIES
    assert len(of(commands, "TritonAot")) >= 1


def test_every_compiler_action_runs_its_pinned_program(commands):
    wrong = {
        (command["target"], command["mnemonic"], command["argv"][0])
        for command in of(commands, *_COMPILERS)
        if not re.fullmatch(_COMPILERS[command["mnemonic"]], command["argv"][0])
    }
    assert wrong == set()


def test_every_nvcc_action_runs_the_pinned_nvcc_with_clang_as_host_compiler(commands):
    expected = f"{_NVCC} -ccbin {_CLANG}"
    nvcc = of(commands, "CudaCubin", "OpenKernels", "TileMatmul")
    found = [" ".join(command["argv"][1:4]) for command in nvcc]
    assert found
    assert [words for words in found if not re.fullmatch(expected, words)] == []
    assert [command for command in nvcc if command["argv"].count("-ccbin") != 1] == []


def test_no_working_folder_gets_into_lto_ir(commands):
    """nvcc takes it from $PWD, which must be the same wherever Bazel runs."""
    found = of(commands, "OpenKernels", "TileMatmul")
    assert found
    assert {command["env"].get("PWD") for command in found} == {"/proc/self/cwd"}


def test_every_other_action_runs_a_program_of_the_repository(commands):
    rest = [command for command in commands if command["mnemonic"] not in _COMPILERS]
    assert rest
    for command in rest:
        argv = command["argv"]
        if command["mnemonic"] == "Genrule":
            assert re.fullmatch(r"(/usr)?/bin/bash", argv[0]), command["target"]
            assert re.fullmatch(_GENRULE, argv[2], flags=re.DOTALL), command["target"]
        else:
            assert command["mnemonic"] in _PROGRAMS, (command["target"], argv[:4])
            assert re.fullmatch(_PROGRAMS[command["mnemonic"]], argv[0]), command["target"]


def test_no_word_of_any_command_is_a_tool_of_the_system(commands):
    found = {
        (command["target"], word)
        for command in commands
        # zig's first word says what it shall be.
        for word in command["argv"][2 if command["argv"][0] == _ZIG else 0 :]
        if _SYSTEM_TOOL.fullmatch(word) and not _PINNED_TOOL.fullmatch(word)
    }
    assert found == set()


def test_no_word_of_any_command_is_an_absolute_path(commands):
    """An absolute path names the machine; the shell and the null device are everywhere."""
    found = {
        (command["mnemonic"], word)
        for command in commands
        for word in command["argv"]
        if re.match(r"(-\w+)?/\w", word) and word not in ("/bin/bash", "/usr/bin/bash", "/dev/null")
    }
    assert found == set()


def test_no_python_program_contains_the_path_of_the_hosts_python(actions):
    """Programs are inputs of the actions that run them: another path would compile every kernel again."""
    programs = {action["target"]: action["content"] for action in actions if "content" in action}
    assert any("nvcc_wrapper" in target for target in programs)
    assert any("triton_aot" in target for target in programs)
    for target, content in programs.items():
        assert content.startswith("#!/bin/sh\n"), target
        assert re.findall("^PYTHON_BINARY = '(.*)'$", content, re.MULTILINE) == ["stoneware_python/python3"], target
        for python in {sys.executable, os.path.realpath(sys.executable)}:
            assert os.path.dirname(python) not in content.removeprefix("#!/bin/sh"), target


def test_quickstart_needs_no_headers_for_the_stable_abi(commands):
    """They come from Debian where python3 is older than 3.12, and not every machine can fetch them."""
    words = {word for action in listing("STONEWARE_TEST_QUICKSTART_COMMANDS") for word in action.get("argv", [])}
    folders = {abi: f"external/stoneware_python_headers_{abi}/" for abi in ("host", "abi3")}
    assert any(folders["host"] in word for word in words)
    assert [word for word in words if folders["abi3"] in word] == []
    assert any(folders["abi3"] in word for command in commands for word in command["argv"])


def test_path_of_every_action_has_the_shells_folders_alone(commands):
    for command in commands:
        folders = command["env"].get("PATH", "/bin").split(":")
        assert set(folders) <= _SHELL_FOLDERS, (command["target"], command["mnemonic"], folders)


def test_no_compiler_action_sees_the_users_environment(commands):
    zig = {"STONEWARE_ZIG_CACHE", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"}
    allowed = {"BAZEL_DO_NOT_DETECT_CPP_TOOLCHAIN", "PATH", "PWD"} | zig
    found = {
        (command["mnemonic"], name)
        for command in of(commands, *_COMPILERS)
        for name in command["env"]
        if name not in allowed
    }
    assert found == set()


@pytest.mark.parametrize(
    "word",
    [
        "gcc",
        "/usr/bin/gcc",
        "/usr/bin/x86_64-linux-gnu-gcc-12",
        "cc",
        "/usr/bin/ld",
        "clang-18",
        "/usr/local/cuda/bin/nvcc",
        "/usr/bin/ar",
        "c++",
    ],
)
def test_the_pattern_knows_system_tools(word):
    assert _SYSTEM_TOOL.fullmatch(word)
