"""Runs an epilogue once on tensors without memory, and notes what it computes.

Torch's dispatcher calls `_Trace.__torch_dispatch__` for each operator, after it has taken composite ones
apart. Shapes, dtypes and views follow from the same operator on the device "meta".

A mode takes the operators, since the first call of a subclass's own `__torch_dispatch__` imports 500 modules
of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoneware.epilogue import arithmetic
from stoneware.epilogue.expression import (
    Acc,
    Apply,
    Constant,
    Dropout,
    Element,
    Expression,
    Half,
    Load,
    Output,
    load_of,
)
from stoneware.epilogue.promotion import ROUNDED_NUMBERS, broadcast, common_dtype, result_of
from stoneware.errors import UnsupportedError, quoted

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
"""Those that an input, and a value in between, may have."""

_SAME = frozenset({"alias", "detach", "clone", "contiguous", "lift_fresh", "view", "_unsafe_view", "reshape", "expand"})
"""Operators that change nothing if the shape stays."""

_VIEWS = frozenset(
    {
        *_SAME,
        "as_strided",
        "diagonal",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
    }
) - {"clone", "contiguous"}

_COMMUTATIVE = frozenset({"add", "mul"})

_FILLED = {"zeros_like": 0.0, "ones_like": 1.0}

_DROPOUT = "stoneware::dropout"


class _View:
    """A view of input `index`; the traced tensor's meta tensor has its strides."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Pairs:
    """A value whose neighbouring columns are a dimension of two."""

    def __init__(self, node: Any) -> None:
        self.node = node


class _RowMax:
    def __init__(self, node: Any, is_half: bool) -> None:
        self.node, self.is_half = node, is_half


class _Memory:
    """What a computed value and its views have in common.

    Attributes:
      has_views: whether a change in place would change several tensors.
    """

    has_views = False


class _Traced(torch.Tensor):
    """A tensor without memory: `meta` has its shape and strides, and `node` says what it is."""

    meta: torch.Tensor
    node: Any
    frames: _Frames
    memory: _Memory

    @staticmethod
    def __new__(cls, meta: torch.Tensor, node: Any, frames: _Frames, memory: _Memory | None = None) -> _Traced:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=frames.device,
        )
        self.meta, self.node, self.frames, self.memory = meta, node, frames, memory or _Memory()
        return self

    def view_as_node(self, meta: torch.Tensor, node: Any) -> _Traced:
        """A view of a computed value."""
        self.memory.has_views = True
        return _Traced(meta, node, self.frames, self.memory)

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UnsupportedError("an epilogue must not change tensors, but sets .data; compute a new tensor")

    def __bool__(self) -> bool:
        raise _value_error()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UnsupportedError(
            f"an epilogue's arguments must be used while it runs, but {function} gets one afterwards; keep none of them"
        )


def _value_error() -> UnsupportedError:
    return UnsupportedError(
        "an epilogue must not read a tensor's value in Python, such as in a branch or with .item(), because it is "
        "traced without values; use torch.where or the tensor itself"
    )


class _Trace(TorchDispatchMode):
    """Inside it, operators of traced tensors go to `frames`; others run."""

    def __init__(self, frames: _Frames) -> None:
        super().__init__()
        self._frames = frames

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch wraps `__torch_dispatch__`, for which it imports torch._dynamo."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise UnsupportedError(
                f"an epilogue must not use torch's random numbers or its dropout, but uses {function._schema.name}; "
                "use sw.dropout(x, p, seed)"
            )
        if any(isinstance(value, _Traced) for value in _flat((args, kwargs))):
            return self._frames.run(function, args, kwargs)
        return function(*args, **kwargs)


