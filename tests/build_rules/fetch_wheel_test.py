"""fetch_wheel.py takes only the locked file, and says which it wanted and which it got.

A package named pip, ahead of the real one, stands in for it. STONEWARE_TEST_FETCH_WHEEL names the
program, STONEWARE_TEST_LOCK the lock.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

_WHEEL = "small-1.0-py3-none-any.whl"
_PIP = """\
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
(here / "arguments").write_text("\\n".join(sys.argv[1:]))
if (here / "complaint").exists():
    sys.exit((here / "complaint").read_text())
shutil.copy(here / "{wheel}", sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def pip(tmp_path) -> pathlib.Path:
    """The stand-in's folder: the wheel it serves, and the arguments it got."""
    folder = tmp_path / "site/pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(_PIP.format(wheel=_WHEEL))
    with zipfile.ZipFile(folder / _WHEEL, "w") as archive:
        archive.writestr("small/__init__.py", "")
        program = zipfile.ZipInfo("small/bin/program")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, "#!/bin/sh\n")
    return folder


@pytest.fixture
def fetch(pip, tmp_path):
    """Fetches small 1.0, locked with `sha256`, into tmp_path/unpacked."""
    program = os.path.abspath(os.environ["STONEWARE_TEST_FETCH_WHEEL"])

    def run(*sha256: str, wheel: str = _WHEEL) -> subprocess.CompletedProcess[str]:
        locked = [f"{idx}-{wheel}={digest}" for idx, digest in enumerate(sha256)]
        return subprocess.run(
            [sys.executable, program, "small", "1.0", "unpacked", *locked],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(pip.parent)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def served(pip: pathlib.Path) -> str:
    return hashlib.sha256((pip / _WHEEL).read_bytes()).hexdigest()


def test_the_locked_wheel_is_unpacked_with_its_run_bits(fetch, pip, tmp_path):
    result = fetch(served(pip))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "unpacked/small/__init__.py").exists()
    assert os.access(tmp_path / "unpacked/small/bin/program", os.X_OK)
    assert not (tmp_path / "unpacked/small/__init__.py").stat().st_mode & 0o111


def test_any_of_several_locked_files_will_do(fetch, pip):
    assert fetch("0" * 64, served(pip)).returncode == 0


def test_another_file_fails_with_name_version_expected_found_and_remedy(fetch, pip, tmp_path):
    result = fetch("0" * 64)
    assert result.returncode == 1
    for words in (
        "small 1.0",
        f"expected {'0' * 64}  0-{_WHEEL}",
        f"found    {served(pip)}  {_WHEEL}",
        "//third_party/pypi:refresh",
    ):
        assert words in result.stderr
    assert not (tmp_path / "unpacked").exists()


def test_a_failing_pip_fails_with_name_version_and_its_own_words(fetch, pip):
    (pip / "complaint").write_text("ERROR: No matching distribution found for small==1.0")
    result = fetch(served(pip))
    assert result.returncode == 1
    assert "small 1.0: `pip download small==1.0` failed" in result.stderr
    assert "No matching distribution found" in result.stderr


def test_pip_is_asked_by_name_and_version_and_given_no_address(fetch, pip):
    assert fetch(served(pip)).returncode == 0
    arguments = (pip / "arguments").read_text().splitlines()
    assert arguments[0] == "download"
    assert "small==1.0" in arguments
    assert "--no-deps" in arguments
    assert [argument for argument in arguments if "://" in argument or "index" in argument] == []


def test_a_wheel_for_another_python_fails_before_pip_is_asked(fetch, pip):
    result = fetch(served(pip), wheel="small-1.0-cp36-cp36m-manylinux_2_28_x86_64.whl")
    assert result.returncode == 1
    for words in ("small 1.0", "for Python 3.6", sys.version.split()[0], "so that it is on PATH"):
        assert words in result.stderr
    assert not (pip / "arguments").exists()


def test_a_wheel_of_the_stable_abi_is_fetched_by_any_python(fetch, pip):
    wheel = "small-1.0-cp36-abi3-manylinux_2_28_x86_64.whl"
    assert fetch(served(pip), wheel=wheel).returncode == 0


@pytest.mark.parametrize("python", ["cp311", "cp312", "cp313"])
def test_wheels_can_be_built_with_each_python_that_the_docs_name(python):
    """Of what the wheels are built with, Triton alone has a wheel for each Python."""
    lock: dict[str, dict[str, tuple[str, dict[str, str]]]] = {}
    exec(pathlib.Path(os.environ["STONEWARE_TEST_LOCK"]).read_text(), lock)
    _, files = lock["WHEELS"]["triton"]
    assert [file for file in files if f"-{python}-{python}-" in file], f"triton is locked as {sorted(files)}"
