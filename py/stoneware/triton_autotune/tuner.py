"""Measures the configs of a decorated kernel with the arguments of one launch.

Hooks run as under triton.autotune: a config's pre_hook, then pre_hook (or reset_to_zero and
restore_value), then the kernel, then post_hook (or the restoring). Stoneware's timer times the
kernel alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import KernelKey
from stoneware.triton_autotune.signature import Launch
from stoneware.tuning.samples import Sample

if TYPE_CHECKING:  # measuring is only imported to measure
    from stoneware.measuring.device_timer import Timing

BATCH_SIZE = 32
"""How many configs are timed interleaved before their samples are stored. A process that is killed loses
at most one batch."""

ROUNDS, ROUNDS_BEFORE_DROP = 40, 5
MAX_SECONDS = 3.0
"""Longest time for a batch, after compiling."""

QUANTILES = (0.5, 0.25, 0.75)
"""Quantiles that a do_bench must return: the median and the ends of the interquartile range, which is
the spread of a sample. (Triton requests 0.2 and 0.8.)"""

_LOG = logging.getLogger("stoneware.triton_autotune")


class Pruning:
    """Triton's prune_configs_by.

    Raises:
      TypeError: top_k is neither an int nor a float up to 1.0.
      ValueError: it is not a dict, or contains another name.
    """

    def __init__(self, prune_configs_by: Mapping[str, Any] | None) -> None:
        defaults = {"early_config_prune": None, "perf_model": None, "top_k": 1.0}
        options = prune_configs_by or {}
        if not isinstance(options, Mapping) or set(options) - set(defaults):
            raise ValueError(
                f"prune_configs_by={prune_configs_by!r} must be a dict with some of {', '.join(defaults)}; "
                "correct the name, or leave it out"
            )
        self.early_config_prune, self.perf_model, self.top_k = {**defaults, **options}.values()
        if type(self.top_k) is not int and not (isinstance(self.top_k, float) and self.top_k <= 1.0):
            raise TypeError(f"top_k={self.top_k!r} must be an int, or a float up to 1.0; pass either")

    def __call__(self, configs: Sequence[Any], named_args: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The configs that are left; `named_args` are a launch's positional arguments, by name."""
        left = list(configs)
        if self.early_config_prune:
            left = list(self.early_config_prune(configs, dict(named_args), **kwargs))
            if not left:
                from triton.runtime.errors import AutotunerError

                raise AutotunerError(  # in Triton's words
                    "No valid autotuner configs after pruning. `early_config_prune` should return at least one config."
                )
        most = max(1, self.top_k if type(self.top_k) is int else int(len(left) * self.top_k))
        if self.perf_model and len(left) > most:
            times = [self.perf_model(**{**named_args, **kwargs, **config.all_kwargs()}) for config in left]
            left = [left[idx] for idx in sorted(range(len(left)), key=times.__getitem__)[:most]]
        return left


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What runs around each launch while configs are measured.

    Attributes:
      pre_hook, post_hook: the user's, called like triton.autotune calls them, or None.
      reset_to_zero, restore_value: names of tensors.
    """

    pre_hook: Callable[..., Any] | None = None
    post_hook: Callable[..., Any] | None = None
    reset_to_zero: Sequence[str] = ()
    restore_value: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.pre_hook or self.post_hook or self.reset_to_zero or self.restore_value)

    def before(self, arguments: dict[str, Any], *, reset_only: bool = False) -> dict[str, Any]:
        """Runs what comes before a launch; returns copies of the tensors to restore.

        Args:
          arguments: of the launch, by name.
          reset_only: for the launch that counts, after which nothing is restored.
        """
        if self.pre_hook:
            # Triton passes reset_only only where it is true.
            self.pre_hook(arguments, **({"reset_only": True} if reset_only else {}))
            return {}
        for name in self.reset_to_zero:
            if arguments.get(name) is not None:
                arguments[name].zero_()
        restored = () if reset_only else self.restore_value
        return {name: arguments[name].clone() for name in restored if arguments.get(name) is not None}

    def after(self, arguments: dict[str, Any], copies: Mapping[str, Any], exception: Exception | None) -> None:
        if self.post_hook:
            self.post_hook(arguments, exception=exception)
            return
        for name, copy in copies.items():
            arguments[name].copy_(copy)


class TimedLaunch:
    """A launch with one of the configs: called, it runs hooks and kernel once.

    Attributes:
      config: the triton.Config.
      arguments: of the launch and the config, by name.
      kernel: runs only the kernel, with the `run` of the decorated function.
    """

    def __init__(self, fn: Any, config: Any, launch: Launch, hooks: Hooks) -> None:
        self.config, self.arguments = config, launch.arguments(config)
        self.has_hooks = bool(hooks or config.pre_hook)
        self.kernel = functools.partial(fn.run, *launch.args, **launch.run_kwargs, **config.all_kwargs())
        self._hooks = hooks

    def around(self, step: Callable[[], Any]) -> Any:
        """Runs `step` between the hooks, and returns its result."""
        if self.config.pre_hook:
            self.config.pre_hook(self.arguments)
        copies = self._hooks.before(self.arguments)
        try:
            result = step()
        except Exception as error:
            self._hooks.after(self.arguments, copies, error)
            raise
        self._hooks.after(self.arguments, copies, None)
        return result

    def __call__(self) -> None:
        self.around(self.kernel)


def failures() -> tuple[type[Exception], ...]:
    """Errors that only mean that a config cannot be compiled or does not fit the GPU."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, CompileTimeAssertionFailure, PTXASError


