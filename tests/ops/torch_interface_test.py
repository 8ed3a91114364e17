"""An unsupported torch is refused at import, in one sentence; and the check covers all that the package uses."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import torch

import stoneware
from stoneware.runtime import torch_interface

USES = [
    "sw.scaled_mm",
    "sw.matmul",
    "sw.grouped_mm",
    "sw.prepare",
    "sw.quantize",
    "sw.nn",
    "sw.explain('matmul', m=8, n=8, k=8)",
    "import stoneware.integrations.transformers",
    "import stoneware.integrations.torchao",
    "from stoneware.nn.convert import convert",
]


def errors_of(uses: list[str], damage: str) -> list[str]:
    """The error of each use, in a process whose torch was damaged before."""
    program = f"import torch; {damage}\nimport stoneware as sw\n" + "\n".join(
        f"try: {use}\nexcept ImportError as error: print(error)\nelse: print()" for use in uses
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_an_older_torch_is_refused_in_one_sentence():
    sentence = 'stoneware needs torch>=2.11, but torch 2.10.1+cpu is installed; pip install "torch>=2.11"'
    assert errors_of(USES, "torch.__version__ = torch.torch_version.TorchVersion('2.10.1+cpu')") == [sentence] * len(
        USES
    )


def test_a_torch_that_lacks_what_is_used_is_refused_in_one_sentence():
    damage = "del torch._C._any_requires_grad, torch._scaled_mm_v2; torch.__version__ = '2.99.0'"
    assert errors_of(["sw.nn"], damage) == [
        "stoneware needs torch._C._any_requires_grad, torch._scaled_mm_v2, which torch 2.99.0 lacks; install a newer "
        "stoneware, or a torch that docs/versions.md lists"
    ]


def test_this_torch_is_supported_and_the_check_initialises_no_cuda():
    torch_interface.check(torch)
    assert not torch.cuda.is_initialized()


def private_uses(source: str) -> set[str]:
    """The names below torch with a private part that a source uses."""
    tree, aliases = ast.parse(source), {"torch": "torch"}
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            uses |= {f"{node.module}.{name.name}" for name in node.names}
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in aliases:
            uses.add(".".join([aliases[node.id], *reversed(parts)]))
    return {use for use in uses if any(p.startswith("_") and not p.endswith("__") for p in use.split("."))}


def test_all_private_parts_of_torch_that_the_package_uses_are_checked():
    # Inductor's are imported by those who use `sw.inductor`.
    known = [f"torch.{name}" for name in torch_interface.PRIVATE + torch_interface.PRIVATE_ON_CUDA]
    known += ["torch._inductor"]
    unknown = {
        (str(path), use)
        for path in pathlib.Path(stoneware.__file__).parent.rglob("*.py")
        for use in private_uses(path.read_text())
        if not any(f"{use}.".startswith(f"{name}.") or f"{name}.".startswith(f"{use}.") for name in known)
    }
    assert not unknown, "add these to py/stoneware/runtime/torch_interface.py"
    uses = private_uses("import torch\nfrom torch.autograd import forward_ad\nforward_ad._x\ntorch._C._y")
    assert {"torch.autograd.forward_ad._x", "torch._C._y"} <= uses
