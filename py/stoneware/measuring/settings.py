"""How thoroughly to measure: the settings of a run, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `session.tune`; they go through JSON unchanged.

    Attributes:
      rounds: timings of each candidate that stays in the race.
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
        for name, least in (("rounds", 1), ("rounds_before_drop", 0), ("most_trials", 1)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}; pass as many or more")
        for name in ("drop_ratio", "seconds_per_problem", "hang_limit_s", "start_limit_s"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be positive and finite; pass such a number")
        if self.drop_ratio < 1:
            raise ValueError(
                f"drop_ratio={self.drop_ratio} must be at least 1, or the fastest would be dropped"
            )
        if type(self.remeasure) is not bool:
            raise TypeError(f"remeasure={self.remeasure!r} must be a bool")
        for name in ("command", "commit"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a str")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        return cls(**data)


ON_MISS = Settings(
    rounds=15, rounds_before_drop=3, seconds_per_problem=0.5, command="sw.tuning('on_miss')"
)
"""For a problem that is measured in the middle of a user's program: short."""
