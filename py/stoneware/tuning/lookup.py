"""Which config runs a problem: the steps of a look-up are taken in order and the first that answers wins.

    1. argument        the caller's config=
    2. exact           an entry for this shape, in the order of sources.py
    3. nearest m       an entry for the same n and k at another m
    4. nearest shape   one at another n and k, in log space
    5. heuristic       the op's heuristic
    6. default         the first config that a backend offers

2 to 4 read every entry of the key's family (`Family`): what was measured in bf16 also answers for fp16,
by the kernel of the same tile. An entry with other scales is exact for none but its own, since the
vendor library has other kernels for each; its times of our kernels count in modelled entries.

In 3 and 4 a modelled entry answers where there are models (`time_model.py`): the candidates of the
nearest problems in the order of their times at the very shape. If two sources have the same problem,
the first counts. Otherwise the entry with the next larger m answers, or the largest m: a tile that holds
the rows of a larger m holds those of a smaller one too.

For a batch of products nothing is modelled. There 3 answers from an m at most twice as far, and 4
never, since the vendor library has kernels for small products of which we have none.

2 to 4 are taken for measurements on this device, then for those on the nearest other device of its
compute capability. If that one has more, and nearer ones, only 2 is taken for this device before it.

An answer that the installation or the device refuses is kept as a Refusal and the next choice is
taken. Pure: no compile, no benchmark, no synchronisation, no allocation on a device. How good the
answers are, and why these rules: docs/design/table.md.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from stoneware.errors import UnsupportedError
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, Key, unchecked
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.sources import OVERLAY, Place, Source
from stoneware.tuning.table_entry import MODELLED_RUN, Choice, Entry

if TYPE_CHECKING:
    from stoneware.kernels.candidate import Configs
    from stoneware.kernels.manifest import Manifest
    from stoneware.tuning.time_model import Estimate


class Grade(enum.StrEnum):
    """How far a decision can be trusted, best first: the step of the look-up that answered, or the worst that applies
    to its answer, `STALE` or `OTHER_DEVICE`."""

    __repr__ = str.__repr__

    ARGUMENT = "argument"
    EXACT = "exact"
    NEAREST_M = "nearest m"
    NEAREST_SHAPE = "nearest shape"
    STALE = "stale kernel"
    OTHER_DEVICE = "other device"
    HEURISTIC = "heuristic"
    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An entry that answers for a key.

    Attributes:
      entry: the candidates at the entry's shape, with their configs for the key.
      step: EXACT, NEAREST_M or NEAREST_SHAPE.
      place: the source and the device where it was measured.
      key: the problem that was looked up.
      num_modelled_from: where the entry's times were modelled, how many measured problems are
        behind them; else 0.
      modelled_from: the nearest of these with the key's scales, whose `place` it is then.
      num_of_other_scales, other_scales: how many were measured with other scales, and with which.
    """

    entry: Entry
    step: Grade
    place: Place
    key: AnyKey
    num_modelled_from: int = 0
    modelled_from: Key | None = None
    num_of_other_scales: int = 0
    other_scales: str = ""

    @property
    def source(self) -> str:
        """The name of the Source."""
        return self.place.source.name

    @property
    def runs(self) -> Mapping[str, Mapping[str, Any]]:
        """The runs of the source's table."""
        return self.place.source.table.runs

    @property
    def measured(self) -> AnyKey:
        """The problem that was measured, or the nearest of them."""
        return self.modelled_from or self.entry.key

    @property
    def choice(self) -> Choice:
        """The first of the candidates."""
        return self.entry.choices[0]

    @property
    def grade(self) -> Grade:
        """The grade of `choice`."""
        return self.grade_of(self.choice)

    def grade_of(self, choice: Choice) -> Grade:
        """The grade of one of the candidates: the worst that applies."""
        if self.place.is_other_device:
            return Grade.OTHER_DEVICE
        return Grade.STALE if choice.is_stale else self.step

    @property
    def is_exact(self) -> bool:
        """Whether it is of this very problem and device, and of the kernel as it is now."""
        return self.grade is Grade.EXACT


