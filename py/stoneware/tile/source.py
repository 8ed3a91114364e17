"""CUDA C++ of a tile matmul: the header that a kernel includes, and the source of each linked function.

A linked function has a C++ name, which contains the types of its parameters. So a call with another
signature names another function, which no matmul provides.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

from stoneware.runtime import package_files
from stoneware.tile.description import Description
from stoneware.tile.plan import D_A, D_B, DIRECTIONS, FORWARD, Plan

NAMESPACE = "stoneware_tile_"
"""The namespace of a matmul's types begins with it; its digest follows."""

_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16", "e4m3": "E4m3", "e5m2": "E5m2", "tf32": "Tf32"}
_SUMS = {FORWARD: "SumC", D_A: "SumDA", D_B: "SumDB"}
_ARGUMENTS = {FORWARD: ("c", "a", "b"), D_A: ("da", "dc", "b"), D_B: ("db", "a", "dc")}
_HEADERS = ("tile.cuh", "wgmma.cuh", "mma.cuh")
_PTX_TYPES = {"bf16": "bf16", "fp16": "f16", "e4m3": "e4m3", "e5m2": "e5m2", "tf32": "tf32"}


@functools.cache
def device_headers() -> Mapping[str, str]:
    """The headers of cc/tile by the path under which sources include them."""
    folder = package_files.path("tile", "device")
    if not folder.is_dir():  # a checkout, where they are not in the package
        folder = package_files.ROOT.parent.parent / "cc" / "tile"
    return {f"cc/tile/{name}": (folder / name).read_text(encoding="utf-8") for name in _HEADERS}


def file_name(matmul: Description, direction: str) -> str:
    """The name of a linked function's LTO-IR in the wheel; tile_matmul.bzl writes the same."""
    shape = f"{matmul.m}x{matmul.n}x{matmul.k}"
    words = [matmul.a, matmul.b, *matmul.layouts, shape, str(matmul.threads), matmul.arch, direction]
    return "_".join(words) + ".fatbin"


