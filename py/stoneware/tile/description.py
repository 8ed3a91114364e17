"""What a tile matmul is: extents, dtypes, layouts, threads and GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from stoneware.errors import quoted
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tile.plan import D_A, D_B, DIRECTIONS, ELEMENT_BYTES, FORWARD, STEP_BYTES, Operand, Plan, TileShape, plan

ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")

GRADIENTS = frozenset((D_A, D_B))

Setting = bool | frozenset[str] | None
"""A value of enable_backward: all gradients, none, some of GRADIENTS, or None to leave it to the next wider level."""

_FP8 = ("e4m3", "e5m2")
_LAYOUTS = ("row", "col")
_FIRST_FP8_ARCH = 89
_MULTIPLE = 16
_MOST_SHARED_BYTES = 227 * 1024
"""Shared memory of a block (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0)."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A matmul of tiles in shared memory, with its gradients; `sw.tile.matmul` has the meaning of the fields."""

    m: int
    n: int
    k: int
    a: str
    b: str
    acc: str = "f32"
    layouts: tuple[str, str] = ("row", "row")
    threads: int = 128
    arch: str = "sm_90a"
    name: str = "mm"
    enable_backward: Setting = None

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        reason = self.unsupported.get(FORWARD)
        if reason is not None:
            raise ValueError(reason)
        object.__setattr__(self, "enable_backward", checked_setting("enable_backward", self.enable_backward))

    @property
    def tiles(self) -> Mapping[str, TileShape]:
        """The tiles by name: "A" [m, k], "B" [k, n] and "dC" [m, n], row-major and in the operands' dtype."""
        shapes = (
            ("A", self.m, self.k, self.layouts[0] == "row", self.a),
            ("B", self.k, self.n, self.layouts[1] == "row", self.b),
            ("dC", self.m, self.n, True, self.a),
        )
        return {
            name: TileShape(rows=rows, columns=columns, is_row_major=is_row_major, element_bytes=ELEMENT_BYTES[dtype])
            for name, rows, columns, is_row_major, dtype in shapes
        }

    @property
    def tile_bytes(self) -> Mapping[str, int]:
        """Bytes of shared memory of each tile: sizeof TileA, TileB and TileDC."""
        return {name: tile.num_bytes for name, tile in self.tiles.items()}

    @property
    def plans(self) -> Mapping[str, Plan]:
        """How each direction is computed; without those of `unsupported`."""
        return {name: found for name, found in self._plans.items() if isinstance(found, Plan)}

    @property
    def unsupported(self) -> Mapping[str, str]:
        """The directions that this matmul does not have, and why."""
        return {name: found for name, found in self._plans.items() if isinstance(found, str)}

    @functools.cached_property
    def _plans(self) -> Mapping[str, Plan | str]:
        tiles = self.tiles

        def operand(tile: str, outer_is_rows: bool) -> Operand:
            return Operand(tile=f"Tile{tile[0].upper()}{tile[1:]}", shape=tiles[tile], outer_is_rows=outer_is_rows)

        operands = {
            FORWARD: (operand("A", True), operand("B", False)),
            D_A: (operand("dC", True), operand("B", True)),
            D_B: (operand("A", False), operand("dC", False)),
        }
        return {
            name: plan(name, left, right, threads=self.threads, arch=self.arch)
            for name, (left, right) in operands.items()
        }


def checked_setting(name: str, value: object) -> Setting:
    """A value of enable_backward; raises ValueError or TypeError, with the name of the argument."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name}={quoted(value)} must be None, a bool or a set of {_listed(GRADIENTS)}, not "
            f"{type(value).__name__}; pass True, False or for example {{'dA'}}"
        )
    gradients = frozenset(value)
    if not gradients <= GRADIENTS:
        raise ValueError(
            f"{name}={quoted(sorted(map(str, gradients)))} must have only {_listed(GRADIENTS)}; remove the rest"
        )
    return gradients


def checked_directions(name: str, value: object) -> frozenset[str]:
    """A set of DIRECTIONS; raises ValueError or TypeError, with the name of the argument."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name}={quoted(value)} must be a set of {_listed(DIRECTIONS)}, not {type(value).__name__}; "
            "pass for example {'forward'}"
        )
    directions = frozenset(value)
    if not directions or not directions <= set(DIRECTIONS):
        raise ValueError(
            f"{name}={quoted(sorted(map(str, directions)))} must have at least one of {_listed(DIRECTIONS)} and "
            "nothing else; correct it"
        )
    return directions


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _check_names(matmul: Description) -> None:
    for name, value, allowed in (
        ("a", matmul.a, tuple(ELEMENT_BYTES)),
        ("b", matmul.b, tuple(ELEMENT_BYTES)),
        ("acc", matmul.acc, ("f32",)),
        ("arch", matmul.arch, ARCHS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={quoted(value)} must be one of {', '.join(allowed)}; pass one of these")
    if len(matmul.layouts) != 2 or not set(matmul.layouts) <= set(_LAYOUTS):
        raise ValueError(
            f'layouts={quoted(matmul.layouts)} must be those of a and b, each "row" or "col"; pass ("row", "row") '
            "for example"
        )
    if matmul.a != matmul.b and not {matmul.a, matmul.b} <= set(_FP8):
        raise ValueError(
            f"a={matmul.a!r} and b={matmul.b!r} must have one dtype, apart from e4m3 and e5m2; cast one of them"
        )
    if matmul.a in _FP8 and _number(matmul.arch) < _FIRST_FP8_ARCH:
        raise ValueError(
            f"arch={matmul.arch!r} must be at least sm_{_FIRST_FP8_ARCH} for a={matmul.a!r}; pass operands in bf16"
        )
    if not isinstance(matmul.name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", matmul.name):
        raise ValueError(f"name={quoted(matmul.name)} must be a name of C++ that begins with a letter; change it")


def _check_numbers(matmul: Description) -> None:
    k_multiple = max(_MULTIPLE, STEP_BYTES // ELEMENT_BYTES[matmul.a])
    for name, value, multiple in (
        ("m", matmul.m, _MULTIPLE),
        ("n", matmul.n, _MULTIPLE),
        ("k", matmul.k, k_multiple),
        ("threads", matmul.threads, 32),
    ):
        if type(value) is not int:
            raise TypeError(f"{name}={quoted(value)} must be an int, not {type(value).__name__}; pass one")
        if value < multiple or value % multiple:
            raise ValueError(f"{name}={value} must be a positive multiple of {multiple}; round it up")
    if matmul.threads > 1024:
        raise ValueError(f"threads={matmul.threads} must be at most 1024, the most of a block; use fewer")
    num_bytes = matmul.tile_bytes["A"] + matmul.tile_bytes["B"]
    if num_bytes > _MOST_SHARED_BYTES:
        raise ValueError(
            f"the tiles of a and b have {num_bytes} bytes, and must have at most {_MOST_SHARED_BYTES}, the shared "
            "memory of a block; use a smaller k"
        )


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))
