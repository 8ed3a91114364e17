"""The page of the build counts the kernels that the manifest lists."""

from __future__ import annotations

import json
import re

import pytest
from markdown_pages import ROOT, text

_MANIFEST = ROOT / "py" / "stoneware" / "kernel_manifest.json"
_PAGE = "docs/wheels.md"


def test_the_kernels_that_serve_gradients_alone_are_counted():
    manifest = json.loads(_MANIFEST.read_text())
    kernels = manifest["kernels"] + manifest.get("removed", [])
    archs = {kernel["arch"] for kernel in kernels}
    [named] = re.findall(r"fewer GPUs; choose from ((?:\w+, )+\w+)\.", text(_PAGE))
    if archs != set(named.split(", ")):
        pytest.skip(f"built for {', '.join(sorted(archs))} alone")
    told = re.search(r"no kernels that serve only gradients: (\d+) of (\d+) are left out", text(_PAGE))
    counted = str(sum("forward" not in kernel["serves"] for kernel in kernels)), str(len(kernels))
    assert told and told.groups() == counted, f"{_PAGE} must say {' of '.join(counted)}; correct it"