def digest(matmul: Description) -> str:
    """16 hexadecimal digits: of everything that the linked functions depend on, without name and enable_backward."""
    fields = [matmul.m, matmul.n, matmul.k, matmul.a, matmul.b, list(matmul.layouts), matmul.threads, matmul.arch]
    text = json.dumps([fields, _declarations(matmul), sorted(device_headers().items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def namespace(matmul: Description) -> str:
    return NAMESPACE + digest(matmul)


def symbol(matmul: Description, direction: str) -> str:
    """The mangled name of a linked function (Itanium C++ ABI)."""
    found = matmul.plans[direction]
    outer = namespace(matmul)
    types = [_SUMS[direction], found.left.tile, found.right.tile]
    parameters = "".join(f"R{'K' if i else ''}NS_{len(name)}{name}E" for i, name in enumerate(types))
    return f"_ZN{len(outer)}{outer}6linked{len(direction)}{direction}E{parameters}"


def header(matmul: Description, directions: frozenset[str]) -> str:
    """Declares a matmul to a kernel.

    Args:
      matmul: to declare.
      directions: for which `has_forward`, `has_dA` and `has_dB` are true.
    """
    inner = namespace(matmul)
    flags = "\n".join(
        f"inline constexpr bool has_{name} = {'true' if name in directions else 'false'};" for name in DIRECTIONS
    )
    shape = f"[{matmul.m}, {matmul.k}] {matmul.a} {matmul.layouts[0]} @ [{matmul.k}, {matmul.n}] {matmul.b}"
    return f"""\
// {matmul.name}: {shape} {matmul.layouts[1]}, sums in {matmul.acc}, {matmul.threads} threads, {matmul.arch}.

#include "cc/tile/tile.cuh"

#ifndef {inner.upper()}
#define {inner.upper()}

namespace {inner} {{

{_declarations(matmul)}
{"".join(_checked_call(matmul, direction) for direction in DIRECTIONS).lstrip()}
}}  // namespace {inner}

#endif

namespace {matmul.name} {{

using namespace {inner};

{flags}

}}  // namespace {matmul.name}
"""


def linked_function(matmul: Description, direction: str) -> str:
    """The source of one linked function, a module of its own."""
    found = matmul.plans[direction]
    outer = namespace(matmul)
    operands = ", ".join(
        f"Operand<{side.tile}, {'true' if side.outer_is_rows else 'false'}>" for side in (found.left, found.right)
    )
    return f"""\
// {direction} of {matmul.m}x{matmul.n}x{matmul.k}, by {found.instruction}.

#include "cc/tile/{found.instruction}.cuh"

namespace {outer} {{

{_declarations(matmul)}
namespace {{

{_instruction(matmul, found)}
}}  // namespace

namespace linked {{

{_signature(found, direction).removesuffix(";")} {{
  Start<Instruction, {operands}>(sum, left, right);
}}

}}  // namespace linked
}}  // namespace {outer}
"""


def _declarations(matmul: Description) -> str:
    """Types and linked functions; the same text in the header and in the modules."""
    lines = ["using namespace stoneware::tile;", ""]
    dtypes = {"A": matmul.a, "B": matmul.b, "dC": matmul.a}
    for name, shape in matmul.tiles.items():
        order = "true" if shape.is_row_major else "false"
        base = f"Tile<{_ELEMENTS[dtypes[name]]}, {shape.rows}, {shape.columns}, {order}, {matmul.threads}>"
        lines.append(f"struct Tile{name[0].upper()}{name[1:]} : {base} {{}};")
    for direction, found in matmul.plans.items():
        groups = f"{found.group_warps}, {found.group_rows}, {found.group_columns}"
        lines.append(f"struct {_SUMS[direction]} : Sum<{found.rows}, {found.columns}, {groups}> {{}};")
    lines += ["", "namespace linked {", ""]
    lines += [_signature(found, direction) for direction, found in matmul.plans.items()]
    lines += ["", "}  // namespace linked", ""]
    return "\n".join(lines)


def _signature(found: Plan, direction: str) -> str:
    types = f"{_SUMS[direction]}& sum, const {found.left.tile}& left, const {found.right.tile}& right"
    return f"__device__ void {direction}({types});"


def _checked_call(matmul: Description, direction: str) -> str:
    """The functions that kernels call; they check the types of their arguments, and say which are right."""
    names = _ARGUMENTS[direction]
    types = ("SumType", "Left", "Right")
    template = f"template <class {', class '.join(types)}>\n__device__ __forceinline__ void"
    parameters = f"SumType& {names[0]}, const Left& {names[1]}, const Right& {names[2]}"
    if direction in matmul.unsupported:
        reason = json.dumps(matmul.unsupported[direction])
        body = f"  static_assert(kNever<SumType>, {reason});\n"
        return f"\n{template} {direction}({parameters}) {{\n{body}}}\n"
    found = matmul.plans[direction]
    rights = (_SUMS[direction], found.left.tile, found.right.tile)
    call = f"{direction}({', '.join(names)})"
    checks = "".join(
        f"  static_assert(kIsSame<{type_}, {right}>,\n"
        f'                "{name} of {call} must be {right}, {_described(matmul, right)}; pass that");\n'
        for name, type_, right in zip(names, types, rights)
    )
    is_right = " && ".join(f"kIsSame<{type_}, {right}>" for type_, right in zip(types, rights))
    return f"""
{template} start_{direction}({parameters}) {{
{checks}  if constexpr ({is_right}) linked::{call};
}}

{template} {direction}({parameters}) {{
  {namespace(matmul)}::start_{call};
  WaitForMatmuls({names[0]});
}}
"""


def _described(matmul: Description, type_: str) -> str:
    sums = {"SumC": (matmul.m, matmul.n), "SumDA": (matmul.m, matmul.k), "SumDB": (matmul.k, matmul.n)}
    if type_ in sums:
        rows, columns = sums[type_]
        return f"sums [{rows}, {columns}] in registers"
    name = type_.removeprefix("Tile").replace("DC", "dC")
    shape = matmul.tiles[name]
    dtype = matmul.b if name == "B" else matmul.a
    return f"a tile [{shape.rows}, {shape.columns}] of {dtype} in shared memory"


def _instruction(matmul: Description, found: Plan) -> str:
    """The struct Instruction that Start of wgmma.cuh or mma.cuh needs."""
    types = {D_A: (matmul.a, matmul.b), D_B: (matmul.a, matmul.a)}.get(found.direction, (matmul.a, matmul.b))
    left, right = (_PTX_TYPES[dtype] for dtype in types)
    summed = 32 // found.left.shape.element_bytes
    if found.instruction == "mma":
        kind = f"m16n8k{summed}.row.col.f32.{left}.{right}.f32"
        return f"""\
struct Instruction {{
  static __device__ __forceinline__ void Multiply(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {{
    asm volatile("mma.sync.aligned.{kind} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }}
}};
"""
    num = found.instruction_columns // 2
    factors = "1, 1"
    if found.left.shape.element_bytes == 2:
        factors += "".join(f", {int(not side.is_k_major)}" for side in (found.left, found.right))
    registers = ", ".join(f"%{i}" for i in range(num))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(num))
    name = f"wgmma.mma_async.sync.aligned.m64n{found.instruction_columns}k{summed}.f32.{left}.{right}"
    return f"""\
struct Instruction {{
  static constexpr int kColumns = {found.instruction_columns};
  static __device__ __forceinline__ void Multiply(float (&sums)[{num}], unsigned long long a, unsigned long long b) {{
    asm volatile("{name} {{{registers}}}, %{num}, %{num + 1}, 1, {factors};"
                 : {operands}
                 : "l"(a), "l"(b));
  }}
}};
"""
