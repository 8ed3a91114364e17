"""The proof of an RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from stoneware.nn.arguments import has_hooks
from stoneware.nn.proofs import fx_nodes
from stoneware.nn.proofs.fx_nodes import is_call
from stoneware.nn.proofs.no_proof import NoProof
from stoneware.nn.proofs.tracer import trace


def rms_norm(module: torch.nn.Module) -> float:
    """The epsilon of a norm that computes x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in float32.

    Raises:
      NoProof: its code does not show that.
    """
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"]:
        raise NoProof(f"its parameters are {', '.join(names) or 'none'}, not the weight alone")
    if module.weight.ndim != 1:
        raise NoProof("its weight has more than one dimension")
    if type(module) is torch.nn.RMSNorm:
        if module.eps is None or has_hooks(module):
            raise NoProof("it has hooks" if has_hooks(module) else "its epsilon depends on the dtype of x")
        return module.eps
    return _NormTrace(module).result(trace(module, "forward", autocast=(False, True)))


class _Value(NamedTuple):
    """The meaning of a node in a norm's trace.

    Attributes:
      kind: "x", "weight", "dtype" (of both), "square", "mean", "mean + eps", "1 / rms", "x / rms", or "y".
      is_wide: whether its elements are float32.
      eps: of the norm, from "mean + eps" on.
    """

    kind: str
    is_wide: bool
    eps: float = 0.0


class _NormTrace:
    """Follows the trace of a norm that is called with x in the dtype of its weight."""

    def __init__(self, module: Any) -> None:
        self.shape, self.dtype = module.weight.shape, module.weight.dtype
        self.values: dict[torch.fx.Node, _Value] = {}

    def result(self, graph: torch.fx.Graph) -> float:
        """The epsilon of the norm."""
        fx_nodes.inputs(graph)
        for node in graph.nodes:
            if node.op == "output":
                break
            self.values[node] = self._value(node)
        value = self.values[fx_nodes.result(graph)]
        if value.kind != "y" or (value.is_wide and self.dtype != torch.float32):
            raise NoProof("its result is not the norm times the weight in the dtype of x")
        return value.eps

    def _value(self, node: torch.fx.Node) -> _Value:
        is_float32 = self.dtype == torch.float32
        if node.op == "placeholder":
            return _Value("x", is_float32)
        if node.op == "get_attr" and node.target == "weight":
            return _Value("weight", is_float32)
        arguments = [self._argument(argument) for argument in node.args]
        keywords = {name: self._argument(argument) for name, argument in node.kwargs.items()}
        value = None
        if node.op in ("call_method", "call_function") and arguments:
            value = self._call(node, arguments, keywords)
        if value is None:
            raise NoProof(f"it computes {fx_nodes.name(node)}, which the norm does not")
        return value

    def _argument(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, torch.fx.Node) else argument

    def _call(self, node: torch.fx.Node, arguments: list[Any], keywords: dict[str, Any]) -> _Value | None:
        first, *rest = arguments
        if node.target is getattr:
            is_dtype = rest == ["dtype"] and first.kind in ("x", "weight")
            return _Value("dtype", first.is_wide) if is_dtype else None
        if node.target is torch.nn.functional.rms_norm:
            return self._norm(dict(zip(("input", "normalized_shape", "weight", "eps"), arguments)) | keywords)
        if node.op == "call_method" and node.target in ("to", "float", "type_as"):
            return self._cast(first, [*rest, *keywords.values()], keywords)
        if is_call(node, "mean", torch.mean):
            dims = dict(zip(("dim", "keepdim"), rest)) | keywords
            is_last = dims in ({"dim": dim, "keepdim": True} for dim in (-1, (-1,), [-1]))
            return _Value("mean", True) if _kind(first) == "square" and is_last else None
        if keywords:
            return None
        if is_call(node, "mul", torch.mul, operator.mul) and len(rest) == 1:
            return self._multiply(first, rest[0])
        if is_call(node, "add", torch.add, operator.add) and len(rest) == 1:
            mean, eps = (rest[0], first) if isinstance(first, float) else (first, rest[0])
            is_shifted = _kind(mean) == "mean" and isinstance(eps, float)
            return _Value("mean + eps", True, eps) if is_shifted else None
        power = self._power(node, rest)
        if power == 2 and _kind(first) == "x" and first.is_wide:
            return _Value("square", True)
        return _Value("1 / rms", True, first.eps) if power == -0.5 and _kind(first) == "mean + eps" else None

    def _power(self, node: torch.fx.Node, rest: list[Any]) -> float | None:
        if is_call(node, "pow", torch.pow, operator.pow) and len(rest) == 1 and isinstance(rest[0], (int, float)):
            return rest[0]
        if rest:
            return None
        return 2 if is_call(node, "square", torch.square) else -0.5 if is_call(node, "rsqrt", torch.rsqrt) else None

    def _multiply(self, a: Any, b: Any) -> _Value | None:
        values = {_kind(factor): factor for factor in (a, b)}
        if a == b and _kind(a) == "x" and a.is_wide:
            return _Value("square", True)
        if values.keys() == {"x", "1 / rms"}:
            return _Value("x / rms", True, values["1 / rms"].eps)
        if values.keys() == {"x / rms", "weight"}:
            return _Value("y", a.is_wide or b.is_wide, values["x / rms"].eps)
        return None

    def _norm(self, arguments: dict[str, Any]) -> _Value | None:
        kinds = [_kind(arguments.get(name)) for name in ("input", "weight")]
        eps = arguments.get("eps")
        is_whole = tuple(arguments.get("normalized_shape") or ()) == tuple(self.shape)
        if kinds != ["x", "weight"] or not is_whole or not isinstance(eps, float):
            return None
        return _Value("y", arguments["input"].is_wide, eps)

    def _cast(self, source: Any, dtypes: list[Any], keywords: dict[str, Any]) -> _Value | None:
        """A cast to float32 or to the dtype of x and of the weight."""
        if _kind(source) not in ("x", "x / rms", "weight", "y") or len(dtypes) > 1 or not {*keywords} <= {"dtype"}:
            return None
        dtype = dtypes[0] if dtypes else torch.float32  # of float()
        if isinstance(dtype, _Value):
            is_wide, is_dtype = dtype.is_wide, dtype.kind in ("x", "weight", "dtype")
        else:
            is_wide, is_dtype = dtype == torch.float32, dtype in (torch.float32, self.dtype)
        return source._replace(is_wide=is_wide) if is_dtype else None


def _kind(value: Any) -> str | None:
    return value.kind if isinstance(value, _Value) else None
