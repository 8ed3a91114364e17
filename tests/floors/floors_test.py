"""Which module may import which: the floors of floors.toml, and no circles."""

from __future__ import annotations

import graphlib
from pathlib import Path

import grimp
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

FLOORS = Path(__file__).with_name("floors.toml")


def test_a_floor_imports_only_those_below_it(capsys):
    status = lint_imports(config_filename=str(FLOORS), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("stoneware", exclude_type_checking_imports=True, cache_dir=None)
    imported = {
        module: graph.find_modules_directly_imported_by(module) - {"stoneware"}
        for module in graph.modules
    }
    # Raises CycleError with the circle. The package itself is left out: it has the version.
    graphlib.TopologicalSorter(imported).prepare()
