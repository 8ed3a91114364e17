"""sw.tuning: what to do about a problem that was not measured, and which measurements come first.

with sw.tuning("on_miss"): ...                        measure it now, and keep the samples
with sw.tuning("error_on_miss"): ...                  raise TuningMissError
with sw.tuning("off", overlay="measured/"): ...       these entries come before all others
with sw.batch_invariant(): ...                        a row's bits do not depend on the batch
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.errors import quoted
from stoneware.runtime.environment import MODES
from stoneware.specs.problem import check_bool
from stoneware.tuning import sources
from stoneware.tuning.decorator import DecoratingScope

if TYPE_CHECKING:
    from stoneware.tuning.table import Table


def tuning(
    mode: str, *, overlay: Table | str | Path | None = None, batch_invariant: bool | None = None
) -> DecoratingScope:
    """Sets the mode, and optionally an overlay, for the code inside the `with`; also a decorator.

    A decorated function may be async or a generator: the mode holds while its body runs, and not for
    the caller between two steps.

    Args:
      mode: "off" takes the nearest measurement or the heuristic; "on_miss" measures the problem
        first, at its first call, and stores the samples in the user's store; during CUDA graph
        capture nothing is measured; "error_on_miss" raises TuningMissError at the call.
      overlay: entries that come before the user's store and the wheel: a Table, a baked table's
        file, a store (.sqlite3), or a folder of samples. None keeps that of the `with` around this
        one.
      batch_invariant: True or False, like for `sw.batch_invariant`; None keeps what holds around this one.

    Raises:
      ValueError: `mode` is unknown, or `overlay` is something else.
      TypeError: `overlay` or `batch_invariant` is of another type.
      TableError: a file of the overlay is damaged.
    """
    if mode not in MODES:
        raise ValueError(f"mode={quoted(mode)} must be one of {', '.join(MODES)}; pass one of these")
    if batch_invariant is not None:
        check_bool("batch_invariant", batch_invariant)
    return DecoratingScope(mode, None if overlay is None else sources.overlay_tables(overlay), batch_invariant)


def batch_invariant(enabled: bool = True) -> DecoratingScope:
    """Makes the bits of a row of a result independent of the rest of the batch, for the code inside
    the `with`; also a decorator.

    A row's bits are then the same at every m and at every place in the batch, eager, compiled and in
    graphs, on every GPU of the capability: each element is one sum along k, whichever kernel runs.
    docs/batch_invariance.md has what is promised, what is not, and what it costs. It holds for the
    calls of this thread and task; STONEWARE_BATCH_INVARIANT=1 holds for the whole process. A decorated
    function may be async or a generator, as with `sw.tuning`.

    Args:
      enabled: False takes the promise back for the code inside.

    Raises:
      TypeError: `enabled` is not a bool.

    A call for which no kernel has this order raises UnsupportedError.
    """
    check_bool("enabled", enabled)
    return DecoratingScope(batch_invariant=enabled)
