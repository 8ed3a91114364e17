"""What a tuning table holds at a problem: the candidates, timed and in order."""

from __future__ import annotations

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.runtime.fast_dataclass import dataclass

MODELLED_RUN = "modelled"
"""Stands for the run of a choice whose time a look-up computed from measurements elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate at a problem, with its measurement.

    Attributes:
      config: the candidate.
      median_us, spread_us: median and interquartile range, to four and two digits; the spread of a modelled
        time is 0.
      run: id of the run that measured it; MODELLED_RUN if none did.
      is_stale: whether the kernel has other bytes now than when it was measured.
      interval_us: of a modelled time, where it lies with a probability of 90 %; of a measured one None.
    """

    config: AnyConfig
    median_us: float
    spread_us: float
    run: str
    is_stale: bool = False
    interval_us: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The candidates at one problem.

    Attributes:
      key: the problem, with the dtypes and scales that were measured.
      choices: the chosen candidate first, then the runners-up from fast to slow.
      rule: why the first was chosen.
      kernel_sha256: digest of a decorated kernel's source as it was measured; empty for our ops.
    """

    key: AnyKey
    choices: tuple[Choice, ...]
    rule: str
    kernel_sha256: str = ""
