"""The pages of the repository: their code blocks, links and inline code, with line numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).absolute().parents[2]
"""Folder of the pages and of the tests' data: the checkout, or under Bazel the runfiles."""

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where every file is: under Bazel this file's own link leads there, outside of the sandbox."""

_MARKER = re.compile(r"<!--\s*(?P<what>needs a GPU|not run: (?P<reason>.+?))\s*-->\s*")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
      page: path of the page, relative to ROOT.
      line: of the opening fence, counted from 1.
      language: after the fence, such as "python"; may be empty.
      text: the code.
      needs_gpu: marked by `<!-- needs a GPU -->` in the line above.
      not_run: the reason in `<!-- not run: reason -->` in the line above, else empty.
    """

    page: str
    line: int
    language: str
    text: str
    needs_gpu: bool
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its lines that call the program `stoneware`."""
        return [line for line in self.text.splitlines() if line.startswith("stoneware ")]


def pages() -> list[str]:
    """README.md and its neighbours, the wheel's page, and the pages below docs/, without generated ones."""
    found = [*ROOT.glob("*.md"), ROOT / "py" / "README.md", *(ROOT / "docs").glob("**/*.md")]
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    assert "README.md" in names, f"{ROOT} is no checkout"
    return [name for name in names if not name.startswith("docs/measured/")]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced code blocks of a page, in their order."""
    found = []
    before: Token | None = None
    for token in _PARSER.parse(text(page)):
        if token.type == "fence":
            marker = _MARKER.fullmatch(before.content) if before and before.type == "html_block" else None
            found.append(
                Block(
                    page=page,
                    line=token.map[0] + 1,
                    language=token.info.strip(),
                    text=token.content,
                    needs_gpu=marker is not None and marker["what"] == "needs a GPU",
                    not_run=(marker["reason"] or "") if marker else "",
                )
            )
        before = token
    return found


def inline(page: str, kind: str) -> Iterator[tuple[int, Token]]:
    """Line and token of each inline element of a kind: "link_open", "image" or "code_inline"."""
    for token in _PARSER.parse(text(page)):
        for child in token.children or []:
            if child.type == kind:
                yield token.map[0] + 1, child


def anchors(page: str) -> set[str]:
    """What `page#...` may name: its headings, as GitHub writes them."""
    tokens = _PARSER.parse(text(page))
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