def find(
    key: AnyKey,
    device: DeviceFingerprint,
    sources: Sequence[Source],
    kernel_sha256: str = "",
    *,
    kernels: Manifest | None = None,
) -> Answer | None:
    """The first of `answers`, or None."""
    return next(answers(key, device, sources, kernel_sha256, kernels=kernels), None)


def decision(answer: Answer) -> Decision:
    """The answer of `find` as a decision, in which nothing is refused."""
    return _from_entry(answer, answer.choice, ())


def answers(
    key: AnyKey,
    device: DeviceFingerprint,
    sources: Sequence[Source],
    kernel_sha256: str = "",
    *,
    kernels: Manifest | None = None,
    excludes_split_k: bool = False,
    only_open: bool = False,
    most_choices: int = 6,
) -> Iterator[Answer]:
    """The best entry of each step, in their order: of this device, then of the nearest other one.

    Args:
      key: of an op of ours or of a decorated kernel.
      device: where it runs.
      sources: those of `sources.sources`.
      kernel_sha256: digest of a decorated kernel's source as it is now; entries that were measured
        with another are found too, with the grade "stale kernel".
      kernels: which give the configs of candidates; None for those of this installation.
      excludes_split_k: exclude configs that split k from modelled entries.
      only_open: exclude all but open kernels from these.
      most_choices: of a modelled entry; by default enough that one is not refused.
    """
    excluded = {"excludes_split_k": excludes_split_k, "only_open": only_open}
    search = _Search(key, kernel_sha256, kernels, excluded, most_choices)
    places = list(_places(key, device, sources, is_other_device=False))
    yield from search.exact(places)
    others = list(_places(key, device, sources, is_other_device=True))
    # Samples that are not baked yet are entries for their own problems alone.
    places = [place for place in places if place.block.num_entries]
    others = [place for place in others if place.block.num_entries or key.sizes in place.block]
    if others and isinstance(key, Key):
        least = min(place.distance for place in others)
        others = [place for place in others if place.distance == least]  # two devices would be two scales of time
        if places:
            from stoneware.tuning import nearest

            if nearest.is_nearer(key, others, places):
                places, others = others, places
                yield from search.exact(places)
    yield from search.near(places)
    yield from search.exact(others)
    yield from search.near(others)


def _places(
    key: AnyKey, fingerprint: DeviceFingerprint, sources: Sequence[Source], is_other_device: bool
) -> Iterator[Place]:
    for position, source in enumerate(sources):
        for distance, device in source.table.near(fingerprint)[is_other_device]:
            blocks = device.of_family(key)
            for block in blocks:
                yield Place(source, position, device, block, distance, is_other_device)
            if blocks:
                break


