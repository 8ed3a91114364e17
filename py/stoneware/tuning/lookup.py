"""Which config runs a problem: the layers are asked in order and the first that answers wins.

    1. argument        the caller's config=
    2. exact           an entry for this shape, of the sources in the order of sources.py
    3. nearest m       an entry for the same n and k at another m
    4. nearest shape   one at another n and k, in log space
    5. heuristic       the op's heuristic
    6. default         the first config that a backend offers

In 3 and 4 a modelled entry answers where there are models (`time_model.py`): the candidates of the
nearest problems in the order of their times at the very shape. Of two sources with the same problem
the first counts. Else the entry with the next larger m answers, or the largest m: a tile that holds
the rows of a larger m holds those of a smaller one too.

For a batch of products nothing is modelled. There 3 answers from an m at most twice as far, and 4
never, since the vendor library has kernels for small products of which we have none.

2 to 4 are gone through for measurements on this device, then for those on the nearest other device
of its compute capability. If that one has more of them, they count in modelled entries too. Our
kernels' times with other scales always do, if these do not change them (`Key.kin`).

An answer that the installation or the device refuses is kept as a Refusal and the next choice is
asked. Pure: no compile, no benchmark, no synchronisation, no allocation on a device. How good the
answers are, and why these rules: docs/design/table.md.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from stoneware.errors import UnsupportedError
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, Key, unchecked
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.sources import OVERLAY, Place, Source
from stoneware.tuning.table_entry import MODELLED_RUN, Choice, Entry

if TYPE_CHECKING:
    from stoneware.tuning.time_model import Corrections, Estimate


class Layer(enum.StrEnum):
    """What answers, in the order in which it is asked."""

    __repr__ = str.__repr__

    ARGUMENT = "argument"
    EXACT = "exact"
    NEAREST_M = "nearest m"
    NEAREST_SHAPE = "nearest shape"
    HEURISTIC = "heuristic"
    DEFAULT = "default"


class Grade(enum.StrEnum):
    """How far a decision can be trusted, best first; of several that apply the last is given."""

    __repr__ = str.__repr__

    ARGUMENT = "argument"
    EXACT = "exact"
    OTHER_16_BIT = "16-bit dtype"
    NEAREST_M = "nearest m"
    NEAREST_SHAPE = "nearest shape"
    STALE = "stale kernel"
    OTHER_DEVICE = "other device"
    HEURISTIC = "heuristic"
    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Found:
    """An entry that answers for a key.

    Attributes:
      entry: the candidates at the entry's shape.
      layer: EXACT, NEAREST_M or NEAREST_SHAPE.
      place: the source and the device where it was measured.
      key: what was asked.
      num_modelled_from: where the entry's times were modelled, how many measured problems are
        behind them; else 0.
      modelled_from: the nearest of these with the key's scales on the device in `place`, whose `place` it is
        then.
      num_of_other_device: how many of these are of a device that is not the one in `place`.
      num_of_kin: how many were measured with other scales (`Key.kin`).
      is_mostly_other_device: whether those decide more than the rest.
    """

    entry: Entry
    layer: Layer
    place: Place
    key: AnyKey
    num_modelled_from: int = 0
    modelled_from: Key | None = None
    num_of_other_device: int = 0
    num_of_kin: int = 0
    is_mostly_other_device: bool = False

    @property
    def source(self) -> str:
        """The name of the Source."""
        return self.place.source.name

    @property
    def runs(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the source's table."""
        return self.place.source.table.runs

    @property
    def choice(self) -> Choice:
        """The first of the candidates."""
        return self.entry.choices[0]

    @property
    def grade(self) -> Grade:
        """Of `choice`."""
        return self.grade_of(self.choice)

    def grade_of(self, choice: Choice) -> Grade:
        """Of one of the candidates: the worst that applies."""
        if self.place.is_other_device or self.is_mostly_other_device:
            return Grade.OTHER_DEVICE
        if choice.is_stale:
            return Grade.STALE
        if self.layer is not Layer.EXACT:
            return Grade(self.layer)
        return Grade.EXACT if self.is_own else Grade.OTHER_16_BIT

    @property
    def is_own(self) -> bool:
        """Whether it was measured with the dtypes that are asked for."""
        return self.entry.measured_out_dtype == getattr(self.key, "out_dtype", "")

    @property
    def is_exact(self) -> bool:
        """Whether it is of this very problem and device, and of the kernel as it is now."""
        return self.grade is Grade.EXACT


