"""What the tests of epilogues share."""

from __future__ import annotations

import ctypes
import os
import pathlib

import nvidia.cu13
import pytest

# Where the bindings look for NVRTC and nvJitLink, apart from site-packages, which Bazel does not have.
os.environ["CUDA_PATH"] = nvidia.cu13.__path__[0]
# NVRTC opens this library by its name alone, and finds it if it is open already.
[_BUILTINS] = pathlib.Path(nvidia.cu13.__path__[0], "lib").glob("libnvrtc-builtins.so.*")
ctypes.CDLL(str(_BUILTINS))
OPEN_BUILTINS = f"import ctypes; ctypes.CDLL({str(_BUILTINS)!r})\n"
"""The same for a program in another process."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The tuning folder of one test."""
    folder = tmp_path_factory.mktemp("tuning")
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(folder))
    return folder