class _Search:
    """The search for the entries that answer for a key.

    Args:
      key, kernel_sha256, kernels, most_choices: as of `answers`.
      excluded: its other arguments.
    """

    def __init__(
        self, key: AnyKey, kernel_sha256: str, kernels: Manifest | None, excluded: Mapping[str, bool], most_choices: int
    ) -> None:
        self._key, self._kernel_sha256 = key, kernel_sha256
        self._kernels, self._excluded, self._most_choices = kernels, excluded, most_choices

    def _configs(self, **excluded: bool) -> Configs:
        from stoneware.kernels import candidate, manifest

        return candidate.configs(self._key, self._kernels or manifest.packaged(), **excluded)

    def _at(self, step: Grade, place: Place, sizes: tuple[int, ...]) -> Iterator[Answer]:
        """The entry of a place with the configs for the key, if there are any."""
        key, entry = self._key, place.block.entry(sizes, self._kernel_sha256)
        if entry.key.dtypes != key.dtypes:
            from stoneware.kernels.candidate import candidate_of
            from stoneware.tuning.choose import choose

            configs = self._configs()
            choices = [
                unchecked(Choice, {**choice.__dict__, "config": config})
                for choice in entry.choices
                if (config := configs[candidate_of(choice.config, entry.key)]) is not None
            ]
            if not choices:
                return
            ordered, rule = tuple(choices), entry.rule
            if len(choices) < len(entry.choices):
                ordered, rule = choose(choices, [choice.config for choice in choices])
            entry = replace(entry, choices=ordered, rule=rule)
        yield Answer(entry=entry, step=step, place=place, key=key)

    def exact(self, places: Sequence[Place]) -> Iterator[Answer]:
        """The entries at the very problem, those with the key's dtypes first. A stale one comes before another only
        where the caller put it on top."""
        stale = []
        for place in sorted(places, key=lambda place: place.block.kind.dtypes != self._key.dtypes):
            kind = place.block.kind
            if (
                self._key.sizes in place.block
                and kind.scales == self._key.scales
                and (kind.dtypes == self._key.dtypes or self._configs().were_raced(kind))
            ):
                for answer in self._at(Grade.EXACT, place, self._key.sizes):
                    if answer.choice.is_stale and answer.source != OVERLAY:
                        stale.append(answer)
                    else:
                        yield answer
        yield from stale

    def near(self, places: Sequence[Place]) -> Iterator[Answer]:
        """The entries near the problem, modelled ones first."""
        from stoneware.tuning import nearest  # an exact entry needs no more

        key = self._key
        places = [place for place in places if place.block.num_entries]
        if isinstance(key, Key):
            yield from self._modelled(key, places)
        own = nearest.with_scales(key, places)
        for step, nearest_of in ((Grade.NEAREST_M, nearest.nearest_m), (Grade.NEAREST_SHAPE, nearest.nearest_shape)):
            best = nearest_of(key, own)
            if best is not None:
                yield from self._at(step, *best)

    def _modelled(self, key: Key, places: Sequence[Place]) -> Iterator[Answer]:
        """The candidates at the key's own shape with modelled times, the least expected time first;
        nothing where too little was measured for that."""
        from stoneware.tuning import nearest, time_model

        places = [place for place in places if place.block.has_models]
        if not nearest.with_scales(key, places):
            return
        near, near_with_other_scales = nearest.near_problems_of_family(key, places)
        own, others = (
            [(distance, place.block.corrections(sizes)) for distance, sizes, place in some]
            for some in (near, near_with_other_scales)
        )
        configs = self._configs(**self._excluded)
        _, sizes, place = near[0]
        if sizes[:-1] == key.sizes[:-1] and not time_model.has_model(own, configs):
            return  # better the entry at a near m than a comparison without its choice
        both = sorted([*own, *others], key=operator.itemgetter(0)) if others else own
        estimates = time_model.estimates(
            key.m, key.n, key.k, both, configs, key.num_groups, is_other_device=place.is_other_device
        )
        choices = tuple(map(_choice, estimates[: self._most_choices]))
        if choices:
            yield Answer(
                entry=Entry(key=key, choices=choices, rule=f"the least expected time of {len(estimates)} as modelled"),
                step=Grade.NEAREST_M if sizes[:-1] == key.sizes[:-1] else Grade.NEAREST_SHAPE,
                place=place,
                key=key,
                num_modelled_from=len(both),
                modelled_from=place.block.kind.with_sizes(sizes),
                num_of_other_scales=len(others),
                other_scales=near_with_other_scales[0][2].block.kind.scales if others else "",
            )


def _dtypes_in_words(key: Key) -> str:
    return f"{key.a_dtype}*{key.b_dtype}->{key.out_dtype}"