def find(key: AnyKey, device: DeviceFingerprint, sources: Sequence[Source], kernel_sha256: str = "") -> Found | None:
    """The first of `answers`, or None."""
    return next(answers(key, device, sources, kernel_sha256), None)


def decision(found: Found) -> Decision:
    """What `find` found as a decision, in which nothing is refused."""
    return _from_entry(found, found.choice, ())


def answers(
    key: AnyKey,
    device: DeviceFingerprint,
    sources: Sequence[Source],
    kernel_sha256: str = "",
    *,
    has_one_order: bool = False,
) -> Iterator[Found]:
    """Every layer's best entry, best layer first: of this device, then of others.

    Args:
      key: of an op of ours or of a decorated kernel.
      device: where it runs.
      sources: as `sources.sources` gives them.
      kernel_sha256: digest of a decorated kernel's source as it is now; entries that were measured
        with another are found too, with the grade "stale kernel".
      has_one_order: whether configs that split k are of no use, so that modelled times are told of
        the others alone.
    """
    family = key.family
    for is_other_device in (False, True):
        places = list(_places(family, device, sources, is_other_device))
        if places:
            others = () if is_other_device else _places(family, device, sources, True)
            kin = family.kin if isinstance(family, Key) else None
            kins = () if kin is None else _places(kin, device, sources, is_other_device)
            yield from _answers(key, places, kernel_sha256, has_one_order, others, kins)


_MOST_CHOICES = 6
"""Of a modelled entry: enough that one is not refused."""


def _places(
    family: AnyKey, fingerprint: DeviceFingerprint, sources: Sequence[Source], is_other_device: bool
) -> Iterator[Place]:
    for position, source in enumerate(sources):
        for distance, device in source.table.near(fingerprint)[is_other_device]:
            block = device.block(family)
            if block is not None:
                yield Place(source, position, device, block, distance, is_other_device)
                break


def _answers(
    key: AnyKey,
    places: Sequence[Place],
    kernel_sha256: str,
    has_one_order: bool,
    others: Iterable[Place],
    kins: Iterable[Place],
) -> Iterator[Found]:
    sizes = key.sizes

    def found(layer: Layer, place: Place, at: tuple[int, ...]) -> Found:
        return Found(entry=place.block.entry(at, kernel_sha256), layer=layer, place=place, key=key)

    # A measurement of the kernel as it is now, with the dtypes that are asked for, comes before one that
    # is not, and a stale one only where the caller put it on top.
    less = []
    for place in places:
        if sizes in place.block:
            one = found(Layer.EXACT, place, sizes)
            if one.grade is Grade.EXACT or (one.source == OVERLAY and one.is_own):
                yield one
            else:
                less.append(one)
    yield from sorted(less, key=lambda one: list(Grade).index(one.grade))

    # Samples that are not baked yet are entries of their own problems alone.
    places, others, kins = ([one for one in some if one.block.num_entries] for some in (places, others, kins))
    if not places:
        return
    from stoneware.tuning import nearest  # an exact entry needs no more

    if isinstance(key, Key):
        of_one, others = _of_one_device(places), _of_one_device(list(others))
        kins = [one for one in kins if not one.is_other_device or one.distance == of_one[0].distance]
        yield from _modelled(key, of_one, others, kins, has_one_order)
    for layer, near in ((Layer.NEAREST_M, nearest.nearest_m), (Layer.NEAREST_SHAPE, nearest.nearest_shape)):
        best = near(key, places)
        if best is not None:
            yield found(layer, *best)


def _of_one_device(places: Sequence[Place]) -> Sequence[Place]:
    """Of places on other devices those on the nearest: two devices would be two scales of time."""
    least = min((place.distance for place in places), default=0)
    return [place for place in places if not place.is_other_device or place.distance == least]


