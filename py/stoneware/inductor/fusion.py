"""The pass over Inductor's graphs: a matmul and the pointwise operators after it become one node."""

from __future__ import annotations

import hashlib
import logging
import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils import _pytree

from stoneware.distributed import description
from stoneware.inductor import gain, region
from stoneware.inductor.operators import OPERATORS, plans_of
from stoneware.inductor.region import Output, Region
from stoneware.ops import fused
from stoneware.runtime.canonical import canonical_json

_LOG = logging.getLogger("stoneware.epilogue")

_OPS = {getattr(torch.ops.stoneware, op).default: op for op in OPERATORS}


class EpilogueFusion(CustomGraphPass):
    """Fuses pointwise operators into the matmul before them: Inductor's option post_grad_custom_pre_pass.

    A matmul of `sw.matmul`, `sw.scaled_mm` or `sw.grouped_mm` and the operators that an epilogue can have become a
    call of the op with an epilogue. It computes from the float32 sums, where the graph would round the matmul's result
    to 16 bits before; results have the dtypes of the graph. Values that the rest of the graph reads become further
    results. A matmul stays as it is if the call has a backend or a config, or if no gain is predicted.

    Args:
      always: fuse also where no gain is predicted.
    """

    def __init__(self, *, always: bool = False) -> None:
        self.always = always

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            op = _OPS.get(node.target) if node.op == "call_function" else None
            if op is not None and isinstance(node.meta.get("val"), torch.Tensor):
                self._fuse(op, node)

    def uuid(self) -> str:
        """Part of the key of Inductor's cache: the code of the pass, and all that its decisions depend on."""
        package = Path(__file__).parents[1]
        sources = [path for folder in ("inductor", "epilogue") for path in sorted((package / folder).glob("*.py"))]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        return canonical_json({"pass": digest, "always": self.always, **description()})

    def _fuse(self, op: str, matmul: fx.Node) -> None:
        spec = plans_of(op).spec
        bound = {
            argument.name: value
            for argument, value in zip(matmul.target._schema.arguments, matmul.args)  # type: ignore[union-attr]
        } | matmul.kwargs
        if bound.get("backend") is not None or bound.get("config") is not None or matmul.meta["val"].ndim < 2:
            return
        most_tensors = fused.MOST_TENSORS - len(spec.inputs) - 1
        found = region.find(matmul, most_tensors)
        if found is None or not (self.always or self._pays(op, bound, found)):
            return
        arguments = [
            *[bound.get(name) for name in spec.inputs],
            _graph_inputs(matmul, found),
            *[bound.get(name) for name, _ in spec.arguments],
            found.program.text(),
        ]
        _replace(matmul, found, OPERATORS[op], tuple(arguments))
        _LOG.info("torch.compile fuses %s operators into %s", len(found.nodes) - 1, matmul)

    def _pays(self, op: str, bound: dict[str, Any], found: Region) -> bool:
        spec, matmul = plans_of(op).spec, found.nodes[0]
        try:
            tensors = [None if bound.get(name) is None else region.like(bound[name]) for name in spec.inputs]
        except region.UnknownSizeError:
            return False
        sums = region.like(matmul)
        is_read = any(output.node is matmul for output in found.outputs)
        saved_bytes = sums.nbytes * (1 if is_read else 2)
        arguments = [bound.get(name) for name, _ in spec.arguments]
        saved_us = gain.saved_us(op, tensors, arguments, matmul.meta["val"].device, saved_bytes=saved_bytes)
        return saved_us is not None and saved_us > 0


def _graph_inputs(matmul: fx.Node, found: Region) -> list[fx.Node]:
    """The tensors of an epilogue, as nodes before the matmul."""
    for node in found.moved:
        matmul.prepend(node)
    nodes = []
    for each in found.inputs:
        if each.shape is None:
            nodes.append(each.node)
            continue
        with matmul.graph.inserting_before(matmul):
            nodes.append(_added(torch.ops.aten.reshape.default, each.node, list(each.shape)))
    return nodes


def _replace(matmul: fx.Node, found: Region, target: Any, arguments: tuple[Any, ...]) -> None:
    """Puts the call where the matmul is, and each of its results where the node is that it replaces."""
    graph, val = matmul.graph, matmul.meta["val"]
    vals = [
        val.new_empty(result.shape(val.shape), dtype=getattr(torch, result.dtype)) for result in found.program.results
    ]
    with graph.inserting_before(matmul):
        call = graph.call_function(target, arguments)
        items = [graph.call_function(operator.getitem, (call, position)) for position in range(len(vals))]
    call.meta = {key: value for key, value in matmul.meta.items() if key in ("stack_trace", "nn_module_stack")}
    call.meta["val"] = vals
    # Inductor keeps the strides of these: a weight stays column-major.
    call.meta["eager_input_vals"] = (_pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], arguments), {})
    for output, item, item_val in zip(found.outputs, items, vals):
        item.meta["val"] = item_val
        node = output.node
        with graph.inserting_before(node):
            result = _in_shape(output, item)
            if node.meta["val"].dtype != item_val.dtype:  # the maximum of a row is float32
                result = _added(torch.ops.prims.convert_element_type.default, result, node.meta["val"].dtype)
        node.replace_all_uses_with(result)
    _erase(found.nodes)


def _erase(nodes: list[fx.Node]) -> None:
    """Erases nodes, and those that only they have read."""
    unread = [node for node in nodes if not node.users]
    while unread:
        node = unread.pop()
        before = node.all_input_nodes
        node.graph.erase_node(node)
        unread += [each for each in before if each.op == "call_function" and not each.users and not each.is_impure()]


def _in_shape(output: Output, result: fx.Node) -> fx.Node:
    """The result with the dimensions of the node that it replaces."""
    if output.leading is not None:
        columns = [] if output.is_row_max else [region.shape_of(output.node)[-1]]
        result = _added(torch.ops.aten.reshape.default, result, [*output.leading, *columns])
    return _added(torch.ops.aten.unsqueeze.default, result, -1) if output.keeps_dim else result


def _added(target: Any, tensor: fx.Node, argument: Any) -> fx.Node:
    """A new node of an operator with two arguments."""
    node = tensor.graph.call_function(target, (tensor, argument))
    sizes = _pytree.tree_map_only(fx.Node, lambda size: size.meta["val"], argument)
    node.meta["val"] = target(tensor.meta["val"], sizes)
    return node
