"""Decides which config of a decorated kernel a launch runs.

    1. an exact entry      of this kernel at this key on this device, from the first source that has one
                           (sources.py). Under on_miss, configs of the list that have neither a timing nor a
                           failure are measured first, with the default and the best so far
    2. the nearest entry   of the look-up (lookup.py)
    3. the first config    of the list, as pruned

Entries are reduced to the configs of the list. Configs are measured only in mode on_miss, and never while a
CUDA graph is captured.

Clocks and temperature differ from run to run, so only medians of one run are compared: of the newest that
timed the default, which is timed whenever anything is measured.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoneware.kernels.config import AnyConfig, KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune import tuner
from stoneware.triton_autotune.signature import Launch, plain
from stoneware.triton_autotune.tuner import Hooks, TimedLaunch
from stoneware.tuning import lookup, policy, sources
from stoneware.tuning.choose import choose
from stoneware.tuning.lookup import Answer, Grade
from stoneware.tuning.samples import Run
from stoneware.tuning.table_entry import Choice

ONLY, FIRST, MEASURED = "the only config", "first of the list", "measured"

OTHER = (0, 0)
"""The compute capability of a GPU of another vendor and of a CPU, whose timings stay in the process."""

_LOG = logging.getLogger("stoneware.triton_autotune")


@dataclass(frozen=True, kw_only=True)
class KernelDecision:
    """The config that a launch of a decorated kernel runs, and why.

    Attributes:
      key: of the launch.
      config: the triton.Config.
      source: ONLY, FIRST, MEASURED (for this very launch), or the name of the source that has the timing.
      step, grade: like in lookup.Decision; "default" without a timing.
      reason: a sentence.
      choices: the timings that were compared, the chosen config first.
      is_provisional: whether the next launch has to decide again.
    """

    key: KernelKey
    config: Any
    source: str
    step: str = "default"
    grade: Grade = Grade.DEFAULT
    reason: str
    choices: tuple[Choice, ...] = ()
    is_provisional: bool = False

    def __str__(self) -> str:
        lines = [
            f"{self.key.op} {self.key.shape}",
            f"  runs     {self.config}",
            f"  from     {self.source}: {self.step}, {self.grade}",
            f"  because  {self.reason}",
        ]
        lines += [f"  {choice.median_us:9.2f} us +- {choice.spread_us:.2f}  {choice.config}" for choice in self.choices]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class KernelRace:
    """The configs of a kernel that compete at a key.

    Attributes:
      launch: the one that is measured if timings are missing.
      key: of the launch.
      configs: config in samples -> triton.Config, of the list as pruned; the first is the default.
      device: fingerprint; of compute capability OTHER where our driver module does not run.
      ordinal: torch's number of the GPU; None without one.
    """

    launch: Launch
    key: KernelKey
    configs: Mapping[AnyConfig, Any]
    device: DeviceFingerprint
    ordinal: int | None

    @property
    def default(self) -> AnyConfig:
        return next(iter(self.configs))

    def __str__(self) -> str:
        return f"{self.key.op} {self.key.shape}"

    def listed(self, answer: Answer) -> Answer | None:
        """The answer with the timings of one run of configs of the list; None without any."""
        choices = [choice for choice in answer.entry.choices if choice.config in self.configs]
        if not choices:
            return None
        complete = [choice for choice in choices if choice.config == self.default] or choices
        newest = max((answer.runs.get(choice.run, {}).get("date", ""), choice.run) for choice in complete)[1]
        # The canonical order is that of the list, which a table does not contain.
        ordered, rule = choose([choice for choice in choices if choice.run == newest], list(self.configs))
        return replace(answer, entry=replace(answer.entry, choices=ordered, rule=rule))

    def decision(
        self, answer: Answer | None, reason: str = "no timing of a config of the list exists"
    ) -> KernelDecision:
        """The first config of a listed answer; without one the first of the list, for `reason`."""
        if answer is None:
            return KernelDecision(key=self.key, config=self.configs[self.default], source=FIRST, reason=reason)
        return KernelDecision(
            key=self.key,
            config=self.configs[answer.choice.config],
            source=answer.source,
            step=answer.step,
            grade=answer.grade,
            reason=lookup.decision(answer).reason,
            choices=answer.entry.choices,
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a race: the decision by the timings so far, and the configs without one.

    Attributes:
      answer: the exact entry that decides; None without one.
      missing: the configs that must be timed.
      failures: config -> reason, of the configs that failed and have no timing.
    """

    answer: Answer | None
    missing: Sequence[AnyConfig]
    failures: Mapping[AnyConfig, str]