def _choice(estimate: Estimate) -> Choice:
    values = {
        "config": estimate.config,
        "median_us": float(f"{estimate.us:.4g}"),
        "spread_us": 0.0,
        "run": MODELLED_RUN,
        "is_stale": estimate.is_stale,
        "interval_us": estimate.interval_us,
    }
    return unchecked(Choice, values)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A config or a whole backend that was refused.

    Attributes:
      what: the config, or the backend's name.
      step: of the look-up; empty for a backend, which is refused in every step.
      reason: a sentence.
    """

    what: str
    step: Grade | str = ""
    reason: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.step})' if self.step else ''}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The config that runs a problem, and why.

    Attributes:
      config: what runs.
      step, grade: which step of the look-up answered, and how far the answer can be trusted.
      reason: a sentence.
      source: "overlay", "memory", "user's store", "wheel" or "package NAME", for steps 2 to 4.
      chosen: the measurement behind the config, for steps 2 to 4.
      runners_up: the other candidates at the entry's shape, fast ones first.
      measured_on: name of the GPU whose times these are, for steps 2 to 4.
      refusals: what was refused before.
      run: what the source knows of the run that measured `chosen`; empty if none did.
    """

    config: Config
    step: Grade
    grade: Grade
    reason: str
    source: str = ""
    chosen: Choice | None = None
    runners_up: tuple[Choice, ...] = ()
    measured_on: str = ""
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
    answers: Iterable[Answer],
    others: Iterable[tuple[Grade, str, Sequence[Config]]],
    refusal: Callable[[Config], str | None],
    refused_backends: Callable[[], Sequence[Refusal]],
    backend: str | None = None,
) -> Decision:
    """Chooses a config for `key` on `device`: the first that is not refused.

    Args:
      key: the problem.
      device: where it runs.
      answers: from entries, the best first; empty where no table applies, like on a CPU, or the caller
        gives the config.
      others: (step, reason in words, configs, best first) of each step without entries.
      refusal: why a config cannot run here, or None.
      refused_backends: the backends that do not support the problem at all.
      backend: the one that the caller asked for, if any; the others are refused for that.

    Raises:
      UnsupportedError: every step refused; the message lists each refusal, or only those of
        `backend` if the caller names one.
    """
    refusals: list[Refusal] = []

    def accepts(config: AnyConfig, step: Grade) -> bool:
        reason = refusal(config)
        if reason is not None:
            item = Refusal(what=str(config), step=step, reason=reason)
            if item not in refusals:
                refusals.append(item)
        return reason is None

    def all_refusals() -> tuple[Refusal, ...]:
        backends = refused_backends()
        reasons = {(item.what, item.reason) for item in backends}
        # Nobody chose or measured a config of the heuristic, so that of a refused backend is not refused once more.
        others = (
            item
            for item in refusals
            if item.step != Grade.HEURISTIC or (item.what.partition(":")[0], item.reason) not in reasons
        )
        return (*backends, *others)

    for answer in answers:
        for choice in answer.entry.choices:
            if accepts(choice.config, answer.step):
                return _from_entry(answer, choice, all_refusals())
    for step, reason, configs in others:
        for config in configs:
            if accepts(config, step):
                return Decision(config=config, step=step, grade=step, reason=reason, refusals=all_refusals())
    raise _nothing_runs(key, device, backend, all_refusals())


def _nothing_runs(key: Key, device: Device, backend: str | None, refusals: Sequence[Refusal]) -> UnsupportedError:
    if refusals and (last := refusals[-1]).step == Grade.ARGUMENT:
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


def _from_entry(answer: Answer, chosen: Choice, refusals: tuple[Refusal, ...]) -> Decision:
    entry, name = answer.entry, answer.place.device.fingerprint.name
    key, measured = answer.key, answer.measured
    if answer.modelled_from:
        low_us, high_us = chosen.interval_us
        others = ""
        if answer.num_of_other_scales:
            others = f", {answer.num_of_other_scales} of them with {answer.other_scales} scales"
        notes = [
            f"{chosen.median_us:.2f} us modelled for {name}, between {low_us:.2f} and {high_us:.2f} with 90 %",
            f"from {answer.num_modelled_from} measured problems{others}, the nearest {measured.shape}",
        ]
    else:
        notes = [f"{chosen.median_us:.2f} us on {name}, run {chosen.run}"]
        if answer.step is not Grade.EXACT:
            notes.append(f"measured at {measured.shape}")
    notes.append(entry.rule if chosen is entry.choices[0] else "the choices before it were refused")
    if isinstance(key, Key) and isinstance(measured, Key) and measured.dtypes != key.dtypes:
        notes.append(f"measured with {_dtypes_in_words(measured)}, {_dtypes_in_words(key)} asked")
    if chosen.is_stale:
        notes.append("the kernel was rebuilt with other bytes since")
    if answer.place.is_other_device:
        notes.append("the nearest device that was measured")
    return Decision(
        config=chosen.config,
        step=answer.step,
        grade=answer.grade_of(chosen),
        reason="; ".join(notes),
        source=answer.source,
        chosen=chosen,
        runners_up=tuple(choice for choice in entry.choices if choice is not chosen),
        measured_on=name,
        refusals=refusals,
        run=answer.runs.get(chosen.run, {}),
    )
