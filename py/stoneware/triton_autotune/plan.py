"""Plans: how calls of one kind of a decorated kernel are launched, by the driver or by Triton.

A plan holds the config that was decided. Its variants, one for each outcome of the heuristics below
the decorator (without heuristics one), hold the compiled kernel; the variant of a kernel that only
Triton can launch is None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stoneware.triton_autotune import cache, launch
from stoneware.triton_autotune.cache import LaunchDescription
from stoneware.triton_autotune.call import Layout
from stoneware.triton_autotune.identity import Identity
from stoneware.triton_autotune.launch import NotLaunchable
from stoneware.triton_autotune.specialization import INT32_MAX, Kinds, Specialization, specialize
from stoneware.tuning import policy as tuning

_ABSENT = object()

_LOG = logging.getLogger("stoneware.triton_autotune")

CallKinds = tuple[tuple[Any, ...], list[Any], int]
"""What decides how a call is launched. First the key of its plan: device, tuning state, and a token
of each value. Then the values, with addresses in place of tensors, and the device. A tuple, since
every launch makes one."""


class Compiled(NamedTuple):
    """A kernel ready to launch: `_driver`'s launch, its description, Triton's kernel if known."""

    launch: Callable[..., None]
    description: LaunchDescription
    kernel: Any


class Variant(NamedTuple):
    """`_driver`'s launch, how to make its arguments from a call, Triton's kernel if known."""

    launch: Callable[..., None]
    pack: Callable[[Sequence[Any]], tuple[Any, ...]]
    kernel: Any


class FastPath:
    """What is needed to launch one decorated kernel without Triton.

    Args:
      fn: what was decorated.
      identity: of the kernel; asked for when it is needed.
      is_kept: whether compiled kernels may be read from disk and kept there.

    Attributes:
      constants: names of the parameters that are tl.constexpr.
    """

    def __init__(self, fn: Any, identity: Callable[[], Identity], *, is_kept: bool) -> None:
        import triton
        from triton.runtime.autotuner import Heuristics
        from triton.runtime.jit import JITFunction

        self.fn, self.identity, self._is_kept = fn, identity, is_kept
        self.heuristics: list[Mapping[str, Callable[..., Any]]] = []
        while type(fn) is Heuristics:
            self.heuristics.append(fn.values)
            fn = fn.fn
        # Gluon's functions, the interpreter's, and what others wrap, are launched by their makers.
        is_plain = (
            type(fn) is JITFunction
            and not fn.debug
            and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in fn.signature.parameters.values())
        )
        self._jit = fn if is_plain else None
        self.parameters = {item.name: item for item in fn.params} if is_plain else {}
        self.constants = [name for name, item in self.parameters.items() if item.is_constexpr]
        self._knobs = triton.knobs
        self._compiled: dict[str, Compiled] = {}
        self._kinds: Kinds | None = None
        self._is_possible = is_plain
        self._device: Callable[[], int] | None = None
        self.stream: Callable[[int], int] | None = None

    def must_ask_triton(self) -> bool:
        """Whether hooks or debug mode make Triton launch just now."""
        return bool(self._jit.pre_run_hooks) or launch.must_ask_triton(self._knobs.runtime, self._knobs.compilation)

    def kinds(self, layout: Layout, values: Sequence[Any]) -> CallKinds | None:
        """The kinds of a call's values; None if Triton has to launch it."""
        if self._kinds is None and not self._start():
            return None
        ordinal = self._device()
        tokens = [ordinal, tuning.state()]
        passed = self._kinds.of(values, layout.is_valued, tokens)
        return None if passed is None else (tuple(tokens), passed, ordinal)

    def _start(self) -> bool:
        """Finds torch's functions at the first launch; False where Triton launches everything."""
        if not self._is_possible:
            return False
        import torch
        from triton.runtime.driver import driver

        is_own = getattr(driver, "_active", None) is getattr(driver, "_default", None)
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._is_possible = bool(is_own and self.stream and torch.cuda.is_available() and not torch.version.hip)
        if self._is_possible:
            torch.cuda.current_device()  # initialises CUDA
            self._device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
            self._kinds = Kinds()
        return self._is_possible

    def compiled_from(
        self, ordinal: int, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Specialization]]:
        """Everything that decides the bytes of the cubin, for `cache.digest`; and of each parameter
        what Triton specialises on.

        Args:
          ordinal: torch's number of the GPU.
          arguments: the value of each parameter: of the call, its defaults and the config.
          options: the others, such as num_warps.

        Raises:
          NotLaunchable: an argument is missing, or of a type that only Triton knows.
        """
        import torch
        import triton

        specializations: dict[str, Specialization] = {}
        for name, parameter in self.parameters.items():
            known = specialize(parameter, arguments[name]) if name in arguments else None
            if known is None:
                value = arguments.get(name, "missing")
                raise NotLaunchable(f"{name}={value!r:.100} is Triton's to convert")
            specializations[name] = known
        compiled_from = {
            "kernel": self.identity().sha256,
            "parameters": [[name, type_name, _text(known)] for name, (type_name, known) in specializations.items()],
            "options": sorted([name, _text(value)] for name, value in options.items()),
            "compute_capability": list(torch.cuda.get_device_capability(ordinal)),
            **launch.compiler_settings(triton),
        }
        return compiled_from, specializations

    def find(self, compiled_from: Mapping[str, Any]) -> Compiled | None:
        """The compiled kernel, of this process or from disk; None if Triton has to compile it."""
        name = cache.digest(compiled_from)
        known = self._compiled.get(name)
        if known is not None or not self._is_kept or not launch.may_be_kept(self._knobs):
            return known
        read = cache.read(name)
        if read is None:
            return None
        description, cubin = read
        known = Compiled(launch.load(description, cubin), description, None)
        return self._compiled.setdefault(name, known)

    def learn(
        self, compiled_from: Mapping[str, Any], specializations: Mapping[str, Specialization], kernel: Any
    ) -> Compiled:
        """Takes over what Triton compiled, and keeps it on disk.

        Raises:
          NotLaunchable: only Triton can launch it.
        """
        name = cache.digest(compiled_from)
        description, cubin = launch.describe(kernel, specializations)
        known = Compiled(launch.load(description, cubin), description, kernel)
        self._compiled[name] = known
        if self._is_kept and launch.may_be_kept(self._knobs):
            cache.write(name, description, cubin, compiled_from)
        return known

    def where(self, layout: Layout, values: Sequence[Any], config: Any, run: Mapping) -> str:
        """For `explain`: whether the kernel of a call is compiled, and where."""
        kinds = self.kinds(layout, values)
        if kinds is None:
            return "by Triton at each start, which alone can launch this call"
        try:
            arguments, options, _ = Plan(self, layout, config).arguments(values, run)
            compiled_from, _ = self.compiled_from(kinds[2], arguments, options)
        except NotLaunchable as error:
            return f"by Triton at each start: {error}"
        name = cache.digest(compiled_from)
        if name in self._compiled:
            return "in this process"
        return "on disk" if self._is_kept and cache.read(name) else "not yet"


