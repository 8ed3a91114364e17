"""Figures in the text of pages are those of the committed measurements."""

from __future__ import annotations

import json
import re
from typing import Any

from markdown_pages import ROOT, text

_BENCH = "docs/measured/nvidia_h200/bench.md"

_ROWS = [
    ("scaled_mm, fp8 with row scales", "torch_row"),
    ("scaled_mm, fp8 with row scales", "fastest of torch"),
    ("scaled_mm, fp8 with block scales 1x128 and 128x128", "torch_block"),
    ("matmul, bf16", "torch_mm"),
    ("grouped_mm, bf16", "torch_grouped"),
    ("grouped_mm, fp8 with row scales", "torch_grouped"),
]
"""Family and peer of each row of the README's table, as the benchmark's page names them."""


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of each table row of a page that has `columns` columns."""
    lines = [line for line in text(page).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == columns]


def test_readme_has_the_figures_of_the_benchmark():
    means = {tuple(row[:3]): row[3] for row in rows(_BENCH, 7)}
    measured = [[f"{float(means[*names, m]):.2f}" for m in ("up to 128", "all")] for names in _ROWS]
    told = [row[2:] for row in rows("README.md", 4) if re.fullmatch(r"\d\.\d\d", row[3])]
    assert told == measured, f"README.md says {told}, and {_BENCH} {measured}; correct README.md"


def measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "measured" / name).read_text())


def test_readme_has_the_figures_of_compiled_models():
    part = measured("nvidia_h200/layers.json")["parts"]["models"]
    rows = [row for row in part["rows"] if row["model"] == "LlamaForCausalLM"]
    times = [{name: time["median_ms"] for name, time in row["step"].items()} for row in rows]
    ratios = [time["torch bf16"] / time["stoneware rowwise"] for time in times]
    tokens = [row["tokens"] for row in rows]
    figures = (
        f"Llama 3 8B with {part['num_layers']} of its 32 blocks and random weights, compiled, in a CUDA graph, is "
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as in bf16 at {min(tokens)} to {max(tokens):,} tokens"
    )
    assert figures in " ".join(text("README.md").split()), f"README.md must say: {figures}; correct it"


def test_the_page_of_the_build_has_the_figures_of_both_builds():
    builds = [measured("backward_build.json")[mode] for mode in ("off", "on")]
    removed, kernels = builds[1]["kernels"] - builds[0]["kernels"], builds[1]["kernels"]
    megabytes = [f"{build['wheel_bytes'] / 1e6:.1f}" for build in builds]
    seconds = [sum(build["cpu_seconds"][kind]["seconds"] for kind in ("Genrule", "CudaCubin")) for build in builds]
    figures = (
        f"When {removed} of {kernels} were left out, the wheel had {megabytes[0]} MB instead of {megabytes[1]}, "
        f"and its kernels took {seconds[0]:.0f} CPU seconds instead of {seconds[1]:.0f}"
    )
    assert figures in text("docs/wheels.md"), f"docs/wheels.md must say: {figures}; correct it"
