"""Which config runs a problem: the layers are asked in order and the first that answers wins.

    1. argument        the caller's config=
    2. exact           an entry for this shape, of the sources in the order of layers.py
    3. nearest m       an entry for the same n and k at another m
    4. nearest shape   one at another n and k, in log space
    5. heuristic       the op's rule of thumb
    6. default         the first config that a backend offers

In 3 and 4, where configs were measured at enough shapes to be modelled (`time_fit.py`), the answer
is no entry but the candidates of the nearest ones, in the order of their times at the very shape:
the model's, corrected by what was measured at the four nearest n and k, at the m below and above or
the nearer of these (`time_model.py`). Of two sources with the same problem the first counts. Else
the entry with the next larger m answers, with the largest where none is larger: a tile that is as
tall as the m that was measured holds every smaller m too, while one row more than it holds costs a
second row of tiles.

The regret is the measured time of what is chosen over the best one's; here its geometric mean and
worst. At 168 shapes of layers of other models, with m, n and k that no sample has, drawn before they
were measured, on an H200: 1.2 % and 14 %; of the vendor library always 30 % and 183 %
(tools/bench/table_quality.py). Without models, by the nearest entry alone, it was 2.3 % and 54 % on
the shapes and the table before, where it was 0.7 % and 24 % with them: that table had hardly an m
above 256 but multiples of 64, and the worst were a tile filled in part by an m of which no near one
was measured, and the vendor library, whose own choice of kernels is not modelled.

For a batch of products nothing is modelled, and the vendor library has kernels for small products
of which we have none: there 3 answers from an m at most twice as far, and 4 never.

2 to 4 are gone through for measurements on this device, then for those on the nearest other device
of its compute capability. A prediction is no measurement: it decides in which order the rule of
thumb takes the kernels of one backend, and not whether they come before the vendor library, with
which they were never raced.

An answer that the installation or the device refuses is kept as a Refusal and the next choice is
asked. Pure: no compile, no benchmark, no synchronisation, no allocation on a device.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from stoneware.errors import UnsupportedError
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, Key, unchecked
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.layers import OVERLAY, Source
from stoneware.tuning.table import Block, Choice, DeviceBlocks, Entry, size_log
from stoneware.tuning.table_entry import MODELLED_RUN
from stoneware.tuning.time_model import estimates

LAYERS = ("argument", "exact", "nearest m", "nearest shape", "heuristic", "default")
GRADES = (
    "argument", "exact", "16-bit output", "nearest m", "nearest shape", "drifted kernel",
    "other device", "predicted", "heuristic", "default",
)
"""How far a decision can be trusted, best first; of several that apply the last is given."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An entry that answers for a key.

    Attributes:
      entry: the candidates at the entry's shape.
      choice: the first of them.
      source: the name of the Source.
      layer: "exact", "nearest m" or "nearest shape".
      grade: of `choice`, one of GRADES.
      device: where it was measured.
      runs: of the source's table.
      num_modelled_from: where the entry's times were modelled, how many measured problems are
        behind them; else 0.
      modelled_from: the nearest of these, of which `source`, `device` and `runs` are then.
    """

    entry: Entry
    choice: Choice
    source: str
    layer: str
    grade: str
    device: DeviceBlocks
    runs: Mapping[str, Mapping[str, Any]]
    num_modelled_from: int = 0
    modelled_from: Key | None = None


def find(
    key: AnyKey, device: DeviceFingerprint, sources: Sequence[Source], kernel_sha256: str = ""
) -> Found | None:
    """The best entry for a key of either kind, or None.

    Args:
      key: of an op of ours or of a decorated kernel.
      device: where it runs.
      sources: as `layers.sources` gives them.
      kernel_sha256: digest of a decorated kernel's source as it is now; entries that were measured
        with another are found too, with the grade "drifted kernel".
    """
    return next(answers(key, device, sources, kernel_sha256), None)


def answers(
    key: AnyKey, device: DeviceFingerprint, sources: Sequence[Source], kernel_sha256: str = ""
) -> Iterator[Found]:
    """Every layer's best entry, best layer first: this device, then others, then predictions."""
    family = key.family
    for level in _LEVELS:
        blocks = list(_blocks(family, device, sources, level))
        if blocks:
            yield from _answers(key, blocks, level, kernel_sha256)


