"""From a problem to a plan: queries the backends, the table and the heuristic, and makes the plan.

Runs on a miss of an op's plan cache, and in `explain`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from stoneware.errors import TuningMissError, UnsupportedError, quoted
from stoneware.kernels import manifest, split_k, sum_order, tile_rule
from stoneware.kernels.config import REFERENCE, VENDOR, Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest
from stoneware.ops.backend import Backend, Plan
from stoneware.runtime.device import Device
from stoneware.specs.op_spec import OpSpec
from stoneware.tuning import lookup, sources
from stoneware.tuning import policy as tuning
from stoneware.tuning.lookup import Answer, Decision, Grade, Refusal

_LOG = logging.getLogger("stoneware")

_MOST_CHOICES = 40
"""Most choices of a modelled entry where only few kernels come into question."""


class Operation:
    """An op and its backends.

    Args:
      spec: of the op.
      backends: in the order in which the default step tries them. The last is the reference, which
        runs anywhere and is the last resort on a GPU.

    Attributes:
      spec: as above.
      backends: by name.
    """

    def __init__(self, spec: OpSpec, *backends: Backend) -> None:
        self.spec = spec
        self.backends = {backend.name: backend for backend in backends}

    def preferred(self, key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
        """The configs of the heuristic, best first."""
        return self.spec.preferred(key, compute_capability, manifest)

    def candidates(self, problem: Any, device: Device) -> list[Config]:
        """The configs that are timed: all that can run the problem, except those whose tile is far from m.
        The reference is timed only if no other backend can run it."""
        configs = _Backends(self, problem, device).configs()
        key, kernels = problem.key, manifest.packaged().kernels
        first = {config.backend: config for config in reversed(configs)}.values()
        kernel_of = {config: kernels[config.kernel] for config in configs if config.kernel in kernels}
        largest = max(map(tile_rule.tile_m, kernel_of.values()), default=0)
        near = [
            config
            for config in configs
            if config in first or config not in kernel_of or tile_rule.is_worth_timing(kernel_of[config], key, largest)
        ]
        others = [config for config in near if config.backend != REFERENCE]
        return others or near

    def decide(
        self,
        problem: Any,
        device: Device,
        *,
        backend: str | None = None,
        config: Config | None = None,
        lists_refusals: bool = True,
        checks_vendor: bool = False,
        only_open: bool = False,
    ) -> Decision:
        """Chooses the config; see `lookup.decide` for the order.

        Args:
          problem, device: the call.
          backend: use configs of this backend only.
          config: use this config.
          lists_refusals: whether the decision lists every backend that cannot run the problem, or only
            the refusals on the way to the choice, which takes less time.
          checks_vendor: whether the vendor's kernel may run now to compare its bits with ours, if results
            must be batch invariant.
          only_open: whether the kernel must be open, for an epilogue. If there are `tile_rule.overlapping_kernels`,
            it is one of these.

        Raises:
          TypeError, ValueError: `backend` or `config` is not valid.
          UnsupportedError: nothing can run the problem; every refusal is listed.
          TableError: the table or the manifest is damaged.
        """
        self.check_argument(backend, config)
        key = problem.key
        has_kernels = device.kind == "cuda" and config is None
        is_invariant = tuning.is_batch_invariant()
        if is_invariant and device.kind == "cpu":
            _warn_once(
                f"no promise of {self.spec.name}",
                "sw.%s runs on the CPU, where batch invariance is not promised: torch's own kernels run there",
                self.spec.name,
            )
            is_invariant = False
        backends = _Backends(self, problem, device, backend)

        def why_not(config: Config) -> str | None:
            reason = backends.refusal(config)
            if reason is None and only_open and config.kernel not in manifest.packaged().open:
                reason = f"kernel {config.kernel} is not open: no epilogue can be linked into it"
            if reason is None and is_invariant:
                return self._why_not_invariant(config, problem, device, checks_vendor)
            return reason

        overlapping: list[str] = []
        if only_open and has_kernels:
            configs = self._overlapping_configs(key, device)
            overlapping = [config.kernel for config in configs if why_not(config) is None]

        def refusal(config: Config) -> str | None:
            if overlapping and config.kernel not in overlapping:
                return f"kernel {overlapping[0]} multiplies while it computes an epilogue"
            return why_not(config)

        def others() -> Iterator[tuple[Grade, str, Sequence[Config]]]:
            if config is not None:
                yield Grade.ARGUMENT, "the caller gave it", [config]
                return
            if has_kernels:
                preferred = self.preferred(key, device.compute_capability, manifest.packaged())
                for name, configs in itertools.groupby(preferred, lambda preference: preference.backend):
                    yield Grade.HEURISTIC, self.spec.preferred_reason[name], list(configs)
            first = "no measurement and no heuristic applies; the first that can run here"
            yield Grade.DEFAULT, first, backends.configs()

        options: dict[str, Any] = {"excludes_split_k": is_invariant, "only_open": only_open}
        if overlapping:
            options["most_choices"] = _MOST_CHOICES

        def decide_with(refusal: Callable[[Config], str | None]) -> Decision:
            return lookup.decide(
                key,
                device,
                answers=_answers(key, device, **options) if has_kernels else (),
                others=others(),
                refusal=refusal,
                refused_backends=lambda: backends.refusals(asks_all=lists_refusals),
                backend=backend,
            )

        decision = decide_with(refusal)
        conversion = self.backends[decision.config.backend].conversion(problem)
        if conversion is None:
            return decision
        if (rival := _faster_than(decision, conversion.us, refusal)) is not None:
            slower, reason = decision.config, f"{conversion.text}; {rival} is faster than both together"
            return decide_with(lambda config: reason if config == slower else refusal(config))
        return replace(decision, reason=f"{decision.reason}; {conversion.text}")

    def _overlapping_configs(self, key: Key, device: Device) -> list[Config]:
        """The open kernels that multiply while they compute an epilogue of this problem, if its result is large."""
        packaged = manifest.packaged()
        kernels = (kernel for id, kernel in packaged.of_op(self.spec.name).items() if id in packaged.open)
        assert device.fingerprint is not None  # a GPU has one
        ids = tile_rule.overlapping_kernels(kernels, key, device.compute_capability, device.fingerprint.num_sms)
        return [Config.of_kernel(packaged.kernels[id].backend, id) for id in ids]

    def plan(self, problem: Any, device: Device, *, backend: str | None = None, config: Config | None = None) -> Plan:
        """Decides, and makes the plan. A miss is tuned first under `sw.tuning("on_miss")`.

        Arguments and errors are those of `decide`, and

        Raises:
          TuningMissError: the mode is "error_on_miss" and the problem was not measured.
        """
        options = {"backend": backend, "config": config, "checks_vendor": True}
        epoch = tuning.EPOCH[0]
        decision = self.decide(problem, device, **options, lists_refusals=False)
        if device.kind == "cuda" and decision.is_miss and _is_tuned_on_miss(self.spec.name, problem, device, decision):
            from stoneware.measuring import candidates, device_timer

            with device_timer.MEASURING:
                if tuning.EPOCH[0] != epoch:  # another thread may have measured this very problem
                    decision = self.decide(problem, device, **options)
                if decision.is_miss:
                    # A call with a choice of its own may refuse each one that is expected to be fastest.
                    is_restricted = backend is not None or tuning.is_batch_invariant()
                    candidates.tune_on_miss(self, problem.representative, device, measures_all=is_restricted)
                    decision = self.decide(problem, device, **options)
        if decision.config.backend == REFERENCE and backend is None and config is None:
            _warn_of_reference(self.spec.name, device, decision)
        return self.backends[decision.config.backend].plan(problem, decision.config, device)

    def answers(self, key: Key, device: Device, most_choices: int) -> Iterator[Answer]:
        """What the tables answer for a key, whatever may run; see `lookup.answers`."""
        return _answers(key, device, most_choices=most_choices)

    def make_plan(self, problem: Any, config: Config, device: Device) -> Plan:
        """The plan of one config, for tuners, also inside `sw.batch_invariant`.

        Raises:
          UnsupportedError: the config cannot run here.
        """
        reason = _Backends(self, problem, device).refusal(config)
        if reason is not None:
            raise UnsupportedError(f"config={config} cannot run {problem} on {device}: {reason}; take another config")
        return self.backends[config.backend].plan(problem, config, device)

    def _why_not_invariant(self, config: Config, problem: Any, device: Device, checks_vendor: bool) -> str | None:
        """Why the results of a config that can run may depend on the batch, or None."""
        if config.backend == VENDOR and self.backends[VENDOR].may_have_our_bits(problem):
            from stoneware.ops import vendor_bits

            return vendor_bits.why_not(self, config, problem, device, may_run=checks_vendor)
        record = manifest.packaged().kernels.get(config.kernel)
        return sum_order.why_not_invariant(record, config, problem.key)

    def check_argument(self, backend: str | None, config: Config | None) -> None:
        """Raises TypeError or ValueError unless both are valid."""
        remedy = f"one of {', '.join(self.backends)}, or leave it out"
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend={quoted(backend)} must be a str, not {type(backend).__name__}; pass {remedy}")
        if backend is not None and backend not in self.backends:
            raise ValueError(f"backend={quoted(backend)} is an unknown backend for {self.spec.name}; expected {remedy}")
        if config is None:
            return
        if not isinstance(config, Config):
            raise TypeError(
                f"config={quoted(config)} must be a stoneware.kernels.config.Config, "
                f"not {type(config).__name__}; take stoneware.explain(...).config, or leave it out"
            )
        if backend is not None and config.backend != backend:
            raise ValueError(
                f"backend={quoted(backend)} and config.backend={quoted(config.backend)} must agree; leave backend out"
            )


class _Backends:
    """The configs and refusals of each backend for one problem, computed once, when they are needed.

    Args:
      operation, problem, device: the call to decide.
      only: the only backend to use; None for all.
    """

    def __init__(self, operation: Operation, problem: Any, device: Device, only: str | None = None) -> None:
        self._operation, self._problem, self._device = operation, problem, device
        self._only = only
        self._names = [name for name in operation.backends if only in (None, name)]
        self._reasons: dict[str, str | None] = {}
        self._configs: dict[str, list[Config]] = {}

    def _reason(self, name: str) -> str | None:
        """Why a backend does not support the problem, or None."""
        if name not in self._reasons:
            backend = self._operation.backends[name]
            self._reasons[name] = backend.supports(self._problem, self._device)
        return self._reasons[name]

    def _configs_of(self, name: str) -> list[Config]:
        if name not in self._configs:
            backend = self._operation.backends[name]
            self._configs[name] = backend.configs(self._problem, self._device) if self._reason(name) is None else []
        return self._configs[name]

    def configs(self) -> list[Config]:
        """The configs of every backend that supports the problem, in the order of the backends."""
        return [config for name in self._names for config in self._configs_of(name)]

    def refusals(self, *, asks_all: bool) -> list[Refusal]:
        """The backends that do not support the problem; without `asks_all`, only those that were
        queried before."""
        return [
            Refusal(what=name, reason=reason)
            for name in self._names
            if (asks_all or name in self._reasons) and (reason := self._reason(name)) is not None
        ]

    def refusal(self, config: Config) -> str | None:
        """Why a config of a known or unknown backend cannot run the problem; None if it can."""
        name = config.backend
        if self._only is not None and name != self._only:
            return f"backend={self._only!r} was requested"
        if name not in self._operation.backends:
            return f"{self._operation.spec.name} has no backend {quoted(name)}; it has {list(self._operation.backends)}"
        reason = self._reason(name)
        if reason is not None:
            return reason
        record = manifest.packaged().kernels.get(config.kernel)
        # Checking one kernel is cheaper than listing all configs of the backend.
        is_candidate = (
            record is not None
            and (record.op, record.backend) == (self._operation.spec.name, name)
            and self._operation.backends[name].runs(self._problem, record)
        )
        if not is_candidate and config.kernel not in (
            kernels := {candidate.kernel for candidate in self._configs_of(name)}
        ):
            return (
                f"kernel {quoted(config.kernel)} is not one of those that {name} has for this "
                f"problem: {', '.join(sorted(kernels))}"
            )
        key = self._problem.key
        return record and split_k.why_not(record, key.m, key.n, key.k, config.splits)


def _faster_than(decision: Decision, extra_us: float, refusal: Callable[[Config], str | None]) -> Config | None:
    """The fastest runner-up that can run, if it is faster than the choice plus `extra_us`."""
    if decision.chosen is None:
        return None
    limit_us = decision.chosen.median_us + extra_us
    faster = [
        runner_up
        for runner_up in decision.runners_up
        if runner_up.median_us < limit_us and refusal(runner_up.config) is None
    ]
    return min(faster, key=lambda runner_up: runner_up.median_us).config if faster else None


def _answers(key: Key, device: Device, **options: Any) -> Iterator[Answer]:
    """`lookup.answers` with the sources of this process.

    Packages are searched only if this installation has no measurement of the exact problem on this device: finding
    them takes 15 ms.
    """
    near = sources.sources(key.op, has_packages=False)
    fingerprint = sources.with_power_limit(device.fingerprint, device.ordinal, near)
    answers = lookup.answers(key, fingerprint, near, **options)
    first = next(answers, None)
    if first is None or not first.is_exact:
        everywhere = sources.with_packages(key.op, near)
        if len(everywhere) > len(near):
            yield from lookup.answers(key, fingerprint, everywhere, **options)
            return
    if first is not None:
        yield first
        yield from answers


def _is_tuned_on_miss(op: str, problem: Any, device: Device, decision: Decision) -> bool:
    """Whether a miss is to be measured now.

    Raises:
      TuningMissError: misses are errors.
    """
    mode = tuning.current_mode()
    if mode == "off":
        return False
    if mode == "error_on_miss":
        raise TuningMissError(
            f"{problem} on {device} must have been measured, because tuning is 'error_on_miss', "
            f"and its config would come from step {decision.step!r} with grade "
            f"{decision.grade!r}; measure it with `python -m stoneware tune`, call it once inside "
            'sw.tuning("on_miss"), or use sw.tuning("off")'
        )
    if tuning.is_capturing():
        _warn_once(
            f"capture of {op}",
            "%s was not measured and is not now, because a CUDA graph is being captured; it "
            "runs %s by step %r; call it once before the capture, inside "
            'sw.tuning("on_miss")',
            problem,
            decision.config,
            decision.step,
        )
        return False
    return True


def _warn_of_reference(op: str, device: Device, decision: Decision) -> None:
    """Warns once per process and kind of device that only the reference runs, and why."""
    subject = f"reference on {device.kind}"
    if device.kind == "cpu":
        text = "sw.%s runs on the CPU with the reference backend, which is slow and meant for checking results"
        _warn_once(subject, text, op)
        return
    _warn_once(
        subject,
        "%s runs on %s with the reference backend, which is slow, because no other backend can: %s",
        op,
        device,
        "; ".join(map(str, decision.refusals)),
    )


_subjects: set[str] = set()
"""Subjects of earlier warnings."""


def _warn_once(subject: str, text: str, *values: object) -> None:
    """Logs a warning unless this process had one on the same subject."""
    if subject not in _subjects:
        _subjects.add(subject)
        _LOG.warning(text, *values)
