"""The README's table of speed-ups has the figures of the committed benchmark."""

from __future__ import annotations

import re

from markdown_pages import text

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
    """The cells of each table row of a page that has so many columns."""
    lines = [line for line in text(page).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == columns]


def test_readme_has_the_figures_of_the_benchmark():
    means = {tuple(row[:3]): row[3] for row in rows(_BENCH, 7)}
    measured = [[f"{float(means[*names, m]):.2f}" for m in ("up to 128", "all")] for names in _ROWS]
    told = [row[2:] for row in rows("README.md", 4) if re.fullmatch(r"\d\.\d\d", row[3])]
    assert told == measured, f"README.md says {told}, and {_BENCH} {measured}; correct README.md"
