"""Which config of a decorated kernel runs a call: by a table, by timings taken now, or the first.

    1. on_miss             timings of this kernel at this key on this device; configs of the list
                           that have none are measured, beside the default and the best so far
    2. the look-up         overlay, user's store, wheel, tables of other packages: exact, then
                           nearest (lookup.py); the best of the entry that is in the list
    3. the first config    of the list, as pruned

Only mode on_miss measures, and never while a CUDA graph is captured.

Clocks and temperature differ from run to run. So only medians of one run are compared: of the newest
that timed the default, which races whenever something is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune import kernel_sources, kernel_tuner
from stoneware.triton_autotune.kernel_sources import Taken
from stoneware.triton_autotune.kernel_tuner import Candidate, Measured
from stoneware.tuning import policy as tuning, sources
from stoneware.tuning.choose import choose
from stoneware.tuning.lookup import Found
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.table_entry import Choice

ONLY, FIRST, MEASURED, MEMORY = "the only config", "first of the list", "measured", sources.MEMORY

_MEMORY_RUN = "memory"
_NOW = "now"
"""The date of what this call or this process alone knows: after every other."""

Timed = TypeVar("Timed", Sample, Choice)

_LOG = logging.getLogger("stoneware.triton_autotune")


@dataclass(frozen=True, kw_only=True)
class KernelDecision:
    """The config that runs a call of a decorated kernel, and why.

    Attributes:
      config: the triton.Config.
      source: ONLY, FIRST, MEASURED (for this very call), or where the timing is from: MEMORY (of
        this process alone), or the name of another source (`sources`).
      layer, grade: as of lookup.Decision; "default" where there is no timing.
      reason: a sentence.
      choices: (config, median_us, spread_us) of what was compared, the chosen one first.
      is_provisional: whether the next call asks anew.
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
      is_capturing: whether the current stream is being captured into a CUDA graph.
      candidate: makes a triton.Config of the list runnable.
      do_bench: the user's; None for Stoneware's timer.
    """

    key: KernelKey
    configs: Mapping[KernelConfig, Any]
    device: DeviceFingerprint | None
    ordinal: int | None
    is_capturing: bool
    candidate: Callable[[Any], Candidate]
    do_bench: Callable[..., Any] | None

    @property
    def can_measure(self) -> bool:
        return self.do_bench is not None or self.ordinal is not None


def identify(configs: Sequence[Any]) -> dict[KernelConfig, Any]:
    """triton.Configs by what they are called in samples, in the order of the list.

    A value that JSON does not give back, such as a tl.dtype, is taken by its text. Of two configs
    that differ in their hook alone the later one carries the hook's name; equal ones are one.
    """
    found: dict[KernelConfig, Any] = {}
    for config in configs:
        name = _kernel_config(config)
        other = found.get(name)
        if other is not None and other.pre_hook is not config.pre_hook:
            name = _kernel_config(config, with_hook=True)
        found.setdefault(name, config)
    return found


def _right(call: Call, known: Mapping[KernelConfig, Taken]) -> list[Sample]:
    """The samples of configs of the list that ran, in the order of the list."""
    return [
        known[config].sample for config in call.configs
        if config in known and known[config].sample.status == "ok"
    ]


def _of_one_run(
    timed: Sequence[Timed], default: KernelConfig, dates: Mapping[str, str]
) -> list[Timed]:
    """Those of the newest run that timed the default; without one, of the newest run.

    Args:
      timed: at least one.
      default: the first of the list.
      dates: run id -> when it was.
    """
    runs = {item.run for item in timed if item.config == default} or {item.run for item in timed}
    newest = max(runs, key=lambda run: (dates.get(run, ""), run))
    return [item for item in timed if item.run == newest]


def _missing(call: Call, known: Mapping[KernelConfig, Taken]) -> list[KernelConfig]:
    """The configs that must be timed: those without a sample; else those that were faster in an
    older run than the fastest of the newest, as after what beat them has left the list."""
    missing = [config for config in call.configs if config not in known]
    right = _right(call, known)
    if missing or not right:
        return missing
    compared = _of_one_run(right, next(iter(call.configs)), _dates_of(known))
    if known[compared[0].config].source == sources.OVERLAY:
        return []
    fastest_us = min(sample.median_us for sample in compared)
    return [
        sample.config for sample in right
        if sample.run != compared[0].run and sample.median_us < fastest_us
    ]


def _dates_of(known: Mapping[KernelConfig, Taken]) -> dict[str, str]:
    return {one.sample.run: one.date for one in known.values()}


def _dates(found: Found) -> dict[str, str]:
    return {run_id: run["date"] for run_id, run in found.runs.items()}


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


@dataclass(kw_only=True)
class Chooser:
    """Decides for one kernel; called under the kernel's lock.

    Attributes:
      kernel_sha256: the kernel's digest, asked for when it is needed.
      cache_results: whether the user's store is read and written.
    """

    kernel_sha256: Callable[[], str]
    cache_results: bool = True
    _run: dict[int, Run] = field(default_factory=dict)
    _in_memory: dict[tuple[Any, ...], dict[KernelConfig, Sample]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

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
            config = next(iter(call.configs.values()))
            return KernelDecision(config=config, source=ONLY, reason="there is no other")
        mode = tuning.current_mode()
        is_provisional = False
        if mode == "on_miss":
            if not call.is_capturing and call.can_measure:
                return self._timed(call, may_measure)
            is_provisional = call.is_capturing
        found = self._look_up(call)
        is_overlaid = found is not None and found.source == sources.OVERLAY
        if not is_overlaid and not tuning.wheel_only():
            in_memory = self._choice(call, self._memory(call))
            if in_memory is not None:
                return in_memory
        is_miss = found is None or not kernel_sources.is_exact(found)
        if is_miss and mode == "error_on_miss":
            self._raise_miss(call, found)
        if is_miss:
            self._say_miss(call, mode, found)
        decision = found or self._first(call)
        if not is_provisional or not is_miss:
            return decision
        return KernelDecision(**{**vars(decision), "is_provisional": True})

    def _place(self, call: Call) -> tuple[Any, ...]:
        return call.key, call.ordinal

    def _first(self, call: Call) -> KernelDecision:
        return KernelDecision(
            config=next(iter(call.configs.values())),
            source=FIRST,
            reason="no timing of a config of the list is known",
        )

    def _look_up(self, call: Call) -> KernelDecision | None:
        """The best config of the nearest entry that has one of the list; None without one."""
        if call.device is None:
            return None
        found = kernel_sources.find(
            call.key, call.device, call.ordinal, self.kernel_sha256(), call.configs,
            has_store=self.cache_results,
        )
        if found is None:
            return None
        # Anew, since the canonical order is that of the list, which a table does not know.
        choices, rule = choose(
            _of_one_run(
                [choice for choice in found.entry.choices if choice.config in call.configs],
                next(iter(call.configs)), _dates(found),
            ),
            list(call.configs),
        )
        chosen = choices[0]
        notes = [f"{chosen.median_us:.2f} us, run {chosen.run}"]
        if found.layer != "exact":
            notes.append(f"measured at {found.entry.key.shape}")
        notes.append(rule)
        return KernelDecision(
            config=call.configs[chosen.config],
            source=found.source,
            layer=found.layer,
            grade=found.grade,
            reason="; ".join(notes),
            choices=tuple((item.config, item.median_us, item.spread_us) for item in choices),
        )

    def _timed(self, call: Call, may_measure: bool) -> KernelDecision:
        """By timings of this very kernel, key and device; what lacks one is measured before."""
        known = self._known(call)
        missing = _missing(call, known)
        if missing and not may_measure:
            found = self._look_up(call) or self._first(call)
            reason = f"{found.reason}; {len(missing)} of {len(call.configs)} configs would be timed"
            return KernelDecision(**{**vars(found), "reason": reason, "is_provisional": True})
        if missing:
            self._measure(call, missing, known)
            if tuning.current_overlay() is not None:
                known = self._known(call)  # where the overlay's own come first
        return self._choice(call, known) or KernelDecision(
            config=next(iter(call.configs.values())),
            source=FIRST,
            reason="every config of the list failed: " + "; ".join(
                one.sample.detail for one in known.values()
            )[:500],
        )

    def _choice(self, call: Call, known: Mapping[KernelConfig, Taken]) -> KernelDecision | None:
        timed = _right(call, known)
        if not timed:
            return None
        ordered, rule = choose(
            _of_one_run(timed, next(iter(call.configs)), _dates_of(known)), list(call.configs)
        )
        return KernelDecision(
            config=call.configs[ordered[0].config],
            source=known[ordered[0].config].source,
            layer="exact",
            grade="exact",
            reason=f"{ordered[0].median_us:.2f} us, run {ordered[0].run}; {rule}",
            choices=tuple((item.config, item.median_us, item.spread_us) for item in ordered),
        )

    def _memory(self, call: Call) -> dict[KernelConfig, Taken]:
        return {
            config: Taken(sample, _NOW, MEMORY)
            for config, sample in self._in_memory.get(self._place(call), {}).items()
        }

    def _known(self, call: Call) -> dict[KernelConfig, Taken]:
        if call.device is None:
            return self._memory(call)
        known: dict[KernelConfig, Taken] = {}
        sha256 = self.kernel_sha256()
        found = kernel_sources.find(
            call.key, call.device, call.ordinal, sha256, call.configs,
            has_store=self.cache_results,
        )
        if found is not None and kernel_sources.is_exact(found):
            dates = _dates(found)
            for choice in found.entry.choices:
                if choice.kernel_sha256 in ("", sha256) and not choice.is_drifted:
                    sample = Sample(
                        key=call.key, config=choice.config, median_us=choice.median_us,
                        spread_us=choice.spread_us, count=1, status="ok", run=choice.run,
                    )
                    known[choice.config] = Taken(sample, dates.get(choice.run, ""), found.source)
        is_overlaid = found is not None and found.source == sources.OVERLAY
        overlaid = set(known) if is_overlaid and next(iter(call.configs)) in known else set()
        # These have the failures too. The overlay's own come before them if they are a race: if
        # the default is among them.
        taken = kernel_sources.samples(
            call.key, call.device, call.ordinal, sha256, has_store=self.cache_results
        )
        for one in (*taken, *self._memory(call).values()):
            if one.sample.config not in overlaid:
                known[one.sample.config] = one
        return known

    def _measure(
        self, call: Call, missing: Sequence[KernelConfig], known: dict[KernelConfig, Taken]
    ) -> None:
        """Measures configs; adds their samples to `known`, and stores each as it is taken.

        The best that is known and the default are timed once more, in this order and last: with the
        default the run counts, and all that it has to be compared with is there.
        """
        from stoneware.measuring import search

        is_stored = self.cache_results and call.device is not None and call.ordinal is not None
        run = self._run_on(call.ordinal) if is_stored else None
        memory = self._in_memory.setdefault(self._place(call), {})
        default = next(iter(call.configs))
        right = _right(call, known)
        racing = list(missing)
        if right:
            best = min(
                _of_one_run(right, default, _dates_of(known)),
                key=lambda sample: sample.median_us,
            )
            again = dict.fromkeys((best.config, default))
            if default not in missing and known[default].sample.status != "ok":
                del again[default]
            racing = [*(config for config in missing if config not in again), *again]
        _LOG.info(
            "%s %s: timing %d of %d configs", call.key.op, call.key.shape, len(racing),
            len(call.configs),
        )

        def measure(configs: Sequence[KernelConfig]) -> dict[KernelConfig, float | None]:
            candidates = {config: call.candidate(call.configs[config]) for config in configs}
            medians: dict[KernelConfig, float | None] = {}
            for batch in kernel_tuner.measure(candidates, call.do_bench, call.ordinal):
                samples = [self._sample(call, run, *item) for item in batch.items()]
                for sample in samples:
                    known[sample.config] = Taken(sample, _NOW, MEASURED)
                    medians[sample.config] = sample.median_us or None
                if run is None:
                    memory.update({sample.config: sample for sample in samples})
                else:
                    tuning.keep(run, samples)
            return medians

        before = {
            config: one.sample.median_us or None for config, one in known.items()
            if config in call.configs
        }
        search.run(racing, measure, always=(default,), known=before)

    def _sample(
        self, call: Call, run: Run | None, config: KernelConfig, measured: Measured
    ) -> Sample:
        return kernel_tuner.sample_of(
            call.key, config, measured, self.kernel_sha256() if run else "",
            run.id if run else _MEMORY_RUN,
        )

    def _run_on(self, ordinal: int) -> Run:
        if ordinal not in self._run:
            self._run[ordinal] = kernel_tuner.new_run(ordinal)
        return self._run[ordinal]

    def _say_miss(self, call: Call, mode: str, found: KernelDecision | None) -> None:
        if mode == "on_miss" and call.is_capturing:
            self._say(
                "capture",
                f"{call.key.op}: {call.key.shape} is not measured while a CUDA graph is captured; "
                "call it once before the capture",
            )
        elif mode == "on_miss":
            self._say(
                "cannot measure", f"{call.key.op}: without a GPU configs are timed by do_bench= "
                "alone; the first of the list runs",
            )
        elif found is None and call.ordinal is not None:
            self._say(
                "miss",
                f"{call.key.op}: no timing is known for {call.key.shape}, so the first config of "
                'the list runs; tune with `with stoneware.tuning("on_miss"):` around the calls, '
                "or STONEWARE_TUNING=on_miss",
            )

    def _say(self, what: str, message: str) -> None:
        """Once a kernel."""
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("%s", message)

    def _raise_miss(self, call: Call, found: KernelDecision | None) -> None:
        from stoneware.errors import TuningMissError

        nearest = f"the nearest is {found.layer}, {found.grade} ({found.reason})" if found else (
            "there is none near"
        )
        raise TuningMissError(
            f"{call.key.op} {call.key.shape} must have been measured on "
            f"{call.device or 'this device'} with this kernel, since tuning is error_on_miss; "
            f'{nearest}; run the call once under stoneware.tuning("on_miss")'
        )