class Plan:
    """The launch of calls of one kind; call it with the call.

    Attributes:
      config: the triton.Config.
      generation: that of `tuning` for which the config was decided.
    """

    def __init__(self, fast: FastPath, layout: Layout, config: Any) -> None:
        self.config, self.generation = config, -1
        self._fast = fast
        self._config_kwargs = config.all_kwargs()
        fixed = dict(layout.defaults)
        self._config_options: dict[str, Any] = {}
        for name, value in self._config_kwargs.items():
            (fixed if name in fast.parameters else self._config_options)[name] = value
        self._layout = replace(layout, defaults=fixed)  # what the config gives needs no other handling
        self._globals = fast.identity().global_values
        self._variants: dict[tuple[Any, ...], Variant | None] = {}
        self._lean: Variant | None = None  # the only one, where nothing is asked before a launch

    def __call__(
        self, grid: Any, kinds: CallKinds, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        variant, arguments = self._lean, None
        if variant is None:
            run = {**dict(zip(self._layout.names, args)), **kwargs, "grid": grid, "warmup": False}
            if self.config.pre_hook is not None:
                self.config.pre_hook({**run, **self._config_kwargs})
            try:
                arguments, options, outcome = self.arguments(values, run)
            except NotLaunchable:
                return self._by_triton(grid, args, kwargs)
            if outcome not in self._variants:
                kernel = self._add_variant(outcome, kinds, arguments, options, grid, args, kwargs)
                if kernel is not _ABSENT:
                    return kernel
            variant = self._variants[outcome]
            if variant is None:
                return self._by_triton(grid, args, kwargs)
        for name, value, scope in self._globals:
            if scope.get(name, _ABSENT) is not value:
                _check_global(name, value, scope)
        extents = grid
        if callable(grid):
            extents = grid(self._layout.bound(values) if arguments is None else arguments)
        num_axes = len(extents)
        x = extents[0]
        y = extents[1] if num_axes > 1 else 1
        z = extents[2] if num_axes > 2 else 1
        driver_launch, pack, kernel = variant
        if type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0:
            _, passed, ordinal = kinds
            driver_launch(ordinal, self._fast.stream(ordinal), x, y, z, *pack(passed))
            return kernel
        # An empty grid launches nothing, as in Triton; Triton refuses what is no int.
        if all(type(extent) is int and 0 <= extent <= INT32_MAX for extent in (x, y, z)):
            return kernel
        return self._by_triton((x, y, z), args, kwargs)

    def arguments(
        self, values: Sequence[Any], run: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]:
        """The value of each parameter of a call, the options, and the heuristics' outcome.

        Args:
          values: of the call.
          run: what Triton's `run` of the decorator would get: positional arguments by name,
            keywords, grid and warmup; heuristics see it.
        """
        arguments, options = self._layout.bound(values), dict(self._config_options)
        if self._layout.options:
            passed = dict(zip(self._layout.names, values))
            options.update((name, passed[name]) for name in self._layout.options)
        if options.get("ir_override"):
            raise NotLaunchable("ir_override names a file whose content no digest covers")
        outcome: list[Any] = []
        seen = {**run, **self._config_kwargs}
        for heuristics in self._fast.heuristics:
            for name, heuristic in heuristics.items():
                seen[name] = arguments[name] = heuristic(seen)
                outcome.append(_text(seen[name]))
        return arguments, options, tuple(outcome)

    def _add_variant(
        self,
        outcome: tuple[Any, ...],
        kinds: CallKinds,
        arguments: dict[str, Any],
        options: dict[str, Any],
        grid: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Finds the variant, in memory or on disk, else has Triton compile and launch it; gives
        Triton's kernel then, else _ABSENT."""
        kernel, variant = _ABSENT, None
        try:
            compiled_from, specializations = self._fast.compiled_from(kinds[2], arguments, options)
            compiled = self._fast.find(compiled_from)
            if compiled is None:
                kernel = self._by_triton(grid, args, kwargs)
                compiled = self._fast.learn(compiled_from, specializations, kernel)
            pack = launch.packer(compiled.description, self._layout.names, kinds[1], arguments)
            variant = Variant(compiled.launch, pack, compiled.kernel)
        except NotLaunchable as error:
            _LOG.info("Triton launches %s each time: %s", self._fast.fn, error)
        self._variants[outcome] = variant
        if not self._fast.heuristics and self.config.pre_hook is None:
            self._lean = variant
        return kernel

    def _by_triton(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._fast.fn.run(*args, grid=grid, warmup=False, **kwargs, **self._config_kwargs)


def _check_global(name: str, value: Any, scope: Mapping[str, Any]) -> None:
    now = scope.get(name, _ABSENT)
    if now is _ABSENT or now != value:
        shown = "is gone" if now is _ABSENT else f"is {now!r}"
        raise RuntimeError(
            f"the global {name} must stay as it was when the kernel was compiled, and {shown} "
            f"instead of {value!r}; pass it as a tl.constexpr argument"
        )


def _text(value: Any) -> str:
    """A value of a constant or option, with its type, as text."""
    if type(value) is float:
        return f"float {value.hex()}"
    if value is None or type(value) in (bool, int, str) or type(value).__name__ == "dtype":
        return f"{type(value).__name__} {value}"
    raise NotLaunchable(f"{value!r:.100} of type {type(value).__name__} is Triton's to handle")