def _modelled(
    key: Key, places: Sequence[Place], others: Sequence[Place], kins: Sequence[Place], has_one_order: bool
) -> Iterator[Found]:
    """The candidates at the key's own shape with modelled times, the least expected time first;
    nothing where too little was measured for that. What was measured on another device counts too, if that is
    more, and what our kernels took with other scales (`Key.kin`)."""
    from stoneware.tuning import nearest, time_model

    most, most_of_others = (max((one.block.num_entries for one in some), default=0) for some in (places, others))
    if most_of_others <= most:
        others = ()
    # Those fitted to the most weights: few measurements of one's own correct them, and spoil a fit.
    modelled = max(
        (place for place in (*places, *others) if place.block.has_models),
        key=lambda place: len(place.block.first_sizes),
        default=None,
    )
    if modelled is None:
        return

    names, models = modelled.block.models_names, modelled.block.models

    def saying(near: nearest.Near, num_names: int = 2) -> list[tuple[float, Corrections]]:
        found = []
        for distance, sizes, place in near:
            has_these = place.block.models_names[:num_names] == names[:num_names]
            said = place.block.corrections(sizes, None if has_these else models)
            if has_one_order:
                said = time_model.without_splits(said)
            if said.corrections:
                found.append((distance, said))
        return found

    near = nearest.near_problems(key, places)
    there: nearest.Near = []
    of_kin: nearest.Near = []
    if kins:
        near, of_kin = nearest.nearest_of_both(near, nearest.near_problems(key, kins), "kin")
    if others:
        near, there = nearest.nearest_of_both(near, nearest.near_problems(key, others), "device")
    own = saying(near)
    if not own or not time_model.has_model(own[0][1]):
        return  # better the nearest entry than a comparison without its choice
    measured_out_dtype = own[0][1].measured_out_dtype
    ours = time_model.of_kin(saying(of_kin, 1))
    own = sorted([*own, *ours], key=operator.itemgetter(0))
    said, share = time_model.with_other_device(own, saying(there)) if there else (own, 0.0)
    # Beside another device's this one's problems tell the scale of times.
    strangeness = 1.0 if places[0].is_other_device else share / 2
    found = time_model.estimates(key.m, key.n, key.k, said, key.num_groups, strangeness)
    choices = tuple(map(_choice, found[:_MOST_CHOICES]))
    if not choices:
        return
    entry = Entry(
        key=key,
        choices=choices,
        rule=f"the least expected time of {len(found)} as modelled",
        measured_out_dtype=measured_out_dtype,
    )
    _, sizes, place = near[0]
    yield Found(
        entry=entry,
        layer=Layer.NEAREST_M if sizes[:-1] == key.sizes[:-1] else Layer.NEAREST_SHAPE,
        place=place,
        key=key,
        num_modelled_from=len(said),
        modelled_from=key.with_sizes(sizes),
        num_of_other_device=len(said) - len(own),
        num_of_kin=len(ours),
        is_mostly_other_device=share > 0.5,
    )


