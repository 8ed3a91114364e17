"""Python, C++ and Starlark of the source tree are formatted."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
import style

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", style.FORMATTERS)
def test_sources_are_formatted(name):
    tool = style.FORMATTERS[name]
    try:
        assert style.sources(_ROOT, tool.suffixes)
        result = style.run(tool, tool.check, _ROOT)
    except style.ToolMissing as error:
        pytest.skip(str(error))
    if result.returncode:
        pytest.fail(f"{result.stdout}\nto mend: ./bazelw run //tools:format", pytrace=False)


@pytest.mark.parametrize(
    ("name", "file", "before", "after"),
    [
        ("imports", "a.py", "import sys\nimport os\n\nprint(os, sys)\n", "import os\nimport sys\n\nprint(os, sys)\n"),
        ("python", "a.py", "x = {'a':1}\n", 'x = {"a": 1}\n'),
        ("cpp", "a.cc", "int  f( );\n", "int f();\n"),
        ("starlark", "a.bzl", "x = [ 1 ]\n", "x = [1]\n"),
    ],
)
def test_a_formatter_finds_and_mends(tmp_path, name, file, before, after):
    tool = style.FORMATTERS[name]
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / file).write_text(before)
    try:
        assert style.run(tool, tool.check, tmp_path).returncode != 0
        assert (tmp_path / file).read_text() == before
        assert style.run(tool, tool.fix, tmp_path).returncode == 0
    except style.ToolMissing as error:
        pytest.skip(str(error))
    assert (tmp_path / file).read_text() == after


def test_a_program_that_is_missing_says_why(tmp_path, monkeypatch):
    """Like the stand-in of //third_party/buildifier without npm; the tests above are then skipped."""
    program = tmp_path / "buildifier"
    program.write_text("#!/bin/sh\necho install Node.js >&2\nexit 69\n")
    program.chmod(0o755)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setattr(style, "_program", lambda name: program)
    tool = style.FORMATTERS["starlark"]
    with pytest.raises(style.ToolMissing, match="install Node.js"):
        style.run(tool, tool.check, tmp_path)
