"""How long a kernel takes at a problem that was not measured, from the problems that were.

A model is a few times, each with a count that follows from the kernel's tiles, fitted to the
kernel's own measurements (`time_fit.py`):

    a launch
    + waves * (a wave + steps * a step)         what the last block waits for
    + blocks * steps * a block's step           what all SMs have to do
    + the part of the tiles' rows past m * the same     rows that no operand fills are not free
    + bytes * a byte                            the operands, once, and the result
    + the part of a line before the rows * the same     a row that begins within a cache line reads one more
    + the same of a second product, and a part          the last rows, where a kernel takes m in whole units

where blocks = tiles * splits, of all groups, steps are the tiles of k that a block goes through, and a wave is as
many blocks as run at once. It is corrected by what measured times are of modelled ones at near
problems, the more the nearer the problem is, and the more alike the part of the last wave that is
full. How far the measured times are from the nearest problems, and how much these disagree, gives the
interval in which the time lies. How good that is, and the constants: docs/design/table.md.

The same on any machine: integers and IEEE +, -, *, / and square root alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.kernels.candidate import candidate_of
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.tile_rule import LINE_BYTES, alignment, is_near, takes_turns
from stoneware.tuning.choose import is_vendor

if TYPE_CHECKING:
    from stoneware.tuning.table_entry import Entry

_SLOW = 3.0
"""A candidate that took that much longer than the fastest at a problem is ignored there. It is more than a
race drops early at (measuring/device_timer.py): that a config is slow at a near problem is worth knowing, though
that time is rougher."""

_FULLNESS = 30.0
_NEAR = 0.4
"""How much a difference in fullness counts compared with the ratios of the sizes, and the distance
below which nearer problems count no more."""

_LEAST_VARIANCE = 0.003
_VARIANCES = {False: (0.0085, 0.85), True: (0.018, 0.9)}
"""Variance of the measured time over the estimate: that of a call between a model's others over one of a tune;
and for our kernels and the vendor library, whose choice among its own is not known, what each unit of distance adds,
and each unit of the variance among the ratios of near problems."""

_OTHER_DEVICE_VARIANCE = 0.06
"""Added if the measurements are of another device: which config is the fastest carries over better than its
time."""

_QUANTILE = 1.645
"""Standard deviations within which 90 % of a normal distribution lie."""

_FASTEST = 10
"""Only configs among the ten fastest of a near problem are estimated."""


ALONG_K, ALONG_N = 1, 2
"""Whether a row of b in memory has all k of a column, or all n."""


class TimeModel(NamedTuple):
    """The model of one candidate in one family on one device. A tuple, because a look-up makes a few
    dozen and unpacks each several times.

    Attributes:
      tile_m, tile_n, tile_k: elements of a block's tile along the user's m, n and k.
      cluster_m, cluster_n: tiles that are launched together.
      splits, max_swizzle: as of the config.
      slots: blocks that run at once.
      a_bytes, b_bytes, out_bytes: of an element.
      m_unit: rows of a unit of m; another product computes the last one of what is more.
      rows_along: ALONG_K or ALONG_N, what a row of b in memory consists of.
      largest_m: m of the largest measurement that it was fitted to.
      launch_us, wave_us, step_us, work_us, unfilled_us, byte_us, crossing_us, part_us: the times above, in their
        order.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    cluster_n: int
    splits: int
    max_swizzle: int
    slots: int
    a_bytes: int
    b_bytes: int
    out_bytes: int
    m_unit: int = 1
    rows_along: int = ALONG_K
    largest_m: int = 1
    launch_us: float = 0.0
    wave_us: float = 0.0
    step_us: float = 0.0
    work_us: float = 0.0
    unfilled_us: float = 0.0
    byte_us: float = 0.0
    crossing_us: float = 0.0
    part_us: float = 0.0

    def at(self, m: int, n: int, k: int, num_groups: int = 0) -> tuple[float, float]:
        """The time at a problem in µs, and the fullness: the part of the waves' blocks that there
        are. `num_groups`: each of m rows, with a b of its own; 0 for one product."""
        if m % self.m_unit and m > self.m_unit:
            us, fullness = self.at(m - m % self.m_unit, n, k, num_groups)
            return us + self.at(self.m_unit, n, k, num_groups)[0] + self.part_us, fullness
        launch_us, wave_us, step_us, work_us, unfilled_us, byte_us, crossing_us, _ = self[-NUM_TIMES:]
        waves, steps, work, unfilled, num_bytes, crossing, fullness = self.counts(m, n, k, num_groups)
        return (
            launch_us
            + waves * (wave_us + steps * step_us)
            + work * (work_us + unfilled * unfilled_us)
            + num_bytes * (byte_us + crossing * crossing_us)
        ), fullness

    def counts(
        self, m: int, n: int, k: int, num_groups: int = 0
    ) -> tuple[float, float, float, float, float, float, float]:
        """Waves, steps of a block, steps of all blocks, the part of the tiles' rows past m, bytes, the part
        of a cache line that rows begin after, in the mean, and the fullness."""
        tile_m, tile_n, tile_k, unit_m, unit_n, splits, max_swizzle, slots, a_bytes, b_bytes, out_bytes, *_ = self
        tiles_m: float = -(-m // (tile_m * unit_m)) * unit_m
        tiles_n = -(-n // (tile_n * unit_n)) * unit_n
        num_products = 1.0
        if num_groups:
            tiles_m = _tiles_of_groups(m, tile_m * unit_m) * unit_m
            num_products = num_groups * _part_with_rows(m)
        if max_swizzle > 1:
            # CUTLASS rounds up to whole swizzles (sm90_tile_scheduler.hpp, get_log_swizzle_size).
            least = min(tiles_m, tiles_n)
            swizzle = min(max_swizzle, 8 if least >= 6 else 4 if least >= 3 else 2 if least >= 2 else 1)
            unit_m, unit_n = unit_m * swizzle, unit_n * swizzle
            tiles_m = -(-tiles_m // unit_m) * unit_m
            tiles_n = -(-tiles_n // unit_n) * unit_n
        blocks = tiles_m * tiles_n * splits * num_products
        waves = -(-blocks // slots)
        tiles_k = -(-k // tile_k)
        steps = -(-tiles_k // splits)
        return (
            waves,
            steps,
            blocks * steps,
            1 - m / (tiles_m * tile_m),
            num_products * n * k * b_bytes + (num_groups or 1) * m * (k * a_bytes + n * out_bytes),
            1 - alignment(n * b_bytes if self.rows_along == ALONG_N else k * a_bytes) / LINE_BYTES,
            blocks / (waves * slots),
        )


def _tiles_of_groups(m: int, rows: int) -> float:
    """The mean number of tiles of `rows` rows in a group, where m is the mean of the groups' rows.

    These vary as `measuring/grouped_mm_operands.py` draws them: their variance is that of shares from 0.7 to 1.3 of
    the mean, and m for each row's draw; taken as even between two bounds.
    """
    half = math.sqrt(3 * (0.03 * m * m + m))
    low, high = max(m - half, 0.0), m + half
    return (_tiles_up_to(high, rows) - _tiles_up_to(low, rows)) / (high - low)


def _tiles_up_to(size: float, rows: int) -> float:
    """The integral of the number of tiles over sizes from 0."""
    whole = size // rows
    return (whole + 1) * (size - whole * rows / 2)


def _part_with_rows(m: int) -> float:
    """The part of groups that have any: 1 - exp(-m), without libm."""
    return 1 - 1 / (1 + m * (1 + m / 2 * (1 + m / 3 * (1 + m / 4))))


NUM_TIMES = 8

_MOST_BEYOND = 2
"""How many times the m of its measurements a model is used for: far beyond, its error has no bound."""


_RATIOS = 1e-4, 6e4
"""The least and the largest that half precision tells apart well: no measurement is that far from its model."""

Candidate = tuple[AnyConfig, TimeModel | None]
"""The candidate of a config that was measured (kernels/candidate.py), and its model, if it has one."""


class Corrections(NamedTuple):
    """By how much measured times differ from modelled ones at a problem.

    Attributes:
      candidates: by whatever the corrections name them; one object for all problems of a block.
      corrections: of each candidate in the order of the entry, without slow ones: which, whether
        its kernel has other bytes now, its measured time over the modelled one, and the fullness of
        its waves, the one of `TimeModel.at`; both 0 without a model.
    """

    candidates: Mapping[Any, Candidate]
    corrections: Sequence[tuple[Any, int, float, float]]


Near = Sequence[tuple[float, Corrections]]
"""Measured problems, nearest first: how far the sizes of each are, squared, and its corrections."""


def corrections_of(entry: Entry, models: Mapping[AnyConfig, TimeModel]) -> list[tuple[AnyConfig, bool, float, float]]:
    """The corrections at an op's entry, by candidate.

    Args:
      entry: where they were measured.
      models: candidate -> model.
    """
    slow_us = _SLOW * min(choice.median_us for choice in entry.choices)
    key = entry.key
    corrections = []
    for choice in entry.choices:
        if choice.median_us <= slow_us:
            candidate, ratio, fullness = candidate_of(choice.config, key), 0.0, 0.0
            if (model := models.get(candidate)) is not None:
                modelled_us, fullness = model.at(key.m, key.n, key.k, key.num_groups)
                ratio = min(max(choice.median_us / modelled_us, _RATIOS[0]), _RATIOS[1])
            corrections.append((candidate, choice.is_stale, ratio, fullness))
    return corrections


def has_model(near: Near, configs: Mapping[AnyConfig, AnyConfig | None]) -> bool:
    """Whether there is a model of the first candidate with a config, at the nearest problem that has any."""
    usable = (candidates[at] for _, (candidates, corrections) in near for at, *_ in corrections)
    return next((model is not None for one, model in usable if configs[one] is not None), False)


class Estimate(NamedTuple):
    """A config's time at a problem, from near measurements: the modelled time, times the mean of
    their ratios, each with the weight 1 / distance^4. Sorts by the expected time, so that what the
    choice of the first is expected to lose is least.

    Attributes:
      expected_us: the mean; above `us` by half of the variance, as of a log-normal distribution.
      config: of what.
      us: the median.
      interval_us: where the time lies with a probability of 90 %.
      is_stale: whether a measurement was taken with other bytes of the kernel.
    """

    expected_us: float
    config: AnyConfig
    us: float
    interval_us: tuple[float, float]
    is_stale: bool


def _estimate(
    least_variance: float,
    config: AnyConfig,
    modelled_us: float,
    weights: float,
    ratios: float,
    squares: float,
    is_stale: bool,
) -> Estimate:
    """The estimate of a config from the sums over near problems of the weights, and of these times
    the ratios and times their squares."""
    mean = ratios / weights
    us = modelled_us * mean
    distance_factor, scatter_factor = _VARIANCES[is_vendor(config)]
    scatter = max(squares / (weights * mean * mean) - 1, 0.0)
    # The distance of the one problem that would have all the weight.
    variance = least_variance + distance_factor / math.sqrt(weights) + scatter_factor * scatter
    factor = 1 + _QUANTILE * math.sqrt(variance)
    return Estimate(us * (1 + variance / 2), config, us, (us / factor, us * factor), is_stale)


def estimates(
    m: int,
    n: int,
    k: int,
    near: Near,
    configs: Mapping[AnyConfig, AnyConfig | None],
    num_groups: int = 0,
    *,
    is_other_device: bool = False,
) -> list[Estimate]:
    """The estimate of every config that was among the fastest at a near problem and would be raced here, the one
    with the least expected time first.

    Args:
      m, n, k, num_groups: the problem.
      near: measured problems; the choice of each comes first in its corrections.
      configs: candidate -> its config for the problem; None for one that has none.
      is_other_device: whether their times are those of another device.
    """
    # By the object: each block names candidates in its own way. A list is config, modelled time,
    # fullness, sums of weights, of ratios and of their squares, is_stale.
    by_source: dict[int, dict[Any, list[Any]]] = {}
    fast: dict[int, dict[Any, tuple[AnyConfig | None, TimeModel | None]]] = {}
    largest = 0
    for _, (candidates, corrections) in near:
        fastest, num_fast = fast.setdefault(id(candidates), {}), 0
        for position, _, _, _ in corrections:
            if position not in fastest:
                tile, model = candidates[position]
                config = configs[tile]
                fastest[position] = config, model
                if config is not None and model is not None and model.tile_m > largest and not is_vendor(config):
                    largest = model.tile_m
            num_fast += fastest[position][0] is not None
            if num_fast == _FASTEST:
                break
    for source, fastest in fast.items():
        sums_of = by_source[source] = {}
        for position, (config, model) in fastest.items():
            if (
                config is not None
                and model is not None
                and (
                    is_vendor(config)
                    or is_near(model.tile_m, model.tile_n, largest, m, n, num_groups, takes_turns(config.kernel))
                )
                and m <= _MOST_BEYOND * model.largest_m
            ):
                sums_of[position] = [config, *model.at(m, n, k, num_groups), 0.0, 0.0, 0.0, False]
    for apart, (candidates, corrections) in near:
        nearest = apart + _NEAR
        sums_at = by_source[id(candidates)].get
        for position, is_stale, ratio, fullness in corrections:
            sums = sums_at(position)
            if sums is not None:
                off = fullness - sums[2]
                distance = nearest + _FULLNESS * off * off
                weight = 1 / (distance * distance)
                weighted = weight * ratio
                sums[3] += weight
                sums[4] += weighted
                sums[5] += weighted * ratio
                if is_stale:
                    sums[6] = True
    by_config: dict[AnyConfig, list[Any]] = {}
    for sums_of in by_source.values():
        for sums in sums_of.values():
            if (same := by_config.setdefault(sums[0], sums)) is not sums:
                factor = sums[1] / same[1]  # the ratios of each source are to its own model
                same[3] += sums[3]
                same[4] += sums[4] * factor
                same[5] += sums[5] * factor * factor
                same[6] |= sums[6]
    least_variance = _LEAST_VARIANCE + is_other_device * _OTHER_DEVICE_VARIANCE
    return sorted(_estimate(least_variance, config, us, *sums) for config, us, _, *sums in by_config.values())