def identify(configs: Sequence[Any]) -> dict[AnyConfig, Any]:
    """The triton.Configs by their configs in samples, in the order of the list.

    A value that JSON cannot represent, such as a tl.dtype, becomes text. If two configs differ only in their
    hook, the later one gets the hook's name; of equal configs the first is kept.
    """
    identities: dict[AnyConfig, Any] = {}
    for config in configs:
        identity = _kernel_config(config)
        other = identities.get(identity)
        if other is not None and other.pre_hook is not config.pre_hook:
            hook = getattr(config.pre_hook, "__qualname__", str(config.pre_hook))
            identity = replace(identity, kwargs=(*identity.kwargs, ("pre_hook", hook)))
        identities.setdefault(identity, config)
    return identities


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
      kernel_sha256: returns the kernel's digest.
      do_bench: the user's; None for Stoneware's timer.
      cache_results: whether the user's store is read and written.
    """

    fn: Any
    hooks: Hooks
    kernel_sha256: Callable[[], str]
    do_bench: Callable[..., Any] | None
    cache_results: bool
    _runs: dict[int | None, Run] = field(default_factory=dict)
    _warnings: set[str] = field(default_factory=set)
    _locks: dict[Any, threading.RLock] = field(default_factory=dict)

    def decide(self, race: KernelRace, *, may_measure: bool = True) -> KernelDecision:
        """The config of a launch; nothing is measured for `explain` and `warmup`.

        Raises:
          TuningMissError: mode is error_on_miss, and no exact timing exists.
          Exception: a kernel or hook raises it while it is measured.
        """
        if len(race.configs) == 1:
            return replace(race.decision(None, "there is no other"), source=ONLY)
        mode, is_capturing = policy.current_mode(), policy.is_capturing()
        bench: Any = race.ordinal if self.do_bench is None else self.do_bench
        if mode == "on_miss" and bench is not None and not is_capturing:
            return self._decide_on_miss(race, bench, may_measure)
        decision = race.decision(self._nearest(race))
        if decision.grade == Grade.EXACT:
            return decision
        if mode == "error_on_miss":
            _raise_miss(race, decision)
        if mode == "on_miss" and is_capturing:
            self._warn(race, "is not measured while a CUDA graph is captured", "call it once before the capture")
            return replace(decision, is_provisional=True)
        if decision.source == FIRST and race.ordinal is not None:
            self._warn(
                race,
                "has no timing, so the first config of the list runs",
                'tune with `with stoneware.tuning("on_miss"):` around the calls, or STONEWARE_TUNING=on_miss',
            )
        return decision

    def _decide_on_miss(self, race: KernelRace, bench: Callable[..., Any] | int, may_measure: bool) -> KernelDecision:
        """Decides by timings of the whole list; those that are missing are taken first.

        Only threads that need missing timings of the same key wait for each other.
        """
        progress = self._progress(race)
        missing = progress.missing
        if missing and not may_measure:
            decision = race.decision(self._nearest(race))
            reason = f"{decision.reason}; {len(missing)} of {len(race.configs)} configs would be timed"
            return replace(decision, reason=reason)
        if missing:
            place = os.getpid(), race.key, race.ordinal  # a fork would copy the lock of a thread that it lacks
            with self._locks.setdefault(place, threading.RLock()):
                progress = self._progress(race)  # another thread may just have completed it
                missing = progress.missing
                if missing:
                    self._measure(race, bench, progress)
            self._locks.pop(place, None)
            if missing:
                progress = self._progress(race)
        failures = "; ".join(progress.failures.values())
        decision = race.decision(progress.answer, f"every config of the list failed: {failures[:500]}")
        if missing:
            self.hooks.before(race.launch.arguments(decision.config), reset_only=True)
            if decision.source in (sources.STORE, sources.MEMORY):
                decision = replace(decision, source=MEASURED)
        return decision

    def _search(self, race: KernelRace, has_packages: bool) -> tuple[Sequence[sources.Source], DeviceFingerprint]:
        """What a look-up searches: the sources, and the device, with its power limit if they have several."""
        searched = [
            source
            for source in sources.sources(race.key.op, has_packages=has_packages)
            if self.cache_results or source.name != sources.STORE
        ]
        return searched, sources.with_power_limit(race.device, race.ordinal, searched)

    def _answers(self, race: KernelRace, has_packages: bool) -> Iterator[Answer]:
        searched, device = self._search(race, has_packages)
        return lookup.answers(race.key, device, searched, self.kernel_sha256())

    def _nearest(self, race: KernelRace) -> Answer | None:
        """The first answer that has a config of the list; None without one."""
        # Other packages' tables take 15 ms to find, and an exact answer needs none of them.
        for has_packages in (False, True):
            answer = next(filter(None, map(race.listed, self._answers(race, has_packages))), None)
            if answer is not None and answer.is_exact:
                break
        return answer

    def _progress(self, race: KernelRace) -> Progress:
        answers = itertools.takewhile(lambda answer: answer.step == "exact", self._answers(race, True))
        exact = [answer for answer in answers if answer.is_exact]
        timings = {choice.config: choice for answer in reversed(exact) for choice in answer.entry.choices}
        missing = [config for config in race.configs if config not in timings]
        failures = {}
        if missing:  # to find failures, all samples of the kernel are read
            failures = {config: reason for config, reason in self._failures(race).items() if config in missing}
            missing = [config for config in missing if config not in failures]
        # An overlay may lack the default; then the samples decide, which can be compared with it.
        listed = sorted(
            filter(None, map(race.listed, exact)),
            key=lambda answer: all(choice.config != race.default for choice in answer.entry.choices),
        )
        if listed and not missing and listed[0].source != sources.OVERLAY:
            # Those that were faster in an older run, which happens when a faster config is removed from the list.
            compared = {choice.config: choice.median_us for choice in listed[0].entry.choices}
            missing = [
                config
                for config in race.configs
                if config in timings and config not in compared and timings[config].median_us < min(compared.values())
            ]
        return Progress(answer=next(iter(listed), None), missing=missing, failures=failures)

    def _failures(self, race: KernelRace) -> dict[AnyConfig, str]:
        """Config -> reason, by the failed samples of this kernel at this key; tables have no failures."""
        store = sources.existing_store() if self.cache_results else None
        samples = sources.samples_of_store(store, race.key.op) if store is not None else []
        samples = [*samples, *policy.memory(race.key.op)]
        if not samples:
            return {}
        sha256, (_, device) = self.kernel_sha256(), self._search(race, False)
        return {
            sample.config: sample.detail or sample.status
            for run, sample in samples
            if sample.status != "ok"
            and sample.kernel_sha256 == sha256
            and sample.key == race.key
            and run.device.same_hardware(device)
        }

    def _measure(self, race: KernelRace, bench: Callable[..., Any] | int, progress: Progress) -> None:
        """Measures the missing configs; stores each sample immediately.

        The best measured config and then the default are timed again, last: a run without the default
        does not count, so a killed run is either complete or ignored.
        """
        again: dict[AnyConfig, None] = {}
        if progress.answer is not None:
            best = min(progress.answer.entry.choices, key=lambda choice: choice.median_us)
            again = dict.fromkeys((best.config, race.default))
            if race.default in progress.failures:
                del again[race.default]
        configs = [*(config for config in progress.missing if config not in again), *again]
        _LOG.info("%s: timing %d of %d configs", race, len(configs), len(race.configs))
        launches = {config: TimedLaunch(self.fn, race.configs[config], race.launch, self.hooks) for config in configs}
        run, sha256 = self._run(race), self.kernel_sha256()
        keep = policy.keep if self.cache_results and race.device.compute_capability != OTHER else policy.add_to_memory
        for batch in tuner.measure(launches, bench):
            keep(run, [tuner.sample_of(race.key, config, result, sha256, run.id) for config, result in batch.items()])

    def _run(self, race: KernelRace) -> Run:
        """The run of this kernel on this GPU in this process."""
        if race.ordinal not in self._runs:
            from stoneware.measuring import machine

            if race.device.compute_capability != OTHER and race.ordinal is not None:
                run = machine.new_run(race.ordinal, command="sw.autotune")
            else:
                run = Run(
                    id=f"memory, GPU {race.ordinal}",
                    device=race.device,
                    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    **dict.fromkeys(("driver", "cuda", "torch", "triton", "python", "commit"), machine.UNKNOWN),
                    command="sw.autotune",
                    sm_clock_mhz_before=0,
                    sm_clock_mhz_after=0,
                    memory_clock_mhz_before=0,
                    memory_clock_mhz_after=0,
                )
            self._runs[race.ordinal] = run
        return self._runs[race.ordinal]

    def _warn(self, race: KernelRace, what: str, remedy: str) -> None:
        """Logs a warning once per kernel."""
        if what not in self._warnings:
            self._warnings.add(what)
            _LOG.warning("%s %s; %s", race, what, remedy)


def _raise_miss(race: KernelRace, decision: KernelDecision) -> None:
    from stoneware.errors import TuningMissError

    nearest = "nothing near was measured"
    if decision.source != FIRST:
        nearest = f"the nearest is {decision.step}, {decision.grade} ({decision.reason})"
    raise TuningMissError(
        f"{race} must have been measured on {race.device} with this kernel, since tuning is error_on_miss; "
        f'{nearest}; run the call once under stoneware.tuning("on_miss")'
    )
