"""The table of docs/versions.md, from docs/measured/versions.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = "docs/versions.md"
START, END = "<!-- table: ./bazelw run //tools/version_matrix -->\n", "<!-- end of table -->\n"


def verdict(result: Mapping[str, Any]) -> str:
    """The result of a combination in words."""
    status = result["status"]
    if status in ("gap", "not run", "refused"):
        return f"{status if status == 'refused' else 'not tested'}: {result['reason']}"
    if "num_passed" not in result:
        return f"failed: {result['reason']}"
    counts = f"{result['num_passed']} passed, {result['num_skipped']} skipped"
    return counts if status == "passed" else f"{result['num_failed']} failed, {counts}"


def table(document: Mapping[str, Any]) -> str:
    """The table in Markdown: a row a combination."""
    lines = ["| Python | torch | Transformers | Triton | tests |", "|---|---|---|---|---|"]
    for result in document["results"]:
        versions = result.get("versions", {})
        cells = [versions.get(name, result[name]) for name in ("python", "torch", "transformers", "triton")]
        if result["status"] == "refused":
            cells[2:] = ["-", "-"]
        lines.append(f"| {' | '.join(cells)} | {verdict(result)} |")
    return "\n".join(lines) + "\n"


def rendered(page: str, document: Mapping[str, Any]) -> str:
    """The page with the table of `document`.

    Raises:
      ValueError: the page has no place for it.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{PAGE} must have the lines {START.strip()!r} and {END.strip()!r} around its table; add them")
    return f"{before}{start}\n{table(document)}\n{end}{after}"


def write(root: Path, document: Mapping[str, Any]) -> None:
    """Writes the table into the page of the repository at `root`."""
    path = root / PAGE
    path.write_text(rendered(path.read_text(), document))
