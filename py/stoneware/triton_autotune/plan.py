"""Plans: how calls of one kind of a decorated kernel are launched, by the driver or by Triton.

A plan holds the config that was decided, and how it is launched for each outcome of the heuristics
below the decorator: without heuristics there is one outcome. A kernel that only Triton can launch
has None there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stoneware.errors import UnsupportedError
from stoneware.kernels.launch_description import INT32_MAX, LaunchDescription
from stoneware.triton_autotune import cache, launch
from stoneware.triton_autotune.call import Call, Layout
from stoneware.triton_autotune.identity import Identity, identity_of
from stoneware.triton_autotune.launch import NotLaunchable
from stoneware.triton_autotune.specialization import tokens_of
from stoneware.tuning import policy as tuning

_ABSENT = object()

_LOG = logging.getLogger("stoneware.triton_autotune")

CallKinds = tuple[tuple[Any, ...], list[Any], int]
"""What decides how a call is launched. First the key of its plan: device, tuning state, and a token
of each value. Then the values, with addresses instead of tensors, and the device. A tuple, since
every launch makes one."""

Ready = tuple[Callable[..., None], Callable[[Sequence[Any]], tuple[Any, ...]], Any]
"""`_driver`'s launch, a function that makes its arguments from a call's values, and Triton's kernel if
known."""


class Compiled(NamedTuple):
    """A kernel ready to launch: `_driver`'s launch, how, and Triton's kernel if known."""

    launch: Callable[..., None]
    description: LaunchDescription
    kernel: Any


class FastPath:
    """What is needed to launch one decorated kernel without Triton.

    Attributes:
      fn: what was decorated.
      heuristics: below the decorator, by the parameter that each gives, the outermost first.
      parameters: Triton's KernelParam by name; none if Triton launches every call.
      stream: torch's current stream on a device; there once `kinds` has given something.
    """

    stream: Callable[[int], int]
    _device: Callable[[], int]
    _tensor_types: frozenset[type]

    def __init__(self, fn: Any, *, is_kept: bool) -> None:
        import triton
        from triton.runtime.autotuner import Heuristics
        from triton.runtime.jit import JITFunction

        self.fn, self._is_kept = fn, is_kept
        self.heuristics: list[tuple[str, Callable[..., Any]]] = []
        while type(fn) is Heuristics:
            self.heuristics += fn.values.items()
            fn = fn.fn
        # Gluon's functions, the interpreter's, and what others wrap, are launched by their makers.
        self._is_possible = type(fn) is JITFunction and not fn.debug
        self._jit, self._knobs = fn, triton.knobs
        self.parameters = {item.name: item for item in fn.params} if self._is_possible else {}
        self._compiled: dict[str, Compiled] = {}  # of this process, by `cache.digest`

    @functools.cached_property
    def identity(self) -> Identity:
        """What the kernel computes; reads its source."""
        return identity_of(self.fn)

    def kinds(self, layout: Layout, values: Sequence[Any]) -> CallKinds | None:
        """The kinds of a call's values; None if Triton has to launch it, as under hooks and in debug mode."""
        if not self._is_started:
            return None
        runtime = self._knobs.runtime
        if (
            launch.is_set(runtime.launch_enter_hook)
            or launch.is_set(runtime.launch_exit_hook)
            or runtime.debug
            or self._knobs.compilation.instrumentation_mode
            or self._jit.pre_run_hooks
        ):
            return None
        ordinal = self._device()
        tokens = [ordinal, tuning.state()]
        passed = tokens_of(values, layout.is_valued, tokens, self._tensor_types)
        return None if passed is None else (tuple(tokens), passed, ordinal)

    @functools.cached_property
    def _is_started(self) -> bool:
        """False if Triton launches everything; finds torch's functions at the first access."""
        if not self._is_possible:
            return False
        import torch
        from triton.runtime.driver import driver

        is_own = getattr(driver, "_active", None) is getattr(driver, "_default", None)
        stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if not (is_own and stream and torch.cuda.is_available()) or torch.version.hip:
            return False
        torch.cuda.current_device()  # initialises CUDA
        self.stream = stream
        self._device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self._tensor_types = frozenset((torch.Tensor, torch.nn.Parameter))
        return True

    def compiled_from(self, ordinal: int, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that decides the bytes of the cubin, for `cache.digest`.

        Args:
          ordinal: torch's number of the GPU.
          arguments: the value of each parameter.
          options: further options of the call and the config, such as num_warps.

        Raises:
          NotLaunchable: an argument is missing, or of a type that only Triton supports.
        """
        import torch
        import triton

        if options.get("ir_override"):
            raise NotLaunchable("ir_override names a file whose content no digest covers")
        return {
            "kernel": self.identity.sha256,
            "parameters": [
                [
                    name,
                    self._token(name, arguments.get(name, _ABSENT), item.is_constexpr),
                    item.annotation,
                    item.do_not_specialize,
                    item.do_not_specialize_on_alignment,
                ]
                for name, item in self.parameters.items()
            ],
            "options": [[name, self._token(name, options[name], True)] for name in sorted(options)],
            "compute_capability": list(torch.cuda.get_device_capability(ordinal)),
            **launch.compiler_settings(triton),
        }

    def _token(self, name: str, value: Any, is_valued: bool) -> str:
        tokens: list[Any] = []
        if tokens_of([value], [is_valued], tokens, self._tensor_types) is None:
            raise NotLaunchable(f"{name}={'missing' if value is _ABSENT else value!r:.100} is Triton's to convert")
        return repr(tokens[0])

    def find(self, compiled_from: Mapping[str, Any]) -> Compiled | None:
        """The compiled kernel, of this process or from disk; None if Triton has to compile it."""
        name = cache.digest(compiled_from)
        known = self._compiled.get(name)
        read = cache.read(name) if known is None and self._uses_disk() else None
        return self._load(name, *read, None) if read else known

    def learn(self, compiled_from: Mapping[str, Any], kernel: Any) -> Compiled:
        """Takes over what Triton compiled, and keeps it on disk; raises NotLaunchable if only Triton
        can launch it."""
        name = cache.digest(compiled_from)
        description, cubin = launch.describe(kernel)
        known = self._load(name, description, cubin, kernel)
        if self._uses_disk():
            cache.write(name, description, cubin, compiled_from)
        return known

    def _uses_disk(self) -> bool:
        return self._is_kept and launch.may_be_kept(self._knobs)

    def _load(self, name: str, description: LaunchDescription, cubin: bytes, kernel: Any) -> Compiled:
        try:
            loaded = Compiled(description.load(cubin).launch, description, kernel)
        except (TypeError, ValueError, UnsupportedError) as error:
            raise NotLaunchable(str(error)) from error
        return self._compiled.setdefault(name, loaded)


class Plan:
    """The launch of calls of one kind; call it with the call.

    Attributes:
      config: the triton.Config.
      epoch: that of `tuning` in which the config was decided.
    """

    def __init__(self, fast: FastPath, layout: Layout, config: Any) -> None:
        self.config, self.epoch = config, -1
        self._fast, self._config_kwargs = fast, config.all_kwargs()
        # What the config gives a parameter is, for every call, as if it were the default.
        given = {name: value for name, value in self._config_kwargs.items() if name in fast.parameters}
        self._layout = replace(layout, defaults=layout.defaults | given)
        self._globals = fast.identity.global_values
        # By outcome of the heuristics, () without any; None where Triton launches.
        self._ready: dict[tuple[Any, ...] | None, Ready | None] = {None: None}
        self._lean: Ready | None = None  # the only one, if nothing is checked before a launch

    def __call__(
        self, grid: Any, kinds: CallKinds, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ready, arguments = self._lean, None
        if ready is None:
            named = dict(zip(self._layout.names, args))
            seen = {**named, **kwargs, "grid": grid, "warmup": False, **self._config_kwargs}
            if self.config.pre_hook is not None:
                self.config.pre_hook(dict(seen))
            arguments = self._layout.bound(values)
            outcome = self._outcome(seen, arguments)
            if outcome not in self._ready:
                kernel = self._prepare(outcome, Call(self._layout, values, grid, args, kwargs), kinds, arguments)
                if kernel is not _ABSENT:
                    return kernel
            ready = self._ready[outcome]
            if ready is None:
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
        driver_launch, pack, kernel = ready
        if type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0:
            _, passed, ordinal = kinds
            driver_launch(ordinal, self._fast.stream(ordinal), x, y, z, *pack(passed))
            return kernel
        # An empty grid launches nothing, as in Triton; Triton refuses values that are not ints.
        if all(type(extent) is int and 0 <= extent <= INT32_MAX for extent in (x, y, z)):
            return kernel
        return self._by_triton((x, y, z), args, kwargs)

    def _outcome(self, seen: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, ...] | None:
        """Asks the heuristics, and adds what they give to what they see of a call and to its arguments;
        returns tokens of it, None if one gave what only Triton handles."""
        given = []
        for name, heuristic in self._fast.heuristics:
            seen[name] = arguments[name] = value = heuristic(seen)
            given.append(value)
        tokens: list[Any] = []
        is_known = tokens_of(given, [True] * len(given), tokens) is not None
        return tuple(tokens) if is_known else None

    def _prepare(self, outcome: tuple[Any, ...] | None, call: Call, kinds: CallKinds, arguments: dict[str, Any]) -> Any:
        """Finds the kernel in memory or on disk and returns _ABSENT; otherwise lets Triton compile and
        launch it, and returns Triton's kernel."""
        kernel, ready = _ABSENT, None
        _, passed, ordinal = kinds
        try:
            given = dict(zip(call.layout.names, call.values)) | self._config_kwargs
            options = {name: value for name, value in given.items() if name not in self._fast.parameters}
            compiled_from = self._fast.compiled_from(ordinal, arguments, options)
            compiled = self._fast.find(compiled_from)
            if compiled is None:
                kernel = self._by_triton(call.grid, call.args, call.kwargs)
                compiled = self._fast.learn(compiled_from, kernel)
            pack = launch.packer(compiled.description, call.layout.names, passed, arguments)
            ready = compiled.launch, pack, compiled.kernel
        except NotLaunchable as error:
            _LOG.info("Triton launches %s each time: %s", self._fast.fn, error)
        self._ready[outcome] = ready
        if not self._fast.heuristics and self.config.pre_hook is None:
            self._lean = ready
        return kernel

    def _by_triton(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._fast.fn.run(*args, grid=grid, warmup=False, **kwargs, **self._config_kwargs)


def _check_global(name: str, value: Any, scope: Mapping[str, Any]) -> None:
    now = scope.get(name, _ABSENT)
    if now is _ABSENT or now != value:
        shown = "is gone" if now is _ABSENT else f"is {now!r}"
        raise RuntimeError(
            f"the global {name} must stay as it was when the kernel was compiled, and {shown} "
            f"instead of {value!r}; pass it as a tl.constexpr argument"
        )
