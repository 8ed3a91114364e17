"""pip installs the wheels without a network, and the package imports without torch."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from packaging.tags import parse_tag, sys_tags


def environment(home: pathlib.Path) -> dict[str, str]:
    """No configuration of pip, no PYTHONPATH of the test, nothing of the user's."""
    return {
        "HOME": str(home),
        "PATH": os.environ.get("PATH", os.defpath),
        "PIP_CONFIG_FILE": os.devnull,
        "TMPDIR": str(home),
    }


def fits_this_python(wheel) -> bool:
    return bool(parse_tag(wheel.tag) & set(sys_tags()))


def install(wheel, folder: pathlib.Path, home: pathlib.Path) -> None:
    python, abi, platform = wheel.tag.split("-")
    # `pip install` holds Requires-Python against its own Python, whatever --python-version says.
    ignore = [] if fits_this_python(wheel) else ["--ignore-requires-python"]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--only-binary=:all:",
            "--no-compile",
            "--implementation=cp",
            f"--python-version={python[2]}.{python[3:]}",
            f"--abi={abi}",
            f"--platform={platform}",
            *ignore,
            "--target",
            str(folder),
            str(wheel.path),
        ],
        check=True,
        env=environment(home),
    )


def run(program: str, site: pathlib.Path, home: pathlib.Path) -> str:
    """Runs `program` with `site` on sys.path and torch, triton and numpy blocked."""
    prelude = (
        f"import sys\nsys.modules.update(torch=None, triton=None, numpy=None)\nsys.path.insert(0, {str(site)!r})\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", prelude + program],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def site(wheel, tmp_path) -> pathlib.Path:
    folder = tmp_path / "site"
    install(wheel, folder, tmp_path)
    return folder


def test_pip_installs_every_member(wheel, site):
    installed = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    record = f"{wheel.info}/RECORD"
    assert set(wheel.members) <= installed
    assert all((site / p).read_bytes() == d for p, d in wheel.members.items() if p != record)


def test_import_works_without_torch(wheel, site, tmp_path):
    where, version = run("import stoneware; print(stoneware.__file__, stoneware.__version__)", site, tmp_path).split()
    assert pathlib.Path(where) == site / "stoneware/__init__.py"
    assert version == wheel.header("METADATA")["Version"]


def test_native_modules_import_without_torch_or_driver(wheel, site, tmp_path):
    if not fits_this_python(wheel):
        pytest.skip(f"Python {sys.version.split()[0]} cannot load modules of {wheel.tag}")
    program = (
        "import stoneware.runtime._driver as driver\n"
        "from stoneware.ops import _sm90\n"
        "print(driver.__file__, len(_sm90.kernels()))"
    )
    where, num_kernels = run(program, site, tmp_path).split()
    assert pathlib.Path(where).parent == site / "stoneware/runtime"
    assert int(num_kernels) == sum(k["backend"] == "sm90" for k in wheel.manifest)
