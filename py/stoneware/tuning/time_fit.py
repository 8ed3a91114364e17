"""Fits the models of `time_model.py` to what was measured: in the bake, and of the user's store.

Nothing but a kernel's tile and cluster is known of it. How many of its blocks an SM runs at once is the one
of a few guesses that fits best; how many clusters of a size the device runs at once, that which fits all
kernels with such clusters best. The vendor library, whose tiles nobody tells, is taken to have 128x128.

The same bytes on any machine and Python: IEEE +, -, *, / and square root, and math.fsum, which
rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import add, mul
from typing import TYPE_CHECKING

from stoneware.kernels import sm90_kernels
from stoneware.kernels.candidate import candidate_of
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyFamily, Family, Key, rows_run_along_n
from stoneware.kernels.split_k import blocks_along_k
from stoneware.kernels.tile_rule import Tiling, tiling_of
from stoneware.tuning.choose import is_vendor
from stoneware.tuning.time_model import ALONG_K, ALONG_N, NUM_TIMES, TimeModel

if TYPE_CHECKING:
    from stoneware.kernels.manifest import Manifest
    from stoneware.tuning.table_entry import Entry

LEAST_SAMPLES = 8
LEAST_WEIGHTS = 6
"""The fewest of a candidate that is modelled; a weight is an n and k (docs/design/table.md)."""

LEAST_M_VALUES = 2
"""With one m alone the work of rows that no operand fills is a multiple of all work, and noise would
decide which of the two is charged."""

_MOST_RESIDENT = 4
"""Blocks that an SM may hold at a time, as far as is guessed."""

_LARGEST_ANYWHERE = 2
"""Blocks of the largest cluster that finds room on all SMs: two are neighbours everywhere."""

_LEAST_PART_OF_SMS = 0.75
"""The part of the SMs that larger clusters use at least, as far as is guessed."""

_ROWS_TO_GUESS = 128
"""Measurements by which it is guessed; the fit that follows takes all."""

_UNKNOWN_TILING = Tiling(m=128, n=128, k=128, cluster_m=1, cluster_n=1)
"""The vendor library's: of 64, 128 and 256 squared it fits best."""

_BLOCK_UNIT_M = 4
"""The vendor library's with block scales (ops/scaled_mm/vendor.py)."""

_HOPPER_BYTES_PER_US = 2048 * 2 * 1980
"""Products of a row by a column that an SM of Hopper's does in a microsecond, times the bytes of an element: 2048 a
clock of 16-bit elements, and twice as many of 8 bits, at the highest clock."""

_Row = tuple[int, int, int, int, float]
"""m, n, k, the groups and the median in µs."""


def models(
    entries: Iterable[Entry],
    manifest: Manifest | None,
    num_sms: int,
    wheel: Mapping[AnyFamily, Mapping[AnyConfig, TimeModel]] | None = None,
) -> dict[AnyFamily, dict[AnyConfig, TimeModel]]:
    """Family -> candidate -> model, for those that were measured often enough.

    Args:
      entries: of one device.
      manifest: the kernels as they are now, whose tiles it tells; None for a decorated kernel, of
        which nothing is known.
      num_sms: of the device.
      wheel: models of the wheel, which are kept for the candidates that they have.
    """
    if manifest is None or num_sms < 1:
        return {}
    rows: dict[Family, dict[AnyConfig, dict[Key, list[_Row]]]] = {}
    for entry in entries:
        key = entry.key
        if isinstance(key, Key) and not key.is_batch:
            by_candidate = rows.setdefault(key.family, {})
            for choice in entry.choices:
                by_kind = by_candidate.setdefault(candidate_of(choice.config, key), {})
                by_kind.setdefault(key.kind, []).append((key.m, key.n, key.k, key.num_groups, choice.median_us))
    fitted: dict[AnyFamily, dict[AnyConfig, TimeModel]] = {}
    shapes: dict[tuple[Family, Config], tuple[TimeModel, int, list[_Row]]] = {}
    for family, by_candidate in rows.items():
        fitted_before = (wheel or {}).get(family, {})
        for config in sorted(by_candidate):
            largest_m = max(row[0] for timings in by_candidate[config].values() for row in timings)
            if config in fitted_before:
                before = fitted_before[config]
                fitted.setdefault(family, {})[config] = before._replace(largest_m=max(before.largest_m, largest_m))
                continue
            shape, cluster_blocks = _shape(family, config, manifest)
            # Two kinds were measured at other times: those of both together fit no better.
            _, timings = max(sorted(by_candidate[config].items()), key=lambda item: len(item[1]))
            if (
                shape is not None
                and len(timings) >= LEAST_SAMPLES
                and len({row[1:4] for row in timings}) >= LEAST_WEIGHTS
                and len({row[0] for row in timings}) >= LEAST_M_VALUES
            ):
                shapes[family, config] = shape._replace(largest_m=largest_m), cluster_blocks, sorted(timings)
    sms_of = _sms_of_clusters(shapes.values(), num_sms)
    for (family, config), (shape, size, timings) in shapes.items():
        model = _model(shape, timings, sms_of[size])
        # One with nothing but the time of rows that no operand fills would be 0 without these.
        if sum(model[-NUM_TIMES:]) > model.unfilled_us:
            fitted.setdefault(family, {})[config] = model
    return fitted


