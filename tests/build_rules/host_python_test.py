"""The build finds a Python that fits it on PATH, the same one in a virtual environment; no action reads its path."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_PROBE = "third_party/python/probe.py"
_FIND = "third_party/python/find_python.py"
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


class Path:
    """A PATH of stand-ins for Python, which answer to probe.py and to `import pip`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder
        self.folders: list[pathlib.Path] = []

    def add(self, version: str, name: str = "python3", *, pip: bool = True, headers: bool = False) -> str:
        """A folder at the end of PATH with a Python called `name`; returns the interpreter behind it."""
        folder = self.root / f"{len(self.folders)}"
        include = folder / "include"
        include.mkdir(parents=True)
        if headers:
            (include / "Python.h").touch()
        interpreter = folder / "interpreter"
        interpreter.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f'*probe.py) printf "%s\\n" {interpreter} {version} {include} ;;\n'
            f'*"import pip") exit {0 if pip else 1} ;;\nesac\n'
        )
        interpreter.chmod(0o755)
        (folder / name).symlink_to(interpreter)
        self.folders.append(folder)
        return str(interpreter)

    def find(self, preferred: str = "") -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, self.folders))
        return subprocess.run(
            [sys.executable, "-B", _FIND, preferred], capture_output=True, text=True, env={"PATH": path}
        )


@pytest.fixture
def path(tmp_path) -> Path:
    return Path(tmp_path)


def test_the_first_python_that_fits_is_taken(path):
    path.add("3.10")
    first = path.add("3.12")
    path.add("3.11")
    assert path.find().stdout.splitlines()[:2] == [first, "3.12"]


@pytest.mark.parametrize("name", ["python3", "python3.11"])
def test_the_preferred_version_comes_before_the_first_on_path(path, name):
    path.add("3.12")
    preferred = path.add("3.11", name)
    assert path.find("3.11").stdout.splitlines()[:2] == [preferred, "3.11"]


def test_without_the_preferred_version_another_one_is_taken(path):
    python = path.add("3.13", "python3.13")
    assert path.find("3.11").stdout.splitlines()[:2] == [python, "3.13"]


def test_a_python_without_pip_and_a_shim_that_fails_are_passed_over(path):
    path.add("3.11", pip=False)
    shim = pathlib.Path(path.add("3.11", "python3.11"))
    shim.write_text("#!/bin/sh\necho 'python3.11: command not found' >&2\nexit 127\n")
    behind = path.add("3.11", "python3.11")
    assert path.find("3.11").stdout.splitlines()[0] == behind


def test_newer_headers_are_those_of_the_first_python_that_has_some(path):
    path.add("3.11", headers=True)
    path.add("3.12")
    newer = path.add("3.13", headers=True)
    assert path.find("3.11").stdout.splitlines()[3] == os.path.join(os.path.dirname(newer), "include")
    path.folders.pop()
    assert path.find("3.11").stdout.split("\n")[3] == ""


def test_without_a_python_that_fits_one_sentence_says_what_is_there_and_what_to_install(path):
    old, bare = path.add("3.10"), path.add("3.12", pip=False)
    found = path.find("3.11")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == (
        f"the build needs Python 3.11, 3.12 or 3.13 with pip, but PATH has {old} (3.10), {bare} (3.12, without pip); "
        "install Python 3.11 with pip, so that it is on PATH\n"
    )


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