def measure(
    launches: Mapping[AnyConfig, TimedLaunch], bench: Callable[..., Any] | int
) -> Iterator[dict[AnyConfig, Timing | Exception]]:
    """Times every launch; yields timings, or the error of a config that cannot run, as they come.

    Args:
      launches: by config.
      bench: the user's `do_bench(kernel_call, quantiles=...)`, in milliseconds; or torch's number of
        the GPU, for Stoneware's timer.

    Raises:
      Exception: what a kernel or hook raises, except `failures()`.
    """
    if not isinstance(bench, int):
        for config, launch in launches.items():
            yield {config: _with_do_bench(launch, bench)}
        return
    from stoneware.measuring.device_timer import MEASURING, TimingFailed

    timer = None
    configs = list(launches)
    for start in range(0, len(configs), BATCH_SIZE):
        running = {}
        for config in configs[start : start + BATCH_SIZE]:
            try:
                launches[config]()
            except failures() as error:
                yield {config: error}
            else:
                running[config] = launches[config]
        if running:
            timer = timer or _timer(bench)
            try:
                with MEASURING:
                    timings = timer.time(
                        running, rounds=ROUNDS, max_seconds=MAX_SECONDS, rounds_before_drop=ROUNDS_BEFORE_DROP
                    )
            except TimingFailed as error:
                raise (error.__cause__ or error) from None
            yield timings


def _with_do_bench(launch: TimedLaunch, do_bench: Callable[..., Any]) -> Timing | Exception:
    from stoneware.measuring.device_timer import Timing

    try:
        result = do_bench(launch, quantiles=QUANTILES)
    except failures() as error:
        return error
    times_ms = [result] * 3 if isinstance(result, int | float) else [*result, result[0], result[0]]
    median_us, low_us, high_us = (float(value) * 1e3 for value in times_ms[:3])
    return Timing(median_us, max(high_us - low_us, 0.0), 1)


def triton_benchmark(warmup: int | None, rep: int | None, use_cuda_graph: bool) -> Callable[..., Any]:
    """The do_bench that triton.autotune makes of its deprecated options."""
    from triton import testing

    rep_ms = 100 if rep is None else rep
    if use_cuda_graph:
        return functools.partial(testing.do_bench_cudagraph, rep=rep_ms)
    return functools.partial(testing.do_bench, warmup=25 if warmup is None else warmup, rep=rep_ms)


def _timer(ordinal: int) -> Any:
    from stoneware.measuring.device_timer import DeviceTimer
    from stoneware.measuring.stopwatch import CudaStopwatch

    return DeviceTimer(ordinal, stopwatch=_BetweenHooks(CudaStopwatch(ordinal)))


class _BetweenHooks:
    """A stopwatch that runs the hooks of a TimedLaunch around what another stopwatch times."""

    def __init__(self, stopwatch: Any) -> None:
        self._stopwatch = stopwatch
        self.sm_clock_mhz, self.time_graph = stopwatch.sm_clock_mhz, stopwatch.time_graph

    def warm_up(self, name: Any, call: TimedLaunch) -> None:
        call.around(lambda: self._stopwatch.warm_up(name, call.kernel))

    def time_call(self, name: Any, call: TimedLaunch) -> float:
        return call.around(lambda: self._stopwatch.time_call(name, call.kernel))

    def capture(self, call: TimedLaunch | None, num_pairs: int) -> Any:
        """A CUDA graph of a kernel, or of no call; None with hooks, which cannot be captured."""
        if call is not None and call.has_hooks:
            return None
        return self._stopwatch.capture(call and call.kernel, num_pairs)


def sample_of(key: KernelKey, config: AnyConfig, result: Timing | Exception, kernel_sha256: str, run_id: str) -> Sample:
    """The sample to store. A time that is not above zero, like that of an empty grid, is a failure."""
    from stoneware.measuring.device_timer import Timing

    failure, timing = "", Timing()
    if isinstance(result, Exception):
        failure = f"{type(result).__name__}: {result}"[:2000]
    elif not 0 < result.median_us < float("inf"):
        failure = f"median_us={result.median_us} must be positive and finite"
    else:
        timing = result
    if failure:
        _LOG.info("%s of %s failed: %s", config, key.op, failure)
    return Sample(
        key=key,
        config=config,
        status="failed" if failure else "ok",
        **timing.figures,
        kernel_sha256=kernel_sha256,
        run=run_id,
        detail=failure,
    )
