"""Which module may import which: the floors of floors.toml, and no circles."""

from __future__ import annotations

import graphlib
import os
import subprocess
import sys
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
    graph = grimp.build_graph("stoneware", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) - {"stoneware"} for module in graph.modules}
    # Raises CycleError with the circle. The package itself is left out: it has the version.
    graphlib.TopologicalSorter(imported).prepare()