def frames_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the matmul's result, and the one with half of its columns."""
    if not shape:
        raise ValueError(
            "an epilogue must get a result of one dimension or more, but that of two vectors has none; pass a matrix, "
            "such as a[None]"
        )
    return shape, (*shape[:-1], shape[-1] // 2)


class _Frames:
    """The shapes that a value may have: that of the matmul's result, and the one with half of its columns.

    Args:
      shape: of the result.
      device: of the call.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.full, self.half = frames_of(shape)
        self.device = device

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator of torch."""
        name = function._schema.name.split("::")[1]
        arguments = _bound(function, args, kwargs)
        first = next(iter(arguments.values()), None)
        if function._schema.name == _DROPOUT:
            return self._dropout(**arguments)
        if name.endswith("_") and not name.startswith("_") and function._schema.is_mutable:
            return self._in_place(name, args, kwargs)
        if function._schema.name == "aten::view" and function._overloadname == "dtype":
            raise UnsupportedError(
                "an epilogue must not read the bits of a tensor in another dtype, but views "
                f"{arguments['self'].dtype} as {arguments['dtype']}; convert it with .to, or view an input before the "
                "call"
            )
        if function._schema.is_mutable:
            raise UnsupportedError(
                f"an epilogue must not change tensors, but uses aten::{name}.{function._overloadname}; use an operator "
                "that returns a new one, without out="
            )
        if name in _FILLED or name == "full_like":
            value: Any = _FILLED.get(name, arguments.get("fill_value"))
            like = next(one for one in arguments.values() if isinstance(one, _Traced))
            meta = torch.empty(like.shape, dtype=arguments.get("dtype") or like.dtype, device="meta")
            return _Traced(meta, _constant(value, meta.dtype), self)
        if isinstance(first, _Traced):
            if isinstance(first.node, _View) and name in _VIEWS:
                return self._views(function, name, args, kwargs, first.node)
            if isinstance(first.node, _View) and name in ("clone", "contiguous"):
                return _Traced(first.meta, first.node, self)  # the kernel reads the input's memory
            if isinstance(first.node, _Pairs):
                return self._of_pairs(function, name, args, kwargs, first)
            if (same := self._rearranged(function, name, args, kwargs, arguments, first)) is not None:
                return same
            if name == "amax":
                return self._row_max(arguments, first)
        if option := next((key for key in ("rounding_mode", "decimals") if arguments.get(key)), None):
            self._refuse(f"{name} with {option}={arguments[option]!r}")
        if name not in arithmetic.NAMES:
            self._refuse(name)
        meta = result_of(name, arguments)
        if meta.dtype == torch.int64 and any(tensor.dtype == torch.int64 for tensor in _tensors(arguments)):
            raise UnsupportedError(
                f"an epilogue must not compute with int64, such as a seed or an offset of dropout, but {name} does; "
                "compute it before the call, or pass sw.dropout another offset="
            )
        _check_dtype(name, meta.dtype, "convert the result after the call, and add 1.0, not 1, to booleans")
        return _Traced(meta, self._apply(name, arguments, meta), self)

    def _apply(self, name: str, arguments: dict[str, Any], meta: torch.Tensor) -> Apply:
        flags = {key: value for key, value in arguments.items() if key in arithmetic.FLAGS or value is None}
        dtype = common_dtype(arguments)
        nodes = [(key, self._argument(name, value, dtype)) for key, value in arguments.items() if key not in flags]
        if _is_swapped(name, dict(nodes)):
            (first, left), (second, right) = nodes[:2]
            nodes[:2] = [(first, right), (second, left)]
        given = [(key, value) for key, value in flags.items() if key == "approximate"]
        return Apply(name, (*nodes, *given), meta.dtype)

    def _argument(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        """An argument as a node, rounded to the common dtype of all where torch's operator does so."""
        node = self._node(name, value)
        if name in ROUNDED_NUMBERS and isinstance(node, Constant):
            return _constant(node.value, dtype)
        is_scalar = isinstance(value, _Traced) and value.ndim == 0 and name != "_to_copy"
        if is_scalar and torch.promote_types(value.dtype, dtype) != dtype:
            return Apply("_to_copy", (("self", node),), dtype)
        return node

    def _node(self, name: str, value: Any) -> Any:
        """An argument as a node."""
        if isinstance(value, (bool, int, float)):
            return Constant(float(value))
        if isinstance(value, _Traced):
            if isinstance(value.node, (_Pairs, _RowMax)):
                what = "the maximum of a row" if isinstance(value.node, _RowMax) else "pairs of columns"
                raise UnsupportedError(
                    f"an epilogue must not compute with {what}, which other threads have, but {name} gets it; return "
                    "it, and compute after the call"
                )
            return self.resolved(value)
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise UnsupportedError(
                    f"an epilogue must get its tensors with requires_grad=True as arguments, but {name} reads one of "
                    f"shape {list(value.shape)} that it does not get; pass it in inputs=, or its .detach()"
                )
            if value.ndim == 0 and value.device.type == "cpu":
                return Constant(float(value))
            raise UnsupportedError(
                f"an epilogue must get its tensors as arguments, but {name} reads one of shape {list(value.shape)} "
                "that it does not get; pass it in inputs="
            )
        return self._refuse(name)

    def resolved(self, value: _Traced) -> Any:
        """The node of a traced tensor; that of a view is a load."""
        if not isinstance(value.node, _View):
            return value.node
        _check_dtype(f"inputs[{value.node.index}]", value.dtype)
        columns = value.shape[-1] if value.ndim else 1
        is_half = columns == self.half[-1] and columns not in (1, self.full[-1])
        frame = self.half if is_half else self.full
        if broadcast(value.shape, frame) != frame:
            raise ValueError(
                f"inputs[{value.node.index}] with shape {list(value.shape)} must broadcast to the result's shape "
                f"{list(self.full)}, or to {list(self.half)} for pairs of columns; reshape it"
            )
        return load_of(value.node.index, value.meta, frame)

    def _meta(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The views that the operator makes of meta tensors."""
        kwargs = {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
        return function(*_with_meta(args), **_with_meta(kwargs))

    def _views(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], view: _View) -> Any:
        if name == "as_strided" and _bound(function, args, kwargs)["storage_offset"] is not None:
            raise UnsupportedError(
                f"as_strided in an epilogue must begin at the tensor's first element, but has a storage_offset, which "
                f"depends on where inputs[{view.index}] begins in its storage; leave it out, and slice the input first"
            )
        try:
            metas = self._meta(function, args, kwargs)
        except RuntimeError as error:
            raise UnsupportedError(
                f"an epilogue must take views of its inputs that copy nothing, but {name} makes none of "
                f"inputs[{view.index}] ({str(error).splitlines()[0]}); correct the shape, or rearrange it before the "
                "call"
            ) from error
        if isinstance(metas, torch.Tensor):
            return _Traced(metas, view, self)
        return type(metas)(_Traced(meta, view, self) for meta in metas)

    def _rearranged(
        self,
        function: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
        first: _Traced,
    ) -> _Traced | None:
        """The result of an operator that keeps a computed value, or takes every other column of it."""
        if name not in _VIEWS and name not in _SAME:
            return None
        if name in ("clone", "contiguous"):
            return _Traced(torch.empty(first.shape, dtype=first.dtype, device="meta"), first.node, self)
        meta = self._meta(function, args, kwargs)
        if not isinstance(meta, torch.Tensor):
            meta = meta[0]  # of several parts
        if tuple(meta.shape) == tuple(first.shape) and name in (*_SAME, "slice"):
            return first.view_as_node(meta, first.node)
        if tuple(first.shape) == self.full and not isinstance(first.node, _RowMax):
            if name in ("view", "reshape", "_unsafe_view") and tuple(meta.shape) == (*self.half, 2):
                return first.view_as_node(meta, _Pairs(first.node))
            is_last = arguments.get("dim", 0) % first.ndim == first.ndim - 1
            is_strided = arguments.get("step") == 2 and (arguments.get("start") or 0) in (0, 1)
            if name == "slice" and is_last and is_strided and tuple(meta.shape) == self.half:
                return first.view_as_node(meta, Half(first.node, arguments.get("start") or 0))
        raise UnsupportedError(
            f"an epilogue may take only neighbouring columns of a computed value, [..., 0::2] and [..., 1::2], but "
            f"{name} makes a value of shape {list(meta.shape)} of one of shape {list(first.shape)}; rearrange inputs "
            "before they are computed with, and results after the call"
        )

    def _of_pairs(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], first: _Traced) -> Any:
        metas = self._meta(function, args, kwargs)
        pairs = first.node
        if name in ("unbind", "select") and _bound(function, args, kwargs)["dim"] % first.ndim != first.ndim - 1:
            self._refuse(f"{name} over rows")
        if name == "unbind" and len(metas) == 2 and tuple(metas[0].shape) == self.half:
            return [first.view_as_node(meta, Half(pairs.node, parity)) for parity, meta in enumerate(metas)]
        if name == "select" and tuple(metas.shape) == self.half:
            index = _bound(function, args, kwargs)["index"]
            return first.view_as_node(metas, Half(pairs.node, index % 2))
        return self._refuse(name)

    def _row_max(self, arguments: dict[str, Any], first: _Traced) -> _Traced:
        dims = arguments["dim"]
        shape = tuple(first.shape)
        if shape not in (self.full, self.half) or [dim % first.ndim for dim in dims] != [first.ndim - 1]:
            raise UnsupportedError(
                f"amax of an epilogue must be over the last dimension of a value of shape {list(self.full)}, but is "
                f"over {list(dims)} of {list(shape)}; reduce after the call"
            )
        node = _RowMax(self.resolved(first), shape == self.half and shape != self.full)
        of_rows = (*shape[:-1], 1) if arguments.get("keepdim") else shape[:-1]
        return _Traced(torch.empty(of_rows, dtype=torch.float32, device="meta"), node, self)

    def _dropout(self, x: Any, seed_tensor: Any, offset_tensor: Any, p: float, seed: int, offset: int) -> _Traced:
        """`sw.dropout` has checked p, and the types of seed and offset."""
        value = self._node("dropout", x)
        _check_dtype("x of dropout", x.dtype)
        if tuple(x.shape) not in (self.full, self.half):
            raise UnsupportedError(
                f"dropout in an epilogue must get a value of the result's shape {list(self.full)}, or "
                f"{list(self.half)} for pairs of columns, but gets {list(x.shape)}; expand it, or drop before the call"
            )
        numbers = [
            number if tensor is None else self._element(name, tensor)
            for name, tensor, number in (("seed", seed_tensor, seed), ("offset", offset_tensor, offset))
        ]
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return _Traced(meta, Dropout(value, p, numbers[0], numbers[1], x.dtype), self)

    def _element(self, name: str, tensor: torch.Tensor) -> Element:
        if not isinstance(tensor, _Traced) or not isinstance(tensor.node, _View):
            raise UnsupportedError(
                f"{name} of dropout in an epilogue must be an int or one of its arguments, but is another tensor; pass "
                "it in inputs="
            )
        return Element(tensor.node.index, int(tensor.meta.storage_offset()))

    def _in_place(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Traced:
        target, *others = args
        base = name[:-1]
        remedy = f"use {base} instead" if base in arithmetic.NAMES else "compute a new tensor, such as with torch.where"
        if not isinstance(target, _Traced) or isinstance(target.node, (_View, _Pairs, _RowMax)):
            raise UnsupportedError(f"an epilogue must not change its inputs, but {name} does; {remedy}")
        if target.memory.has_views:
            raise UnsupportedError(f"an epilogue must not change a value that has views, but {name} does; {remedy}")
        if base not in arithmetic.NAMES:
            self._refuse(name)
        with _Trace(self):
            result = getattr(torch.ops.aten, base)(target, *others, **kwargs)
            if result.shape != target.shape or not torch.can_cast(result.dtype, target.dtype):
                raise ValueError(
                    f"{name} in an epilogue must keep shape {list(target.shape)} and {target.dtype}, but gives "
                    f"{list(result.shape)} and {result.dtype}; use {base}"
                )
            if result.dtype != target.dtype:
                result = torch.ops.aten._to_copy(result, dtype=target.dtype)
        target.node = result.node
        return target

    def _refuse(self, name: str) -> NoReturn:
        if name in ("_local_scalar_dense", "equal"):
            raise _value_error()
        if name == "empty_like":
            raise UnsupportedError(
                "an epilogue must not use memory without values, but uses aten::empty_like, with which torch's dropout "
                "begins; use sw.dropout(x, p, seed), or torch.zeros_like(x)"
            )
        raise UnsupportedError(
            f"an epilogue must compute each element by itself, with operators that Stoneware can write in CUDA C++, "
            f"but uses aten::{name}; compute it after the call. Known are {', '.join(sorted(arithmetic.NAMES))}, amax "
            "over a row, and views of inputs"
        )


def trace(
    function: Callable[..., Any], shape: Sequence[int], inputs: Sequence[torch.Tensor], device: torch.device
) -> Expression:
    """What function(acc, *inputs) computes.

    Args:
      function: the epilogue.
      shape: of acc, [..., m, n] float32.
      inputs: the tensors that it gets.
      device: of the call.

    Raises:
      TypeError: the function does not return tensors.
      UnsupportedError: it uses an operator that no kernel can have; the message names it.
      UnfusableError: an input has strides that kernels do not follow.
      ValueError: an input or a result has a shape that does not fit.
    """
    frames = _Frames(tuple(shape), device)
    acc = _Traced(torch.empty(frames.full, dtype=torch.float32, device="meta"), Acc(), frames)
    views = [
        _Traced(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"), _View(index), frames)
        for index, one in enumerate(inputs)
    ]
    with torch.no_grad(), _Trace(frames):
        returned = function(acc, *views)
    is_tuple = isinstance(returned, (tuple, list))
    results = tuple(returned) if is_tuple else (returned,)
    if not results:
        raise TypeError("an epilogue must return a tensor or several, but returned an empty tuple; return one")
    return Expression(tuple(_output(frames, position, result) for position, result in enumerate(results)), is_tuple)


def _output(frames: _Frames, position: int, result: object) -> Output:
    if not isinstance(result, _Traced):
        raise TypeError(
            f"an epilogue must return tensors that it computed from its arguments, but result {position} is "
            f"{quoted(result) if not isinstance(result, torch.Tensor) else 'a tensor of its own'}; return a tensor"
        )
    shape = tuple(result.shape)
    if isinstance(result.node, _RowMax):
        return Output("row_max", result.node.node, shape, result.dtype, result.node.is_half)
    if shape not in (frames.full, frames.half) or isinstance(result.node, _Pairs):
        raise ValueError(
            f"result {position} of an epilogue must have the shape {list(frames.full)} of the matmul's result, or half "
            f"of its columns, {list(frames.half)}, but has {list(shape)}; expand it, or compute it elsewhere"
        )
    _check_dtype(f"result {position}", result.dtype)
    is_half = shape != frames.full
    value = frames.resolved(result)
    if isinstance(value, Apply) and value.operator == "_to_copy" and value.dtype == result.dtype != torch.bool:
        value = value.arguments[0][1]  # the store rounds
    return Output("half" if is_half else "full", value, shape, result.dtype, is_half)


def _constant(value: float, dtype: torch.dtype) -> Constant:
    return Constant(float(torch.tensor(value, dtype=dtype)))


def _is_swapped(name: str, nodes: dict[str, Any]) -> bool:
    """Whether an input is added or multiplied from the left: r + acc is traced as acc + r, so both have one text."""
    if name not in _COMMUTATIVE or nodes.get("alpha", Constant(1.0)) != Constant(1.0):
        return False
    return isinstance(nodes["self"], Load) and not isinstance(nodes["other"], (Load, Constant))


def _tensors(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in arguments.values() if isinstance(value, torch.Tensor)]


def _check_dtype(name: str, dtype: torch.dtype, remedy: str = "convert it before the call") -> None:
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} of an epilogue must have one of the dtypes {', '.join(map(str, DTYPES))}, but has {dtype}; "
            f"{remedy}"
        )


def _bound(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, with defaults."""
    schema = function._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound |= dict(zip((argument.name for argument in schema), args))
    bound |= kwargs
    return {argument.name: bound[argument.name] for argument in schema if argument.name in bound}


def _flat(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _with_meta(value: Any) -> Any:
    if isinstance(value, _Traced):
        return value.meta
    if isinstance(value, torch.Tensor):
        return value if value.ndim == 0 else value.to("meta")
    if isinstance(value, (tuple, list)):
        return type(value)(map(_with_meta, value))
    if isinstance(value, dict):
        return {key: _with_meta(one) for key, one in value.items()}
    return value
