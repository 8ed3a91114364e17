"""The operators of an FX graph that can run in the kernel of a matmul: its pointwise readers, and theirs.

A graph of Inductor's, after its decompositions, or of AOTAutograd's. Sizes may be symbols of a trace; the expression
is traced with their hints, and does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _python_dispatch

from stoneware.epilogue import arithmetic, source, trace
from stoneware.errors import UnsupportedError
from stoneware.inductor.program import Program, Result, Step

_CAST = "_to_copy"
_KEPT = frozenset({"alias", "clone", "contiguous", "detach"})
"""Operators that change no value and no position."""

_RESHAPED = frozenset({"view", "reshape", "_unsafe_view"})

_CONSTANTS = {"full": "fill_value", "scalar_tensor": "s"}
"""Operators with one number -> its name."""

_MOST_BYTES = 2
"""Bytes of an element of a result, at most. A wider one, such as the float32 argument of a reduction, stays outside:
the kernel that reads it computes it from 16 bits."""


class Input(NamedTuple):
    """A tensor that an epilogue reads.

    Attributes:
      node: of the graph.
      shape: to which it is reshaped before: (-1, columns) for the rows of a matmul's result that a view has given
        more dimensions, (columns,) for one that is broadcast to all rows; None if it is used as it is.
    """

    node: fx.Node
    shape: tuple[int, ...] | None

    def like(self) -> torch.Tensor:
        """A tensor without memory, with the hints as sizes."""
        meta = like(self.node)
        return meta if self.shape is None else torch.empty(meta.shape, dtype=meta.dtype, device="meta").view(self.shape)


class Output(NamedTuple):
    """A result that the rest of the graph reads.

    Attributes:
      node: that it replaces.
      leading: the graph's sizes of its dimensions but the last, if a view has changed them; otherwise None.
      is_row_max: whether it is the maximum of each row.
      keeps_dim: whether that has a last dimension of one.
    """

    node: fx.Node
    leading: list[Any] | None = None
    is_row_max: bool = False
    keeps_dim: bool = False


class Region(NamedTuple):
    """A matmul and what becomes its epilogue.

    Attributes:
      program: the epilogue.
      inputs, outputs: its arguments and results, in the program's order.
      nodes: all nodes of it, in the order of the graph, the matmul first.
      moved: nodes of the graph after the matmul that `inputs` depend on, in its order.
    """

    program: Program
    inputs: list[Input]
    outputs: list[Output]
    nodes: list[fx.Node]
    moved: list[fx.Node]


class UnknownSizeError(Exception):
    """A size has no hint."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor, with hints as sizes."""
    return tuple(map(_hint, node.meta["val"].shape))


def like(node: fx.Node) -> torch.Tensor:
    """A tensor without memory like that of a node."""
    val = node.meta["val"]
    strides = tuple(map(_hint, val.stride()))
    return torch.empty_strided(shape_of(node), strides, dtype=val.dtype, device="meta")


def _hint(size: Any) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None:
        raise UnknownSizeError
    return int(hint)


