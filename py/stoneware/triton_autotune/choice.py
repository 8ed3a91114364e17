"""Decides which config of a decorated kernel runs a call.

    1. on_miss             by timings of this kernel at this key on this device; configs of the list
                           without one are measured, together with the default and the best so far
    2. the look-up         overlay, user's store, wheel, tables of other packages: exact, then
                           nearest (lookup.py); the best config of the entry that is in the list
    3. the first config    of the list, as pruned

Configs are measured only in mode on_miss, and never while a CUDA graph is captured.

Clocks and temperature differ from run to run, so only medians of one run are compared: of the
newest that timed the default, which is timed whenever anything is measured.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune import tuner
from stoneware.triton_autotune.tuner import Candidate
from stoneware.tuning import lookup
from stoneware.tuning import policy as tuning
from stoneware.tuning import sources as table_sources
from stoneware.tuning.choose import choose
from stoneware.tuning.lookup import Found
from stoneware.tuning.samples import Run, Sample

ONLY, FIRST, MEASURED, MEMORY = "the only config", "first of the list", "measured", table_sources.MEMORY

_NOW = "now"
"""The date of what this call or this process alone knows: sorts after every other date."""

_LOG = logging.getLogger("stoneware.triton_autotune")


@dataclass(frozen=True, kw_only=True)
class KernelDecision:
    """The config that runs a call of a decorated kernel, and why.

    Attributes:
      config: the triton.Config.
      source: ONLY, FIRST, MEASURED (for this very call), or where the timing is from: MEMORY (of
        this process alone), or the name of another source (`layers`).
      layer, grade: as of lookup.Decision; "default" where there is no timing.
      reason: a sentence.
      choices: (config, median_us, spread_us) of what was compared, the chosen one first.
      is_provisional: whether the next call has to decide again.
    """

    config: Any
    source: str
    layer: str = "default"
    grade: str = "default"
    reason: str
    choices: tuple[tuple[KernelConfig, float, float], ...] = ()
    is_provisional: bool = False


@dataclass(kw_only=True)
class Call:
    """What a decision needs to know of a call.

    Attributes:
      key: of the call.
      configs: the list, as pruned, by what they are in samples; the first is the default.
      device: fingerprint; None without an NVIDIA GPU that our driver module knows.
      ordinal: torch's number of the GPU; None without one.
      candidate: makes a triton.Config of the list runnable.
    """

    key: KernelKey
    configs: Mapping[KernelConfig, Any]
    device: DeviceFingerprint | None
    ordinal: int | None
    candidate: Callable[[Any], Candidate]

    @property
    def default(self) -> KernelConfig:
        return next(iter(self.configs))

    @property
    def place(self) -> tuple[KernelKey, int | None]:
        """Under what its timings are filed in memory."""
        return self.key, self.ordinal


class Timed(NamedTuple):
    """A timing, when its run was, and the source that has it. A failure has no median."""

    config: KernelConfig
    median_us: float
    spread_us: float
    run: str
    failure: str
    date: str
    source: str


def identify(configs: Sequence[Any]) -> dict[KernelConfig, Any]:
    """triton.Configs by what they are in samples, in the order of the list.

    A value that JSON does not give back, such as a tl.dtype, counts by its text. If two configs
    differ only in their hook, the later one gets the hook's name; equal ones are one.
    """
    found: dict[KernelConfig, Any] = {}
    for config in configs:
        name = _kernel_config(config)
        other = found.get(name)
        if other is not None and other.pre_hook is not config.pre_hook:
            name = _kernel_config(config, with_hook=True)
        found.setdefault(name, config)
    return found


def _kernel_config(config: Any, *, with_hook: bool = False) -> KernelConfig:
    kwargs = {name: _json_value(value) for name, value in config.kwargs.items()}
    if getattr(config, "ir_override", None):
        kwargs["ir_override"] = str(config.ir_override)
    if with_hook:
        kwargs["pre_hook"] = getattr(config.pre_hook, "__qualname__", str(config.pre_hook))
    return KernelConfig(
        kwargs=tuple(kwargs.items()),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=getattr(config, "num_ctas", None) or 1,
        maxnreg=getattr(config, "maxnreg", None) or 0,
    )


def _json_value(value: Any) -> Any:
    if type(value).__name__ == "constexpr" and hasattr(value, "value"):
        value = value.value
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


def is_exact(found: Found | KernelDecision) -> bool:
    """Whether an answer is of this very key, kernel and device; any other is a miss."""
    return found.layer == "exact" and found.grade in ("exact", "argument")


def _right(call: Call, known: Mapping[KernelConfig, Timed]) -> list[Timed]:
    """The timings of configs of the list that ran, in the order of the list."""
    return [known[config] for config in call.configs if config in known and not known[config].failure]


def _of_one_run(call: Call, timed: Sequence[Timed]) -> list[Timed]:
    """Those of the newest run that timed the default; without one, of the newest run."""
    candidates = [one for one in timed if one.config == call.default] or timed
    newest = max(candidates, key=lambda one: (one.date, one.run)).run
    return [one for one in timed if one.run == newest]


def _missing(call: Call, known: Mapping[KernelConfig, Timed]) -> list[KernelConfig]:
    """The configs that must be timed: those without a timing; else those that were faster in an
    older run than the fastest of the newest, as after what beat them has left the list."""
    missing = [config for config in call.configs if config not in known]
    right = _right(call, known)
    if missing or not right:
        return missing
    compared = _of_one_run(call, right)
    if compared[0].source == table_sources.OVERLAY:
        return []
    fastest_us = min(one.median_us for one in compared)
    return [one.config for one in right if one.run != compared[0].run and one.median_us < fastest_us]


def _best(call: Call, timed: Sequence[Timed], found: Found | None = None) -> KernelDecision | None:
    """The decision by timings, None without any; `found` is their entry in a table."""
    if not timed:
        return None
    # The canonical order is that of the list, which a table does not know.
    (chosen, *others), rule = choose(_of_one_run(call, timed), list(call.configs))
    notes = [f"{chosen.median_us:.2f} us, run {chosen.run}"]
    if found is not None and found.layer != "exact":
        notes.append(f"measured at {found.entry.key.shape}")
    return KernelDecision(
        config=call.configs[chosen.config],
        source=chosen.source,
        layer=found.layer if found else "exact",
        grade=found.grade if found else "exact",
        reason="; ".join([*notes, rule]),
        choices=tuple((one.config, one.median_us, one.spread_us) for one in (chosen, *others)),
    )


def _first(
    call: Call, reason: str = "no timing of a config of the list is known", source: str = FIRST
) -> KernelDecision:
    return KernelDecision(config=call.configs[call.default], source=source, reason=reason)


def _of_entry(call: Call, found: Found) -> list[Timed]:
    """The timings in an entry of configs of the list."""
    dates = {run_id: run["date"] for run_id, run in found.runs.items()}
    return [
        Timed(
            choice.config, choice.median_us, choice.spread_us, choice.run, "", dates.get(choice.run, ""), found.source
        )
        for choice in found.entry.choices
        if choice.config in call.configs
    ]


def _of_sample(sample: Sample, date: str, source: str) -> Timed:
    failure = "" if sample.status == "ok" else sample.detail or sample.status
    return Timed(sample.config, sample.median_us, sample.spread_us, sample.run, failure, date, source)


@dataclass(kw_only=True)
class Chooser:
    """Decides for one kernel, in any number of threads.

    Attributes:
      kernel_sha256: gives the kernel's digest.
      do_bench: the user's; None for Stoneware's timer.
      cache_results: whether the user's store is read and written.
    """

    kernel_sha256: Callable[[], str]
    do_bench: Callable[..., Any] | None
    cache_results: bool
    _run: dict[int, Run] = field(default_factory=dict)
    _in_memory: dict[Any, dict[KernelConfig, Timed]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _measuring: dict[Any, threading.RLock] = field(default_factory=dict)

    def decide(self, call: Call, *, may_measure: bool = True) -> KernelDecision:
        """The config of a call.

        Args:
          call: what is known of it.
          may_measure: False for `explain` and `warmup`.

        Raises:
          TuningMissError: mode is error_on_miss, and no exact timing is known.
          Exception: what a kernel or hook raises while it is measured.
        """
        if len(call.configs) == 1:
            return _first(call, "there is no other", ONLY)
        mode = tuning.current_mode()
        is_capturing = call.ordinal is not None and tuning.is_capturing()
        can_measure = self.do_bench is not None or call.ordinal is not None
        if mode == "on_miss" and can_measure and not is_capturing:
            return self._decide_timed(call, may_measure)
        decision = self._look_up(call)
        is_overlaid = decision is not None and decision.source == table_sources.OVERLAY
        if not is_overlaid and not tuning.wheel_only():
            in_memory = _best(call, _right(call, self._memory(call)))
            if in_memory is not None:
                return in_memory
        if decision is not None and is_exact(decision):
            return decision
        if mode == "error_on_miss":
            self._raise_miss(call, decision)
        if mode == "on_miss" and is_capturing:
            self._say(call, "is not measured while a CUDA graph is captured", "call it once before the capture")
        elif mode == "on_miss":
            self._say(
                call, "is not measured, since there is no GPU", "pass a do_bench=, or the first config of the list runs"
            )
        elif decision is None and call.ordinal is not None:
            self._say(
                call,
                "has no timing, so the first config of the list runs",
                'tune with `with stoneware.tuning("on_miss"):` around the calls, or STONEWARE_TUNING=on_miss',
            )
        return replace(decision or _first(call), is_provisional=mode == "on_miss" and is_capturing)

    def _find(self, call: Call) -> Found | None:
        """The nearest entry that has a config of the list; None without one."""
        if call.device is None:
            return None
        found = None
        # Other packages' tables take 15 ms to find, and an exact answer needs none of them.
        for has_packages in (False, True):
            sources = [
                source
                for source in table_sources.sources(call.key.op, has_packages=has_packages)
                if self.cache_results or source.name != table_sources.STORE
            ]
            where = table_sources.with_power_limit(call.device, call.ordinal, sources)
            answers = lookup.answers(call.key, where, sources, self.kernel_sha256())
            found = next((answer for answer in answers if _of_entry(call, answer)), None)
            if found is not None and is_exact(found):
                break
        return found

    def _look_up(self, call: Call) -> KernelDecision | None:
        found = self._find(call)
        return _best(call, _of_entry(call, found), found) if found is not None else None

    def _decide_timed(self, call: Call, may_measure: bool) -> KernelDecision:
        """By timings of this very kernel, key and device; takes those that are missing.

        Only callers that need missing timings of one key wait for each other.
        """
        known = self._known(call)
        missing = _missing(call, known)
        if missing and not may_measure:
            found = self._look_up(call) or _first(call)
            reason = f"{found.reason}; {len(missing)} of {len(call.configs)} configs would be timed"
            return replace(found, reason=reason)
        if missing:
            place = os.getpid(), call.place  # a fork would copy the lock of a thread that it lacks
            with self._measuring.setdefault(place, threading.RLock()):
                known = self._known(call)  # which another thread may just have completed
                missing = _missing(call, known)
                if missing:
                    self._measure(call, missing, known)
            self._measuring.pop(place, None)
            if tuning.current_overlay() is not None:
                known = self._known(call)  # the overlay's timings come first there
        return _best(call, _right(call, known)) or _first(
            call, "every config of the list failed: " + "; ".join(one.failure for one in known.values())[:500]
        )

    def _memory(self, call: Call) -> dict[KernelConfig, Timed]:
        return dict(self._in_memory.get(call.place, {}))

    def _known(self, call: Call) -> dict[KernelConfig, Timed]:
        """Timings and failures of this very kernel, key and device."""
        if call.device is None:
            return self._memory(call)
        known: dict[KernelConfig, Timed] = {}
        sha256 = self.kernel_sha256()
        found = self._find(call)
        if found is not None and is_exact(found):
            stale = {
                choice.config
                for choice in found.entry.choices
                if choice.kernel_sha256 not in ("", sha256) or choice.is_stale
            }
            known = {one.config: one for one in _of_entry(call, found) if one.config not in stale}
        # The overlay's timings come before the samples if they can be compared: if the default is
        # among them. The samples have the failures too.
        is_overlaid = found is not None and found.source == table_sources.OVERLAY
        overlaid = set(known) if is_overlaid and call.default in known else set()
        for one in (*self._samples(call, sha256), *self._memory(call).values()):
            if one.config not in overlaid:
                known[one.config] = one
        return known

    def _samples(self, call: Call, sha256: str) -> Iterable[Timed]:
        """Samples taken here of this kernel at this key on such a device, newest last."""
        taken = [(table_sources.MEMORY, item) for item in tuning.memory(call.key.op)]
        has_store = self.cache_results and not tuning.wheel_only()
        store = table_sources.existing_store() if has_store else None
        if store is not None:
            of_store = table_sources.samples_of_store(store, call.key.op)
            taken = [*((table_sources.STORE, item) for item in of_store), *taken]
        where = table_sources.with_power_limit(
            call.device, call.ordinal, table_sources.sources(call.key.op, has_packages=False)
        )
        fitting = [
            _of_sample(sample, run.date, source)
            for source, (run, sample) in taken
            if sample.kernel_sha256 == sha256 and sample.key == call.key and run.device.same_hardware(where)
        ]
        return sorted(fitting, key=lambda one: (one.date, one.run))

    def _measure(self, call: Call, missing: Sequence[KernelConfig], known: dict[KernelConfig, Timed]) -> None:
        """Measures configs; adds their timings to `known`, and stores each sample as it is taken.

        The best known config and then the default are timed again, last: a run without the default
        does not count, so a killed one has all that it must be compared with, or does not count.
        """
        from stoneware.measuring import search

        is_stored = self.cache_results and call.device is not None and call.ordinal is not None
        if is_stored and call.ordinal not in self._run:
            self._run[call.ordinal] = tuner.new_run(call.ordinal)
        run = self._run[call.ordinal] if is_stored else None
        sha256 = self.kernel_sha256() if is_stored else ""
        default, right = call.default, _right(call, known)
        racing = list(missing)
        if right:
            best = min(_of_one_run(call, right), key=lambda one: one.median_us)
            again = dict.fromkeys((best.config, default))
            if default not in missing and known[default].failure:
                del again[default]
            racing = [*(config for config in missing if config not in again), *again]
        _LOG.info("%s %s: timing %d of %d configs", call.key.op, call.key.shape, len(racing), len(call.configs))

        def measure(configs: Sequence[KernelConfig]) -> dict[KernelConfig, float | None]:
            candidates = {config: call.candidate(call.configs[config]) for config in configs}
            medians: dict[KernelConfig, float | None] = {}
            for batch in tuner.measure(candidates, self.do_bench, call.ordinal):
                samples = [
                    tuner.sample_of(call.key, config, result, sha256, run.id if run else "memory")
                    for config, result in batch.items()
                ]
                timed = {item.config: _of_sample(item, _NOW, MEASURED) for item in samples}
                known.update(timed)
                medians.update((config, one.median_us or None) for config, one in timed.items())
                if run is None:
                    self._in_memory.setdefault(call.place, {}).update(
                        (config, one._replace(source=MEMORY)) for config, one in timed.items()
                    )
                else:
                    tuning.keep(run, samples)
            return medians

        before = {config: one.median_us or None for config, one in known.items() if config in call.configs}
        search.run(racing, measure, always=(default,), known=before)

    def _say(self, call: Call, what: str, remedy: str) -> None:
        """Logs a warning, once per kernel."""
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("%s: %s %s; %s", call.key.op, call.key.shape, what, remedy)

    def _raise_miss(self, call: Call, found: KernelDecision | None) -> None:
        from stoneware.errors import TuningMissError

        nearest = f"the nearest is {found.layer}, {found.grade} ({found.reason})" if found else ("there is none near")
        raise TuningMissError(
            f"{call.key.op} {call.key.shape} must have been measured on "
            f"{call.device or 'this device'} with this kernel, since tuning is error_on_miss; "
            f'{nearest}; run the call once under stoneware.tuning("on_miss")'
        )
