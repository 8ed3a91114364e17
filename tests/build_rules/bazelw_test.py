"""bazelw runs $BAZEL, bazelisk or a Bazel 7, in this order; otherwise it prints what to install.

A copy of the script runs with a PATH of stand-ins that print what they were started with.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import types

import pytest

_FILES = (
    ".bazelversion",
    "bazelw",
    "third_party/python/find_python.py",
    "third_party/python/probe.py",
    "tools/bootstrap/bazelw.py",
    "tools/bootstrap/debian.py",
    "tools/bootstrap/debian_bazel.py",
)


class Checkout:
    """A copy of bazelw in a folder with a space in its name, and a PATH of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder / "a clone"
        for name in _FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, self.root / name)
        self.cache = folder / "cache"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("dirname", "sh"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        (self.bin / "python3").symlink_to(sys.executable)

    def add_program(self, name: str, version: str = "7.7.1") -> pathlib.Path:
        """A stand-in that tells its name and arguments, and says `version` for --version."""
        path = self.bin / name
        path.write_text(
            '#!/bin/sh\nif [ "$*" = --version ]; then\n'
            f'  echo "bazel {version}"\n  exit\nfi\n'
            f'echo "{name}"\nprintf "%s\\n" "$@"\n'
        )
        path.chmod(0o755)
        return path

    def start(
        self, *arguments: str, cwd: pathlib.Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "bazelw"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env={
                "PATH": str(self.bin),
                "HOME": str(self.cache.parent),
                "XDG_CACHE_HOME": str(self.cache),
                **environment,
            },
        )


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Checkout:
    # A cache below /tmp would be moved; these tests are about something else.
    if tmp_path.is_relative_to("/tmp"):
        pytest.fail("run with --basetemp outside /tmp, or as `bazel test //tests/build_rules/...`")
    return Checkout(tmp_path)


def test_variable_wins_over_every_program(checkout):
    for name in ("bazelisk", "bazel"):
        checkout.add_program(name)
    mine = checkout.add_program("my_bazel", version="6.0.0")
    result = checkout.start("build", BAZEL=str(mine))
    assert result.stdout.splitlines()[0] == "my_bazel"


def test_bazelisk_wins_over_bazel(checkout):
    for name in ("bazel", "bazelisk"):
        checkout.add_program(name)
    assert checkout.start("build").stdout.splitlines()[0] == "bazelisk"


def test_bazel_of_the_major_version_is_taken(checkout):
    checkout.add_program("bazel", version="7.0.2")
    assert checkout.start("build").stdout.splitlines()[0] == "bazel"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("my_bazel", "point $BAZEL at one"), ("bazelisk", "unset USE_BAZEL_VERSION, or put 7.7.1 into .bazelversion")],
)
def test_chosen_bazel_of_another_major_version_is_run_with_a_warning(checkout, name, remedy):
    bazel = checkout.add_program(name, version="8.4.0")
    environment = {"BAZEL": str(bazel)} if name == "my_bazel" else {}
    result = checkout.start("build", **environment)
    assert result.stdout.splitlines()[0] == name
    assert f"{bazel} is version 8.4.0, but Stoneware is tested with 7.7.1 alone; if it fails, {remedy}" in result.stderr
    checkout.add_program(name, version="7.0.2")
    assert checkout.start("build", **environment).stderr == ""


@pytest.mark.parametrize("version", ["8.4.0", "6.5.0", "77.0.0", "no_version"])
def test_bazel_of_another_version_is_left_alone_and_said_so(checkout, version):
    bazel = checkout.add_program("bazel", version=version)
    result = checkout.start("build")
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"{bazel} is version" in result.stderr
    assert "not 7.x; it is left alone" in result.stderr


def test_bazelisk_that_is_called_bazel_chooses_by_the_version_file_of_the_folder(checkout):
    bazelisk = checkout.add_program("bazel")
    text = bazelisk.read_text().replace('echo "bazel 7.7.1"', 'read -r version <.bazelversion && echo "bazel $version"')
    assert ".bazelversion" in text
    bazelisk.write_text(text)
    result = checkout.start("build", cwd=checkout.root)
    assert result.stdout.splitlines()[0] == "bazel", result.stderr


def test_without_bazel_and_apt_one_sentence_says_what_to_install(checkout):
    result = checkout.start("build")
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    for words in ("no Bazel 7 here", "apt-get is not on PATH", "install bazelisk", "Bazel 7.7.1", "$BAZEL"):
        assert words in last
    assert "Traceback" not in result.stderr


def test_without_python_one_sentence_says_what_to_install(checkout):
    (checkout.bin / "python3").unlink()
    result = checkout.start("build")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "python3 is not on PATH; install Python 3.11" in result.stderr


def test_arguments_arrive_behind_the_startup_options(checkout):
    checkout.add_program("bazelisk")
    arguments = ["test", "//...", "--test_arg=two words", "$HOME"]
    lines = checkout.start(*arguments).stdout.splitlines()
    folder = checkout.cache / "stoneware"
    assert lines[1:] == [f"--output_user_root={folder / 'bazel'}", f"--bazelrc={folder / 'bazelw.bazelrc'}", *arguments]


def test_exit_code_is_bazels(checkout):
    failing = checkout.bin / "bazelisk"
    failing.write_text("#!/bin/sh\nexit 37\n")
    failing.chmod(0o755)
    assert checkout.start("build").returncode == 37


