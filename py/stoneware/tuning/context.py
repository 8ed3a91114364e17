"""sw.tuning: what to do about a problem that was not measured, and which measurements come first.

with sw.tuning("on_miss"): ...                        measure it now, and keep the samples
with sw.tuning("error_on_miss"): ...                  raise TuningMissError
with sw.tuning("off", overlay="measured/"): ...       these entries come before all others
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.runtime.environment import MODES
from stoneware.tuning import policy, sources

if TYPE_CHECKING:
    from stoneware.tuning.table import Table


@contextlib.contextmanager
def tuning(mode: str, *, overlay: Table | str | Path | None = None) -> Iterator[None]:
    """Sets the mode, and optionally an overlay, for the code inside the `with`.

    Args:
      mode: "off" takes the nearest measurement or the heuristic; "on_miss" measures the problem
        first, at its first call, and stores the samples in the user's store; during CUDA graph
        capture nothing is measured; "error_on_miss" raises TuningMissError at the call.
      overlay: entries that come before the user's store and the wheel: a Table, a baked table's
        file, a store (.sqlite3), or a folder of samples. None keeps that of the `with` around this
        one.

    Raises:
      ValueError: `mode` is unknown, or `overlay` is no such thing.
      TypeError: `overlay` is of another type.
      TableError: a file of the overlay is damaged.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    with policy.entered(mode, None if overlay is None else sources.overlay_tables(overlay)):
        yield
