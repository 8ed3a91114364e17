"""Which measured sizes are near those of a problem."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Sequence

from stoneware.kernels.key import ELEMENT_BYTES, AnyKey, Key, rows_run_along_n
from stoneware.kernels.tile_rule import LINE_BYTES, alignment
from stoneware.tuning.sources import Place
from stoneware.tuning.table import Block, Sizes, size_log

_NEAR_WEIGHTS = 40
"""How many (n, k) are searched for near problems."""

MOST_PROBLEMS = 16
"""How many near problems correct a model, those of these (n, k) that are nearest with their m. A near (n, k) that
was measured at a far m says little."""

_MOST_OF_ALL_SCALES = 20
"""The same limit when problems with other scales contribute."""

_APART_BY_SCALES = 0.1
"""What is added to the distance of these problems."""

_LEAST_OWN = 8
"""Near problems with the key's own scales that count in any case: only they have the vendor library's times."""

Near = list[tuple[float, Sizes, Place]]
"""Measured problems, nearest first: how far each is, its sizes and its place."""


def near_problems(key: Key, places: Sequence[Place]) -> Near:
    """The measured problems near an op's problem."""
    m = key.sizes[-1]
    near = []
    for apart, weight in near_weights(key, places):
        for place, around in _around(places, weight, m):
            for near_m in around:
                distance = apart + (m - near_m) * (m - near_m) / (m * near_m)
                near.append((distance, place.position, (*weight, near_m), place))
    near.sort(key=_NEAREST)
    return [(distance, sizes, place) for distance, _, sizes, place in near[:MOST_PROBLEMS]]


def near_problems_of_family(key: Key, places: Sequence[Place]) -> tuple[Near, Near]:
    """The measured problems near an op's problem: those with its scales, and those with other scales."""
    own = near_problems(key, with_scales(key, places))
    others = [place for place in places if place.block.kind.scales != key.scales]
    if not others:
        return own, []
    other = [(distance + _APART_BY_SCALES, sizes, place) for distance, sizes, place in near_problems(key, others)]
    farthest = sorted(distance for distance, *_ in (*own, *other))[:_MOST_OF_ALL_SCALES][-1]
    near_own = [problem for position, problem in enumerate(own) if position < _LEAST_OWN or problem[0] <= farthest]
    return near_own, [problem for problem in other if problem[0] <= farthest]


def with_scales(key: AnyKey, places: Sequence[Place]) -> list[Place]:
    """Those of the places of a family that were measured with the key's scales."""
    return [place for place in places if place.block.kind.scales == key.scales]


_FARTHER = 1.5
"""How much farther than this device's near problems those of another one may be and still answer: a device with
few problems is modelled worse than a similar one with many."""

_NEAR_M = 0.1
"""The distance of two m of which one is 1.4 times the other."""


def is_nearer(key: Key, others: Sequence[Place], places: Sequence[Place]) -> bool:
    """Whether another device has more problems with the key's scales, and its near ones are hardly farther away, the
    last one of them compared; not if this device was measured at the same n and k with a near m."""
    theirs, own = with_scales(key, others), with_scales(key, places)
    if _most(theirs) <= _most(own):
        return False
    near_theirs, near_own = near_problems(key, theirs), near_problems(key, own)
    distance, sizes, _ = near_own[0]
    if sizes[:-1] == key.sizes[:-1] and distance < _NEAR_M:
        return False
    return near_theirs[-1][0] < _FARTHER * near_own[-1][0]


def _most(places: Sequence[Place]) -> int:
    return max((place.block.num_entries for place in places), default=0)


_NEAREST = operator.itemgetter(0, 1, 2)
"""By distance, then source, then sizes."""


def _around(places: Sequence[Place], weight: tuple[int, ...], m: int) -> list[tuple[Place, Sequence[int]]]:
    """The measured m itself, otherwise the ones below and above; where several places have one, the first place's."""
    if len(places) == 1:
        return [(places[0], _m_around(places[0].block.last_sizes(weight), m))]
    first: dict[int, Place] = {}
    for place in places:
        for near_m in _m_around(place.block.last_sizes(weight), m):
            first.setdefault(near_m, place)
    return [(first[near_m], [near_m]) for near_m in _m_around(sorted(first), m)]


_APART_BY_ALIGNMENT = 0.3
"""How far two k, or n in layouts nn and tn, are apart of which one begins rows of b at addresses half as aligned."""

_APART_BY_GROUPS = 0.1
"""The same of two numbers of groups, of which the model has the work: times their ratio and its inverse, less 2."""


@functools.lru_cache(maxsize=8)  # there are eight alignments
def _aparts_by_alignment(aligned: int) -> list[float]:
    """How far rows of any bytes, modulo LINE_BYTES, are from rows that are so aligned."""
    bits = aligned.bit_length()
    return [
        _APART_BY_ALIGNMENT * (alignment(row_bytes or LINE_BYTES).bit_length() - bits) ** 2
        for row_bytes in range(LINE_BYTES)
    ]


_MOST_KEPT = 64
"""A network has a few n and k, each at many m."""


def near_weights(key: Key, places: Sequence[Place]) -> list[tuple[float, tuple[int, ...]]]:
    """`_near_weights`, cached in the first block: the table of a user's store, which comes before
    the wheel's, is made anew when the store changes."""
    blocks = [place.block for place in places]
    sizes, element_bytes = key.sizes[:-1], ELEMENT_BYTES[key.b_dtype]
    cache = blocks[0].kept
    question = sizes, element_bytes, *blocks[1:]
    near = cache.get(question)
    if near is None:
        if len(cache) >= _MOST_KEPT:
            cache.clear()
        near = cache[question] = _near_weights(sizes, element_bytes, blocks, rows_run_along_n(key.layout))
    return near


