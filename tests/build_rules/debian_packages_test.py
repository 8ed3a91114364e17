"""Debian's packages are taken if suite and headers are those that the build names; otherwise an error says why.

Stand-ins for apt-get, apt-cache and dpkg-deb serve one package.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_BOOTSTRAP = pathlib.Path("tools/bootstrap").resolve()
_APT_GET = """#!/bin/sh
echo "apt-get $*" >>"{folder}/log"
case " $* " in
*" indextargets "*) echo "file:/mirror main bookworm" ;;
*" download "*) touch small_1.0.deb ;;
esac
"""
_APT_CACHE = """#!/bin/sh
echo ' small | {version} | file:/mirror bookworm/main amd64 Packages'
"""
_DPKG_DEB = """#!/bin/sh
mkdir -p "$3/usr/include/small"
echo "#define SMALL {define}" >"$3/usr/include/small/small.h"
"""


class Machine:
    """A PATH of stand-ins, and a keyring."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        (folder / "keyring.gpg").touch()
        self.set_package("1.0-2+deb12u3", define=1)

    def set_package(self, version: str, define: int) -> None:
        """What the suite has from now on."""
        for name, text in (
            ("apt-get", _APT_GET.format(folder=self.folder)),
            ("apt-cache", _APT_CACHE.format(version=version)),
            ("dpkg-deb", _DPKG_DEB.format(define=define)),
        ):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def fetch(self, version: str, sha256: str) -> subprocess.CompletedProcess[str]:
        """`debian.py` for version `version` of the package small."""
        program = (
            f"import pathlib, sys; sys.path.insert(0, {str(_BOOTSTRAP)!r}); import debian; "
            f"debian.KEYRING = pathlib.Path({str(self.folder / 'keyring.gpg')!r}); sys.exit(debian.main(sys.argv))"
        )
        return subprocess.run(
            [
                sys.executable,
                "-B",
                "-c",
                program,
                "bookworm",
                "small",
                version,
                sha256,
                str(self.folder / "headers"),
                "amd64",
            ],
            env={"PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin"},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def downloads(self) -> int:
        return (self.folder / "log").read_text().count(" download ")


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def sha256_of_headers(machine: Machine) -> str:
    """What the error about another sha256 names."""
    result = machine.fetch("1.0", "0" * 64)
    assert result.returncode == 1
    assert f"headers of small (bookworm) must have sha256 {'0' * 64}, but have " in result.stderr
    return result.stderr.split()[-1]


def test_a_new_revision_with_the_same_headers_is_taken(machine):
    sha256 = sha256_of_headers(machine)
    machine.set_package("1.0-2+deb12u9", define=1)
    assert machine.fetch("1.0", sha256).returncode == 0
    assert (machine.folder / "headers/unpacked/usr/include/small/small.h").read_text() == "#define SMALL 1\n"


def test_other_headers_in_the_same_version_are_refused(machine):
    sha256 = sha256_of_headers(machine)
    machine.set_package("1.0-3", define=2)
    result = machine.fetch("1.0", sha256)
    assert result.returncode == 1
    assert f"must have sha256 {sha256}, but have " in result.stderr


@pytest.mark.parametrize("carried", ["1.1-1", "1.0.1-1", "1.01-1", "2"])
def test_a_suite_that_has_moved_on_is_refused_before_the_download(machine, carried):
    machine.set_package(carried, define=1)
    result = machine.fetch("1.0", "0" * 64)
    assert (result.returncode, machine.downloads) == (1, 0)
    assert f"Debian bookworm must have small 1.0, but has {carried}: it has moved on" in result.stderr


def test_the_accepted_version_is_downloaded_not_the_newest(machine):
    newest_first = "2.0-1\n small | 1.0-7 | file:/mirror bookworm/main amd64 Packages\n small | 0.9-1"
    machine.set_package(newest_first.replace("\n", "'\necho '"), define=1)
    assert machine.fetch("1.0", "0" * 64).returncode == 1
    assert " download small=1.0-7\n" in (machine.folder / "log").read_text()


@pytest.mark.parametrize(("carried", "is_accepted"), [("25.0.5+8-1", True), ("25.9-1", True), ("250.1-1", False)])
def test_a_version_may_be_accepted_by_how_it_begins(machine, carried, is_accepted):
    machine.set_package(carried, define=1)
    result = machine.fetch("25.*", "0" * 64)
    assert machine.downloads == is_accepted
    assert (f"must have small 25.*, but has {carried}" in result.stderr) is not is_accepted


def test_no_package_is_taken_in_any_version(machine):
    result = machine.fetch("", "0" * 64)
    assert machine.downloads == 0
    assert "must have small , but has 1.0-2+deb12u3" in result.stderr


def test_apt_is_asked_for_its_mirror_before_the_first_update(machine):
    sha256_of_headers(machine)
    first = (machine.folder / "log").read_text().splitlines()[0]
    assert "indextargets --no-release-info" in first
