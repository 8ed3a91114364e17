"""Formatters and linters of the source tree: the pinned programs, their options, their sources.

Options that editors read too are in pyproject.toml and .clang-format.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

PYTHON = (".py",)
CPP = (".cc", ".cu", ".cuh", ".h")
STARLARK = (".BUILD", ".bazel", ".bzl", "WORKSPACE")

_UNAVAILABLE = 69  # what //third_party/buildifier ends with where npm is missing

# Without: Bazel 7 has sh_binary, but no rules_sh; tests of the rules load what is private; a function
# for WORKSPACE, or one that makes several targets, has no name.
_STARLARK_WARNINGS = "-bzl-visibility,-native-sh-binary,-unnamed-macro"


class ToolMissing(Exception):
    """A program cannot be had here; the message says what to do."""


@dataclass(frozen=True)
class Tool:
    """One program on some sources.

    Attributes:
      program: ruff, clang-format or buildifier.
      suffixes: which files it reads.
      check: its options to check without writing; its exit code is not 0 if it finds something.
      fix: its options to write; None if it cannot fix what it finds.
    """

    program: str
    suffixes: tuple[str, ...]
    check: tuple[str, ...]
    fix: tuple[str, ...] | None = None


FORMATTERS: Mapping[str, Tool] = {
    "imports": Tool(
        "ruff", PYTHON, ("check", "--no-cache", "--select=I"), ("check", "--no-cache", "--quiet", "--select=I", "--fix")
    ),
    "python": Tool("ruff", PYTHON, ("format", "--no-cache", "--check", "--diff"), ("format", "--no-cache", "--quiet")),
    "cpp": Tool("clang-format", CPP, ("--dry-run", "-Werror"), ("-i",)),
    "starlark": Tool("buildifier", STARLARK, ("-mode=check",), ("-mode=fix",)),
}
LINTERS: Mapping[str, Tool] = {
    "python": Tool("ruff", PYTHON, ("check", "--no-cache")),
    "starlark": Tool("buildifier", STARLARK, ("-mode=check", "-lint=warn", f"-warnings={_STARLARK_WARNINGS}")),
}


def sources(root: pathlib.Path, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Existing paths below `root` that git tracks or would add.

    Raises:
      ToolMissing: git is missing, or `root` is not a clone.
    """
    command = ["git", "-c", f"safe.directory={root}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ToolMissing(f"git must list the sources of {root}, but {error}; use a clone, with git on PATH") from error
    paths = [path for path in listed.split("\0") if path.endswith(suffixes)]
    return sorted({path for path in paths if path and (root / path).is_file()})


def run(tool: Tool, options: tuple[str, ...], root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs the program with `options` on its sources below `root`; what it says is in stdout.

    Raises:
      ToolMissing: the program or git cannot be had here.
    """
    result = subprocess.run(
        [_program(tool.program), *options, *sources(root, tool.suffixes)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode == _UNAVAILABLE:
        raise ToolMissing(result.stdout.strip())
    return result


def _program(name: str) -> pathlib.Path:
    if name == "buildifier":
        runfiles = pathlib.Path(os.path.abspath(__file__)).parents[3]
        return runfiles / "stoneware_buildifier/buildifier"
    spec = importlib.util.find_spec(name.replace("-", "_"))
    assert spec is not None and spec.origin is not None, f"{name} is no dependency of this target"
    package = pathlib.Path(spec.origin).parent
    if name == "clang-format":
        return package / "data/bin/clang-format"
    return next(package.parent.glob("ruff-*.data/scripts/ruff"))
