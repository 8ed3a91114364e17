"""README's table of GPUs says how each is served, as `explain` answers without having it."""

from __future__ import annotations

import json
import re

import pytest
from markdown_pages import ROOT, text

import stoneware as sw

_ROW = re.compile(r"^\| ([^|]+) \| ([\d., ]+) \| (tuned|estimated|Triton|torch) \|", re.MULTILINE)
_TUNING_DATA = ROOT / "py" / "stoneware" / "tuning_data"


def gpus() -> list[tuple[str, list[str], str]]:
    """Each GPU of the table, with the compute capabilities and the status of its row."""
    return [
        (name, capabilities.split(", "), status)
        for names, capabilities, status in _ROW.findall(text("README.md"))
        for name in names.split(", ")
        if not name.startswith("other ")
    ]


def status(name: str) -> str:
    """How a GPU is served, by its measurements and by the choice for a matmul of fp8 with row scales."""
    answer = sw.explain("scaled_mm", m=16, n=4096, k=4096, device=name)
    gpu = answer.device.fingerprint
    measured = [json.loads(path.read_text())["fingerprint"] for path in _TUNING_DATA.glob("*/device.json")]
    if gpu.name in (device["name"] for device in measured):
        return "tuned"
    if list(gpu.compute_capability) in (device["compute_capability"] for device in measured):
        assert answer.grade == "other device"
        return "estimated"
    return {"triton_aot": "Triton", "vendor": "torch"}[answer.config.backend]


def test_the_table_has_every_status():
    assert {row[2] for row in gpus()} == {"tuned", "estimated", "Triton", "torch"}


@pytest.mark.parametrize(("name", "capabilities", "expected"), gpus())
def test_a_gpu_is_served_as_the_table_says(name, capabilities, expected):
    major, minor = sw.explain("matmul", m=16, n=4096, k=4096, device=name).device.fingerprint.compute_capability
    assert f"{major}.{minor}" in capabilities
    assert status(name) == expected
