"""The build finds the same Python in a virtual environment, and its path is in no file that actions read."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_PROBE = "third_party/python/probe.py"
_PYTHON3 = pathlib.Path("third_party/python/python3.sh")


def probe(python: str | pathlib.Path) -> list[str]:
    done = subprocess.run([python, "-B", _PROBE], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_probe_names_interpreter_version_and_headers():
    interpreter, version, headers = probe(sys.executable)
    assert os.path.samefile(interpreter, os.path.realpath(sys.executable))
    assert version == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert os.path.isabs(headers)


@pytest.mark.parametrize("option", ["--symlinks", "--copies"])
def test_probe_answers_the_same_in_a_virtual_environment(tmp_path, option):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", option, tmp_path], check=True)
    assert probe(tmp_path / "bin/python3") == probe(sys.executable)


def test_probe_answers_the_same_through_a_link(tmp_path):
    (tmp_path / "python3").symlink_to(sys.executable)
    assert probe(tmp_path / "python3") == probe(sys.executable)


@pytest.fixture
def python3(tmp_path) -> pathlib.Path:
    """python3 as the repository rule writes it, reached through a link, as an action has it."""
    repository = tmp_path / "the repository"
    repository.mkdir()
    (repository / "python3").write_text(_PYTHON3.read_text().replace("{version}", "3.11"))
    (repository / "python3").chmod(0o755)
    (tmp_path / "sandbox").mkdir()
    link = tmp_path / "sandbox/python3"
    link.symlink_to(repository / "python3")
    return link


def name_interpreter(python3: pathlib.Path, path: pathlib.Path) -> None:
    python3.resolve().with_name("interpreter").write_text(f"{path}\n")


def test_python3_starts_the_interpreter_that_the_file_beside_it_names(python3, tmp_path):
    before = python3.read_bytes()
    for folder in ("one", "two of them"):
        interpreter = tmp_path / folder / "python"
        interpreter.parent.mkdir()
        interpreter.write_text('#!/bin/sh\necho "$0"\nprintf "%s\\n" "$@"\nexit 7\n')
        interpreter.chmod(0o755)
        name_interpreter(python3, interpreter)
        done = subprocess.run([python3, "main.py", "two words"], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()) == (7, [str(interpreter), "main.py", "two words"])
    assert python3.read_bytes() == before


def test_an_interpreter_that_is_gone_is_said_with_the_remedy(python3, tmp_path):
    name_interpreter(python3, tmp_path / "gone/python3.11")
    done = subprocess.run([python3, "main.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"Python 3.11 must be at {tmp_path}/gone/python3.11" in done.stderr
    assert "run `./bazelw sync --only=stoneware_python`" in done.stderr
