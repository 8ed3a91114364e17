"""Stoneware: GPU matmul kernels that are compiled, tuned and chosen before you install them.

    import stoneware as sw
    y = sw.scaled_mm(a8, b8, scale_a, scale_b)                # fp8
    y = sw.matmul(a, b)                                       # bf16, fp16
    y = sw.grouped_mm(a, b, offs)                             # experts: bf16; fp8 with scales
    y = sw.matmul(a, b, epilogue=f, inputs=(r,))              # f(acc, r) inside the kernel, linked
    x8, scale = sw.quantize(x, scales="row")                  # fp8 and scales for scaled_mm
    sw.nn.convert(model, recipe="rowwise")                    # a model's linears, trained or frozen
    print(sw.explain("scaled_mm", m=16, n=4096, k=14336))     # which kernel, from where, and why
    print(sw.info())                                          # versions, GPUs, kernels, tables
    with sw.tuning("on_miss"): ...                            # measure what was not measured yet
    print(sw.tune(model, tokens=[1, 16, 512]))                # measure a model's linears, in minutes
    with sw.batch_invariant(): ...                            # a row's bits do not depend on the batch

    torch.compile(model, options=sw.inductor.options())       # fuses what follows a matmul into it

    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16") # for CUDA C++ kernels of your own

    @sw.autotune(configs=[...], key=["M", "N", "K"])          # like triton.autotune, and persistent
    @triton.jit
    def my_kernel(...): ...

Importing the package imports neither torch nor any native module; each name is loaded at first use.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without the cost of importing typing
if TYPE_CHECKING:
    from stoneware import distributed, errors, inductor, nn, tile
    from stoneware.explanation import explain
    from stoneware.installation import info
    from stoneware.ops.dropout import dropout
    from stoneware.ops.fused import prepare
    from stoneware.ops.grouped_mm.api import grouped_mm
    from stoneware.ops.matmul.api import matmul
    from stoneware.ops.scaled_mm.api import scaled_mm
    from stoneware.quantizing.api import quantize
    from stoneware.sessions.model import tune
    from stoneware.triton_autotune.decorator import autotune
    from stoneware.tuning.context import batch_invariant, tuning

    __all__ = [
        "autotune",
        "batch_invariant",
        "distributed",
        "dropout",
        "errors",
        "explain",
        "grouped_mm",
        "inductor",
        "info",
        "matmul",
        "nn",
        "prepare",
        "quantize",
        "scaled_mm",
        "tile",
        "tune",
        "tuning",
    ]

__version__ = "0.1.0"

_HOMES = {
    "autotune": "stoneware.triton_autotune.decorator",
    "batch_invariant": "stoneware.tuning.context",
    "dropout": "stoneware.ops.dropout",
    "explain": "stoneware.explanation",
    "info": "stoneware.installation",
    "prepare": "stoneware.ops.fused",
    "quantize": "stoneware.quantizing.api",
    "tune": "stoneware.sessions.model",
}
_MODULES = ("distributed", "errors", "inductor", "nn", "tile", "tuning")
"""Names that are modules of the package; `tuning` is one that can be called."""


def __getattr__(name: str) -> object:
    """Every name that users have, and `__all__`, which has the ops too."""
    if name == "__all__":
        return _names()
    try:
        home = importlib.import_module(_home(name))
    except ModuleNotFoundError as error:
        from stoneware.errors import explained

        raise explained(error) from error
    value = home if name in _MODULES else getattr(home, name)
    globals()[name] = value
    return value


def _names() -> list[str]:
    from stoneware.ops import APIS

    return sorted([*_HOMES, *_MODULES, *APIS])


def _home(name: str) -> str:
    """The module that a name is in; raises AttributeError if nothing has it."""
    if name in _MODULES:
        return f"stoneware.{name}"
    if name in _HOMES:
        return _HOMES[name]
    from stoneware.ops import APIS

    if name in APIS:
        return APIS[name]
    raise AttributeError(f"module 'stoneware' has no attribute {name!r}; it has {_names()}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})
