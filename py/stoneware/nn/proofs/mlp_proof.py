"""The proof of a feed-forward of two layers: down(activation(up(x)))."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.attribute_reads import Reads
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.pointwise import Pointwise, pointwise
from stoneware.nn.proofs.tracer import trace


@dataclass(frozen=True, kw_only=True)
class MLPParts:
    """The submodules of down(activation(up(x))), by name.

    Attributes:
      up, down: the layers.
      activation: the function between them.
      attributes: (submodule, attribute, value) that the code of the activation reads. The value of a method, which
        no attribute may hide, is None.
      keywords: (submodule, attribute, keywords) of attributes that are a functools.partial.
      methods: (submodule, method, function of its class) that the code of the block reads; "" is the block. The
        function is None in a pickle.
    """

    up: str
    down: str
    activation: Pointwise
    attributes: tuple[tuple[str, str, Any], ...]
    keywords: tuple[tuple[str, str, tuple[tuple[str, Any], ...]], ...]
    methods: tuple[tuple[str, str, Any], ...]


def mlp(module: torch.nn.Module) -> MLPParts:
    """The parts of a feed-forward that computes down(activation(up(x))), with an activation that an epilogue can have.

    Raises:
      NoProof: its code does not show that.
    """
    reads = Reads({}, {})
    graph = trace(module, "forward", reads)
    (x,) = fx_nodes.inputs(graph)
    down = fx_nodes.result(graph)
    last = fx_nodes.linear_argument(module, down)
    calls = [node for node in graph.nodes if node.op == "call_module" and node is not down]
    layers = [node for node in calls if type(module.get_submodule(str(node.target))) is torch.nn.Linear]
    if len(layers) != 1 or layers[0].target == down.target:
        raise NoProof("it does not call two layers, once each")
    (up,) = layers
    fx_nodes.linear_name(module, up, x)
    activation = pointwise(module, up, last, {x, up, down})
    return MLPParts(
        up=str(up.target),
        down=str(down.target),
        activation=activation,
        attributes=tuple((*names, value) for names, value in reads.attributes.items()),
        keywords=tuple(
            (*names, tuple(value.keywords.items()))
            for names, value in reads.attributes.items()
            if isinstance(value, functools.partial)
        ),
        methods=tuple((*names, function) for names, function in reads.methods.items()),
    )