def _shape(family: Family, config: Config, manifest: Manifest) -> tuple[TimeModel | None, int]:
    """The model of a candidate without its blocks at once, and with the least that its times can be, None of an unknown
    tile; and the blocks of a cluster, with those that share the k of a tile."""
    kernels = manifest.with_tile(family.op, config.backend, config.kernel)
    if not kernels and not is_vendor(config):
        return None, 1
    tiling = tiling_of(kernels[0]) if kernels else _UNKNOWN_TILING
    cluster_blocks = tiling.cluster_m * tiling.cluster_n
    if kernels:
        cluster_blocks *= blocks_along_k(kernels[0], config.splits)
    shape = TimeModel(
        tile_m=tiling.m,
        tile_n=tiling.n,
        tile_k=tiling.k,
        cluster_m=tiling.cluster_m,
        cluster_n=tiling.cluster_n,
        splits=config.splits,
        max_swizzle=config.max_swizzle,
        slots=0,
        a_bytes=family.a_bytes,
        b_bytes=family.b_bytes,
        out_bytes=family.out_bytes,
        m_unit=_BLOCK_UNIT_M if is_vendor(config) and "block" in family.scales else 1,
        rows_along=ALONG_N if rows_run_along_n(family.layout) else ALONG_K,
        step_us=_least_step_us(tiling, family.a_bytes) if config.backend == sm90_kernels.BACKEND else 0.0,
    )
    return shape, cluster_blocks


def _least_step_us(tiling: Tiling, a_bytes: int) -> float:
    """How long the tensor cores of an SM need for a block's step. A kernel that was measured with full waves alone
    could seem to need less, as if a block had the other SMs as well."""
    return tiling.m * tiling.n * tiling.k * a_bytes / _HOPPER_BYTES_PER_US


