"""The proof of experts of transformers.

They branch on their routing, which no trace can follow. They are proved by the digest of their code and by a trace of
their activation.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn.data_flow import function_definition
from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.swiglu_proof import gate_and_up
from stoneware.nn.proofs.tracer import check_call, trace


def experts(module: torch.nn.Module) -> None:
    """Returns if a module of transformers computes down(silu(gate(x)) * up(x)) for the experts of each token, and sums
    the results with their weights.

    Raises:
      NoProof: its code does not show that.
    """
    check_call(module)
    kind = type(module)
    eager = inspect.unwrap(kind.forward)
    digest = _digest(eager)
    if digest not in _EXPERTS_FORWARD:
        raise NoProof(f"the code of {kind.__name__}.forward (digest {digest}) is not known")
    required = {
        "has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False,
        "is_concatenated": True, "_is_expert_parallel": False,
    }  # fmt: skip
    for name, value in required.items():
        if getattr(module, name, value) is not value:
            raise NoProof(f"{name} is {getattr(module, name)!r}")
    if not hasattr(kind, "_apply_gate"):
        raise NoProof(f"{kind.__name__} has no _apply_gate")
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if eager is not kind.forward:
        if kind.forward.__globals__["__name__"] != "transformers.integrations.moe":
            raise NoProof(f"{kind.__name__}.forward is wrapped by {kind.forward.__globals__['__name__']}")
        if implementation not in _EXPERTS_IMPLEMENTATIONS:
            raise NoProof(f"its experts implementation is {implementation!r}")
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, torch.nn.Module):
        raise NoProof("act_fn is not a module")
    if type(activation) is not torch.nn.SiLU:
        graph = trace(activation, "forward")
        if not fx_nodes.is_silu(activation, fx_nodes.result(graph)):
            raise NoProof(f"act_fn computes {fx_nodes.name(fx_nodes.result(graph))}, not silu")
        fx_nodes.check_operations(graph, {*fx_nodes.inputs(graph), fx_nodes.result(graph)})
    graph = trace(module, "_apply_gate")
    (z,) = fx_nodes.inputs(graph)
    sources, inner = gate_and_up(module, fx_nodes.result(graph))
    if sources != [z]:
        raise NoProof("_apply_gate does not split its argument alone")
    fx_nodes.check_operations(graph, {z, *inner})


_EXPERTS_FORWARD = frozenset({"e7aef0c2abf5f6a2", "d52dc7c02b15aa1c"})
"""`_digest` of MixtralExperts.forward, whose code some fifty models of transformers share: of 5.17, and of 5.18 to
5.24, where a token may have an expert that is on no rank."""

_EXPERTS_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
"""Names in transformers' ExpertsInterface of kernels that all compute what the code of forward does."""


def _digest(function: Callable[..., Any]) -> str:
    """A digest of a function's code without annotations, docstring and decorators."""
    definition = function_definition(function)
    if definition is None:
        return "without source"
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    definition.decorator_list, definition.returns = [], None
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return hashlib.sha256(ast.unparse(definition).encode()).hexdigest()[:16]
