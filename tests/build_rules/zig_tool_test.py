"""clang++, ar and objcopy of the toolchain call zig, with a cache of each call's own, and leave nothing behind.

A shell script stands in for zig. STONEWARE_TEST_ZIG_TOOLS names the three programs.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time

import pytest

_TOOLS = {os.path.basename(path): os.path.abspath(path) for path in os.environ["STONEWARE_TEST_ZIG_TOOLS"].split()}
_ZIG = """#!/bin/sh
printf '%s\\n' "$@" > arguments
[ "$ZIG_GLOBAL_CACHE_DIR" = "$ZIG_LOCAL_CACHE_DIR" ] || exit 9
if [ -n "$ZIG_LOCAL_CACHE_DIR" ]; then
  cp -R "$ZIG_LOCAL_CACHE_DIR" seen
  echo left > "$ZIG_LOCAL_CACHE_DIR/left" && echo new >> "$ZIG_LOCAL_CACHE_DIR/o/libc.a"
fi
[ -z "$WAIT" ] || { touch started; exec sleep 600; }
exit 3
"""


@pytest.fixture
def start(tmp_path):
    """Starts a tool in an execution root, where zig exits with 3."""
    zig = tmp_path / "external/stoneware_zig/tree/zig"
    zig.parent.mkdir(parents=True)
    zig.write_text(_ZIG)
    zig.chmod(0o755)
    cache = tmp_path / "stored"
    (cache / "o").mkdir(parents=True)
    (cache / "o/libc.a").write_text("archive\n")
    (cache / "o/libc.a").chmod(0o444)
    (tmp_path / "cache").symlink_to(cache)
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(tool: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [_TOOLS[tool], *arguments],
            cwd=tmp_path,
            env={"PATH": "/bin:/usr/bin", "TMPDIR": str(scratch), **environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    yield run
    assert list(scratch.iterdir()) == [], "the scratch folder must be gone"
    assert (cache / "o/libc.a").read_text() == "archive\n"


def arguments_of(folder: pathlib.Path) -> list[str]:
    return (folder / "arguments").read_text().splitlines()


@pytest.mark.parametrize(("source", "driver"), [("main.cc", "c++"), ("main.c", "cc")])
def test_clang_is_zig_s_for_glibc_2_28(start, tmp_path, source, driver):
    assert start("clang++", "-c", source, "two words").wait() == 3
    assert arguments_of(tmp_path) == [driver, "-target", "x86_64-linux-gnu.2.28", "-c", source, "two words"]


def test_a_compilation_begins_with_an_empty_cache(start, tmp_path):
    start("clang++", "-c", "main.cc").wait()
    assert list((tmp_path / "seen").iterdir()) == []


def test_a_link_begins_with_a_copy_of_the_finished_cache_that_it_may_write(start, tmp_path):
    assert start("clang++", "main.o", STONEWARE_ZIG_CACHE="cache").wait() == 3
    assert [str(path.relative_to(tmp_path / "seen")) for path in (tmp_path / "seen").rglob("*")] == ["o", "o/libc.a"]
    assert (tmp_path / "seen/o/libc.a").stat().st_mode & 0o200


@pytest.mark.parametrize("tool", ["ar", "objcopy"])
def test_other_tools_are_zig_s_of_that_name_and_need_no_cache(start, tmp_path, tool):
    assert start(tool, "rcs", "out.a").wait() == 3
    assert arguments_of(tmp_path) == [tool, "rcs", "out.a"]
    assert not (tmp_path / "seen").exists()


def test_a_stopped_compilation_stops_zig_and_fails(start, tmp_path):
    process = start("clang++", "-c", "main.cc", WAIT="1")
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1


def test_a_cache_that_cannot_be_copied_is_named(start):
    process = start("clang++", "main.o", STONEWARE_ZIG_CACHE="missing")
    assert process.wait() == 1
    assert process.stderr.read() == "zig_tool: missing: No such file or directory\n"
