"""Stoneware: GPU matmul kernels that are compiled, tuned and chosen before you install them.

    import stoneware as sw
    y = sw.scaled_mm(a8, b8, scale_a, scale_b)                # fp8
    y = sw.matmul(a, b)                                       # bf16, fp16
    y = sw.grouped_mm(a, b, offs)                             # experts: bf16; fp8 with scales
    print(sw.explain("scaled_mm", m=16, n=4096, k=14336))     # which kernel, from where, and why
    print(sw.info())                                          # what this installation has
    with sw.tuning("on_miss"): ...                            # measure what was not measured yet

    @sw.autotune(configs=[...], key=["M", "N", "K"])          # as triton.autotune, and remembered
    @triton.jit
    def my_kernel(...): ...

Importing the package imports neither torch nor any native module; each name is loaded at first use.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from stoneware import distributed
    from stoneware.explanation import explain
    from stoneware.installation import info
    from stoneware.ops.grouped_mm.api import grouped_mm
    from stoneware.ops.matmul.api import matmul
    from stoneware.ops.scaled_mm.api import scaled_mm
    from stoneware.triton_autotune.decorator import autotune
    from stoneware.tuning.policy import tuning

__version__ = "0.1.0"

__all__ = ["autotune", "distributed", "explain", "grouped_mm", "info", "matmul", "scaled_mm", "tuning"]

_HOMES = {
    "autotune": "stoneware.triton_autotune.decorator",
    "explain": "stoneware.explanation",
    "grouped_mm": "stoneware.ops.grouped_mm.api",
    "info": "stoneware.installation",
    "matmul": "stoneware.ops.matmul.api",
    "scaled_mm": "stoneware.ops.scaled_mm.api",
}
_MODULES = ("distributed", "tuning")
"""Names that are modules of the package; `tuning` is one that can be called."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stoneware' has no attribute {name!r}; it has {__all__}")
    try:
        home = importlib.import_module(_HOMES.get(name, f"stoneware.{name}"))
    except ModuleNotFoundError as error:
        from stoneware.errors import explained

        raise explained(error) from error
    value = home if name in _MODULES else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
