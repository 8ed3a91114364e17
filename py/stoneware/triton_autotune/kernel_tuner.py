"""Measures the configs of a decorated kernel at one call of it.

Hooks are honoured as by triton.autotune: a config's pre_hook, then pre_hook (or reset_to_zero and
restore_value), then the kernel, then post_hook (or the restoring). Where Stoneware's timer
measures, only the kernel is between its events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.tuning.samples import Run, Sample

BATCH_SIZE = 32
"""So many configs are timed against each other before their samples are stored. A process that is
killed loses at most the batch that it was at."""

ROUNDS = 40
ROUNDS_BEFORE_DROP = 5
DROP_RATIO = 1.5
"""A config that is half as slow again as the fastest after five rounds has lost."""

MAX_SECONDS = 3.0
"""A batch takes no longer, after compiling."""

QUANTILES = (0.5, 0.25, 0.75)
"""What is asked of a do_bench: the median, and the ends of the interquartile range, which is the
spread of a sample. (Triton asks for 0.2 and 0.8.)"""

_LOG = logging.getLogger("stoneware.triton_autotune")


@dataclass(kw_only=True)
class Hooks:
    """What runs around each launch while configs are measured.

    Attributes:
      pre_hook, post_hook: the user's, called as triton.autotune calls them; None if there is none.
      reset_to_zero, restore_value: names of tensors.
    """

    pre_hook: Callable[..., Any] | None = None
    post_hook: Callable[..., Any] | None = None
    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()
    _copies: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.pre_hook or self.post_hook or self.reset_to_zero or self.restore_value
        )

    def before(self, arguments: dict[str, Any], *, reset_only: bool = False) -> None:
        """`reset_only`: for the launch that counts, after which nothing is restored."""
        if self.pre_hook:
            # As Triton, which passes reset_only where it is true alone.
            self.pre_hook(arguments, **({"reset_only": True} if reset_only else {}))
            return
        for name in self.reset_to_zero:
            if arguments.get(name) is not None:
                arguments[name].zero_()
        if not reset_only:
            self._copies = {
                name: arguments[name].clone()
                for name in self.restore_value
                if arguments.get(name) is not None
            }

    def after(self, arguments: dict[str, Any], exception: Exception | None) -> None:
        if self.post_hook:
            self.post_hook(arguments, exception=exception)
            return
        copies, self._copies = self._copies, {}
        for name, copy in copies.items():
            arguments[name].copy_(copy)


class Candidate:
    """One config of one call: called, it runs hooks and kernel once.

    Args:
      fn: what is below the decorator, with Triton's `run`.
      config: a triton.Config.
      args, kwargs: of the call, grid and warmup among them.
      arguments: of the call by name, with the config's.
      hooks: the decorator's.
    """

    def __init__(
        self, fn: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        arguments: Mapping[str, Any], hooks: Hooks,
    ) -> None:
        self._fn, self._args, self._hooks = fn, args, hooks
        self._current = {**kwargs, **config.all_kwargs()}
        self.arguments = {**arguments, **self._current}
        self._config_hook = config.pre_hook

    @property
    def has_hooks(self) -> bool:
        return bool(self._hooks or self._config_hook)

    def before(self) -> None:
        if self._config_hook:
            self._config_hook(self.arguments)
        self._hooks.before(self.arguments)

    def kernel(self) -> None:
        self._fn.run(*self._args, **self._current)

    def after(self, exception: Exception | None = None) -> None:
        self._hooks.after(self.arguments, exception)

    def __call__(self) -> None:
        self.before()
        try:
            self.kernel()
        except Exception as error:
            self.after(error)
            raise
        self.after()


@dataclass(frozen=True)
class Measured:
    """What became of one config: microseconds, or the text of its failure."""

    median_us: float = 0.0
    spread_us: float = 0.0
    count: int = 0
    sm_clock_mhz_before: int = 0
    sm_clock_mhz_after: int = 0
    failure: str = ""


def failures() -> tuple[type[Exception], ...]:
    """Errors of a config that cannot be compiled or does not fit the GPU; others are errors."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, CompileTimeAssertionFailure, PTXASError


