"""Which directions of a matmul are linked: what is needed, without the gradients that enable_backward leaves out.

enable_backward has four levels. The narrowest that is not None holds:

    matmul    sw.tile.matmul(..., enable_backward=)
    kernel    Module.kernel(name, enable_backward=), Module.link(..., enable_backward=)
    module    sw.tile.Module(source, matmuls, enable_backward=)
    global    with sw.tile.enable_backward(...), else STONEWARE_TILE_BACKWARD, else whether this installation was
              built with gradients (--//:enable_backward)

A value is True for all gradients, False for none, or a set of "dA" and "dB".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

from stoneware.kernels import manifest
from stoneware.kernels import needs as kernel_needs
from stoneware.runtime import environment
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tile.description import GRADIENTS, Description, Setting, checked_directions, checked_setting
from stoneware.tile.plan import D_A, D_B, FORWARD

_GLOBAL: ContextVar[Setting] = ContextVar("stoneware_tile_enable_backward", default=None)

_ROLES = {kernel_needs.FORWARD: FORWARD, kernel_needs.DGRAD: D_A, kernel_needs.WGRAD: D_B}


@contextlib.contextmanager
def enable_backward(setting: bool | Iterable[str] = True) -> Iterator[None]:
    """The widest level, for what is linked inside the `with`; also a decorator.

    Args:
      setting: whether gradients are linked, or which of "dA" and "dB".

    Raises:
      TypeError, ValueError: `setting` is something else.
    """
    checked = checked_setting("setting", setting)
    if checked is None:
        raise TypeError("setting=None must be a bool or a set of 'dA', 'dB'; pass True or False")
    token = _GLOBAL.set(checked)
    try:
        yield
    finally:
        _GLOBAL.reset(token)


def global_setting() -> tuple[str, Setting]:
    """What holds if no narrower level says anything, and where that comes from."""
    scope = _GLOBAL.get()
    if scope is not None:
        return f"sw.tile.enable_backward({_shown(scope)})", scope
    variable = environment.tile_backward()
    if variable is not None:
        return f"STONEWARE_TILE_BACKWARD={int(variable)}", variable
    build = manifest.installed()
    if build is not None and not build.has_backward:
        return "this installation, which was built with --//:enable_backward=false,", False
    return "the default", True


def needs_of(matmul: Description, needs_input_grad: Iterable[str]) -> frozenset[str]:
    """What a call needs whose inputs need these gradients, like autograd's: the rule of every op of Stoneware.

    Args:
      matmul: of the call.
      needs_input_grad: those of "a" and "b" that need a gradient.

    Raises:
      ValueError: a name is neither "a" nor "b".
    """
    inputs = frozenset(needs_input_grad)
    if not inputs <= {"a", "b"}:
        raise ValueError(f"needs_input_grad={sorted(inputs)} must have only 'a' and 'b'; remove the rest")
    layout = "".join("n" if layout == "row" else "t" for layout in matmul.layouts)
    dtypes = (matmul.a, matmul.b, matmul.acc)
    matmuls = kernel_needs.matmuls("matmul", dtypes=dtypes, layout=layout, needs_input_grad=inputs)
    return frozenset(_ROLES[found.role] for found in matmuls)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a kernel may call of one matmul.

    Attributes:
      directions: these are linked if the kernel calls them.
      absent: every other direction -> why it is absent and what to do.
    """

    directions: frozenset[str]
    absent: Mapping[str, str]


def resolve(
    matmul: Description, *, needs: frozenset[str] | None = None, kernel: Setting = None, module: Setting = None
) -> Resolution:
    """Which directions of a matmul a kernel may call.

    Args:
      matmul: with its own level.
      needs: what the caller asks for; None for everything.
      kernel, module: these levels.

    Raises:
      ValueError: the caller asks for a direction that the matmul does not have.
    """
    if needs is not None:
        for direction in sorted(needs & matmul.unsupported.keys()):
            raise ValueError(f"needs has {direction!r}, which {matmul.name} does not have: {_why(matmul, direction)}")
    level, setting = _narrowest(matmul, kernel, module)
    gradients = GRADIENTS if setting is True else frozenset() if setting is False else setting
    absent: dict[str, str] = {}
    for direction in (FORWARD, D_A, D_B):
        if direction in matmul.unsupported:
            absent[direction] = _why(matmul, direction)
        elif needs is not None and direction not in needs:
            absent[direction] = f"needs={{{_listed(needs)}}} must have {direction!r}; add it, or do not call it"
        elif direction != FORWARD and direction not in gradients:
            absent[direction] = (
                f"{level} leaves it out; turn it on there, or at a narrower level of enable_backward, or do not call it"
            )
    return Resolution(directions=frozenset((FORWARD, D_A, D_B)) - absent.keys(), absent=absent)


def checked_needs(value: object, matmuls: Iterable[Description]) -> dict[str, frozenset[str] | None]:
    """The needs of each matmul by its name.

    Args:
      value: None, a set of directions for all matmuls, or a mapping from names to sets.
      matmuls: of the module.

    Raises:
      TypeError, ValueError: it is something else.
    """
    names = [matmul.name for matmul in matmuls]
    if value is None:
        return dict.fromkeys(names)
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, checked_directions("needs", value))
    unknown = sorted(map(str, value.keys() - set(names)))
    if unknown:
        raise ValueError(f"needs has {', '.join(unknown)}, and the matmuls are {', '.join(names)}; correct the names")
    return {name: checked_directions(f"needs[{name!r}]", value[name]) if name in value else None for name in names}


def _narrowest(matmul: Description, kernel: Setting, module: Setting) -> tuple[str, bool | frozenset[str]]:
    for level, setting in (
        (f"enable_backward={_shown(matmul.enable_backward)} of the matmul {matmul.name}", matmul.enable_backward),
        (f"enable_backward={_shown(kernel)} of the kernel", kernel),
        (f"enable_backward={_shown(module)} of the module", module),
    ):
        if setting is not None:
            return level, setting
    level, setting = global_setting()
    assert setting is not None
    return level, setting


def _why(matmul: Description, direction: str) -> str:
    return matmul.unsupported[direction]


def _shown(setting: Setting) -> str:
    return f"{{{_listed(setting)}}}" if isinstance(setting, frozenset) else str(setting)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