def _choice(estimate: Estimate) -> Choice:
    values = {
        "config": estimate.config,
        "median_us": float(f"{estimate.us:.4g}"),
        "spread_us": 0.0,
        "run": MODELLED_RUN,
        "is_stale": estimate.is_stale,
        "kernel_sha256": "",
        "interval_us": estimate.interval_us,
    }
    return unchecked(Choice, values)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A config or a whole backend that was asked and refused.

    Attributes:
      what: the config, or the backend's name.
      layer: a Layer; empty for a backend, which is refused in every layer.
      reason: a sentence.
    """

    what: str
    layer: Layer | str = ""
    reason: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.layer})' if self.layer else ''}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The config that runs a problem, and why.

    Attributes:
      config: what runs.
      layer, grade: where it is from, and how far it can be trusted.
      reason: a sentence.
      source: "overlay", "memory", "user's store", "wheel" or "package NAME", for layers 2 to 4.
      chosen: the measurement behind the config, for layers 2 to 4.
      runners_up: the other candidates at the entry's shape, fast ones first.
      refusals: what was asked before and refused.
      run: what the source knows of the run that measured `chosen`; empty if none did.
    """

    config: Config
    layer: Layer
    grade: Grade
    reason: str
    source: str = ""
    chosen: Choice | None = None
    runners_up: tuple[Choice, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_miss(self) -> bool:
        """Whether the problem itself was not measured as it would run now."""
        return self.grade not in (Grade.ARGUMENT, Grade.EXACT)


def decide(
    key: Key,
    device: Device,
    *,
    found: Iterable[Found],
    others: Iterable[tuple[Layer, str, Sequence[Config]]],
    refusal: Callable[[Config], str | None],
    refused_backends: Callable[[], Sequence[Refusal]],
    backend: str | None = None,
) -> Decision:
    """Chooses a config for `key` on `device`: the first that is not refused.

    Args:
      key: the problem.
      device: where it runs.
      found: the entries that may answer, as `answers` gives them; none where no table applies, as
        on a CPU, or the caller gives the config.
      others: (layer, reason in words, configs, best first) of each layer without entries.
      refusal: why a config cannot run here, or None.
      refused_backends: the backends that do not support the problem at all.
      backend: the one that the caller asked for, if any; the others are refused for that.

    Raises:
      UnsupportedError: every layer refused; the message lists each refusal, or only those of
        `backend` if one was asked for.
    """
    refusals: list[Refusal] = []

    def accepts(config: AnyConfig, layer: Layer) -> bool:
        reason = refusal(config)
        if reason is not None:
            item = Refusal(what=str(config), layer=layer, reason=reason)
            if item not in refusals:
                refusals.append(item)
        return reason is None

    def all_refusals() -> tuple[Refusal, ...]:
        return (*refused_backends(), *refusals)

    for one in found:
        for choice in one.entry.choices:
            if accepts(choice.config, one.layer):
                return _from_entry(one, choice, all_refusals())
    for layer, reason, configs in others:
        for config in configs:
            if accepts(config, layer):
                return Decision(config=config, layer=layer, grade=Grade(layer), reason=reason, refusals=all_refusals())
    raise _nothing_runs(key, device, backend, all_refusals())


def _nothing_runs(key: Key, device: Device, backend: str | None, refusals: Sequence[Refusal]) -> UnsupportedError:
    if refusals and (last := refusals[-1]).layer == Layer.ARGUMENT:
        return UnsupportedError(
            f"config={last.what} cannot run {key.op} {key.shape} on {device}: "
            f"{last.reason}; leave config out to let the table choose"
        )
    if backend is not None:
        reasons = dict.fromkeys(
            item.reason for item in refusals if item.what == backend or item.what.startswith(f"{backend}:")
        )
        return UnsupportedError(
            f"backend={backend!r} cannot run {key.op} {key.shape} on {device}: "
            f"{'; '.join(reasons) or 'it has no config for it'}; leave backend out to let another "
            "one run"
        )
    return UnsupportedError(
        f"no backend can run {key.op} {key.shape} on {device}:" + "".join(f"\n  {item}" for item in refusals)
    )


def _from_entry(found: Found, chosen: Choice, refusals: tuple[Refusal, ...]) -> Decision:
    entry, name = found.entry, found.place.device.fingerprint.name
    if found.modelled_from:
        low_us, high_us = chosen.interval_us
        others = f", {found.num_of_other_device} of them of another device" if found.num_of_other_device else ""
        if found.num_of_kin:
            others += f", {found.num_of_kin} with {found.modelled_from.kin.scales} scales"
        which = "its own nearest" if others else "the nearest"
        notes = [
            f"{chosen.median_us:.2f} us modelled for {name}, between {low_us:.2f} and {high_us:.2f} with 90 %",
            f"from {found.num_modelled_from} measured problems{others}, {which} {found.modelled_from.shape}",
        ]
    else:
        notes = [f"{chosen.median_us:.2f} us on {name}, run {chosen.run}"]
        if found.layer is not Layer.EXACT:
            notes.append(f"measured at {entry.key.shape}")
    notes.append(entry.rule if chosen is entry.choices[0] else "the choices before it were refused")
    if isinstance(found.key, Key) and entry.measured_out_dtype != found.key.out_dtype:
        what = "operands" if found.key.a_dtype == found.key.out_dtype else "output"
        notes.append(f"measured with {entry.measured_out_dtype} {what}, {found.key.out_dtype} asked")
    if chosen.is_stale:
        notes.append("the kernel was rebuilt with other bytes since")
    if found.place.is_other_device:
        notes.append("the nearest device that was measured")
    return Decision(
        config=chosen.config,
        layer=found.layer,
        grade=found.grade_of(chosen),
        reason="; ".join(notes),
        source=found.source,
        chosen=chosen,
        runners_up=tuple(choice for choice in entry.choices if choice is not chosen),
        refusals=refusals,
        run=found.runs.get(chosen.run, {}),
    )