_NEAR_WEIGHTS = 4
"""(n, k) whose measurements correct a model. Six were no better, and take half as long again."""

_NEAREST_WEIGHTS = 2
"""So many of these with an m below and one above, the others with the nearer one: at the weights of
an H200's samples, each left out in turn with the m that is asked for, no worse than both of all, and
for one in place of two a tenth of a percent worse."""

_MOST_CHOICES = 6
"""Of a modelled entry: enough that one is not refused."""

_SAME, _OTHER, _PREDICTED = _LEVELS = ("same device", "other device", "predicted")


@dataclass(frozen=True)
class _Place:
    """A family's entries in one source on one device."""

    source: Source
    position: int
    device: DeviceBlocks
    block: Block
    distance: float


def _blocks(
    family: AnyKey, fingerprint: DeviceFingerprint, sources: Sequence[Source], level: str
) -> Iterator[_Place]:
    group = _LEVELS.index(level)
    for position, source in enumerate(sources):
        for distance, device in source.table.near(fingerprint)[group]:
            block = device.block(family)
            if block is not None:
                yield _Place(source, position, device, block, distance)
                break


def _answers(
    key: AnyKey, places: Sequence[_Place], level: str, kernel_sha256: str
) -> Iterator[Found]:
    sizes = key.sizes

    def found(layer: str, place: _Place, at: tuple[int, ...]) -> Found:
        entry = place.block.entry(at, kernel_sha256, key if at == sizes else None)
        return Found(
            entry=entry, choice=entry.choices[0], source=place.source.name, layer=layer,
            grade=_grade(key, layer, level, entry, entry.choices[0]), device=place.device,
            runs=place.source.table.runs,
        )

    # A measurement of the kernel as it is now, with the output that is asked for, comes before one
    # that is not, except where the caller put the latter on top.
    less = []
    for place in places:
        if sizes in place.block:
            one = found("exact", place, sizes)
            if one.grade == "exact" or one.source == OVERLAY:
                yield one
            else:
                less.append(one)
    yield from sorted(less, key=lambda one: GRADES.index(one.grade))

    if isinstance(key, Key):
        yield from _modelled(key, places, level)
    has_m = bool(sizes) and (isinstance(key, Key) or key.has_m)
    if has_m:
        others, m = sizes[:-1], sizes[-1]
        near = [
            (_steps_up(near_m, m), place.distance, place.position, near_m, place)
            for place in places
            for near_m in _near_m(key, place.block.last_sizes(others))
        ]
        if near:
            *_, near_m, place = min(near, key=lambda item: item[:3])
            yield found("nearest m", place, (*others, near_m))
    if _is_batch(key):
        return
    best = _nearest_shape(sizes, places, has_m)
    if best is not None:
        yield found("nearest shape", *best)


