"""Links, paths, classes and `stoneware` commands of pages exist, and paths in comments of sources; pages are short."""

from __future__ import annotations

import fnmatch
import io
import os
import re
import shlex
import tokenize
from collections.abc import Iterator

import pytest
import typer
from markdown_pages import CHECKOUT, anchors, blocks, inline, pages, text

from stoneware.cli import main

_TREES = ("cc", "docs", "py", "tests", "third_party", "tools")
_SOURCE = re.compile(r"[\w./<>*-]+\.(?:bzl|cc|cu|cuh|h|md|patch|py|svg|toml)")
_NOT_OURS = {
    "add_kernel.py",  # of the example of a package
    "MODULE.bazel",
    "tests/generators.py",  # of DeepGEMM
    "tests/gpu/x_test.py",  # stands for any test there
}
_CLASS = re.compile(r"(?:sw\.nn\.)?([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)")
_CODE = (".bazel", ".bzl", ".cc", ".cu", ".cuh", ".h", ".py")


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the checkout, as "/path/below/it"."""
    found = []
    for folder, names, file_names in os.walk(CHECKOUT):
        names[:] = [name for name in names if name != ".git"]
        found += [f"/{os.path.relpath(os.path.join(folder, name), CHECKOUT)}" for name in file_names]
    return found


@pytest.fixture(scope="module")
def sources(files) -> dict[str, str]:
    """The text of every source in cc/, py/ and tools/, by its path."""
    found = [file for file in files if file.startswith(("/cc/", "/py/", "/tools/")) and file.endswith(_CODE)]
    return {file: (CHECKOUT / file.removeprefix("/")).read_text(encoding="utf-8") for file in found}


def prose(file: str, code: str) -> Iterator[tuple[int, str]]:
    """The lines of comments and docstrings in a source, with their numbers."""
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
                yield from enumerate(token.string.splitlines(), start=token.start[0])
        return
    is_docstring = False  # in Starlark
    for number, line in enumerate(code.splitlines(), start=1):
        has_quotes = line.count('"""') % 2 == 1
        comment = re.search(r"//.*" if file.endswith((".cc", ".cu", ".cuh", ".h")) else "#.*", line)
        if is_docstring or '"""' in line:
            yield number, line
        elif comment:
            yield number, comment[0]
        is_docstring ^= has_quotes


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


def test_paths_in_comments_and_docstrings_exist(files, sources):
    packages = {match[1] for file in files if (match := re.fullmatch(r"/py/stoneware/(\w+)/__init__\.py", file))}
    in_tree = rf"(?:{'|'.join(_TREES)})/[\w./<>*-]*[\w/>*]"
    in_package = rf"(?:{'|'.join(packages)})/[\w./<>*-]*\.[a-z]+"
    path = re.compile(rf"(?<![\w./@:<>*-])(?:{in_tree}|{in_package})")
    missing = [
        f"{file.removeprefix('/')}:{line}: {found}"
        for file, code in sources.items()
        for line, text in prose(file, code)
        for found in path.findall(text)
        if found not in _NOT_OURS and not exists(found, files)
    ]
    assert missing == []


@pytest.mark.parametrize("page", pages())
def test_classes_in_backticks_exist(page, sources):
    code = "\n".join(sources.values())
    named = [
        (line, match[1]) for line, token in inline(page, "code_inline") if (match := _CLASS.fullmatch(token.content))
    ]
    assert [f"{page}:{line}: {name}" for line, name in named if not re.search(rf"\b{name}\b", code)] == []


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
    shown = re.sub(r"<!-- figures:.*?-->\n", "", text(page), flags=re.DOTALL)
    num_lines = len(shown.splitlines())
    assert num_lines <= most, f"{page} has {num_lines} lines and may have {most}; move a part to another page"


@pytest.mark.parametrize(
    "code, is_one, is_there",
    [
        ("cc/call/fast_call.cc", True, True),
        ("fast_call.cc", True, True),
        ("ops/<op>/api.py", True, True),
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
