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
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.tile_rule import LINE_BYTES, alignment, is_near
from stoneware.tuning.choose import is_vendor

if TYPE_CHECKING:
    from stoneware.tuning.table_entry import Entry

_SLOW = 3.0
"""A candidate that took that much longer than the fastest at a problem says nothing there of those
that matter. It is more than a race drops early at (measuring/device_timer.py): that a config is slow at
a near problem is worth knowing, though that time is rougher."""

_FULLNESS = 30.0
_NEAR = 0.4
"""How much a difference in fullness counts beside the ratios of the sizes, and from where on nearer
is no better."""

_LEAST_VARIANCE = 0.003
_VARIANCES = {False: (0.0085, 0.85), True: (0.018, 0.9)}
"""Of the measured time over the estimate: that of a call between a model's others over one of a tune; and for our
kernels and the vendor library, whose choice among its own is not known, what each unit of distance adds, and each unit
of the variance among the ratios of near problems."""

_OTHER_DEVICE_VARIANCE = 0.06
"""Added as far as the measurements are of another device: which config is the fastest carries over better than
its time."""

_QUANTILE = 1.645
"""Of a normal distribution 90 % lie within so many standard deviations."""

_FASTEST = 6
"""A config that is not among so many at any of the near problems is not estimated."""


class TimeModel(NamedTuple):
    """The model of one config in one family on one device. A tuple, because a look-up makes a few
    dozen and unpacks each several times.

    Attributes:
      tile_m, tile_n, tile_k: elements of a block's tile along the user's m, n and k.
      cluster_m, cluster_n: tiles that are launched together.
      splits, max_swizzle: as of the config.
      slots: blocks that run at once.
      a_bytes, b_bytes, out_bytes: of an element.
      m_unit: rows of a unit of m; another product computes the last one of what is more.
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
        (tile_m, tile_n, tile_k, unit_m, unit_n, splits, max_swizzle, slots, a_bytes, b_bytes, out_bytes, *_) = self
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
            1 - alignment(k * a_bytes) / LINE_BYTES,
            blocks / (waves * slots),
        )


def _tiles_of_groups(m: int, rows: int) -> float:
    """How many tiles of so many rows a group has in the mean, where m is the mean of the groups' rows.

    These vary as `ops/grouped_mm/operands.py` draws them: their variance is that of shares from 0.7 to 1.3 of
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

_HALF = struct.Struct("<2e")
_RATIOS = 1e-4, 6e4
"""The least and the largest that half precision tells apart well: no measurement is that far from its model."""

Candidate = tuple[AnyConfig, TimeModel | None]
"""A config that was measured, and its model, if it has one."""


class Corrections(NamedTuple):
    """What the measurements at a problem say at other ones.

    Attributes:
      measured_out_dtype: the output that was measured.
      candidates: by whatever the corrections name them; one object for all problems of a block.
      corrections: of each candidate in the order of the entry, without slow ones: which, whether
        its kernel has other bytes now, its measured time over the modelled one, and the fullness of
        its waves, as `TimeModel.at` gives it; both 0 without a model.
    """

    measured_out_dtype: str
    candidates: Mapping[Any, Candidate]
    corrections: Sequence[tuple[Any, int, float, float]]


def corrections_of(
    entry: Entry, candidates: dict[AnyConfig, Candidate], *models: Mapping[AnyConfig, TimeModel]
) -> Corrections:
    """What the choices of an op's entry say at other problems.

    Args:
      entry: where they were measured.
      candidates: those that entries of the same block named before; the entry's are added.
      models: config -> model; the first that has one counts.
    """
    slow_us = _SLOW * min(choice.median_us for choice in entry.choices)
    key = entry.key
    corrections = []
    for choice in entry.choices:
        if choice.median_us > slow_us:
            continue
        config, ratio, fullness = choice.config, 0.0, 0.0
        if config not in candidates:
            candidates[config] = config, next((some[config] for some in models if config in some), None)
        model = candidates[config][1]
        if model is not None:
            modelled_us, fullness = model.at(key.m, key.n, key.k, key.num_groups)
            ratio = min(max(choice.median_us / modelled_us, _RATIOS[0]), _RATIOS[1])
            # Rounded as a table's file has them, so that both answer alike.
            ratio, fullness = _HALF.unpack(_HALF.pack(ratio, fullness))
        corrections.append((config, int(choice.is_stale), ratio, fullness))
    return Corrections(entry.measured_out_dtype, candidates, corrections)