def measure(
    candidates: Mapping[KernelConfig, Candidate],
    do_bench: Callable[..., Any] | None,
    ordinal: int | None,
) -> Iterator[dict[KernelConfig, Measured]]:
    """Measures every candidate, and gives results as soon as there are some.

    Args:
      candidates: by config.
      do_bench: the user's `do_bench(kernel_call, quantiles=...)`, in milliseconds; None for
        Stoneware's timer.
      ordinal: torch's number of the GPU; used without `do_bench`.

    Raises:
      Exception: what a kernel or hook raises beyond `failures()`; what was measured before has been
        given.
    """
    if do_bench is not None:
        for config, candidate in candidates.items():
            yield {config: _with_do_bench(candidate, do_bench)}
        return
    timer = None
    configs = list(candidates)
    for start in range(0, len(configs), BATCH_SIZE):
        running = {}
        for config in configs[start : start + BATCH_SIZE]:
            try:
                candidates[config]()
            except failures() as error:
                yield {config: _failed(error)}
            else:
                running[config] = candidates[config]
        if running:
            timer = timer or _timer(ordinal, any(call.has_hooks for call in candidates.values()))
            yield _timed(timer, running)


def _with_do_bench(candidate: Candidate, do_bench: Callable[..., Any]) -> Measured:
    try:
        result = do_bench(candidate, quantiles=QUANTILES)
    except failures() as error:
        return _failed(error)
    times_ms = [result] * 3 if isinstance(result, int | float) else [*result, result[0], result[0]]
    median_us, low_us, high_us = (float(value) * 1e3 for value in times_ms[:3])
    return Measured(median_us, max(high_us - low_us, 0.0), 1)


def _failed(error: Exception) -> Measured:
    text = f"{type(error).__name__}: {error}"
    _LOG.info("a config failed: %s", text)
    return Measured(failure=text[:2000])


def _timer(ordinal: int | None, has_hooks: bool) -> Any:
    from stoneware.measuring.device_timer import DeviceTimer

    if not has_hooks:
        return DeviceTimer(ordinal)
    from stoneware.measuring.stopwatch import CudaStopwatch

    return DeviceTimer(ordinal, stopwatch=_BetweenHooks(CudaStopwatch(ordinal)))


class _BetweenHooks:
    """A stopwatch that runs a candidate's hooks around what the other one times."""

    def __init__(self, stopwatch: Any) -> None:
        self._stopwatch = stopwatch

    def sm_clock_mhz(self) -> int:
        return self._stopwatch.sm_clock_mhz()

    def warm_up(self, name: Any, call: Candidate) -> None:
        self._around(call, self._stopwatch.warm_up, name)

    def time_call(self, name: Any, call: Candidate) -> float:
        return self._around(call, self._stopwatch.time_call, name)

    def capture(self, call: Any, num_pairs: int) -> None:
        """None: hooks are not captured, so nothing is."""

    def time_graph(self, name: Any, graph: Any) -> float:
        raise AssertionError("nothing is captured")

    def _around(self, call: Candidate, step: Callable[..., Any], name: Any) -> Any:
        call.before()
        try:
            result = step(name, call.kernel)
        except Exception as error:
            call.after(error)
            raise
        call.after()
        return result


def _timed(timer: Any, running: Mapping[KernelConfig, Candidate]) -> dict[KernelConfig, Measured]:
    from stoneware.measuring.device_timer import TimingFailed

    try:
        timings = timer.time(
            running, rounds=ROUNDS, max_seconds=MAX_SECONDS,
            rounds_before_drop=ROUNDS_BEFORE_DROP, drop_ratio=DROP_RATIO,
        )
    except TimingFailed as error:
        raise error.__cause__ from None
    return {
        config: Measured(
            timing.median_us, timing.spread_us, timing.count,
            timing.sm_clock_mhz_before, timing.sm_clock_mhz_after,
        )
        for config, timing in timings.items()
    }


def sample_of(
    key: KernelKey, config: KernelConfig, measured: Measured, kernel_sha256: str, run_id: str
) -> Sample:
    """The sample to store. A time that is not above zero, as of an empty grid, is a failure."""
    failure = measured.failure
    if not failure and not 0 < measured.median_us < float("inf"):
        failure = f"median_us={measured.median_us} must be positive and finite"
    times = {} if failure else {
        # To the nanosecond, below which nothing is known.
        "median_us": max(round(measured.median_us, 3), 0.001),
        "spread_us": round(measured.spread_us, 3), "count": measured.count,
    }
    return Sample(
        key=key, config=config, status="failed" if failure else "ok", detail=failure,
        kernel_sha256=kernel_sha256, run=run_id,
        **{"median_us": 0.0, "spread_us": 0.0, "count": 0, **times},
        sm_clock_mhz_before=measured.sm_clock_mhz_before,
        sm_clock_mhz_after=measured.sm_clock_mhz_after,
    )


def new_run(ordinal: int) -> Run:
    """The run of the samples that a decorated kernel takes in this process."""
    from stoneware.measuring import machine

    return machine.new_run(ordinal, command="sw.autotune")
