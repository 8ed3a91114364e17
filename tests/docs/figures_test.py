"""Figures in the text of pages are those of the committed measurements that a comment above them cites."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from markdown_pages import ROOT, pages, text
from quoted_figures import citations

import stoneware
from stoneware.report import document, sources

_CITATIONS = [citation for page in pages() for citation in citations(page, text(page))]


@functools.cache
def measured(source: str) -> dict[str, Any]:
    path = ROOT / source
    return document.document(sources.load([path])) if path.is_dir() else json.loads(path.read_text())


@pytest.mark.parametrize("citation", _CITATIONS, ids=str)
def test_figures_are_those_of_the_measurements(citation):
    citation.check(measured(citation.source))


def test_the_pages_with_figures_cite_their_measurements():
    assert {"README.md", *(f"docs/{name}.md" for name in ("benchmarks", "layer_figures", "layers", "wheels"))} <= {
        citation.page for citation in _CITATIONS
    }


_PARAGRAPH = """# Title

<!-- figures: x.json
"is # to # times as fast": least_and_most(row["ms"] / 2 for row in rows) -->
Llama 3 with 4 of 32 blocks is 1.50 to
2.25 times as fast; another 7.
"""

_TABLE = """<!-- figures: x.json [[row["ms"], row["change"]] for row in rows] -->
| tokens | a | b |
|---|---|---|
| 1 | 3.0 | +1 % |
| 16 | 4.5 | -2 % |
"""

_ROWS = {"rows": [{"ms": 3.0, "change": 1.2}, {"ms": 4.5, "change": -2.1}]}


@pytest.mark.parametrize(("page", "written"), [(_PARAGRAPH, ["1.50", "2.25"]), (_TABLE, ["3.0", "+1", "4.5", "-2"])])
def test_equal_figures_pass(page, written):
    [citation] = citations("x.md", page)
    assert citation.written() == written
    citation.check(_ROWS)


@pytest.mark.parametrize(
    ("page", "old", "new", "message"),
    [
        (_PARAGRAPH, "2.25", "2.26", "x.md:3: the page has .*2.26.*, and x.json .*2.25"),
        (_PARAGRAPH, "2.25", "2.2", "x.md:3: the page has .*2.2.*, and x.json .*2.3"),
        (_PARAGRAPH, "times as fast;", "times faster;", "must stand once in the block below"),
        (_TABLE, "4.5", "4.6", "x.md:1: the page has"),
        (_TABLE, "| 16 | 4.5 | -2 % |\n", "", "x.md:1: the page has"),
    ],
)
def test_a_figure_that_differs_fails(page, old, new, message):
    [citation] = citations("x.md", page.replace(old, new))
    with pytest.raises(AssertionError, match=message):
        citation.check(_ROWS)


def test_the_changelog_has_the_version_of_the_wheel():
    version = stoneware.__version__.partition("+")[0]
    assert re.search(rf"^## \[{re.escape(version)}\]", text("CHANGELOG.md"), re.MULTILINE), (
        f"CHANGELOG.md must have a heading of version {version}; add `## [{version}] - DATE`"
    )
