"""Decides which config of a decorated kernel runs a call.

    1. exact timings       of this kernel at this key on this device: the entry of the first table
                           that has one (overlay, memory, user's store, wheel, packages), what this
                           kernel keeps in memory; under on_miss also the samples, and configs of the
                           list without a timing are measured, with the default and the best so far
    2. the nearest entry   of the tables (lookup.py); the best config of it that is in the list
    3. the first config    of the list, as pruned

Configs are measured only in mode on_miss, and never while a CUDA graph is captured.

Clocks and temperature differ from run to run, so only medians of one run are compared: of the
newest that timed the default, which is timed whenever anything is measured.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune import tuner
from stoneware.triton_autotune.call import Call, plain
from stoneware.triton_autotune.tuner import Candidate, Hooks
from stoneware.tuning import lookup
from stoneware.tuning import policy as tuning
from stoneware.tuning import sources as table_sources
from stoneware.tuning.choose import choose
from stoneware.tuning.lookup import Answer
from stoneware.tuning.samples import Run, Sample

ONLY, FIRST, MEASURED, MEMORY = "the only config", "first of the list", "measured", table_sources.MEMORY

_NOW = "now"
"""The date of timings that exist only in this call or process: sorts after every other date."""

_LOG = logging.getLogger("stoneware.triton_autotune")


@dataclass(frozen=True, kw_only=True)
class KernelDecision:
    """The config that runs a call of a decorated kernel, and why.

    Attributes:
      key: of the call.
      config: the triton.Config.
      source: ONLY, FIRST, MEASURED (for this very call), or where the timing is from: MEMORY (of
        this process alone), or the name of another source (`sources.py`).
      step, grade: like in lookup.Decision; "default" without a timing.
      reason: a sentence.
      choices: what was compared, the chosen one first.
      is_provisional: whether the next call has to decide again.
    """

    key: KernelKey
    config: Any
    source: str
    step: str = "default"
    grade: str = "default"
    reason: str
    choices: tuple[Timed, ...] = ()
    is_provisional: bool = False

    def __str__(self) -> str:
        lines = [
            f"{self.key.op} {self.key.shape}",
            f"  runs     {self.config}",
            f"  from     {self.source}: {self.step}, {self.grade}",
            f"  because  {self.reason}",
        ]
        lines += [f"  {one.median_us:9.2f} us +- {one.spread_us:.2f}  {one.config}" for one in self.choices]
        return "\n".join(lines)


class Timed(NamedTuple):
    """A timing, when its run was, and the source that has it. A failure has no median."""

    config: Any  # a KernelConfig, as those of the list are
    median_us: float
    spread_us: float
    run: str
    date: str
    source: str
    failure: str = ""

    @classmethod
    def of_sample(cls, sample: Sample, date: str, source: str) -> Timed:
        failure = "" if sample.status == "ok" else sample.detail or sample.status
        return cls(sample.config, sample.median_us, sample.spread_us, sample.run, date, source, failure)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a config is chosen for.

    Attributes:
      call: runs the kernel and hooks where something is measured.
      key: of the call.
      configs: the list, as pruned, by what they are in samples; the first is the default.
      device: fingerprint; None without an NVIDIA GPU that our driver module supports.
      ordinal: torch's number of the GPU; None without one.
    """

    call: Call
    key: KernelKey
    configs: Mapping[KernelConfig, Any]
    device: DeviceFingerprint | None
    ordinal: int | None

    @property
    def default(self) -> KernelConfig:
        return next(iter(self.configs))

    @property
    def place(self) -> tuple[KernelKey, int | None]:
        """Under what its timings are filed in memory."""
        return self.key, self.ordinal

    def ran(self, known: Mapping[KernelConfig, Timed]) -> list[Timed]:
        """The timings of configs of the list that ran, in the order of the list."""
        return [known[config] for config in self.configs if config in known and not known[config].failure]

    def of_one_run(self, timed: Sequence[Timed]) -> list[Timed]:
        """Those of the newest run that timed the default; without one, of the newest run."""
        candidates = [one for one in timed if one.config == self.default] or timed
        newest = max(candidates, key=lambda one: (one.date, one.run)).run
        return [one for one in timed if one.run == newest]

    def missing(self, known: Mapping[KernelConfig, Timed]) -> list[KernelConfig]:
        """The configs that must be timed: those without a timing; otherwise those that were faster in an
        older run than the fastest of the newest, which happens when a faster config is removed from the list."""
        missing = [config for config in self.configs if config not in known]
        ran = self.ran(known)
        if missing or not ran:
            return missing
        compared = self.of_one_run(ran)
        if compared[0].source == table_sources.OVERLAY:
            return []
        fastest_us = min(one.median_us for one in compared)
        return [one.config for one in ran if one.run != compared[0].run and one.median_us < fastest_us]

    def in_entry(self, found: Answer) -> list[Timed]:
        """The timings in a table's entry of configs of the list."""
        runs, source = found.runs, found.source
        return [
            Timed(one.config, one.median_us, one.spread_us, one.run, runs.get(one.run, {}).get("date", ""), source)
            for one in found.entry.choices
            if one.config in self.configs
        ]

    def best(self, timed: Sequence[Timed], found: Answer | None = None) -> KernelDecision | None:
        """The decision by timings, None without any; `found` is their entry in a table."""
        if not timed:
            return None
        # The canonical order is that of the list, which a table does not contain.
        compared, rule = choose(self.of_one_run(timed), list(self.configs))
        chosen = compared[0]
        at = f"measured at {found.entry.key.shape}; " if found and found.step != "exact" else ""
        return KernelDecision(
            key=self.key,
            config=self.configs[chosen.config],
            source=chosen.source,
            step=found.step if found else "exact",
            grade=found.grade if found else "exact",
            reason=f"{chosen.median_us:.2f} us, run {chosen.run}; {at}{rule}",
            choices=compared,
        )

    def best_of(self, known: Mapping[KernelConfig, Timed]) -> KernelDecision:
        """The decision by timings of the whole list, of which all may have failed."""
        failures = "; ".join(one.failure for one in known.values())
        return self.best(self.ran(known)) or self.first(f"every config of the list failed: {failures[:500]}")

    def first(self, reason: str = "no timing of a config of the list is known", source: str = FIRST) -> KernelDecision:
        return KernelDecision(key=self.key, config=self.configs[self.default], source=source, reason=reason)


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
            hook = getattr(config.pre_hook, "__qualname__", str(config.pre_hook))
            name = replace(name, kwargs=(*name.kwargs, ("pre_hook", hook)))
        found.setdefault(name, config)
    return found


