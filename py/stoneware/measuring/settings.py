"""How thoroughly to measure: the settings of a run, as a value."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `session.tune`.

    Attributes:
      rounds: timings of each candidate that is not dropped.
      rounds_before_drop: after so many rounds, candidates that are slower than `drop_ratio` times
        the fastest are dropped; 0 drops none.
      drop_ratio: see above.
      seconds_per_problem: stop timing the candidates of a problem after this long.
      hang_limit_s: a candidate that shows no progress for this long is killed and counts as hung.
      start_limit_s: the longest that the measuring process may take to start.
      most_trials: configs tried where there are too many to measure each, see search.py.
      remeasure: measure again what has a sample.
      command: what the user typed, for the record; without folders of this machine.
      commit: of the repository that the kernels are from, for the record.

    Raises:
      TypeError, ValueError: a field breaks its rule.
    """

    rounds: int = 50
    rounds_before_drop: int = 7
    drop_ratio: float = 1.5
    seconds_per_problem: float = 2.0
    hang_limit_s: float = 30.0
    start_limit_s: float = 300.0
    most_trials: int = 100
    remeasure: bool = False
    command: str = "stoneware tune"
    commit: str = "unknown"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found, wanted = type(value).__name__, field.type
            if found != wanted and (found, wanted) != ("int", "float"):
                raise TypeError(
                    f"{field.name}={value!r} must be {'an' if wanted == 'int' else 'a'} {wanted}, not {found}; pass one"
                )
        for name, least in (("rounds", 1), ("rounds_before_drop", 0), ("drop_ratio", 1), ("most_trials", 1)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {least}; pass a finite number from {least} up"
                )
        for name in ("seconds_per_problem", "hang_limit_s", "start_limit_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite; pass such a number")


ON_MISS = Settings(rounds=15, rounds_before_drop=3, seconds_per_problem=0.5, command="sw.tuning('on_miss')")
"""For a problem that is measured in the middle of a user's program: short."""