def _modelled(key: Key, places: Sequence[_Place], level: str) -> Iterator[Found]:
    """The candidates at the key's own shape with modelled times, the fastest first; nothing where
    too little was measured for that."""
    # Two other devices would be two scales of time.
    least = min(place.distance for place in places)
    places = [place for place in places if level == _SAME or place.distance == least]
    # Those fitted to the most weights: few measurements of one's own correct them, and spoil a fit.
    modelled = max(
        (place for place in places if place.block.has_models),
        key=lambda place: len(place.block.first_sizes), default=None,
    )
    if modelled is None:
        return
    fitted_by = modelled.block.fitted_by
    n, k, m = key.sizes
    near = []
    for rank, (apart, weight) in enumerate(_near_weights(n, k, places)):
        for place, around in _around(places, weight, m, rank < _NEAREST_WEIGHTS):
            block = place.block
            has_these = place is modelled or fitted_by and block.fitted_by == fitted_by
            models = None if has_these else modelled.block.models
            for near_m, said in zip(around, block.corrections(weight, around, models)):
                distance = apart + (m - near_m) * (m - near_m) / (m * near_m)
                near.append((distance, place.position, (*weight, near_m), place, said))
    near.sort(key=_NEAREST)
    found = estimates(m, n, k, [(one[0], one[-1]) for one in near])
    choices = tuple([
        unchecked(Choice, {
            "config": config, "median_us": float(f"{us:.4g}"), "spread_us": 0.0,
            "run": MODELLED_RUN, "is_drifted": is_drifted, "kernel_sha256": "",
        })
        for us, config, is_drifted in found[:_MOST_CHOICES]
    ])
    if not choices:
        return
    entry = Entry(
        key=key, choices=choices, rule=f"the fastest of {len(found)} as modelled",
        measured_out_dtype=near[0][-1].measured_out_dtype,
    )
    _, _, sizes, place, _ = near[0]
    layer = "nearest m" if sizes[:2] == (n, k) else "nearest shape"
    yield Found(
        entry=entry, choice=choices[0], source=place.source.name, layer=layer,
        grade=_grade(key, layer, level, entry, choices[0]), device=place.device,
        runs=place.source.table.runs,
        num_modelled_from=len(near), modelled_from=key.with_sizes(sizes),
    )


def _around(
    places: Sequence[_Place], weight: tuple[int, ...], m: int, takes_both: bool
) -> list[tuple[_Place, Sequence[int]]]:
    """The measured m itself, else the ones below and above, or the nearer of them unless
    `takes_both`; where several places have one, of the first."""
    if len(places) == 1:
        return [(places[0], _m_around(places[0].block.last_sizes(weight), m, takes_both))]
    first: dict[int, _Place] = {}
    for place in places:
        for near_m in _m_around(place.block.last_sizes(weight), m):
            first.setdefault(near_m, place)
    return [(first[near_m], [near_m]) for near_m in _m_around(sorted(first), m, takes_both)]


_NEAREST = operator.itemgetter(0, 1, 2)
"""The distance of what is near, then its source, then its sizes."""


def _near_weights(
    n: int, k: int, places: Sequence[_Place]
) -> list[tuple[float, tuple[int, ...]]]:
    """The nearest n and k that were measured, each with its distance, nearest first."""
    weights = places[0].block.first_sizes
    if len(places) > 1:
        weights = list(dict.fromkeys(
            itertools.chain.from_iterable(place.block.first_sizes for place in places)))
    # The distance of two sizes, (a - b)^2 / (a * b), is about the square of the logarithm of their
    # ratio, without libm.
    aparts = [
        n / near_n + near_n / n + k / near_k + near_k / k - 4.0 for near_n, near_k in weights
    ]
    # Numbers are sorted in a third of the time of tuples.
    most = sorted(aparts)[:_NEAR_WEIGHTS][-1]
    near = [(apart, weight) for apart, weight in zip(aparts, weights) if apart <= most]
    return sorted(near)[:_NEAR_WEIGHTS]


def _m_around(values: Sequence[int], m: int, takes_both: bool = True) -> Sequence[int]:
    """Of ascending values m itself, else the ones next to it, or the nearer one unless
    `takes_both`."""
    position = bisect.bisect_left(values, m)
    if position < len(values) and values[position] == m:
        return [m]
    around = values[max(position - 1, 0):position + 1]
    if takes_both or len(around) < 2:
        return around
    below, above = around
    return [below if m * m < below * above else above]


def _is_batch(key: AnyKey) -> bool:
    return isinstance(key, Key) and key.is_batch


_MOST_APART_M = 2
"""How far the m of a batch may lie from the one that was measured, as a factor."""


def _near_m(key: AnyKey, values: Sequence[int]) -> Sequence[int]:
    """Of ascending values the m that may answer for the key's."""
    m = key.sizes[-1]
    if _is_batch(key):
        return [
            near for near in _m_around(values, m)
            if near != m and max(near, m) <= _MOST_APART_M * min(near, m)
        ]
    near = _next_m(values, m)
    return () if near is None else (near,)


