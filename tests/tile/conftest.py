"""What the tests of sw.tile share."""

from __future__ import annotations

import os

import nvidia.cu13
import pytest

# Where the bindings look for NVRTC and nvJitLink, apart from site-packages, which Bazel does not have.
os.environ["CUDA_PATH"] = nvidia.cu13.__path__[0]


@pytest.fixture(autouse=True, scope="session")
def _own_cubins(tmp_path_factory):
    """Linked cubins of this run alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STONEWARE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
