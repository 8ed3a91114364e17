"""A config: one way to run a problem, as a value that can be compared, printed and stored.

`Config` is for our ops; `KernelConfig` is what triton.Config is, for kernels under `sw.autotune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoneware.errors import quoted
from stoneware.kernels.key import check_fields, check_value, is_kernel, unchecked, value_order
from stoneware.runtime.fast_dataclass import dataclass, field_names

VENDOR = "vendor"
REFERENCE = "reference"
TRITON_AOT = "triton_aot"

BACKENDS_WITHOUT_KERNELS = (VENDOR, REFERENCE)
"""Backends whose kernels are torch's, and so are not in the manifest."""

SWIZZLES = (1, 2, 4, 8)
"""Tile swizzles that CUTLASS's sm90 tile scheduler takes (sm90_tile_scheduler.hpp, log_swizzle)."""

SPLITS = tuple(range(1, 17))
"""Blocks that may share the k of one output tile: those of a cluster, of which every GPU that has clusters
takes eight (CUDA C++ Programming Guide, thread block clusters), or consecutive clusters."""

RASTERS = ("heuristic", "along_m", "along_n")
"""Orders in which the CUTLASS tile scheduler walks over the output tiles."""


@dataclass(frozen=True, kw_only=True, order=True)
class Config:
    """Which backend runs, with which kernel, and with which knobs at launch.

    Attributes:
      backend: the NAME of a backend module, such as "sm90".
      kernel: the kernel's id; for backends without kernels of ours a fixed name, such as
        "torch._scaled_mm".
      max_swizzle: the largest tile swizzle, one of SWIZZLES. Only CUTLASS kernels read it.
      raster: the order of the tiles, one of RASTERS. Only CUTLASS kernels read it.
      splits: blocks, or clusters, that share the k of one tile, one of SPLITS. Only split-k kernels read it.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field has a value outside its set, or an unknown field is in the JSON.
    """

    backend: str
    kernel: str
    max_swizzle: int = 1
    raster: str = "heuristic"
    splits: int = 1

    def __post_init__(self) -> None:
        for name, cls in _TYPES.items():
            value = getattr(self, name)
            if type(value) is not cls:
                raise TypeError(f"{name}={quoted(value)} must be of type {cls.__name__}, not {type(value).__name__}")
        if not self.backend or not self.kernel:
            raise ValueError(
                f"backend={quoted(self.backend)} and kernel={quoted(self.kernel)} must not be empty; "
                "take both from stoneware.explain(...)"
            )
        for name, values in (("max_swizzle", SWIZZLES), ("raster", RASTERS), ("splits", SPLITS)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={quoted(getattr(self, name))} must be one of {values}; pass one of these")

    @classmethod
    def of_kernel(cls, backend: str, kernel: str, *, max_swizzle: int = 1, splits: int = 1) -> Config:
        """A config of a kernel of this build, whose fields are valid."""
        return unchecked(
            cls,
            {"backend": backend, "kernel": kernel, "max_swizzle": max_swizzle, "raster": "heuristic", "splits": splits},
        )

    def __str__(self) -> str:
        knobs = [f"swizzle {self.max_swizzle}"] if self.max_swizzle != 1 else []
        knobs += [f"raster {self.raster}"] if self.raster != "heuristic" else []
        knobs += [f"{self.splits} splits"] if self.splits != 1 else []
        return f"{self.backend}:{self.kernel}" + (f" ({', '.join(knobs)})" if knobs else "")

    def to_json(self) -> dict[str, str | int]:
        """Returns every field, for `json.dumps`; `from_json` gives the same config back."""
        # Not a copy of __dict__, which Dynamo of torch 2.11 cannot trace.
        return {name: getattr(self, name) for name in _TYPES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """Makes the config that `to_json` wrote; knobs that are absent have their default."""
        check_fields("config", data, _TYPES.keys(), _TYPES.keys() - {"backend", "kernel"})
        return cls(**data)


_TYPES = {"backend": str, "kernel": str, "max_swizzle": int, "raster": str, "splits": int}


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelConfig:
    """The data of a triton.Config, without its hooks; Triton is not imported.

    Attributes:
      kwargs: (meta-parameter, value), sorted by name.
      num_warps, num_stages, num_ctas: as in triton.Config.
      maxnreg: the most registers a thread may have; 0 for no limit.

    Raises:
      TypeError, ValueError: a field breaks its rule.
    """

    kwargs: tuple[tuple[str, Any], ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int = 0

    def __post_init__(self) -> None:
        for name, value in self.kwargs:
            check_value(name, value)
        object.__setattr__(self, "kwargs", tuple(sorted(self.kwargs)))
        for name, least in (("num_warps", 1), ("num_stages", 0), ("num_ctas", 1), ("maxnreg", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={quoted(value)} must be an int >= {least}")

    def __eq__(self, other: object) -> bool:
        # By type too: a kernel is compiled anew for True, though it equals 1.
        return isinstance(other, KernelConfig) and self._order == other._order

    def __hash__(self) -> int:
        return hash(self._order)

    def __lt__(self, other: KernelConfig) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[Any, ...]:
        kwargs = tuple((name, *value_order(value)) for name, value in self.kwargs)
        return kwargs, self.num_warps, self.num_stages, self.num_ctas, self.maxnreg

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.kwargs]
        options += [f"{name}={getattr(self, name)}" for name in ("num_warps", "num_stages")]
        options += [f"num_ctas={self.num_ctas}"] if self.num_ctas != 1 else []
        options += [f"maxnreg={self.maxnreg}"] if self.maxnreg else []
        return " ".join(options)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "kwargs": dict(self.kwargs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelConfig:
        """Makes the config that `to_json` wrote."""
        check_fields("config", data, _KERNEL_FIELDS)
        if not isinstance(data["kwargs"], Mapping):
            raise TypeError(f"kwargs={quoted(data['kwargs'])} must be a JSON object")
        return cls(**{**data, "kwargs": tuple(data["kwargs"].items())})


_KERNEL_FIELDS = set(field_names(KernelConfig))

AnyConfig = Config | KernelConfig


def config_from_json(op: str, data: Mapping[str, Any]) -> AnyConfig:
    """Makes the config of an op of ours or, if `op` is "package.module:function", of a kernel."""
    return (KernelConfig if is_kernel(op) else Config).from_json(data)