def name_of(node: fx.Node) -> str:
    """The name of the node's operator in torch.ops.aten; empty if it is another one."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, name = node.target._schema.name.split("::")
    if namespace == "prims" and name == "convert_element_type":
        return _CAST
    return name if namespace == "aten" and not node.target._schema.is_mutable else ""


def find(matmul: fx.Node, most_inputs: int) -> Region | None:
    """The region of a matmul; None if no reader of it can be in one.

    Args:
      matmul: node of one of Stoneware's operators.
      most_inputs: most tensors that the epilogue may have, its results included.
    """
    try:
        return _Search(matmul).region(most_inputs)
    except UnknownSizeError:
        return None


class _Value(NamedTuple):
    """A value of the epilogue.

    Attributes:
      step: its step; None for the matmul's result.
      leading: see `Output`.
      is_pair: whether its columns are in pairs, [..., n / 2, 2].
      is_row_max: whether it is the maximum of each row.
    """

    step: int | None
    leading: list[Any] | None = None
    is_pair: bool = False
    is_row_max: bool = False


class _Search:
    """The search for the region of a matmul.

    Args:
      matmul: the node.
    """

    def __init__(self, matmul: fx.Node) -> None:
        self._matmul = matmul
        self._shape = shape_of(matmul)
        self._device = matmul.meta["val"].device
        self._values: dict[fx.Node, _Value] = {matmul: _Value(None)}
        # Arguments are ("value", step), ("input", Input) and others; they get their numbers last.
        self._steps: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._after: dict[fx.Node, None] = {}
        self._fixed: set[fx.Node] = {matmul}

    def region(self, most_inputs: int) -> Region | None:
        self._grow()
        self._keep_supported()
        outputs = self._outputs()
        program, inputs = self._program(outputs)
        if not program.steps or len(inputs) + len(outputs) > most_inputs:
            return None
        if not all(like(output.node).is_contiguous() for output in outputs) or not self._is_writable(program, inputs):
            return None
        nodes = [self._matmul, *(node for node in self._after if node in self._values)]
        needed = {each.node for each in inputs}
        for node in reversed(self._after):
            if node in needed:
                needed.update(node.all_input_nodes)
        moved = [node for node in self._after if node in needed and node not in self._values]
        return Region(program, inputs, outputs, nodes, moved)

    def _grow(self) -> None:
        """Finds all that may belong to the region, by names and shapes."""
        readers = set(self._matmul.users)
        node = self._matmul.next
        while readers and node.op != "output":
            if _changes_memory(node):
                return  # nothing is moved over it
            self._after[node] = None
            if node in readers and (value := self._value(node)) is not None:
                self._values[node] = value
                readers.update(node.users)
            readers.discard(node)
            if not _is_movable(node) or any(before in self._fixed for before in node.all_input_nodes):
                self._fixed.add(node)  # depends on the matmul, or must stay where it is
            node = node.next

    def _value(self, node: fx.Node) -> _Value | None:
        """The node as a value; None if it cannot be one."""
        name = name_of(node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        first = node.args[0] if node.args else None
        value = self._values.get(first) if isinstance(first, fx.Node) else None
        if value is not None and not value.is_row_max:
            if value.is_pair:
                return self._half_of_pair(node, name, value)
            if name in _KEPT or name in _RESHAPED:
                return self._rearranged(node, name, first, value)
            if name == "slice":
                return self._sliced(node, first, value)
            if name == "amax":
                return self._row_max(node, first, value)
        return self._computed(node, name) if name in arithmetic.NAMES else None

    def _add(self, operator: str, args: list[Any], kwargs: dict[str, Any]) -> int:
        self._steps.append((operator, args, kwargs))
        return len(self._steps) - 1

    def _half_of_pair(self, node: fx.Node, name: str, value: _Value) -> _Value | None:
        bound = _bound(node)
        if name != "select" or bound["dim"] % (len(shape_of(node)) + 1) != len(shape_of(node)):
            return None
        arguments = [("value", value.step), -1, bound["index"] % 2, None, 2]
        return _Value(self._add("slice.Tensor", arguments, {}), value.leading)

    def _rearranged(self, node: fx.Node, name: str, first: Any, value: _Value) -> _Value | None:
        old, new = shape_of(first), shape_of(node)
        if old == new:
            return value
        if name not in _RESHAPED:
            return None
        *leading, _ = _bound(node)["size" if name != "reshape" else "shape"]
        if old[-1] == new[-1] and len(self._shape) == 2:
            return value._replace(leading=leading)
        if new == (*old[:-1], old[-1] // 2, 2):
            return value._replace(is_pair=True)
        return None

    def _sliced(self, node: fx.Node, first: Any, value: _Value) -> _Value | None:
        """Every other column."""
        bound, shape = _bound(node), shape_of(first)
        start = bound["start"] or 0
        is_half = bound["dim"] % len(shape) == len(shape) - 1 and bound["step"] == 2 and start in (0, 1)
        if not is_half or shape[-1] != self._shape[-1] or shape_of(node) != (*shape[:-1], shape[-1] // 2):
            return None
        return _Value(self._add("slice.Tensor", [("value", value.step), -1, start, None, 2], {}), value.leading)

    def _row_max(self, node: fx.Node, first: Any, value: _Value) -> _Value | None:
        last = len(shape_of(first)) - 1
        if [dim % (last + 1) for dim in _bound(node)["dim"]] != [last]:
            return None
        return _Value(self._add("amax.default", [("value", value.step), [-1]], {}), value.leading, is_row_max=True)

    def _computed(self, node: fx.Node, name: str) -> _Value | None:
        shape, nodes = shape_of(node), node.all_input_nodes
        values = [value for before in nodes if (value := self._values.get(before)) is not None]
        leading = values[0].leading
        if any(value.is_pair or value.is_row_max for value in values) or node.meta["val"].device != self._device:
            return None
        if any(shape_of(before) != shape for before in nodes if before in self._values):
            return None
        arguments: dict[str, Any] = {}
        for before in nodes:
            argument = ("value", self._values[before].step) if before in self._values else None
            if argument is None and (argument := self._outside(before, shape, leading is not None)) is None:
                return None
            arguments[before.name] = argument
        args = [_replaced(each, arguments) for each in node.args]
        kwargs = {key: _replaced(each, arguments) for key, each in node.kwargs.items()}
        if name == _CAST:
            dtype = _bound(node)["dtype"]
            return _Value(self._cast(args[0], dtype or node.meta["val"].dtype), leading)
        overload = node.target._overloadname  # type: ignore[union-attr]
        return _Value(self._add(f"{name}.{overload}", args, kwargs), leading)

    def _cast(self, argument: Any, dtype: torch.dtype) -> int:
        return self._add("_to_copy.default", [argument], {"dtype": _dtype_name(dtype)})

    def _outside(self, node: fx.Node, shape: tuple[int, ...], is_viewed: bool) -> Any:
        """An argument that the matmul does not compute: a constant, an input, or a cast of one; else None."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return None
        name = name_of(node)
        if (
            name in _CONSTANTS
            and val.numel() == 1
            and isinstance(number := _bound(node)[_CONSTANTS[name]], (int, float))
        ):
            return ("value", self._add("full.default", [[], float(number)], {}))
        if node in self._fixed or val.device != self._device or val.dtype not in trace.DTYPES:
            return None
        if name == _CAST and isinstance(before := node.args[0], fx.Node):
            cast = before.meta["val"]
            if cast.dtype in trace.DTYPES and cast.device == val.device:
                argument = self._outside(before, shape, is_viewed)
                return None if argument is None else ("value", self._cast(argument, val.dtype))
        own = shape_of(node)
        if not is_viewed or len(own) < 2:
            return ("input", Input(node, None))
        if math.prod(own[:-1]) == 1:
            return ("input", Input(node, (own[-1],)))
        return ("input", Input(node, (-1, own[-1]))) if own[:-1] == shape[:-1] else None

    def _keep_supported(self) -> None:
        """Removes what the language of epilogues does not have."""
        program, inputs = self._program([], needed=range(len(self._steps)))
        supported: list[bool] = []

        def checked(acc: Any, *tensors: Any) -> Any:
            supported.extend(program.supported_steps(acc, tensors))
            return acc

        self._trace(checked, inputs)
        for node, value in list(self._values.items()):
            if value.step is not None and not supported[value.step]:
                del self._values[node]
        self._remove([])

    def _trace(self, function: Any, inputs: Sequence[Input]) -> Any:
        with _python_dispatch._disable_current_modes():
            return trace.trace(function, self._shape, [each.like() for each in inputs], self._device)

    def _remove(self, nodes: Sequence[fx.Node]) -> None:
        """Removes nodes, and those whose arguments are not in the region any more."""
        for node in nodes:
            del self._values[node]
        for node in self._after:
            if node in self._values and any(
                before in self._fixed and before not in self._values for before in self._arguments(node)
            ):
                del self._values[node]

    def _arguments(self, node: fx.Node) -> list[fx.Node]:
        return [before for before in node.all_input_nodes if isinstance(before.meta.get("val"), torch.Tensor)]

    def _outputs(self) -> list[Output]:
        """The values that the rest of the graph reads, without wide ones."""
        while True:
            read = [node for node in self._values if any(user not in self._values for user in node.users)]
            wide = [node for node in read if not self._can_be_result(node)]
            if not wide or self._matmul in wide:
                break
            self._remove(wide)
        if wide:
            self._values = {self._matmul: self._values[self._matmul]}
        return [
            Output(node, value.leading, value.is_row_max, value.is_row_max and _bound(node)["keepdim"])
            for node, value in self._values.items()
            if node in read
        ]

    def _can_be_result(self, node: fx.Node) -> bool:
        value = self._values[node]
        return not value.is_pair and (value.is_row_max or node.meta["val"].dtype.itemsize <= _MOST_BYTES)

    def _program(self, outputs: Sequence[Output], needed: Sequence[int] | None = None) -> tuple[Program, list[Input]]:
        """The program of these results, of the steps in `needed`, or else of those that the results need, and its
        inputs."""
        needed = self._needed(outputs) if needed is None else needed
        inputs = list(dict.fromkeys(each for step in needed for each in _inputs(self._steps[step])))
        first = 1 + len(inputs)
        numbers = {step: first + position for position, step in enumerate(needed)}

        def numbered(argument: Any) -> Any:
            if isinstance(argument, list):
                return [numbered(each) for each in argument]
            if not isinstance(argument, tuple):
                return argument
            kind, what = argument
            if kind == "input":
                return f"%{1 + inputs.index(what)}"
            return "%0" if what is None else f"%{numbers[what]}"

        steps = [
            Step(name, numbered(args), {key: numbered(each) for key, each in kwargs.items()})
            for name, args, kwargs in (self._steps[step] for step in needed)
        ]
        results = [
            Result(int(numbered(("value", self._values[output.node].step))[1:]), *self._kind_and_dtype(output))
            for output in outputs
        ]
        return Program(len(inputs), steps, results), inputs

    def _needed(self, outputs: Sequence[Output]) -> list[int]:
        """The steps that results need, in their order."""
        needed: set[int] = set()
        pending = [self._values[output.node].step for output in outputs]
        while pending:
            step = pending.pop()
            if step is not None and step not in needed:
                needed.add(step)
                pending += [what for kind, what in _references(self._steps[step]) if kind == "value"]
        return sorted(needed)

    def _kind_and_dtype(self, output: Output) -> tuple[str, str]:
        if output.is_row_max:
            return "row_max", "float32"
        kind = "full" if shape_of(output.node)[-1] == self._shape[-1] else "half"
        return kind, _dtype_name(output.node.meta["val"].dtype)

    def _is_writable(self, program: Program, inputs: Sequence[Input]) -> bool:
        """Whether the whole epilogue can be traced and written."""
        try:
            source.write(self._trace(program, inputs), main=None, has_pairs=[False] * len(inputs))
        except (UnsupportedError, ValueError, TypeError):
            return False
        return True


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _changes_memory(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_movable(node: fx.Node) -> bool:
    """Whether it computes the same at another place of the graph; numbers of a generator depend on theirs."""
    is_random = isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in node.target.tags
    )
    return not is_random and not node.is_impure()


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, with defaults."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    bound |= dict(zip((argument.name for argument in arguments), node.args))
    return bound | dict(node.kwargs)


def _replaced(argument: Any, arguments: dict[str, Any]) -> Any:
    return fx.node.map_arg(argument, lambda node: arguments[node.name])


def _references(step: tuple[str, Any, Any]) -> Iterator[tuple[str, Any]]:
    """The values and inputs that a step reads."""
    _, args, kwargs = step
    pending = [*args, *kwargs.values()]
    while pending:
        argument = pending.pop()
        if isinstance(argument, tuple) and argument and argument[0] in ("value", "input"):
            yield argument
        elif isinstance(argument, (list, tuple)):
            pending.extend(argument)


def _inputs(step: tuple[str, Any, Any]) -> list[Input]:
    return [what for kind, what in _references(step) if kind == "input"]
