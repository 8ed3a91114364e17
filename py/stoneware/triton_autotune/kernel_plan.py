"""Plans: how calls of one kind of a decorated kernel are launched, by us or by Triton.

A plan holds the config that was decided. Its variants, one for each outcome of the heuristics below
the decorator (without heuristics one), hold the compiled kernel; the variant of a kernel that only
Triton can launch is None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stoneware.triton_autotune import kernel_cache, kernel_launch
from stoneware.triton_autotune.kernel_cache import LaunchDescription
from stoneware.triton_autotune.kernel_call import OMITTED, Layout
from stoneware.triton_autotune.kernel_identity import Identity
from stoneware.triton_autotune.kernel_launch import NotLaunchable
from stoneware.triton_autotune.kernel_specialization import (
    Kinds, Rule, Specialization, rules_of, specialize,
)
from stoneware.tuning import policy as tuning

_ABSENT = object()
_MISSING = object()

_LOG = logging.getLogger("stoneware.triton_autotune")


CallKinds = tuple[tuple[Any, ...], list[Any], int]
"""What of a call decides how it is launched: tokens (device, tuning state, and the kind of each
value: the key of a plan), the values with addresses in the place of tensors, and the device. No
class, since one is made at each launch."""


class Compiled(NamedTuple):
    """A kernel ready to launch: `_driver`'s launch, its description, Triton's kernel if known."""

    launch: Callable[..., None]
    description: LaunchDescription
    kernel: Any


class Variant(NamedTuple):
    """A compiled kernel, how a call's values become its arguments, and torch's current stream."""

    launch: Callable[..., None]
    pack: Callable[[Sequence[Any]], tuple[Any, ...]]
    stream: Callable[[int], int]
    kernel: Any


class FastPath:
    """What one decorated kernel needs to be launched without Triton.

    Args:
      fn: what was decorated.
      identity: of the kernel; asked for when it is needed.
      is_kept: whether compiled kernels may be read from and written to disk.

    Attributes:
      constants: names of the parameters that are tl.constexpr.
    """

    def __init__(self, fn: Any, identity: Callable[[], Identity], *, is_kept: bool) -> None:
        import triton
        from triton.runtime.autotuner import Heuristics
        from triton.runtime.jit import JITFunction

        self.fn, self.identity, self._is_kept = fn, identity, is_kept
        heuristics = []
        while type(fn) is Heuristics:
            heuristics.append(fn.values)
            fn = fn.fn
        self.heuristics: tuple[Mapping[str, Callable[..., Any]], ...] = tuple(heuristics)
        # Gluon's functions, the interpreter's, and what others wrap, are launched by their makers.
        is_plain = type(fn) is JITFunction and not fn.debug and not any(
            parameter.kind is parameter.VAR_POSITIONAL
            for parameter in fn.signature.parameters.values()
        )
        self._jit = fn if is_plain else None
        self.rules: tuple[Rule, ...] = rules_of(self._jit) if self._jit is not None else ()
        self.constants = tuple(rule.name for rule in self.rules if rule.is_constexpr)
        self._knobs = triton.knobs
        self._compiled: dict[str, Compiled] = {}
        self._kinds: Kinds | None = None
        self._is_possible = self._jit is not None
        self._device: Callable[[], int] | None = None
        self.stream: Callable[[int], int] | None = None

    def must_ask_triton(self) -> bool:
        """Whether hooks or debug mode have Triton launch just now."""
        return bool(self._jit.pre_run_hooks) or kernel_launch.must_ask_triton(
            self._knobs.runtime, self._knobs.compilation
        )

    def kinds(self, layout: Layout, values: Sequence[Any]) -> CallKinds | None:
        """The kinds of a call's values; None if Triton has to launch it."""
        if self._kinds is None and not self._start():
            return None
        ordinal = self._device()
        tokens = [ordinal, tuning.state()]
        passed = self._kinds.of(values, layout.is_valued, tokens)
        return None if passed is None else (tuple(tokens), passed, ordinal)

    def _start(self) -> bool:
        """Finds torch's functions at the first launch; False where no launch can be ours."""
        if not self._is_possible:
            return False
        import torch
        from triton.runtime.driver import driver

        own = getattr(driver, "_active", None) is getattr(driver, "_default", None)
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if not torch.cuda.is_available() or torch.version.hip or raw_stream is None or not own:
            self._is_possible = False
            return False
        torch.cuda.current_device()  # initialises CUDA
        self._device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.stream = raw_stream
        self._kinds = Kinds()
        return True

    def plan(self, layout: Layout, config: Any) -> Plan:
        return Plan(self, layout, config)

    def specializations(self, arguments: Mapping[str, Any]) -> dict[str, Specialization]:
        """Of each parameter by name.

        Args:
          arguments: the value of each parameter: of the call, its defaults and the config.

        Raises:
          NotLaunchable: an argument is missing, or of a type that only Triton knows.
        """
        found = {}
        for rule in self.rules:
            value = arguments.get(rule.name, OMITTED)
            known = None if value is OMITTED else specialize(rule, value)
            if known is None:
                raise NotLaunchable(f"{rule.name}={value!r:.100} is Triton's to convert")
            found[rule.name] = known
        return found

    def compiled_from(
        self, ordinal: int, specializations: Mapping[str, Specialization],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Everything that decides the bytes of the cubin, for `kernel_cache.digest`."""
        import torch
        import triton

        return {
            "kernel": self.identity().sha256,
            "parameters": [
                [name, type_name, _text(known)]
                for name, (type_name, known) in specializations.items()
            ],
            "options": sorted([name, _text(value)] for name, value in options.items()),
            "compute_capability": list(torch.cuda.get_device_capability(ordinal)),
            **kernel_launch.compiler_settings(triton),
        }

    def find(self, compiled_from: Mapping[str, Any]) -> Compiled | None:
        """The compiled kernel, of this process or from disk; None if Triton has to compile it."""
        name = kernel_cache.digest(compiled_from)
        known = self._compiled.get(name)
        if known is not None or not self._is_kept or kernel_launch.why_not_kept(self._knobs):
            return known
        read = kernel_cache.read(name)
        if read is None:
            return None
        description, cubin = read
        known = Compiled(kernel_launch.load(description, cubin), description, None)
        return self._compiled.setdefault(name, known)

    def learn(
        self, compiled_from: Mapping[str, Any], specializations: Mapping[str, Specialization],
        kernel: Any,
    ) -> Compiled:
        """Takes over what Triton compiled, and keeps it on disk.

        Raises:
          NotLaunchable: only Triton can launch it.
        """
        if not hasattr(kernel, "metadata") or not hasattr(kernel, "asm"):
            raise NotLaunchable(f"Triton gave a {type(kernel).__name__}")
        name = kernel_cache.digest(compiled_from)
        description, cubin = kernel_launch.describe(kernel, specializations)
        known = Compiled(kernel_launch.load(description, cubin), description, kernel)
        self._compiled[name] = known
        if self._is_kept and kernel_launch.why_not_kept(self._knobs) is None:
            kernel_cache.write(name, description, cubin, compiled_from)
        return known

    def where(self, layout: Layout, values: Sequence[Any], config: Any, run: Mapping) -> str:
        """For `explain`: whether the kernel of a call is compiled, and where."""
        kinds = self.kinds(layout, values)
        if kinds is None:
            return "by Triton at each start, which alone can launch this call"
        try:
            arguments, options, _ = Plan(self, layout, config).arguments(values, run)
            specializations = self.specializations(arguments)
            compiled_from = self.compiled_from(kinds[2], specializations, options)
        except NotLaunchable as error:
            return f"by Triton at each start: {error}"
        name = kernel_cache.digest(compiled_from)
        if name in self._compiled:
            return "in this process"
        return "on disk" if self._is_kept and kernel_cache.read(name) else "not yet"


class Plan:
    """The launch of calls of one kind; call it with the call."""

    def __init__(self, fast: FastPath, layout: Layout, config: Any) -> None:
        self._fast, self._layout, self._config = fast, layout, config
        self._config_kwargs = config.all_kwargs()
        names = {rule.name for rule in fast.rules}
        self._config_options = {
            name: value for name, value in self._config_kwargs.items() if name not in names
        }
        parameters = [rule.name for rule in fast.rules]
        self._fixed = {
            parameters[position]: value for position, value in layout.rest
            if value is not OMITTED
        }
        self._fixed.update(
            (name, value) for name, value in self._config_kwargs.items() if name in names
        )
        self._globals = fast.identity().global_values
        self._variants: dict[tuple[Any, ...], Variant | None] = {}
        self._lean: Variant | None = None

    def __call__(
        self, grid: Any, kinds: CallKinds, values: Sequence[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        lean = self._lean
        if lean is None:
            return self._run(grid, kinds, values, args, kwargs)
        for name, value, scope in self._globals:
            if scope.get(name, _ABSENT) is not value:
                _check_global(name, value, scope)
        extents = grid
        if callable(grid):
            arguments = dict(zip(self._layout.names, values))
            if self._layout.has_options:
                for name in self._layout.options(values):
                    del arguments[name]
            arguments.update(self._fixed)
            extents = grid(arguments)
        num_axes = len(extents)
        x = extents[0]
        y = extents[1] if num_axes > 1 else 1
        z = extents[2] if num_axes > 2 else 1
        if not (type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0):
            return self._odd_grid((x, y, z), lean, args, kwargs)
        launch, pack, stream, kernel = lean
        _, passed, ordinal = kinds
        launch(ordinal, stream(ordinal), x, y, z, *pack(passed))
        return kernel

    def arguments(
        self, values: Sequence[Any], run: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]:
        """Of a call the value of each parameter, the options, and what the heuristics gave.

        Args:
          values: of the call.
          run: what Triton's `run` of the decorator would get: positional arguments by name,
            keywords, grid and warmup; heuristics see it.
        """
        arguments = {**self._fixed, **dict(zip(self._layout.names, values))}
        options = {**self._config_options, **self._layout.options(values)}
        for name in options:
            arguments.pop(name, None)
        if options.get("ir_override"):
            raise NotLaunchable("ir_override names a file whose content no digest covers")
        outcome: list[Any] = []
        seen = {**run, **self._config_kwargs}
        for heuristics in self._fast.heuristics:
            for name, heuristic in heuristics.items():
                seen[name] = arguments[name] = heuristic(seen)
                outcome.append(_text(seen[name]))
        return arguments, options, tuple(outcome)

    def _run(
        self, grid: Any, kinds: CallKinds, values: Sequence[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """With hooks, heuristics, or for the first time."""
        run = {**dict(zip(self._layout.names, args)), **kwargs, "grid": grid, "warmup": False}
        if self._config.pre_hook is not None:
            self._config.pre_hook({**run, **self._config_kwargs})
        try:
            arguments, options, outcome = self.arguments(values, run)
        except NotLaunchable:
            return self._by_triton(grid, args, kwargs)
        variant = self._variants.get(outcome, _MISSING)
        if variant is _MISSING:
            return self._first(grid, kinds, arguments, options, outcome, args, kwargs)
        if variant is None:
            return self._by_triton(grid, args, kwargs)
        for name, value, scope in self._globals:
            if scope.get(name, _ABSENT) is not value:
                _check_global(name, value, scope)
        return self._launch(variant, grid, kinds, arguments, args, kwargs)

    def _launch(
        self, variant: Variant, grid: Any, kinds: CallKinds, arguments: dict[str, Any],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:
        extents = grid(dict(arguments)) if callable(grid) else grid
        x, y, z = (*extents, 1, 1)[:3]
        if not (type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0):
            return self._odd_grid((x, y, z), variant, args, kwargs)
        _, passed, ordinal = kinds
        variant.launch(ordinal, variant.stream(ordinal), x, y, z, *variant.pack(passed))
        return variant.kernel

    def _first(
        self, grid: Any, kinds: CallKinds, arguments: dict[str, Any], options: dict[str, Any],
        outcome: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:
        """Launches a variant that is not known yet: from memory, from disk, or by Triton."""
        kernel = _MISSING
        try:
            specializations = self._fast.specializations(arguments)
            compiled_from = self._fast.compiled_from(kinds[2], specializations, options)
            compiled = self._fast.find(compiled_from)
            if compiled is None:
                kernel = self._by_triton(grid, args, kwargs)
                compiled = self._fast.learn(compiled_from, specializations, kernel)
            pack = self._packer(compiled, kinds[1], arguments)
            variant = Variant(compiled.launch, pack, self._fast.stream, compiled.kernel)
        except NotLaunchable as error:
            _LOG.info("Triton launches %s each time: %s", self._fast.fn, error)
            self._variants[outcome] = None
            return self._by_triton(grid, args, kwargs) if kernel is _MISSING else kernel
        self._variants[outcome] = variant
        if not self._fast.heuristics and self._config.pre_hook is None:
            self._lean = variant
        if kernel is not _MISSING:
            return kernel
        return self._launch(variant, grid, kinds, arguments, args, kwargs)

    def _packer(
        self, compiled: Compiled, passed: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        names = self._layout.names
        return kernel_launch.packer(
            compiled.description, self._layout, passed,
            [arguments.get(name) is not value for name, value in zip(names, passed)],
            {name: value for name, value in arguments.items() if name not in names},
        )

    def _odd_grid(
        self, extents: tuple[Any, ...], variant: Variant, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """An empty grid launches nothing, as in Triton; what is no int is for Triton to see."""
        if kernel_launch.is_int32_grid(extents):
            return variant.kernel
        return self._by_triton(extents, args, kwargs)

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
