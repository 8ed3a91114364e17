"""The wheel for aarch64 has actions of its own that compile C++ for it, and none that compiles a kernel.

The listings come from Bazel's own action graph (action_commands.bzl): of this wheel, and of those for x86-64.
"""

from __future__ import annotations

import json
import os
import pathlib

_COMPILERS = {"CppCompile", "CppLink", "CudaHostCompile"}
_OFFERED = {"CcStrip", "PythonZipper"}  # not run


def commands(variable: str) -> list[dict]:
    actions = json.loads(pathlib.Path(os.environ[variable]).read_text(encoding="utf-8"))
    return [action for action in actions if "argv" in action]


def test_no_kernel_is_compiled_again_and_modules_are_for_aarch64():
    """An action is the same as another one, and its result is cached, if its output has the same path."""
    shared = {json.dumps(command) for command in commands("STONEWARE_TEST_COMMANDS")}
    own = [c for c in commands("STONEWARE_TEST_AARCH64_COMMANDS") if json.dumps(c) not in shared]
    assert {command["mnemonic"] for command in own} - _OFFERED == _COMPILERS | {"CppArchive", "PythonWheel"}
    # Bazel's launchers are for this machine, and offered to programs in Python, not built.
    compiled = [
        command["argv"]
        for command in own
        if command["mnemonic"] in _COMPILERS and not command["target"].startswith("@bazel_tools//")
    ]
    targets = [tuple(argv[idx + 1] for idx, word in enumerate(argv) if word == "-target") for argv in compiled]
    assert set(targets) == {("aarch64-linux-gnu.2.28",)}