def _sms_of_clusters(
    shapes: Iterable[tuple[TimeModel, int, Sequence[_Row]]], num_sms: int
) -> dict[int, tuple[int, ...]]:
    """Blocks of a cluster -> on how many SMs such clusters run at once.

    Of large clusters it is what leaves the least errors of all candidates that have them: one has too few measurements
    near that number to tell it. Smaller ones have room on all SMs, but some are modelled better with fewer, so that
    nearly full waves take longer: two guesses.
    """
    by_size: dict[int, list[tuple[TimeModel, Sequence[_Row]]]] = {}
    for shape, size, rows in shapes:
        by_size.setdefault(size, []).append((shape, rows))
    sms_of: dict[int, tuple[int, ...]] = {}
    for size, of_size in by_size.items():
        if size <= _LARGEST_ANYWHERE:
            sms_of[size] = num_sms, num_sms - num_sms // 11
            continue
        most = max(num_sms // size, 1)
        guesses = [num * size for num in range(most, max(int(most * _LEAST_PART_OF_SMS), 1) - 1, -1)]
        errors = [math.fsum(_with_slots(shape, rows, (sms,))[1] for shape, rows in of_size) for sms in guesses]
        sms_of[size] = (guesses[errors.index(min(errors))],)
    return sms_of


def _model(shape: TimeModel, rows: Sequence[_Row], sms: Sequence[int]) -> TimeModel:
    best = _with_slots(shape, rows, sms)[0]
    times, _ = _fit(best, rows)
    # Six digits: a fit is not better, and a table is read often.
    return TimeModel(*best[:-NUM_TIMES], *(float(f"{us:.6g}") for us in times))


def _with_slots(shape: TimeModel, rows: Sequence[_Row], sms: Sequence[int]) -> tuple[TimeModel, float]:
    """The shape with the slots that fit best of one to `_MOST_RESIDENT` blocks on each of some numbers of SMs, and the
    sum of squared errors."""
    few = rows[:: -(-len(rows) // _ROWS_TO_GUESS)]
    guesses = [shape._replace(slots=resident * num) for resident in range(1, _MOST_RESIDENT + 1) for num in sms]
    errors = [_fit(guess, few)[1] for guess in guesses]
    return guesses[errors.index(min(errors))], min(errors)


def _fit(model: TimeModel, rows: Sequence[_Row]) -> tuple[list[float], float]:
    """The times, none below those of the model, with the least sum of squared relative errors, and that sum."""
    least = model[-NUM_TIMES:]
    table = []
    for m, n, k, num_groups, us in rows:
        table.append([count / us for count in _terms(model, m, n, k, num_groups)])
    wanted = [1 - math.fsum(map(mul, row, least)) for row in table]
    columns: list[Sequence[float]] = list(zip(*table))
    # Columns of one length, or rounding would decide.
    scales = [math.sqrt(math.fsum(map(mul, column, column))) or 1.0 for column in columns]
    columns = [[value / scale for value in column] for column, scale in zip(columns, scales)]
    products = [[math.fsum(map(mul, one, other)) for other in columns] for one in columns]
    target = [math.fsum(map(mul, column, wanted)) for column in columns]
    times = _non_negative(products, target)
    off = [math.fsum(map(mul, row, times)) - want for row, want in zip(zip(*columns), wanted)]
    error = math.fsum(map(mul, off, off))
    return [time / scale + at_least for time, scale, at_least in zip(times, scales, least)], error


def _terms(model: TimeModel, m: int, n: int, k: int, num_groups: int) -> list[float]:
    """What each of the model's times is multiplied by."""
    if m % model.m_unit and m > model.m_unit:
        whole, last = [_terms(model, rows, n, k, num_groups) for rows in (m - m % model.m_unit, model.m_unit)]
        return [*map(add, whole[:-1], last), 1]
    waves, steps, work, unfilled, num_bytes, crossing, _ = model.counts(m, n, k, num_groups)
    return [1, waves, waves * steps, work, work * unfilled, num_bytes, num_bytes * crossing, 0]


def _non_negative(products: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Least squares without negative values, from the normal equations.

    The active set method of C. Lawson and R. Hanson, Solving Least Squares Problems (1974), chapter
    23: the variable that the error falls fastest with joins, and what turns negative leaves.
    """
    values = [0.0] * len(target)
    free: list[int] = []
    for _ in range(4 * len(target)):
        slopes = {
            idx: target[idx] - math.fsum(map(mul, products[idx], values))
            for idx in range(len(target))
            if idx not in free
        }
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= 1e-9 * abs(target[steepest]):
            break
        free.append(steepest)
        while free:
            solved = _solve([[products[one][other] for other in free] for one in free], [target[one] for one in free])
            if min(solved) > 0:
                for idx, value in zip(free, solved):
                    values[idx] = value
                break
            step = min(values[idx] / (values[idx] - value) for idx, value in zip(free, solved) if value <= 0)
            for idx, value in zip(free, solved):
                values[idx] += step * (value - values[idx])
            left = [idx for idx, value in zip(free, solved) if value <= 0 and values[idx] <= 1e-12]
            for idx in left:
                values[idx] = 0.0
            free = [idx for idx in free if idx not in left]
    return values


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a few linear equations by Gaussian elimination; where they depend on each other, as
    two counts of a kernel may, a pivot next to 0 is taken for 1e-12."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda idx: abs(rows[idx][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            rows[column][column] = 1e-12
        for idx in range(column + 1, size):
            factor = rows[idx][column] / rows[column][column]
            rows[idx] = [value - factor * above for value, above in zip(rows[idx], rows[column])]
    solved = [0.0] * size
    for idx in reversed(range(size)):
        rest = math.fsum(map(mul, rows[idx][idx + 1 : size], solved[idx + 1 :]))
        solved[idx] = (rows[idx][size] - rest) / rows[idx][idx]
    return solved