def with_other_device(
    own: Sequence[tuple[float, Corrections]], other: Sequence[tuple[float, Corrections]]
) -> tuple[list[tuple[float, Corrections]], float]:
    """What near problems say that were measured on this device or on another one, nearest first, and the
    other one's share of the weight. Its times tell which config is faster, in the scale of this
    device's problems; those of a choice without a model tell nothing."""
    here = _mean_ratio(own)
    scaled = []
    for apart, said in other:
        if not has_model(said):
            continue
        scale = here / _mean_ratio([(apart, said)])
        ratios = [(at, is_stale, ratio * scale, full) for at, is_stale, ratio, full in said.corrections]
        scaled.append((apart, said._replace(corrections=ratios)))
    weights = [sum(1 / (apart + _NEAR) ** 2 for apart, _ in near) for near in (own, scaled)]
    return sorted([*own, *scaled], key=operator.itemgetter(0)), weights[1] / sum(weights)


def _mean_ratio(near: Sequence[tuple[float, Corrections]]) -> float:
    """The measured time of what was fast near a problem over the modelled one; 1 if nothing there has a model."""
    weights = ratios = 0.0
    for apart, said in near:
        weight = 1 / (apart + _NEAR) ** 2
        for _, _, ratio, _ in said.corrections[:_FASTEST]:
            if ratio:
                weights += weight
                ratios += weight * ratio
    return ratios / weights if weights else 1.0


def of_kin(near: Iterable[tuple[float, Corrections]]) -> list[tuple[float, Corrections]]:
    """What near problems of kin say of our kernels, without those whose fastest has no model."""
    found = []
    for apart, said in near:
        said = _of_configs(said, lambda config: not is_vendor(config))
        if said.corrections and has_model(said):
            found.append((apart, said))
    return found


def without_splits(said: Corrections) -> Corrections:
    """What is said of configs that do not split k."""
    return _of_configs(said, lambda config: getattr(config, "splits", 1) == 1)


def _of_configs(said: Corrections, is_kept: Callable[[AnyConfig], bool]) -> Corrections:
    return said._replace(corrections=[one for one in said.corrections if is_kept(said.candidates[one[0]][0])])


def has_model(said: Corrections) -> bool:
    """Whether the fastest there has a model."""
    return said.candidates[said.corrections[0][0]][1] is not None


class Estimate(NamedTuple):
    """A config's time at a problem, as near measurements tell: the modelled time, times the mean of
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
    of_distance, of_scatter = _VARIANCES[is_vendor(config)]
    scatter = max(squares / (weights * mean * mean) - 1, 0.0)
    # The distance of the one problem that would have all the weight.
    variance = least_variance + of_distance / math.sqrt(weights) + of_scatter * scatter
    factor = 1 + _QUANTILE * math.sqrt(variance)
    return Estimate(us * (1 + variance / 2), config, us, (us / factor, us * factor), is_stale)


def estimates(
    m: int, n: int, k: int, near: Sequence[tuple[float, Corrections]], num_groups: int = 0, strangeness: float = 0.0
) -> list[Estimate]:
    """The estimate of every config that was among the fastest at a near problem and would be raced here, the one
    with the least expected time first.

    Args:
      m, n, k, num_groups: the problem.
      near: of each measured problem how far its sizes are, squared, and what it says, its choice
        first; the nearest problem first.
      strangeness: how far their times are those of another device, from 0 to 1.

    Returns:
      Nothing at all if what is chosen at the nearest problem has no model: better that answer,
      then, than a comparison without it.
    """
    # By the object: each block names candidates in its own way. A list is config, modelled time,
    # fullness, sums of weights, of ratios and of their squares, is_stale.
    by_source: dict[int, dict[Any, list[Any]]] = {}
    fast: dict[int, dict[Any, Candidate]] = {}
    largest = 0
    for _, (_, candidates, corrections) in near:
        found = fast.setdefault(id(candidates), {})
        for position, _, _, _ in corrections[:_FASTEST]:
            if position not in found:
                config, model = found[position] = candidates[position]
                if model is not None and model.tile_m > largest and not is_vendor(config):
                    largest = model.tile_m
    for source, found in fast.items():
        sums_of = by_source[source] = {}
        for position, (config, model) in found.items():
            if model is not None and (
                is_vendor(config) or is_near(model.tile_m, model.tile_n, largest, m, n, num_groups)
            ):
                sums_of[position] = [config, *model.at(m, n, k, num_groups), 0.0, 0.0, 0.0, False]
    if not near or not has_model(near[0][1]):
        return []
    for apart, (_, candidates, corrections) in near:
        nearest = apart + _NEAR
        of_position = by_source[id(candidates)].get
        for position, is_stale, ratio, fullness in corrections:
            sums = of_position(position)
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
    of_config: dict[AnyConfig, list[Any]] = {}
    for sums_of in by_source.values():
        for sums in sums_of.values():
            if (same := of_config.setdefault(sums[0], sums)) is not sums:
                same[3] += sums[3]
                same[4] += sums[4]
                same[5] += sums[5]
                same[6] |= sums[6]
    least_variance = _LEAST_VARIANCE + strangeness * _OTHER_DEVICE_VARIANCE
    return sorted(_estimate(least_variance, config, us, *sums) for config, us, _, *sums in of_config.values())
