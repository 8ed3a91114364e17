"""What the nodes of a trace compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn.proofs.no_proof import NoProof


def inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The single argument of the trace."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise NoProof(f"it takes {len(inputs)} arguments, not x alone")
    return inputs


def result(graph: torch.fx.Graph) -> torch.fx.Node:
    """The node whose value the trace returns."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    (result,) = output.args
    if not isinstance(result, torch.fx.Node):
        raise NoProof("its result is not one tensor")
    return result


def check_operations(graph: torch.fx.Graph, expected: set[torch.fx.Node]) -> None:
    """Refuses operations beyond those of the function."""
    for node in graph.nodes:
        if node.op != "output" and node not in expected:
            raise NoProof(f"it computes {name(node)}")


def name(node: torch.fx.Node) -> str:
    """The name of what a node calls, for messages."""
    return getattr(node.target, "__name__", str(node.target))


def linear_argument(module: torch.nn.Module, node: torch.fx.Node) -> torch.fx.Node:
    """The argument of a call of a torch.nn.Linear."""
    is_linear = node.op == "call_module" and type(module.get_submodule(str(node.target))) is torch.nn.Linear
    if not is_linear or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], torch.fx.Node):
        raise NoProof(f"it computes {name(node)} where a torch.nn.Linear is expected")
    return node.args[0]


def linear_name(module: torch.nn.Module, node: torch.fx.Node, x: torch.fx.Node) -> str:
    """The name of the torch.nn.Linear that a node calls with x."""
    if linear_argument(module, node) is not x:
        raise NoProof(f"{node.target} does not take x itself")
    return str(node.target)


def is_call(node: torch.fx.Node, method: str, *functions: Callable[..., Any]) -> bool:
    """Whether a node calls a method of this name, or one of the functions."""
    if node.op == "call_method":
        return node.target == method
    return node.op == "call_function" and any(node.target is function for function in functions)


def is_silu(module: torch.nn.Module, node: torch.fx.Node) -> bool:
    """Whether a node is silu of one argument, by torch.nn.SiLU or by the function, and not in place."""
    if len(node.args) != 1:
        return False
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is torch.nn.SiLU and not node.kwargs
    return node.op == "call_function" and node.target is torch.nn.functional.silu and not node.kwargs.get("inplace")
