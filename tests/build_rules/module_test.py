"""MODULE.bazel makes each repository visible that repositories.bzl declares."""

from __future__ import annotations

import ast
import os
import pathlib
from collections.abc import Iterator


def calls(variable: str) -> Iterator[ast.Call]:
    """Calls in the Starlark file that an environment variable names; what is read here is also Python."""
    for node in ast.walk(ast.parse(pathlib.Path(os.environ[variable]).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


def declared() -> set[str]:
    names = set()
    for call in calls("STONEWARE_TEST_REPOSITORIES"):
        name = next((word.value for word in call.keywords if word.arg == "name"), None)
        if isinstance(name, ast.Constant) and str(name.value).startswith("stoneware_"):
            names.add(name.value)
        if call.func.id == "pypi_packages":
            names |= {"stoneware_pypi_" + package.replace("-", "_") for package in ast.literal_eval(call.args[0])}
    return names | {"stoneware_python_headers_" + abi for abi in ("host", "abi3")}


def test_every_repository_is_visible_to_modules():
    (use_repo,) = [call for call in calls("STONEWARE_TEST_MODULE") if call.func.id == "use_repo"]
    visible = {ast.literal_eval(argument) for argument in use_repo.args[1:]}
    assert len(visible) > 70
    assert visible == declared(), "make the list of use_repo in MODULE.bazel that of repositories.bzl"