def _next_m(values: Sequence[int], m: int) -> int | None:
    """The smallest of ascending values above m, else the largest below; not m itself."""
    position = bisect.bisect_right(values, m)
    if position < len(values):
        return values[position]
    below = [value for value in values[-2:] if value != m]
    return below[-1] if below else None


def _steps_up(near_m: int, m: int) -> tuple[bool, float]:
    """By what two m that may answer for another are compared: above before below, then nearness.
    Without logarithms, whose last bit differs from one libm to another."""
    return near_m < m, max(near_m, m) / max(min(near_m, m), 1)


def _nearest_shape(
    sizes: tuple[int, ...], places: Sequence[_Place], has_m: bool
) -> tuple[_Place, tuple[int, ...]] | None:
    """Where the nearest sizes are, but for those that the layers before it went through.

    Distances are rounded, and ties go to the smaller sizes, so that the last bit of a logarithm
    decides nothing.
    """
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


def _grade(key: AnyKey, layer: str, level: str, entry: Entry, choice: Choice) -> str:
    grades = [layer]
    if entry.measured_out_dtype != getattr(key, "out_dtype", "") and level != _PREDICTED:
        grades.append("16-bit output")
    if choice.is_drifted:
        grades.append("drifted kernel")
    if level != _SAME:
        grades.append(level)
    return max(grades, key=GRADES.index)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A config or a whole backend that was asked and refused.

    Attributes:
      what: the config, or the backend's name.
      layer: one of LAYERS; empty for a backend, which is refused in every layer.
      reason: a sentence.
    """

    what: str
    layer: str = ""
    reason: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.layer})' if self.layer else ''}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The config that runs a problem, and why.

    Attributes:
      config: what runs.
      layer: one of LAYERS.
      grade: one of GRADES.
      reason: a sentence.
      source: "overlay", "memory", "user's store", "wheel" or "package NAME", for layers 2 to 4.
      chosen: the measurement behind the config, for layers 2 to 4.
      runners_up: the other candidates at the entry's shape, fast ones first.
      refusals: what was asked before and refused.
      run: what the source knows of the run that measured `chosen`; empty if none did.
    """

    config: Config
    layer: str
    grade: str
    reason: str
    source: str = ""
    chosen: Choice | None = None
    runners_up: tuple[Choice, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_miss(self) -> bool:
        """Whether the problem itself was not measured as it would run now."""
        return self.layer != "argument" and (self.layer, self.grade) != ("exact", "exact")


def decide(
    key: Key,
    device: Device,
    *,
    argument: Config | None,
    found: Callable[[], Iterable[Found]],
    heuristic: Callable[[], Sequence[Config]],
    heuristic_reason: str,
    defaults: Callable[[], Sequence[Config]],
    refusal: Callable[[Config], str | None],
    refused_backends: Callable[[], Sequence[Refusal]],
    backend: str | None = None,
) -> Decision:
    """Chooses a config for `key` on `device`. The callables are called when their layer is reached.

    Args:
      key: the problem.
      device: where it runs.
      argument: the caller's own config; if it is refused, nothing else is tried.
      found: the entries that may answer, as `answers` gives them; none where no table applies, as
        on a CPU.
      heuristic: configs by the op's rule of thumb, best first, and `heuristic_reason`, that rule.
      defaults: configs of every backend that supports the problem, the canonical one first.
      refusal: why a config cannot run here, or None.
      refused_backends: the backends that do not support the problem at all.
      backend: the one that the caller asked for, if any; the others are refused for that.

    Raises:
      UnsupportedError: every layer refused; the message lists each refusal, or only those of
        `backend` if one was asked for.
    """
    refusals: list[Refusal] = []

    def accepts(config: AnyConfig, layer: str) -> bool:
        reason = refusal(config)
        if reason is not None:
            item = Refusal(what=str(config), layer=layer, reason=reason)
            if item not in refusals:
                refusals.append(item)
        return reason is None

    def all_refusals() -> tuple[Refusal, ...]:
        return (*refused_backends(), *refusals)

    if argument is not None:
        if accepts(argument, "argument"):
            return Decision(
                config=argument, layer="argument", grade="argument", reason="the caller gave it",
                refusals=all_refusals(),
            )
        raise UnsupportedError(f"config={argument} cannot run {key.op} {key.shape} on {device}: "
                               f"{refusals[-1].reason}; leave config out to let the table choose")

    prediction = None
    for one in found():
        if one.device.is_predicted:
            prediction = one
            break
        for choice in one.entry.choices:
            if accepts(choice.config, one.layer):
                return _from_entry(key, one, choice, all_refusals())
    for config, choice in _with_predicted_order(heuristic(), prediction):
        if accepts(config, "heuristic"):
            if choice is not None:
                return _from_entry(key, prediction, choice, all_refusals())
            return Decision(
                config=config, layer="heuristic", grade="heuristic", reason=heuristic_reason,
                refusals=all_refusals(),
            )
    for config in defaults():
        if accepts(config, "default"):
            return Decision(
                config=config, layer="default", grade="default",
                reason="no measurement and no rule of thumb applies; the first that can run here",
                refusals=all_refusals(),
            )
    if backend is not None:
        reasons = dict.fromkeys(
            item.reason for item in all_refusals()
            if item.what == backend or item.what.startswith(f"{backend}:")
        )
        raise UnsupportedError(
            f"backend={backend!r} cannot run {key.op} {key.shape} on {device}: "
            f"{'; '.join(reasons) or 'it has no config for it'}; leave backend out to let another "
            "one run"
        )
    raise UnsupportedError(
        f"no backend can run {key.op} {key.shape} on {device}:"
        + "".join(f"\n  {item}" for item in all_refusals())
    )


def _with_predicted_order(
    heuristic: Sequence[Config], prediction: Found | None
) -> Iterator[tuple[Config, Choice | None]]:
    """The rule of thumb's configs, those of a backend for which there are predictions in the order
    of these, where the first of them stood."""
    predicted: dict[str, list[Choice]] = {}
    for choice in prediction.entry.choices if prediction is not None else ():
        predicted.setdefault(choice.config.backend, []).append(choice)
    done = set()
    for config in heuristic:
        for choice in predicted.pop(config.backend, ()):
            done.add(choice.config)
            yield choice.config, choice
        if config not in done:
            yield config, None


def _from_entry(
    key: Key, found: Found, chosen: Choice, refusals: tuple[Refusal, ...]
) -> Decision:
    entry, device = found.entry, found.device
    is_same_device = found.grade not in ("other device", "predicted")
    level = _SAME if is_same_device else found.grade
    if device.is_predicted:
        notes = [f"{chosen.median_us:.2f} us predicted for {device.fingerprint.name}"]
    elif found.modelled_from:
        notes = [
            f"{chosen.median_us:.2f} us modelled for {device.fingerprint.name}",
            f"from {found.num_modelled_from} measured problems, the nearest "
            f"{found.modelled_from.shape}",
        ]
    else:
        notes = [f"{chosen.median_us:.2f} us on {device.fingerprint.name}, run {chosen.run}"]
    if found.layer != "exact" and not found.modelled_from:
        notes.append(f"{'predicted' if device.is_predicted else 'measured'} at {entry.key.shape}")
    notes.append(entry.rule if chosen is entry.choices[0] else "the choices before it were refused")
    if entry.measured_out_dtype != key.out_dtype and not device.is_predicted:
        notes.append(f"measured with {entry.measured_out_dtype} output, {key.out_dtype} asked")
    if chosen.is_drifted:
        notes.append("the kernel was rebuilt with other bytes since")
    if level == _OTHER:
        notes.append("the nearest device that was measured")
    return Decision(
        config=chosen.config, layer=found.layer,
        grade=_grade(key, found.layer, level, entry, chosen), reason="; ".join(notes),
        source=found.source, chosen=chosen,
        runners_up=tuple(choice for choice in entry.choices if choice is not chosen),
        refusals=refusals, run=found.runs.get(chosen.run, {}),
    )
