"""Runs snippets against the real native modules and a fake libcuda, each in its own process.

STONEWARE_TEST_FAKE_LIBCUDA_DIR names the folder with the fake's libcuda.so.1.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

_HERE = pathlib.Path(__file__).resolve().parent
_TIMEOUT_S = 120

Run = Callable[..., Any]


def _run(script: str, libcuda_dir: pathlib.Path, environment: dict[str, str]) -> Any:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(libcuda_dir),
            "PYTHONPATH": os.pathsep.join([str(_HERE), *sys.path]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert process.returncode == 0, f"the snippet failed:\n{process.stdout}\n{process.stderr}"
    assert process.stderr == "", f"the snippet wrote to stderr:\n{process.stderr}"
    return json.loads(process.stdout)


@pytest.fixture(scope="session")
def run_with_fake() -> Run:
    """Runs a snippet that sees the fake libcuda; returns what it gave to `report`."""
    folder = os.environ.get("STONEWARE_TEST_FAKE_LIBCUDA_DIR")
    if folder is None:
        pytest.fail(
            "STONEWARE_TEST_FAKE_LIBCUDA_DIR must name the folder of the fake libcuda.so.1, but is "
            "not set; run `bazel test //tests/driver/...`, or build //tests/driver:fake_libcuda"
        )
    libcuda_dir = pathlib.Path(folder).resolve()

    def run(script: str, **environment: str) -> Any:
        prelude = "import fake_libcuda as fake\nfrom fake_libcuda import error_of, report\n"
        return _run(prelude + textwrap.dedent(script), libcuda_dir, environment)

    return run


@pytest.fixture
def run_without_driver(tmp_path: pathlib.Path) -> Run:
    """Runs a snippet for which libcuda.so.1 cannot be opened, even where a driver is installed."""
    (tmp_path / "libcuda.so.1").write_bytes(b"")

    def run(script: str) -> Any:
        return _run("import json\n" + textwrap.dedent(script), tmp_path, {})

    return run
