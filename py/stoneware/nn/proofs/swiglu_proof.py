"""The proof of a feed-forward of three layers: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.tracer import trace


@dataclass(frozen=True, kw_only=True)
class SwiGLUParts:
    """The submodules of down(silu(gate(x)) * up(x)), by name.

    Attributes:
      gate_up: gate and up, or a single layer with the rows of gate, then those of up.
      down: the last layer.
    """

    gate_up: tuple[str, ...]
    down: str


def swiglu(module: torch.nn.Module) -> SwiGLUParts:
    """The parts of a feed-forward that computes down(silu(gate(x)) * up(x)) without biases.

    Raises:
      NoProof: its code does not show that.
    """
    graph = trace(module, "forward")
    (x,) = fx_nodes.inputs(graph)
    down = fx_nodes.result(graph)
    gate_up, inner = gate_and_up(module, fx_nodes.linear_argument(module, down))
    parts = SwiGLUParts(gate_up=tuple(fx_nodes.linear_name(module, node, x) for node in gate_up), down=str(down.target))
    layers = (*parts.gate_up, parts.down)
    if len({*layers}) != len(layers):
        raise NoProof("one of its layers is used twice")
    fx_nodes.check_operations(graph, {x, down, *gate_up, *inner})
    with_bias = [name for name in layers if module.get_submodule(name).bias is not None]
    if with_bias:
        raise NoProof(f"{with_bias[0]} has a bias")
    return parts


def gate_and_up(module: torch.nn.Module, mul: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """silu(gate) * up: the nodes of gate and up, or the node that holds both as halves; and the nodes in between."""
    if not fx_nodes.is_call(mul, "mul", torch.mul, operator.mul) or len(mul.args) != 2 or mul.kwargs:
        raise NoProof(f"it computes {fx_nodes.name(mul)} where silu(gate) * up is expected")
    first, second = mul.args
    if not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
        raise NoProof("it multiplies by a number")
    silu, up = (first, second) if fx_nodes.is_silu(module, first) else (second, first)
    if not fx_nodes.is_silu(module, silu):
        raise NoProof(f"it computes {fx_nodes.name(first)} and {fx_nodes.name(second)}, of which neither is silu")
    gate = silu.args[0]
    if not isinstance(gate, torch.fx.Node):
        raise NoProof("it computes silu of a number")
    if gate.op == "call_module" and up.op == "call_module":
        return [gate, up], [mul, silu]
    halves, chunks = _halves([gate, up])
    source = chunks[0].args[0]
    if not isinstance(source, torch.fx.Node):
        raise NoProof("it splits a number")
    return [source], [mul, silu, *halves, *chunks]


def _halves(nodes: list[torch.fx.Node]) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The two halves of chunk(2, dim=-1), and the node of that chunk."""
    chunks = []
    for position, half in enumerate(nodes):
        if half.op != "call_function" or half.target is not operator.getitem or half.args[1] != position:
            raise NoProof(f"it computes {fx_nodes.name(half)} where gate and up, in this order, are expected")
        chunk = half.args[0]
        assert isinstance(chunk, torch.fx.Node)  # of getitem
        options = dict(zip(("chunks", "dim"), chunk.args[1:])) | chunk.kwargs
        if not fx_nodes.is_call(chunk, "chunk", torch.chunk) or options != {"chunks": 2, "dim": -1}:
            raise NoProof(f"it computes {fx_nodes.name(chunk)} where chunk(2, dim=-1) is expected")
        chunks.append(chunk)
    if chunks[0] is not chunks[1]:
        raise NoProof("gate and up are not the halves of one tensor")
    return nodes, chunks[:1]
