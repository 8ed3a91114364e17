"""mypy finds nothing in the package, and nothing in a strict program on its public API."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def check(tmp_path: pathlib.Path, *arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), *arguments],
        cwd=_ROOT,
        # mypy looks for torch and, in the second test, for the wheel where this program finds them.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def test_the_package_is_typed(tmp_path):
    code, said = check(tmp_path)
    if code:
        pytest.fail(f"{said}\nmend these by hand, then: ./bazelw test //tests/style:types_test", pytrace=False)


def test_a_strict_program_on_the_public_api_is_typed(tmp_path):
    """With the wheel's annotations, not those of the sources."""
    sample = "tests/style/public_api_sample.py"
    options = ["--strict", "--config-file=", "--python-version=3.11"]
    untyped = pathlib.Path(tmp_path, "mypy.ini")
    untyped.write_text("[mypy]\n[mypy-triton.*]\nignore_missing_imports = true\n")
    options[1] = f"--config-file={untyped}"
    code, said = check(tmp_path, *options, sample)
    if code:
        pytest.fail(f"{said}\nmend the annotations, then: ./bazelw test //tests/style:types_test", pytrace=False)


def test_wrong_arguments_of_the_public_api_are_found(tmp_path):
    """So the wheel's annotations are read: without py.typed all of this would be Any."""
    program = tmp_path / "wrong.py"
    program.write_text("import stoneware as sw\nsw.explain('matmul', m='16', n=1, k=1)\n")
    code, said = check(tmp_path, "--config-file=", "--ignore-missing-imports", str(program))
    assert code == 1, said
    assert '"explain" has incompatible type "str"; expected "int"' in said
