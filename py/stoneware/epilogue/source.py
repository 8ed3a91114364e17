"""Writes an expression as the device function that an open kernel calls, and lays out its parameters.

The text depends on what is computed, on dtypes, and on which strides are 0 or 1; sizes, other strides and
addresses are parameters. So one linked kernel serves every shape.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stoneware.epilogue import arithmetic
from stoneware.epilogue.expression import Acc, Apply, Constant, Expression, Half, Load, UnfusableError, loads

PARAMETER_BYTES = 512
"""EpilogueParams::kBytes of cc/gemm/epilogue_sm90.h."""

_WORD = 8
"""Bytes of an address, and of a stride."""

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


def device_code() -> str:
    """What the text of every epilogue begins with."""
    return Path(__file__).with_name("device_code.h").read_text(encoding="ascii")


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
        self._names: dict[tuple[int, str], str] = {}  # (id of a node, frame) -> variable
        self._slots: dict[Load, str] = {}  # arguments of its load
        self._parameters = bytearray()
        self._inputs: list[tuple[int, int]] = []
        self._outputs: list[tuple[int, int]] = []

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
            store = {
                "full": f"StoreBoth<{_DTYPES[output.dtype]}>",
                "half": f"StoreHalf<{_DTYPES[output.dtype]}>",
                "row_max": "StoreHalfRowMax" if output.is_half else "StoreRowMax",
            }[output.kind]
            self._lines.append(f"{store}(at, {address}, {', '.join(values)});")
        if len(self._parameters) > PARAMETER_BYTES:
            raise UnfusableError(
                f"the addresses and strides of an epilogue's tensors must take at most {PARAMETER_BYTES} bytes, but "
                f"take {len(self._parameters)}; pass fewer tensors, or contiguous ones"
            )
        prefetches = [
            f"  PrefetchRows<{_DTYPES[load.dtype]}>(tile, {slot.rpartition(', ')[0]});\n"
            for load, slot in self._slots.items()
            if load.column_stride == 1
            and load.row_stride not in (0, 1)
            and load.row_stride * load.dtype.itemsize % 16 == 0
            and load.offset * load.dtype.itemsize % 16 == 0
            and self._has_pairs[load.input]
        ]
        body = "".join(f"  {line}\n" for line in self._lines)
        text = (
            'extern "C" __device__ float2 stoneware_epilogue(float2 acc, EpiloguePair pair, '
            "const EpilogueParams* params) {\n"
            f"  const Place at(pair);\n{body}  return {returned};\n}}\n\n"
            'extern "C" __device__ void stoneware_prefetch(EpilogueTile tile, const EpilogueParams* params) {\n'
            f"{''.join(prefetches)}}}\n"
        )
        parameters = bytes(self._parameters).ljust(PARAMETER_BYTES, b"\0")
        return Source(text, parameters, tuple(self._inputs), tuple(self._outputs))

    def _arguments_of(self, load: Load) -> str:
        """The address and the strides of a load; strides of 0 and 1 are in the text."""
        address = self._add_address(self._inputs, load.input, load.offset * load.dtype.itemsize)
        strides = []
        for stride in (load.row_stride, load.column_stride):
            if stride in (0, 1):
                strides.append(str(stride))
            else:
                strides.append(f"Parameter<long long>(params, {len(self._parameters)})")
                self._parameters += struct.pack("<q", stride)
        return ", ".join([f"Parameter<const void*>(params, {address})", *strides])

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
        key = (id(node), frame)
        if key not in self._names:
            if isinstance(node, Load):
                self._load(node, frame)
            elif isinstance(node, Half):
                self._half(node)
            else:
                self._apply(node, frame)
        return self._names[key]

    def _load(self, load: Load, frame: str) -> None:
        name, arguments, dtype = f"v{len(self._names)}", self._slots[load], _DTYPES[load.dtype]
        if frame == "h":
            self._lines.append(f"const float {name} = LoadHalf<{dtype}>(at, {arguments});")
            self._names[id(load), "h"] = name
            return
        item_bytes = load.dtype.itemsize
        has_pairs = (
            load.column_stride == 1
            and load.row_stride % 2 == 0
            and load.offset % 2 == 0
            and self._has_pairs[load.input]
            and item_bytes <= 4
        )
        self._lines.append(f"const float2 {name} = LoadBoth<{dtype}, {str(has_pairs).lower()}>(at, {arguments});")
        for each in "xy":
            self._names[id(load), each] = f"{name}.{each}"

    def _half(self, node: Half) -> None:
        both = (id(node.value), "both")
        if both not in self._names:
            values = ", ".join(self._value(node.value, frame) for frame in "xy")
            name = f"v{len(self._names)}"
            self._lines.append(f"const float2 {name} = EvenAndOdd(at, {values});")
            self._names[both] = name
        self._names[id(node), "h"] = f"{self._names[both]}.{'xy'[node.parity]}"

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
        elif node.dtype not in (torch.float32, torch.bool):
            text = f"Rounded<{_DTYPES[node.dtype]}>({text})"
        name = f"v{len(self._names)}"
        self._lines.append(f"const {'bool' if is_bool else 'float'} {name} = {text};")
        self._names[id(node), frame] = name


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
