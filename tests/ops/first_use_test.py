"""What the first use of an op costs a process: no library is imported, no method generated."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys
import torch
generated = []
sys.addaudithook(lambda event, arguments: generated.append(arguments[0])
                 if event == "compile" and b"__create_fn__" in (arguments[0] or b"") else None)
before = set(sys.modules)
import stoneware as sw
sw.{name}
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] != "stoneware"))
print(generated)
"""


def imported(name: str) -> list[str]:
    command = [sys.executable, "-c", _CODE.format(name=name)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()


def test_an_op_imports_nothing_that_torch_does_not_and_generates_no_methods():
    for name in ("scaled_mm", "matmul", "grouped_mm"):
        modules, generated = imported(name)
        assert modules == "[]"
        assert generated == "[]"
