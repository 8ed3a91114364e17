"""Which module may import which: the floors of floors.toml, and no circles."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

FLOORS = Path(__file__).with_name("floors.toml")


def test_a_floor_imports_only_those_below_it():
    # A process of its own: it silences the loggers of the process that it runs in.
    program = (
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, FLOORS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("stoneware", exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) - {"stoneware"} for module in graph.modules}
    # Raises CycleError with the circle. The package itself is left out: it has the version.
    graphlib.TopologicalSorter(imported).prepare()


def test_a_module_named_in_a_string_is_not_on_a_higher_floor():
    """What importlib imports: import-linter does not see it."""
    [contract] = tomllib.loads(FLOORS.read_text())["tool"]["importlinter"]["contracts"]
    floor_of = {
        f"stoneware.{name}": height
        for height, names in enumerate(reversed(contract["layers"]))
        for name in names.split(" : ")
    }
    modules = grimp.build_graph("stoneware", cache_dir=None).modules
    root = Path(importlib.util.find_spec("stoneware").origin).parent

    def floor(module):
        return floor_of[".".join(module.split(".")[:2])]

    upward = []
    for path in root.glob("*/**/*.py"):
        module = ".".join(["stoneware", *path.relative_to(root).with_suffix("").parts])
        for node in ast.walk(ast.parse(path.read_bytes())):
            # A log has the name of a folder.
            if isinstance(node, ast.Constant) and node.value in modules and node.value.count(".") > 1:
                upward += [(module, node.value)] if floor(node.value) > floor(module) else []
    assert upward == []
