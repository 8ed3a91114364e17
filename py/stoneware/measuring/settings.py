"""How thoroughly to measure: the settings of a run."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `session.tune`.

    Attributes:
      rounds: timings of each candidate that is not dropped.
      rounds_before_drop: the number of rounds after which slow candidates are dropped, see
        device_timer.py; 0 drops none.
      seconds_per_problem: stop timing the candidates of a problem after this long.
      hang_limit_s: a candidate that shows no progress for this long is killed and counts as hung.
      remeasure: measure again what has a sample.
      fastest: as of `candidates.of_problem`.
      command: what the user typed, for the record; without folders of this machine.
      commit: of the repository that the kernels are from, for the record.

    Raises:
      ValueError: a number is out of its range.
    """

    rounds: int = 50
    rounds_before_drop: int = 7
    seconds_per_problem: float = 2.0
    hang_limit_s: float = 30.0
    remeasure: bool = False
    fastest: int | None = None
    command: str = "stoneware tune"
    commit: str = "unknown"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1; pass a number from 1 up")
        if self.fastest is not None and self.fastest < 1:
            raise ValueError(f"fastest={self.fastest} must be at least 1; pass a number from 1 up, or leave it out")
        for name in ("seconds_per_problem", "hang_limit_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite; pass such a number")


ON_MISS = Settings(rounds=15, rounds_before_drop=3, seconds_per_problem=0.5, fastest=12, command="sw.tuning('on_miss')")
"""Short, for a problem that is measured in the middle of a user's program. Why twelve: docs/design/table.md."""
