"""sw.autotune: triton.autotune's decorator, with timings that last and short launches.

    @sw.autotune(configs=[triton.Config({"BLOCK": 64}), ...], key=["M", "N", "K"])
    @triton.jit
    def kernel(a_ptr, b_ptr, M, N, K, BLOCK: tl.constexpr): ...

    kernel[grid](a, b, m, n, k)

The path of a launch: the kinds of the values (specialization.py) -> one dict look-up -> `_driver`.
The first launch of a kind: which config (choice.py) -> its cubin on disk (cache.py); otherwise Triton
compiles and launches it, and the cubin is stored. Kernels that only Triton can launch (launch.py lists
the reasons) are launched by Triton each time. Triton is imported when a kernel is decorated.

Threads: no lock is held here, in particular not during pruning, hooks or measurements. A decision or
plan carries the epoch of `tuning` in which it was made. Once the epoch has changed, the next launch
decides again, by a look-up, and keeps the plan if the config is still the same.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.errors import UnsupportedError
from stoneware.kernels.key import KernelKey
from stoneware.runtime import native
from stoneware.runtime.device import DRIVER_MODULE, DeviceFingerprint, cuda_device
from stoneware.triton_autotune.choice import MEASURED, OTHER, Chooser, KernelDecision, KernelRace, identify
from stoneware.triton_autotune.identity import op_name, python_function
from stoneware.triton_autotune.plan import FastPath, KernelPlan, Kinds
from stoneware.triton_autotune.signature import Form, KernelSignature, Launch, check_names, check_passed_once
from stoneware.triton_autotune.tuner import Hooks, Pruning, triton_benchmark
from stoneware.tuning import policy

MAX_DECISIONS = 4096
"""Most decisions cached per kernel, and most plans per form of launches; past it all are dropped."""


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = True,
) -> Callable[[Any], AutotunedKernel]:
    """Decorates a `triton.jit` kernel so that its fastest measured config runs.

    Takes the arguments of triton.autotune. By default nothing is measured: timings come from
    `stoneware.tuning(overlay=)`, the user's store, the wheel and other packages' tables. Without
    timings, the first config of the list runs. Under `stoneware.tuning("on_miss")`, configs
    without a timing are measured at the first call with a key, and the timings are stored. Ties
    within the noise go to the config that comes first in the list.

    Args:
      configs: triton.Config objects; the first is the default. An empty list has one: 4 warps, 3 stages, as in Triton.
      key: parameters whose values, besides the dtypes of tensors, identify a problem.
      prune_configs_by: "early_config_prune", "perf_model" and "top_k", as in Triton.
      reset_to_zero, restore_value: tensors to zero before, or restore after, each measured launch.
      pre_hook, post_hook: replace these two: `pre_hook(arguments, reset_only=...)` and
        `post_hook(arguments, exception=...)`. Timings are also kept with hooks.
      warmup, rep, use_cuda_graph: deprecated in Triton; measure with triton.testing as it did.
      do_bench: `do_bench(kernel_call, quantiles=(0.5, 0.25, 0.75))`, in milliseconds; None for
        Stoneware's interleaved timer.
      cache_results: False neither reads nor writes the user's store or compiled kernels on disk.

    Raises:
      ValueError: `key`, `reset_to_zero` or `restore_value` names no parameter of the kernel.
      TypeError: the decorated object is not a kernel, or an argument has the wrong type.
    """
    if warmup is not None or rep is not None or use_cuda_graph:
        warnings.warn(
            "warmup, rep and use_cuda_graph are deprecated in triton.autotune, and honoured here; "
            "pass do_bench, or none of them for Stoneware's timer",
            DeprecationWarning,
            stacklevel=2,
        )
        do_bench = triton_benchmark(warmup, rep, use_cuda_graph)
    hooks = Hooks(
        pre_hook=pre_hook, post_hook=post_hook, reset_to_zero=reset_to_zero or (), restore_value=restore_value or ()
    )
    return lambda fn: AutotunedKernel(fn, configs, key, Pruning(prune_configs_by), hooks, do_bench, cache_results)


class AutotunedKernel:
    """A Triton kernel with configs; made by `autotune`.

    Attributes:
      fn: what was decorated: a triton.JITFunction, or one under triton.heuristics.
      base_fn: the Python function.
      op: the kernel's name in samples and tables, "package.module:function".
      configs: as given.
      keys, key_idx: the key arguments, and their positions in the kernel's signature.
      arg_names: of the kernel.
      best_config: the config that was decided last; None before.
      configs_timings: of the last decision, {triton.Config: median in ms}.
    """

    def __init__(
        self,
        fn: Any,
        configs: Sequence[Any],
        key: Sequence[str],
        pruning: Pruning,
        hooks: Hooks,
        do_bench: Callable[..., Any] | None,
        cache_results: bool,
    ) -> None:
        self.base_fn = python_function(fn)
        if not hasattr(fn, "arg_names"):
            raise TypeError(
                f"sw.autotune must decorate a kernel, and {self.base_fn.__name__} is a plain "
                "function; put @triton.jit below it"
            )
        self.fn, self.op = fn, op_name(fn)
        self.arg_names = list(fn.arg_names)
        self.configs = _check_configs(configs)
        self.do_bench, self.cache_results = do_bench, cache_results
        self.best_config: Any = None
        self.configs_timings: dict[Any, float] = {}
        self.__name__, self.__doc__ = self.base_fn.__name__, self.base_fn.__doc__
        self.__module__, self.__qualname__ = self.base_fn.__module__, self.base_fn.__qualname__
        self._fast = FastPath(fn, uses_disk=cache_results)
        self._signature = KernelSignature(
            inspect.signature(self.base_fn),
            key,
            [name for name, item in self._fast.parameters.items() if item.is_constexpr],
        )
        self.keys, self.key_idx = list(self._signature.key_names), self._signature.key_idx
        check_names("reset_to_zero", hooks.reset_to_zero, self.arg_names)
        check_names("restore_value", hooks.restore_value, self.arg_names)
        self._pruning = pruning
        self._chooser = Chooser(
            fn=fn,
            hooks=hooks,
            kernel_sha256=lambda: self._fast.identity.sha256,
            do_bench=do_bench,
            cache_results=cache_results,
        )
        self._forms: dict[tuple[Any, ...], Form] = {}  # by the number of positional values, and the keywords
        # By key, GPU and state of `tuning`; each with the epoch in which it was made.
        self._decisions: dict[Any, tuple[KernelDecision, int]] = {}

    def __repr__(self) -> str:
        return f"AutotunedKernel({self.op}, {len(self.configs)} configs, key={self.keys})"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._launch
        return lambda *args, **kwargs: launch(grid, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{self.op} must be launched with a grid: {self.__name__}[grid](...); it was called without")

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launches the kernel; decorators above this one call it.

        Returns:
          Triton's compiled kernel; None if it was launched from disk and Triton has none.
        """
        if warmup:
            config = self.explain(*args, grid=grid, **kwargs).config
            return self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())
        return self._launch(grid, args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Compiles every config that pruning leaves, and launches none, like Triton's."""
        named = dict(zip(self.arg_names, args))
        return [
            self.fn.warmup(*args, **kwargs, **config.all_kwargs())
            for config in self._pruning(self.configs, named, kwargs)
        ]

    def explain(self, *args: Any, grid: Any = (1,), **kwargs: Any) -> KernelDecision:
        """What a launch with these arguments would run and why; nothing is measured or launched.

        Args:
          *args, **kwargs: as of the launch.
          grid: as of the launch; pruning may look at it.
        """
        form, values = self._form(args, kwargs)
        return self._decide(Launch(form, values, grid, args, kwargs), may_measure=False)

    @property
    def cache(self) -> dict[KernelKey, Any]:
        """The config that was decided last for each key, in this process."""
        return {place[0]: decision.config for place, (decision, _) in [*self._decisions.items()]}

    def _launch(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form, values = self._form(args, kwargs)
        kinds = self._fast.kinds(form, values)
        if kinds is None:
            return self._launch_by_triton(Launch(form, values, grid, args, kwargs))
        plan = form.plans.get(kinds[0])
        if plan is None or plan.epoch != policy.EPOCH[0]:
            plan = self._plan(Launch(form, values, grid, args, kwargs), kinds)
        return plan(grid, kinds, values, args, kwargs)

    def _plan(self, launch: Launch, kinds: Kinds) -> KernelPlan:
        epoch, decision, plans = policy.EPOCH[0], self._decide(launch), launch.form.plans
        self.best_config = decision.config
        plan = plans.get(kinds[0])
        if plan is None or plan.config is not decision.config:
            plan = KernelPlan(self._fast, launch.form, decision.config)
        if not decision.is_provisional:
            plan.epoch = epoch
            _put(plans, kinds[0], plan)
        return plan

    def _launch_by_triton(self, launch: Launch) -> Any:
        _check_driver(self.op, self.fn)
        config = self._decide(launch).config
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook(launch.arguments(config))
        return self.fn.run(*launch.args, **launch.run_kwargs, **config.all_kwargs())

    def _form(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form, tuple[Any, ...]]:
        """The form of a launch, and its values in that order."""
        form = self._forms.get((len(args), *kwargs))
        if form is None:
            form = self._signature.form(len(args), tuple(kwargs))
            for config in self.configs:
                check_passed_once(form.names, config.all_kwargs())
            form = self._forms.setdefault((len(args), *kwargs), form)
        return form, (*args, *kwargs.values()) if kwargs else args

    def _decide(self, launch: Launch, *, may_measure: bool = True) -> KernelDecision:
        key, ordinal = self._signature.key(self.op, launch.form.parameters(launch.values)), _current_device()
        place, epoch = (key, ordinal, policy.state()), policy.EPOCH[0]
        decision, decision_epoch = self._decisions.get(place, (None, -1))
        # Nothing is newer than what was measured here, whatever samples others have brought.
        is_measured = decision and decision.source == MEASURED and not policy.wheel_only()
        if decision and (is_measured or decision_epoch == epoch):
            return decision
        configs = self.configs
        if len(configs) > 1:
            configs = self._pruning(configs, launch.named_args, launch.run_kwargs)
        race = KernelRace(
            launch=launch, key=key, configs=identify(configs), device=_fingerprint(ordinal), ordinal=ordinal
        )
        decision = self._chooser.decide(race, may_measure=may_measure)
        self.configs_timings = {race.configs[choice.config]: choice.median_us / 1e3 for choice in decision.choices}
        if may_measure and not decision.is_provisional:
            _put(self._decisions, place, (decision, epoch))
        return decision


def _put(cache: dict[Any, Any], place: Any, value: Any) -> None:
    if len(cache) >= MAX_DECISIONS and place not in cache:
        cache.clear()
    cache[place] = value


def _check_configs(configs: Sequence[Any]) -> list[Any]:
    import triton

    if not isinstance(configs, (list, tuple)):
        raise TypeError(
            f"configs={configs!r} must be a list of triton.Config, not {type(configs).__name__}; "
            "write configs=[triton.Config(...), ...]"
        )
    for idx, config in enumerate(configs):
        if not isinstance(config, triton.Config):
            raise TypeError(
                f"configs[{idx}]={config!r} must be a triton.Config, not "
                f"{type(config).__name__}; write triton.Config({{...}})"
            )
    return list(configs) or [triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)]


def _check_driver(op: str, fn: Any) -> None:
    """Raises UnsupportedError if Triton has no GPU to launch on, and does not interpret the kernel."""
    from triton.runtime.driver import driver

    try:
        _ = driver.active
    except RuntimeError as error:
        from triton.runtime.interpreter import InterpretedFunction

        while hasattr(fn, "fn"):  # under triton.heuristics
            if isinstance(fn, InterpretedFunction):
                return
            fn = fn.fn
        raise UnsupportedError(
            f"{op} must be launched on a machine with a GPU, and Triton finds none: {error}; run it on a GPU, or set "
            "TRITON_INTERPRET=1 before the kernel is decorated"
        ) from error


def _current_device() -> int | None:
    """torch's number of the current NVIDIA GPU; None without one."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _fingerprint(ordinal: int | None) -> DeviceFingerprint:
    """The GPU's; of compute capability OTHER where our driver module does not run, as on another vendor's GPU."""
    import torch

    if ordinal is None:
        return DeviceFingerprint(name="CPU", compute_capability=OTHER, num_sms=0, l2_bytes=0, memory_clock_khz=0)
    if torch.version.hip or native.why_missing(DRIVER_MODULE):
        properties = torch.cuda.get_device_properties(ordinal)
        return DeviceFingerprint(
            name=properties.name,
            compute_capability=OTHER,
            num_sms=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            memory_clock_khz=0,
        )
    fingerprint = cuda_device(ordinal).fingerprint
    assert fingerprint is not None  # only a CPU has none
    return fingerprint
