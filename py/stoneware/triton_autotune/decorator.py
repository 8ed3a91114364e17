"""sw.autotune: triton.autotune's decorator with timings that stay, and a short way to the GPU.

    @sw.autotune(configs=[triton.Config({"BLOCK": 64}), ...], key=["M", "N", "K"])
    @triton.jit
    def kernel(a_ptr, b_ptr, M, N, K, BLOCK: tl.constexpr): ...

    kernel[grid](a, b, m, n, k)

The way of a launch: the values' kinds (kernel_specialization.py) -> one dict look-up -> `_driver`.
The first launch of a kind: which config (kernel_choice.py) -> its cubin on disk (kernel_cache.py),
else Triton compiles, launches, and the cubin is kept. What only Triton can launch, it launches
each time (kernel_launch.py says what that is). Triton is imported when a kernel is decorated.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import cuda_device
from stoneware.triton_autotune import kernel_call
from stoneware.triton_autotune.kernel_call import KernelSignature, Layout
from stoneware.triton_autotune.kernel_choice import Call, Chooser, KernelDecision, identify
from stoneware.triton_autotune.kernel_identity import (
    Identity, identity_of, op_name, python_function,
)
from stoneware.triton_autotune.kernel_plan import FastPath
from stoneware.triton_autotune.kernel_tuner import Candidate, Hooks
from stoneware.tuning import policy as tuning

MAX_DECISIONS = 4096
"""So many keys a kernel remembers; then all are forgotten and asked for anew."""


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
    """Decorates a `triton.jit` kernel with configs of which the fastest known one runs.

    Takes the arguments of triton.autotune. By default nothing is measured: timings come from
    `stoneware.tuning(overlay=)`, the user's store, the wheel and other packages' tables, and
    without any the first config of the list runs. Under `stoneware.tuning("on_miss")` configs that
    have no timing are measured at the first call of a key, and stored. Ties within the noise go to
    the config that stands first in the list.

    Args:
      configs: triton.Config objects; the first is the default.
      key: parameters by whose values, beside the dtypes of tensors, timings are filed.
      prune_configs_by: "early_config_prune", "perf_model" and "top_k", as in Triton.
      reset_to_zero, restore_value: tensors to zero before, or restore after, each measured launch.
      pre_hook, post_hook: in their place, `pre_hook(arguments, reset_only=...)` and
        `post_hook(arguments, exception=...)`. Hooks do not switch anything off.
      warmup, rep, use_cuda_graph: deprecated in Triton; measure with triton.testing as it did.
      do_bench: `do_bench(kernel_call, quantiles=(0.5, 0.25, 0.75))`, in milliseconds; None for
        Stoneware's interleaved timer.
      cache_results: False neither reads nor writes the user's store or compiled kernels on disk.

    Raises:
      ValueError: `key`, `reset_to_zero` or `restore_value` names no parameter of the kernel.
      TypeError: what is decorated is no kernel.
    """
    if warmup is not None or rep is not None or use_cuda_graph:
        warnings.warn(
            "warmup, rep and use_cuda_graph are deprecated in triton.autotune, and honoured here; "
            "pass do_bench, or none of them for Stoneware's timer",
            DeprecationWarning, stacklevel=3,  # of sw.autotune: the package calls this
        )
        do_bench = _triton_benchmark(warmup, rep, use_cuda_graph)

    def decorate(fn: Any) -> AutotunedKernel:
        return AutotunedKernel(
            fn, configs, key, Pruning.of(prune_configs_by),
            Hooks(
                pre_hook=pre_hook, post_hook=post_hook,
                reset_to_zero=tuple(reset_to_zero or ()), restore_value=tuple(restore_value or ()),
            ),
            do_bench, cache_results,
        )

    return decorate


def _triton_benchmark(
    warmup: int | None, rep: int | None, use_cuda_graph: bool
) -> Callable[..., Any]:
    def do_bench(kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
        from triton import testing

        rep_ms = 100 if rep is None else rep
        if use_cuda_graph:
            return testing.do_bench_cudagraph(kernel_call, rep=rep_ms, quantiles=quantiles)
        warmup_ms = 25 if warmup is None else warmup
        return testing.do_bench(kernel_call, warmup=warmup_ms, rep=rep_ms, quantiles=quantiles)

    return do_bench


@dataclass(frozen=True)
class Pruning:
    """Triton's prune_configs_by."""

    early_config_prune: Callable[..., Any] | None = None
    perf_model: Callable[..., float] | None = None
    top_k: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Pruning:
        given = given or {}
        known = ("early_config_prune", "perf_model", "top_k")
        if not isinstance(given, Mapping) or set(given) - set(known):
            raise ValueError(
                f"prune_configs_by={given!r} must be a dict with some of {', '.join(known)}; "
                "correct the name, or leave it out"
            )
        top_k = given.get("top_k", 1.0)
        if type(top_k) is not int and not (isinstance(top_k, float) and top_k <= 1.0):
            raise TypeError(f"top_k={top_k!r} must be an int, or a float up to 1.0; pass either")
        return cls(given.get("early_config_prune"), given.get("perf_model"), top_k)

    def __call__(
        self, configs: Sequence[Any], named: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """The configs that are left; `named` are the positional arguments, as in Triton."""
        left = list(configs)
        if self.early_config_prune:
            left = list(self.early_config_prune(configs, dict(named), **kwargs))
            if not left:
                from triton.runtime.errors import AutotunerError

                raise AutotunerError(
                    f"early_config_prune must leave at least one config, and left none of "
                    f"{len(configs)}; have it keep the default"
                )
        if self.perf_model:
            most = self.top_k if type(self.top_k) is int else int(len(left) * self.top_k)
            if len(left) > max(most, 1):
                times = [
                    self.perf_model(**{**named, **kwargs, **config.all_kwargs()})
                    for config in left
                ]
                order = sorted(range(len(left)), key=times.__getitem__)
                left = [left[idx] for idx in order[: max(most, 1)]]
        return left


@dataclass(frozen=True, kw_only=True)
class KernelExplanation:
    """What would run for a call of a decorated kernel, and why.

    Attributes:
      key: of the call.
      decision: the config, its source, layer, grade and reason.
      kernel_sha256: digest of the kernel's source, which its timings carry.
      compiled: "in this process", "on disk" or "not yet".
    """

    key: KernelKey
    decision: KernelDecision
    kernel_sha256: str
    compiled: str

    def __str__(self) -> str:
        decision = self.decision
        lines = [
            f"{self.key.op} {self.key.shape}",
            f"  runs     {decision.config}",
            f"  from     {decision.source}: {decision.layer}, {decision.grade}",
            f"  because  {decision.reason}",
            f"  compiled {self.compiled}",
        ]
        lines += [
            f"  {median_us:9.2f} us +- {spread_us:.2f}  {config}"
            for config, median_us, spread_us in decision.choices
        ]
        return "\n".join(lines)


class AutotunedKernel:
    """A Triton kernel with configs; made by `autotune`.

    Attributes:
      fn: what was decorated: a triton.JITFunction, or one under triton.heuristics.
      base_fn: the Python function.
      op: the kernel's name in samples and tables, "package.module:function".
      configs: as given.
      keys, key_idx: the key arguments, and their positions in the kernel's signature.
      arg_names: of the kernel.
      best_config: the config of the last first call of a kind; None before.
      configs_timings: of the last decision, {triton.Config: median in ms}.
    """

    def __init__(
        self, fn: Any, configs: Sequence[Any], key: Sequence[str], pruning: Pruning, hooks: Hooks,
        do_bench: Callable[..., Any] | None, cache_results: bool,
    ) -> None:
        import triton

        self.base_fn = python_function(fn)
        if not hasattr(fn, "arg_names"):
            raise TypeError(
                f"sw.autotune must decorate a kernel, and {self.base_fn.__name__} is a plain "
                "function; put @triton.jit below it"
            )
        self.fn, self.op = fn, op_name(fn)
        self.arg_names = list(fn.arg_names)
        if not isinstance(configs, (list, tuple)):
            raise TypeError(
                f"configs={configs!r} must be a list of triton.Config, not "
                f"{type(configs).__name__}; write configs=[triton.Config(...), ...]"
            )
        for idx, config in enumerate(configs):
            if not isinstance(config, triton.Config):
                raise TypeError(
                    f"configs[{idx}]={config!r} must be a triton.Config, not "
                    f"{type(config).__name__}; write triton.Config({{...}})"
                )
        self.configs = list(configs) or [triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)]
        self.do_bench, self.cache_results = do_bench, cache_results
        self.best_config: Any = None
        self.configs_timings: dict[Any, float] = {}
        self.__name__, self.__doc__ = self.base_fn.__name__, self.base_fn.__doc__
        self.__module__, self.__qualname__ = self.base_fn.__module__, self.base_fn.__qualname__
        self._fast = FastPath(fn, self._identity, is_kept=cache_results)
        self._signature = KernelSignature(
            inspect.signature(self.base_fn), key, self._fast.constants
        )
        self.keys, self.key_idx = list(self._signature.key_names), self._signature.key_idx
        for parameter in ("reset_to_zero", "restore_value"):
            kernel_call.checked_names(parameter, getattr(hooks, parameter), self.arg_names)
        self._pruning, self._hooks = pruning, hooks
        self._chooser = Chooser(
            kernel_sha256=lambda: self._identity().sha256, cache_results=cache_results
        )
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._decisions: dict[Any, KernelDecision] = {}
        self._known_identity: Identity | None = None
        self._generation = tuning.generation()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"AutotunedKernel({self.op}, {len(self.configs)} configs, key={self.keys})"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._launch
        return lambda *args, **kwargs: launch(grid, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"{self.op} must be launched with a grid: {self.__name__}[grid](...); it was called "
            "without"
        )

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launches the kernel; what decorators above this one call.

        Returns:
          Triton's compiled kernel; None if it was launched from disk and Triton knows none.
        """
        if warmup:
            values, layout = self._values(args, kwargs)
            decision = self._decide(grid, args, kwargs, layout, values, may_measure=False)
            return self.fn.run(
                *args, grid=grid, warmup=True, **kwargs, **decision.config.all_kwargs()
            )
        return self._launch(grid, args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Compiles every config that pruning leaves, and launches none; as Triton's."""
        named = dict(zip(self.arg_names, args))
        return [
            self.fn.warmup(*args, **kwargs, **config.all_kwargs())
            for config in self._pruning(self.configs, named, kwargs)
        ]

    def explain(self, *args: Any, grid: Any = (1,), **kwargs: Any) -> KernelExplanation:
        """What a call with these arguments would run and why; nothing is measured or launched.

        Args:
          *args, **kwargs: as of the call.
          grid: as of the call; pruning may look at it.
        """
        values, layout = self._values(args, kwargs)
        decision = self._decide(grid, args, kwargs, layout, values, may_measure=False)
        run = {**dict(zip(self.arg_names, args)), **kwargs, "grid": grid, "warmup": False}
        compiled = self._fast.where(layout, values, decision.config, run)
        return KernelExplanation(
            key=self._key(layout, values), decision=decision,
            kernel_sha256=self._identity().sha256, compiled=compiled,
        )

    @property
    def cache(self) -> dict[KernelKey, Any]:
        """The config of each key that was decided in this process and still holds."""
        with self._lock:
            return {key[0]: decision.config for key, decision in self._decisions.items()}

    def _launch(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tuning.generation() != self._generation:
            self._forget()
        values, layout = self._values(args, kwargs)
        kinds = self._fast.kinds(layout, values)
        if kinds is not None:
            plan = layout.plans.get(kinds[0])
            if plan is not None and not self._fast.must_ask_triton():
                return plan(grid, kinds, values, args, kwargs)
        return self._first_launch(grid, args, kwargs, layout, values, kinds)

    def _first_launch(
        self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout,
        values: Sequence[Any], kinds: Any,
    ) -> Any:
        decision = self._decide(grid, args, kwargs, layout, values)
        config = self.best_config = decision.config
        if kinds is not None:
            plan = self._fast.plan(layout, config)
            with self._lock:
                # Not if another thread has brought new samples since it was decided.
                if self._decisions.get(self._place(layout, values)) is decision:
                    if len(layout.plans) >= MAX_DECISIONS:
                        layout.plans.clear()
                    plan = layout.plans.setdefault(kinds[0], plan)
            if not self._fast.must_ask_triton():
                return plan(grid, kinds, values, args, kwargs)
        if config.pre_hook is not None:
            config.pre_hook(
                {**dict(zip(self.arg_names, args)), **kwargs, "grid": grid, "warmup": False,
                 **config.all_kwargs()}
            )
        return self.fn.run(*args, grid=grid, warmup=False, **kwargs, **config.all_kwargs())

    def _values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Layout]:
        layout = self._layouts.get((len(args), *kwargs))
        if layout is None:
            layout = self._signature.layout(len(args), tuple(kwargs))
            for config in self.configs:
                kernel_call.conflicts(layout.names, config.all_kwargs())
            layout = self._layouts.setdefault((len(args), *kwargs), layout)
        return (*args, *kwargs.values()) if kwargs else args, layout

    def _key(self, layout: Layout, values: Sequence[Any]) -> KernelKey:
        return self._signature.key(self.op, layout.bound(values))

    def _place(self, layout: Layout, values: Sequence[Any]) -> tuple[KernelKey, int | None, int]:
        """Under what a decision is filed: key, GPU, and the state of `sw.tuning`."""
        return self._key(layout, values), _current_device(), tuning.state()

    def _identity(self) -> Identity:
        if self._known_identity is None:
            self._known_identity = identity_of(self.fn)
        return self._known_identity

    def _forget(self) -> None:
        with self._lock:
            self._generation = tuning.generation()
            for layout in list(self._layouts.values()):
                layout.plans.clear()
            self._decisions.clear()

    def _decide(
        self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout,
        values: Sequence[Any], *, may_measure: bool = True,
    ) -> KernelDecision:
        if tuning.generation() != self._generation:
            self._forget()
        with self._lock:
            place = key, ordinal, _ = self._place(layout, values)
            known = self._decisions.get(place)
            if known is not None:
                return known
            generation = tuning.generation()
            decision = self._decide_anew(key, grid, args, kwargs, ordinal, may_measure)
            if not decision.is_provisional and may_measure:
                if len(self._decisions) >= MAX_DECISIONS:
                    self._decisions.clear()
                self._decisions[place] = decision
                if tuning.generation() != generation:
                    self._forget()  # what was measured just now is news to the other plans
                    self._decisions[place] = decision
            return decision

    def _decide_anew(
        self, key: KernelKey, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        ordinal: int | None, may_measure: bool,
    ) -> KernelDecision:
        named = dict(zip(self.arg_names, args))
        run_kwargs = {**kwargs, "grid": grid, "warmup": False}
        configs = self.configs
        if len(configs) > 1:
            configs = self._pruning(configs, named, run_kwargs)
        used: list[Candidate] = []

        def candidate(config: Any) -> Candidate:
            used.append(Candidate(self.fn, config, args, run_kwargs, named, self._hooks))
            return used[-1]

        by_name: dict[KernelConfig, Any] = identify(configs)
        decision = self._chooser.decide(
            Call(
                key=key, configs=by_name, ordinal=ordinal, candidate=candidate,
                device=None if ordinal is None else _fingerprint(ordinal),
                is_capturing=ordinal is not None and tuning.is_capturing(),
                do_bench=self.do_bench,
            ),
            may_measure=may_measure,
        )
        self.configs_timings = {
            by_name[config]: median_us / 1e3 for config, median_us, _ in decision.choices
        }
        if used:
            self._hooks.before(
                {**named, **run_kwargs, **decision.config.all_kwargs()}, reset_only=True
            )
        return decision


def _current_device() -> int | None:
    """torch's number of the current NVIDIA GPU; None without one."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _fingerprint(ordinal: int) -> Any:
    """The GPU's; None where our driver module does not run, as on another vendor's GPU."""
    from stoneware.runtime import native
    from stoneware.runtime.device import DRIVER_MODULE

    import torch

    if torch.version.hip or native.why_missing(DRIVER_MODULE):
        return None
    return cuda_device(ordinal).fingerprint