def _kernel_config(config: Any) -> KernelConfig:
    kwargs = dict(config.kwargs)
    if getattr(config, "ir_override", None):
        kwargs["ir_override"] = config.ir_override
    values = {name: plain(value) for name, value in kwargs.items()}
    return KernelConfig(
        kwargs=tuple(
            (name, value if value is None or type(value) in (bool, int, float, str) else str(value))
            for name, value in values.items()
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=getattr(config, "num_ctas", None) or 1,
        maxnreg=getattr(config, "maxnreg", None) or 0,
    )


@dataclass(kw_only=True)
class Chooser:
    """Decides for one kernel, in any number of threads.

    Attributes:
      fn: the decorated function, with Triton's `run`.
      hooks: the decorator's.
      kernel_sha256: gives the kernel's digest.
      do_bench: the user's; None for Stoneware's timer.
      cache_results: whether the user's store is read and written.
    """

    fn: Any
    hooks: Hooks
    kernel_sha256: Callable[[], str]
    do_bench: Callable[..., Any] | None
    cache_results: bool
    _runs: dict[int, Run] = field(default_factory=dict)
    _in_memory: dict[Any, dict[KernelConfig, Timed]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _measuring: dict[Any, threading.RLock] = field(default_factory=dict)

    def decide(self, problem: Problem, *, may_measure: bool = True) -> KernelDecision:
        """The config of a call; nothing is measured for `explain` and `warmup`.

        Raises:
          TuningMissError: mode is error_on_miss, and no exact timing exists.
          Exception: a kernel or hook raises it while it is measured.
        """
        if len(problem.configs) == 1:
            return problem.first("there is no other", ONLY)
        mode, is_capturing = tuning.current_mode(), tuning.is_capturing()
        bench: Any = problem.ordinal if self.do_bench is None else self.do_bench
        measures = mode == "on_miss" and bench is not None and not is_capturing
        found = self._find(problem)
        nearest = problem.best(problem.in_entry(found), found) if found is not None else None
        known = self._known(problem, found, has_samples=measures)
        missing = problem.missing(known) if measures else ()
        if missing and may_measure:
            return self._measured(problem, bench)
        if missing:
            decision = nearest or problem.first()
            reason = f"{decision.reason}; {len(missing)} of {len(problem.configs)} configs would be timed"
            return replace(decision, reason=reason)
        if measures or problem.ran(known):
            return problem.best_of(known)
        if mode == "error_on_miss":
            self._raise_miss(problem, nearest)
        if mode == "on_miss" and is_capturing:
            self._say(problem, "is not measured while a CUDA graph is captured", "call it once before the capture")
        elif nearest is None and problem.ordinal is not None:
            self._say(
                problem,
                "has no timing, so the first config of the list runs",
                'tune with `with stoneware.tuning("on_miss"):` around the calls, or STONEWARE_TUNING=on_miss',
            )
        return replace(nearest or problem.first(), is_provisional=mode == "on_miss" and is_capturing)

    def _find(self, problem: Problem) -> Answer | None:
        """The nearest entry that has a config of the list; None without one."""
        if problem.device is None:
            return None
        found = None
        # Other packages' tables take 15 ms to find, and an exact answer needs none of them.
        for has_packages in (False, True):
            sources = [
                source
                for source in table_sources.sources(problem.key.op, has_packages=has_packages)
                if self.cache_results or source.name != table_sources.STORE
            ]
            where = table_sources.with_power_limit(problem.device, problem.ordinal, sources)
            answers = lookup.answers(problem.key, where, sources, self.kernel_sha256())
            found = next((answer for answer in answers if problem.in_entry(answer)), None)
            if found is not None and found.is_exact:
                break
        return found

    def _known(self, problem: Problem, found: Answer | None, *, has_samples: bool) -> dict[KernelConfig, Timed]:
        """The timing or failure that counts of each config, of this very kernel, key and device. Failures
        are in the samples alone, which only a call that may measure has to read."""
        of_table = problem.in_entry(found) if found is not None and found.is_exact else []
        is_overlay = bool(of_table) and of_table[0].source == table_sources.OVERLAY
        sources = [of_table]
        if has_samples:
            sources.append(self._samples(problem))
        if has_samples or not (is_overlay or tuning.wheel_only()):
            sources.append([*self._in_memory.get(problem.place, {}).values()])
        # The overlay's timings count before the samples if they can be compared with the default.
        if is_overlay and any(one.config == problem.default for one in of_table):
            sources.append(of_table)
        return {one.config: one for source in sources for one in source}

    def _measured(self, problem: Problem, bench: Callable[..., Any] | int) -> KernelDecision:
        """Takes the timings that are missing, and decides by them.

        Only callers that need missing timings of one key wait for each other.
        """
        place = os.getpid(), problem.place  # a fork would copy the lock of a thread that it lacks
        with self._measuring.setdefault(place, threading.RLock()):
            # Another thread may just have completed them.
            known = self._known(problem, self._find(problem), has_samples=True)
            missing = problem.missing(known)
            if missing:
                self._measure(problem, bench, missing, known)
        self._measuring.pop(place, None)
        if tuning.current_overlay() is not None:  # its timings come first there
            known = self._known(problem, self._find(problem), has_samples=True)
        decision = problem.best_of(known)
        if missing:
            self.hooks.before(problem.call.arguments(decision.config), reset_only=True)
        return decision

    def _samples(self, problem: Problem) -> list[Timed]:
        """Samples taken here of this kernel at this key on such a device, newest last."""
        store = table_sources.existing_store() if self.cache_results else None
        of_store = table_sources.samples_of_store(store, problem.key.op) if store is not None else []
        taken = [(table_sources.STORE, *item) for item in of_store]
        taken += [(table_sources.MEMORY, *item) for item in tuning.memory(problem.key.op)]
        if problem.device is None or not taken:
            return []
        where = table_sources.with_power_limit(
            problem.device, problem.ordinal, table_sources.sources(problem.key.op, has_packages=False)
        )
        sha256 = self.kernel_sha256()
        fitting = [
            Timed.of_sample(sample, run.date, source)
            for source, run, sample in taken
            if sample.kernel_sha256 == sha256 and sample.key == problem.key and run.device.same_hardware(where)
        ]
        return sorted(fitting, key=lambda one: (one.date, one.run))

    def _measure(
        self,
        problem: Problem,
        bench: Callable[..., Any] | int,
        missing: Sequence[KernelConfig],
        known: dict[KernelConfig, Timed],
    ) -> None:
        """Measures configs; adds their timings to `known`, and stores each sample immediately.

        The best measured config and then the default are timed again, last: a run without the default
        does not count, so a killed run is either complete or ignored.
        """
        run = self._run(problem)
        default, ran = problem.default, problem.ran(known)
        racing = list(missing)
        if ran:
            best = min(problem.of_one_run(ran), key=lambda one: one.median_us)
            again = dict.fromkeys((best.config, default))
            if default not in missing and known[default].failure:
                del again[default]
            racing = [*(config for config in missing if config not in again), *again]
        _LOG.info(
            "%s %s: timing %d of %d configs", problem.key.op, problem.key.shape, len(racing), len(problem.configs)
        )
        candidates = {
            config: Candidate(self.fn, problem.configs[config], problem.call, self.hooks) for config in racing
        }
        run_id, sha256 = run.id if run else "memory", self.kernel_sha256()
        for batch in tuner.measure(candidates, bench):
            samples = {
                config: tuner.sample_of(problem.key, config, result, sha256, run_id) for config, result in batch.items()
            }
            timed = {config: Timed.of_sample(item, _NOW, MEASURED) for config, item in samples.items()}
            known.update(timed)
            if run is not None:
                tuning.keep(run, [*samples.values()])
            else:
                in_memory = {config: one._replace(source=MEMORY) for config, one in timed.items()}
                self._in_memory.setdefault(problem.place, {}).update(in_memory)
                tuning.forget_plans()

    def _run(self, problem: Problem) -> Run | None:
        """The run of this kernel on this GPU in this process; None where no sample can be stored."""
        from stoneware.measuring import machine

        if not self.cache_results or problem.device is None or problem.ordinal is None:
            return None
        if problem.ordinal not in self._runs:
            self._runs[problem.ordinal] = machine.new_run(problem.ordinal, command="sw.autotune")
        return self._runs[problem.ordinal]

    def _say(self, problem: Problem, what: str, remedy: str) -> None:
        """Logs a warning, once per kernel."""
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("%s: %s %s; %s", problem.key.op, problem.key.shape, what, remedy)

    def _raise_miss(self, problem: Problem, found: KernelDecision | None) -> None:
        from stoneware.errors import TuningMissError

        nearest = (
            f"the nearest is {found.step}, {found.grade} ({found.reason})" if found else "nothing near was measured"
        )
        raise TuningMissError(
            f"{problem.key.op} {problem.key.shape} must have been measured on "
            f"{problem.device or 'this device'} with this kernel, since tuning is error_on_miss; "
            f'{nearest}; run the call once under stoneware.tuning("on_miss")'
        )