def _near_weights(
    sizes: tuple[int, ...], element_bytes: int, blocks: Sequence[Block], along_n: bool
) -> list[tuple[float, tuple[int, ...]]]:
    """The nearest n and k (and number of groups before them) that were measured, each with its distance,
    nearest first.

    Rows that do not begin at a cache line cost a kernel up to half of its speed, whatever their
    length, so problems whose rows are aligned alike are nearer.

    Args:
      sizes: of the problem, without m.
      element_bytes: of an element of b.
      blocks: what was measured, in one layout.
      along_n: whether a row of b has all n, not all k of a column.
    """
    weights = blocks[0].first_sizes
    if len(blocks) > 1:
        weights = list(dict.fromkeys(itertools.chain.from_iterable(block.first_sizes for block in blocks)))
    # The distance of two sizes, (a - b)^2 / (a * b), is about the square of the logarithm of their
    # ratio, without libm.
    *groups, n, k = sizes
    by_alignment = _aparts_by_alignment(alignment((n if along_n else k) * element_bytes))
    aparts = [
        n / near_n
        + near_n / n
        + k / near_k
        + near_k / k
        - 4.0
        + by_alignment[(near_n if along_n else near_k) * element_bytes % LINE_BYTES]
        for *_, near_n, near_k in weights
    ]
    for num_groups in groups:
        aparts = [
            apart + _APART_BY_GROUPS * (num_groups / near + near / num_groups - 2.0)
            for apart, (near, *_) in zip(aparts, weights)
        ]
    # Numbers are sorted in a third of the time of tuples.
    most = sorted(aparts)[:_NEAR_WEIGHTS][-1]
    near = [(apart, weight) for apart, weight in zip(aparts, weights) if apart <= most]
    return sorted(near)[:_NEAR_WEIGHTS]


def _m_around(values: Sequence[int], m: int) -> Sequence[int]:
    """m itself if it is among ascending values, otherwise the ones next to it."""
    position = bisect.bisect_left(values, m)
    if position < len(values) and values[position] == m:
        return [m]
    return values[max(position - 1, 0) : position + 1]


_MOST_APART_M = 2
"""How far the m of a batch may lie from the one that was measured, as a factor."""


def nearest_m(key: AnyKey, places: Sequence[Place]) -> tuple[Place, Sizes] | None:
    """Where the same n and k were measured at the m that answers for the key's."""
    if not key.has_m:
        return None
    first, m = key.sizes[:-1], key.sizes[-1]
    near = [
        (_steps_up(near_m, m), place.distance, place.position, near_m, place)
        for place in places
        for near_m in _near_m_of(key, place.block.last_sizes(first))
    ]
    if not near:
        return None
    *_, near_m, place = min(near, key=lambda item: item[:3])
    return place, (*first, near_m)


def _near_m_of(key: AnyKey, values: Sequence[int]) -> Sequence[int]:
    """Of ascending values the m that may answer for the key's."""
    m = key.sizes[-1]
    if key.is_batch:
        return [near for near in _m_around(values, m) if near != m and max(near, m) <= _MOST_APART_M * min(near, m)]
    near = _next_m(values, m)
    return () if near is None else (near,)


def _next_m(values: Sequence[int], m: int) -> int | None:
    """The smallest of ascending values above m, otherwise the largest below; not m itself."""
    position = bisect.bisect_right(values, m)
    if position < len(values):
        return values[position]
    below = [value for value in values[-2:] if value != m]
    return below[-1] if below else None


def _steps_up(near_m: int, m: int) -> tuple[bool, float]:
    """By what two m that may answer for another are compared: above before below, then nearness.
    Without logarithms, whose last bit differs from one libm to another."""
    return near_m < m, max(near_m, m) / max(min(near_m, m), 1)


def nearest_shape(key: AnyKey, places: Sequence[Place]) -> tuple[Place, Sizes] | None:
    """Where the nearest sizes are, except those of the steps before; None for a batch.

    Distances are rounded, and ties go to the smaller sizes, so that the last bit of a logarithm
    decides nothing.
    """
    if key.is_batch:
        return None
    sizes, has_m = key.sizes, key.has_m
    first, logs = sizes[:-1], [size_log(size) for size in sizes]
    near = []
    for place in places:
        for others, their_logs in place.block.first_logs:
            if has_m and others == first:
                continue
            apart = 0.0
            for their_log, log in zip(their_logs, logs):
                apart += (their_log - log) ** 2
            near.append((apart, others, place))
    best = None
    for apart, others, place in sorted(near, key=_APART):
        if best is not None and apart > best[0][0] + 1e-9:
            break
        apart = round(apart, 9)
        last = place.block.last_sizes(others)
        if has_m:
            size = sizes[-1] if sizes[-1] in last else _next_m(last, sizes[-1])
            rank = apart, _steps_up(size, sizes[-1]), others, place.distance, place.position
            if best is None or rank < best[0]:
                best = rank, place, (*others, size)
            continue
        for size in last:
            at = (*others, size)
            if at == sizes:
                continue
            distance = round(apart + (size_log(size) - logs[-1]) ** 2, 9)
            rank = distance, (False, 0.0), at, place.distance, place.position
            if best is None or rank < best[0]:
                best = rank, place, at
    return None if best is None else best[1:]


_APART = operator.itemgetter(0)
