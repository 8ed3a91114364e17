"""Links, paths in backticks and `stoneware` commands of every page name what exists; pages are short."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex

import pytest
import typer
from markdown_pages import CHECKOUT, anchors, blocks, inline, pages, text

from stoneware.cli import main

_TREES = ("cc", "docs", "py", "tests", "third_party", "tools")
_SOURCE = re.compile(r"[\w./<>*-]+\.(?:bzl|cc|cu|cuh|h|md|patch|py|svg|toml)")
_NOT_OURS = {
    "add_kernel.py",  # of the example of a package
    "MODULE.bazel",
}


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the checkout, as "/path/below/it"."""
    found = []
    for folder, names, file_names in os.walk(CHECKOUT):
        names[:] = [name for name in names if name != ".git"]
        found += [f"/{os.path.relpath(os.path.join(folder, name), CHECKOUT)}" for name in file_names]
    return found


def is_path(code: str) -> bool:
    """Whether inline code means a file or folder of this repository."""
    if code in _NOT_OURS:
        return False
    is_in_tree = code.split("/")[0] in _TREES and re.fullmatch(r"[\w./<>*-]+", code) is not None
    return ("/" in code and is_in_tree) or _SOURCE.fullmatch(code) is not None


def exists(code: str, files: list[str]) -> bool:
    """Whether a path, the end of one, or one with <placeholders> is that of a file or folder."""
    pattern = "/" + re.sub(r"<\w+>", "*", code.removeprefix("./"))
    patterns = [f"*{pattern}*"] if code.endswith("/") else [f"*{pattern}", f"*{pattern}/*"]
    return any(fnmatch.filter(files, one) for one in patterns)


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    links = [(line, token.attrs["href"]) for line, token in inline(page, "link_open")]
    links += [(line, token.attrs["src"]) for line, token in inline(page, "image")]
    broken = []
    for line, link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (CHECKOUT / page).parent / path if path else CHECKOUT / page
        if not target.exists():
            broken.append(f"{page}:{line}: {link}: no such file")
        elif anchor and anchor not in anchors(str(target.resolve().relative_to(CHECKOUT))):
            broken.append(f"{page}:{line}: {link}: no such heading")
    assert broken == []


@pytest.mark.parametrize("page", pages())
def test_paths_in_backticks_exist(page, files):
    named = [(line, token.content) for line, token in inline(page, "code_inline") if is_path(token.content)]
    assert [f"{page}:{line}: {path}" for line, path in named if not exists(path, files)] == []


@pytest.mark.parametrize("page", pages())
def test_commands_and_their_options_exist(page):
    known = typer.main.get_command(main.app).commands
    lines = [(block.line, line) for block in blocks(page) for line in block.commands]
    lines += [(line, token.content) for line, token in inline(page, "code_inline")]
    wrong = []
    for line, command in lines:
        match = re.match(r"(?:torchrun .* -m )?stoneware ([a-z]\S*)(.*)", command)
        if match is None:
            continue
        name, rest = match.groups()
        if name not in known:
            wrong.append(f"{page}:{line}: {command}: no such command")
            continue
        options = {option for one in known[name].params for option in one.opts} | {"--help"}
        given = [word.partition("=")[0] for word in shlex.split(rest, comments=True) if word.startswith("-")]
        wrong += [f"{page}:{line}: {command}: no option {option}" for option in given if option not in options]
    assert wrong == []


@pytest.mark.parametrize("page", pages())
def test_a_page_is_short(page):
    most = 149 if page == "README.md" else 300
    num_lines = len(text(page).splitlines())
    assert num_lines <= most, f"{page} has {num_lines} lines and may have {most}; move a part to another page"


@pytest.mark.parametrize(
    "code, is_one, is_there",
    [
        ("cc/call/fast_call.cc", True, True),
        ("fast_call.cc", True, True),
        ("ops/<op>/spec.py", True, True),
        ("tests/docs", True, True),
        ("tests/docs/", True, True),
        ("tests/nothing", True, False),
        ("call.cc", True, False),
        ("k / 128", False, False),
        ("py:README", False, False),
    ],
)
def test_what_a_path_is(code, is_one, is_there, files):
    assert is_path(code) == is_one
    assert exists(code, files) == is_there