def test_rc_file_has_the_disk_cache_and_is_written_once(checkout):
    checkout.add_program("bazelisk")
    checkout.start("build")
    rc = checkout.cache / "stoneware/bazelw.bazelrc"
    line = f"common --disk_cache={checkout.cache / 'stoneware/disk_cache'}"
    assert line in rc.read_text().splitlines()
    before = rc.stat()
    checkout.start("build")
    assert (rc.stat().st_ino, rc.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    rc.write_text("old")
    checkout.start("build")
    assert "--disk_cache" in rc.read_text()
    assert [path.name for path in rc.parent.glob("bazelw*")] == ["bazelw.bazelrc"]


@pytest.fixture
def bazelw(checkout, monkeypatch) -> types.ModuleType:
    """The module itself, out of the copy."""
    monkeypatch.syspath_prepend(str(checkout.root / "tools/bootstrap"))
    for name in ("bazelw", "debian_bazel", "debian"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bazelw as module

    yield module
    for name in ("bazelw", "debian_bazel", "debian"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("machine", [("Linux", "aarch64"), ("Darwin", "arm64"), ("Linux", "i686")])
def test_another_machine_is_refused_before_anything_is_made(bazelw, monkeypatch, checkout, machine):
    monkeypatch.setattr(platform, "system", lambda: machine[0])
    monkeypatch.setattr(platform, "machine", lambda: machine[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.cache))
    monkeypatch.setattr(bazelw, "find_bazel", lambda _: pytest.fail("nothing may be looked for or set up"))
    with pytest.raises(SystemExit) as caught:
        bazelw.main(["build", "//:wheel"])
    message = str(caught.value)
    assert "is built on x86-64 Linux" in message and "\n" not in message
    assert f"this machine is {' '.join(machine)}; build there, or here by `docker run " in message
    assert not checkout.cache.exists()


@pytest.mark.parametrize("libc", [("musl", "1.2.5"), ("", "")])
def test_linux_without_glibc_is_refused(bazelw, monkeypatch, libc):
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(SystemExit, match="this machine is Linux x86_64 without glibc; build there, or here by"):
        bazelw.main(["build", "//:wheel"])


def test_the_documented_docker_line_is_the_one_that_is_printed(bazelw):
    page = pathlib.Path("docs/wheels.md").read_text()
    assert bazelw.DOCKER in page.replace(" \\\n    ", " ")


@pytest.fixture
def made_folders(monkeypatch) -> list[pathlib.Path]:
    """The folders that would be made; none is made."""
    made: list[pathlib.Path] = []
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda path, **options: made.append(path))
    monkeypatch.setattr(pathlib.Path, "stat", lambda path, **options: types.SimpleNamespace(st_uid=os.getuid()))
    return made


@pytest.mark.parametrize("base", ["/tmp/mine", "/tmp", "/usr/../tmp/mine"])
def test_cache_below_tmp_is_moved_and_said_so(bazelw, made_folders, monkeypatch, capfd, base):
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    folder = bazelw.cache_folder()
    assert not folder.is_relative_to("/tmp")
    assert folder.name.startswith(f"stoneware-{os.getuid()}-")
    assert made_folders == [folder]
    message = capfd.readouterr().err
    assert "lies under /tmp" in message
    assert str(folder) in message


def test_two_caches_below_tmp_are_moved_apart(bazelw, made_folders, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/one")
    first = bazelw.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/two")
    assert bazelw.cache_folder() != first
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/one")
    assert bazelw.cache_folder() == first


def test_cache_is_the_users_by_default(bazelw, made_folders, monkeypatch, capfd):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home-of-nobody")
    assert bazelw.cache_folder() == pathlib.Path("/home-of-nobody/.cache/stoneware")
    assert capfd.readouterr().err == ""


def test_cache_of_another_user_is_refused(bazelw, made_folders, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(pathlib.Path, "stat", lambda path, **options: types.SimpleNamespace(st_uid=1))
    with pytest.raises(SystemExit, match="belongs to another user; set XDG_CACHE_HOME"):
        bazelw.cache_folder()


@pytest.mark.parametrize("bazel", ["/nowhere/bazel", "no-such-program"])
def test_bazel_that_is_no_program_is_said(checkout, bazel):
    result = checkout.start("build", BAZEL=bazel)
    assert result.returncode == 1
    assert f"$BAZEL must name a program, but is {bazel!r}; correct or unset it" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["with space", "with#hash", "with'quote"])
def test_cache_folder_that_bazel_would_misread_is_refused_before_any_download(checkout, name):
    checkout.add_program("bazel")
    result = checkout.start("build", XDG_CACHE_HOME=str(checkout.cache / name))
    assert result.returncode == 1
    assert "must have no white space, quote, backslash or #" in result.stderr
    assert "set XDG_CACHE_HOME" in result.stderr


def test_cache_folder_that_is_a_file_is_said(checkout):
    checkout.add_program("bazel")
    checkout.cache.write_text("")
    result = checkout.start("build")
    assert result.returncode == 1
    assert "must be one that can be written" in result.stderr and "Traceback" not in result.stderr


def test_bazel_on_path_that_does_not_run_is_left_alone(checkout):
    checkout.add_program("bazel").write_bytes(b"\x7fELF not really")
    result = checkout.start("build")
    assert "is version unknown, not 7.x; it is left alone" in result.stderr
    assert "Traceback" not in result.stderr
