"""Writes an expression as the device function that an open kernel calls, and lays out its parameters.

The text depends on what is computed, on dtypes, and on which strides are 0 or 1; sizes, other strides and
addresses are parameters. So one linked kernel serves every shape.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stoneware.epilogue import arithmetic, philox
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
    UnfusableError,
    loads,
)

PARAMETER_BYTES = 512
"""EpilogueParams::kBytes of cc/gemm/epilogue_sm90.h."""

_WORD = 8
"""Bytes of an address, and of a stride."""

_STATE_WORDS = 64
"""EpilogueState::kWords of cc/gemm/epilogue_sm90.h."""

_ROW_MAX_WORDS = 11
"""Those of RowMaxAlongM of fragments.h."""

_DTYPES = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float8_e4m3fn: "Float8E4M3",
    torch.float8_e5m2: "Float8E5M2",
    torch.bool: "Bool",
}


class Source(NamedTuple):
    """An epilogue for NVRTC.

    Attributes:
      text: CUDA C++ without the device code that every epilogue begins with.
      parameters: what a launch passes; where an address goes, the bytes to add to it.
      inputs: (offset in the parameters, position of the input) of each address.
      outputs: the same of outputs.
    """

    text: str
    parameters: bytes
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


def write(expression: Expression, *, main: int | None, has_pairs: Sequence[bool]) -> Source:
    """The text of an expression.

    Args:
      expression: what it computes.
      main: the output that the kernel itself stores, of kind "full"; None if it stores none.
      has_pairs: whether the address of each input is a multiple of 16 bytes.

    Raises:
      UnfusableError: there are more parameters than fit.
    """
    return _Writer(main, has_pairs).write(expression)


class _Writer:
    def __init__(self, main: int | None, has_pairs: Sequence[bool]) -> None:
        self._main, self._has_pairs = main, has_pairs
        self._lines: list[str] = []
        self._names: dict[tuple[Any, str], str] = {}  # (a load, or the id of a node; frame) -> variable
        self._variables: dict[str, str] = {}  # what a variable has -> the variable
        self._slots: dict[Load, tuple[str, ...]] = {}  # address, row stride and column stride
        self._random: dict[tuple[str, bool], str] = {}  # (seed and offset, whether of halves) -> variable
        self._integers: dict[Any, str] = {}  # seed or offset -> text
        self._parameters = bytearray()
        self._inputs: list[tuple[int, int]] = []
        self._outputs: list[tuple[int, int]] = []
        self._num_words = 0  # of the state

    def write(self, expression: Expression) -> Source:
        for load in loads(expression):
            self._slots[load] = self._arguments_of(load)
        returned = "{0.0f, 0.0f}"
        for position, output in enumerate(expression.outputs):
            values = [
                self._value(output.value, frame) for frame in ("h" if output.kind == "half" or output.is_half else "xy")
            ]
            if position == self._main:
                returned = f"{{{', '.join(values)}}}"
                continue
            dtype = "float" if output.kind == "row_max" else "void"
            address = f"Parameter<{dtype}*>(params, {self._add_address(self._outputs, position)})"
            self._lines.append(f"{self._store(output)}, {address}, {', '.join(values)});")
        if len(self._parameters) > PARAMETER_BYTES:
            raise UnfusableError(
                f"the addresses and strides of an epilogue's tensors must take at most {PARAMETER_BYTES} bytes, but "
                f"take {len(self._parameters)}; pass fewer tensors, or contiguous ones"
            )
        prefetches = [
            f"  PrefetchRows<{_DTYPES[load.dtype]}>(tile, {', '.join(slot[:2])});\n"
            for load, slot in self._slots.items()
            if load.column_stride == 1
            and load.row_stride not in (0, 1)
            and load.row_stride * load.dtype.itemsize % 16 == 0
            and load.offset * load.dtype.itemsize % 16 == 0
            and self._has_pairs[load.input]
        ]
        body = "".join(f"  {line}\n" for line in self._lines)
        text = (
            f"{_philox() if self._random else ''}"
            'extern "C" __device__ float2 stoneware_epilogue(float2 acc, EpiloguePair pair, '
            "EpilogueState* state, const EpilogueParams* params) {\n"
            f"  const Place at(pair);\n{body}  return {returned};\n}}\n\n"
            'extern "C" __device__ void stoneware_prefetch(EpilogueTile tile, const EpilogueParams* params) {\n'
            f"{''.join(prefetches)}}}\n"
        )
        parameters = bytes(self._parameters).ljust(PARAMETER_BYTES, b"\0")
        return Source(text, parameters, tuple(self._inputs), tuple(self._outputs))

    def _words(self, count: int = 4) -> str | None:
        """Words of the state; None if too many are taken."""
        first, self._num_words = self._num_words, self._num_words + count
        return None if self._num_words > _STATE_WORDS else f"state->words + {first}"

    def _store(self, output: Output) -> str:
        """The text that stores an output, up to its address."""
        dtype, item_bytes = _DTYPES[output.dtype], output.dtype.itemsize
        if output.kind == "row_max" and output.is_half:
            return "StoreHalfRowMax(at"
        if output.kind == "row_max":
            words = self._words(_ROW_MAX_WORDS)
            return f"StoreRowMaxOfRun(at, pair, {words}" if words else "StoreRowMax(at"
        if output.kind == "half":
            words = self._words() if item_bytes <= 2 else None
            return f"StoreHalfOfFragment<{dtype}>(at, pair, {words}" if words else f"StoreHalf<{dtype}>(at"
        words = self._words() if item_bytes == 2 else None
        return f"StoreOfFragment<{dtype}>(at, pair, {words}" if words else f"StoreBoth<{dtype}>(at"

    def _arguments_of(self, load: Load) -> tuple[str, ...]:
        """The address and the strides of a load; strides of 0 and 1 are in the text."""
        address = self._add_address(self._inputs, load.input, load.offset * load.dtype.itemsize)
        arguments = [f"Parameter<const void*>(params, {address})"]
        for stride in (load.row_stride, load.column_stride):
            if stride in (0, 1):
                arguments.append(str(stride))
            else:
                arguments.append(f"Parameter<long long>(params, {len(self._parameters)})")
                self._parameters += struct.pack("<q", stride)
        return tuple(arguments)

    def _add_address(self, addresses: list[tuple[int, int]], position: int, offset_bytes: int = 0) -> int:
        offset = len(self._parameters)
        addresses.append((offset, position))
        self._parameters += struct.pack("<q", offset_bytes)
        return offset

    def _value(self, node: Any, frame: str) -> str:
        """The variable with a node's value; frames are "x" and "y", a pair's values, and "h", their half."""
        if isinstance(node, Acc):
            return f"acc.{frame}"
        if isinstance(node, Constant):
            return _literal(node.value)
        key = (node if isinstance(node, Load) else id(node), frame)
        if key not in self._names:
            if isinstance(node, Load):
                self._load(node, frame)
            elif isinstance(node, Half):
                self._half(node)
            elif isinstance(node, Dropout):
                self._dropout(node, frame)
            else:
                self._apply(node, frame)
        return self._names[key]

    def _load(self, load: Load, frame: str) -> None:
        address, row_stride, column_stride = self._slots[load]
        arguments, dtype = ", ".join(self._slots[load]), _DTYPES[load.dtype]
        if load.row_stride == load.column_stride == 0:
            self._names[load, frame] = self._variable("float", f"LoadScalar<{dtype}>({address})")
            return
        if frame == "h":
            self._names[load, "h"] = self._variable("float", f"LoadHalf<{dtype}>(at, {arguments})")
            return
        item_bytes = load.dtype.itemsize
        has_pairs = (
            load.column_stride == 1
            and load.row_stride % 2 == 0
            and load.offset % 2 == 0
            and self._has_pairs[load.input]
            and item_bytes <= 4
        )
        has_eight = has_pairs and item_bytes == 2 and load.row_stride % 8 == 0 and load.offset % 8 == 0
        words = self._words() if has_eight or load.row_stride == 0 else None
        if words is None:
            text = f"LoadBoth<{dtype}, {str(has_pairs).lower()}>(at, {arguments})"
        elif load.row_stride == 0:
            text = f"LoadOfRow<{dtype}, {str(has_pairs).lower()}>(at, pair, {words}, {address}, {column_stride})"
        else:
            text = f"LoadOfFragment<{dtype}>(at, pair, {words}, {address}, {row_stride})"
        name = self._variable("float2", text)
        for each in "xy":
            self._names[load, each] = f"{name}.{each}"

    def _variable(self, kind: str, text: str) -> str:
        """The variable with this value; equal parts of an expression are computed once."""
        if text not in self._variables:
            name = self._variables[text] = f"v{len(self._variables)}"
            self._lines.append(f"const {kind} {name} = {text};")
        return self._variables[text]

    def _half(self, node: Half) -> None:
        values = ", ".join(self._value(node.value, frame) for frame in "xy")
        both = self._variable("float2", f"EvenAndOdd(at, {values})")
        self._names[id(node), "h"] = f"{both}.{'xy'[node.parity]}"

    def _dropout(self, node: Dropout, frame: str) -> None:
        bits = self._random_bits(node, is_half=frame == "h")
        word = bits if frame == "h" else f"{bits}.{frame}"
        kept = f"__fmul_rn({self._value(node.value, frame)}, {_literal(philox.scale(node.p))})"
        text = _rounded(f"({word} < {philox.threshold(node.p)}u ? 0.0f : {kept})", node.dtype)
        self._names[id(node), frame] = self._variable("float", text)

    def _random_bits(self, node: Dropout, *, is_half: bool) -> str:
        """The variable with the random bits of both values, or of their half."""
        arguments = f"{self._integer(node, 'seed')}, {self._integer(node, 'offset')}"
        key = arguments, is_half
        if key not in self._random:
            if is_half:
                text = f"RandomWord({arguments}, at.half_m, at.half_n)"
            elif words := self._words():
                text = f"RandomOfFragment(at, {words}, {arguments})"
            else:
                text = f"RandomOfPair(at, {arguments})"
            self._random[key] = self._variable("unsigned" if is_half else "uint2", text)
        return self._random[key]

    def _integer(self, node: Dropout, role: str) -> str:
        """The seed or the offset: a parameter, since it changes from call to call. A seed that equals an offset has one
        of its own, so that the text does not change with the numbers."""
        value = getattr(node, role)
        key = value if isinstance(value, Element) else (value, role)
        if key not in self._integers:
            if isinstance(value, Element):
                address = self._add_address(self._inputs, value.input, value.offset * _WORD)
                text = f"__ldg(Parameter<const unsigned long long*>(params, {address}))"
                self._integers[key] = self._variable("unsigned long long", text)
            else:
                self._integers[key] = f"Parameter<unsigned long long>(params, {len(self._parameters)})"
                self._parameters += struct.pack("<q", value)
        return self._integers[key]

    def _apply(self, node: Apply, frame: str) -> None:
        arguments = {
            key: self._value(value, frame) if isinstance(value, tuple) else value for key, value in node.arguments
        }
        # Constants as numbers: some texts depend on them.
        numbers = {key: value.value if isinstance(value, Constant) else value for key, value in node.arguments}
        text = arithmetic.text(node.operator, numbers).format(**arguments)
        is_bool = node.dtype == torch.bool
        if is_bool and node.operator == "_to_copy":
            text = f"Truth({text})"
        elif not is_bool:
            text = _rounded(text, node.dtype)
        self._names[id(node), frame] = self._variable("bool" if is_bool else "float", text)


def _rounded(text: str, dtype: torch.dtype) -> str:
    return text if dtype == torch.float32 else f"Rounded<{_DTYPES[dtype]}>({text})"


@functools.cache
def _philox() -> str:
    """The device code of dropout, which other epilogues do without: what the wheel has linked does not depend on it."""
    return (Path(__file__).parent / "philox.h").read_text(encoding="ascii") + "\n"


def _literal(value: float) -> str:
    """A float32 in CUDA C++, exactly."""
    if value != value:
        return "NAN_F"
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        rounded = float("inf") if value > 0 else float("-inf")
    if rounded in (float("inf"), float("-inf")):
        return "INFINITY_F" if rounded > 0 else "(-INFINITY_F)"
    return f"{rounded.hex()}f" if rounded >= 0 else f"({rounded.hex()}f)"
