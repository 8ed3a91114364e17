"""Plans of decorated kernels: how launches of one kind are made, by the driver or by Triton.

A plan holds the config that was decided, and a launcher for each outcome of the heuristics below the
decorator: without heuristics there is one outcome. The launcher is None if only Triton can launch the
kernel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stoneware.errors import UnsupportedError
from stoneware.kernels.launch_description import INT32_MAX, LaunchDescription
from stoneware.triton_autotune import cache
from stoneware.triton_autotune.identity import Identity, identity_of
from stoneware.triton_autotune.launch import NotLaunchable, compiler_settings, describe, is_set, may_be_kept, packer
from stoneware.triton_autotune.signature import Form, Launch
from stoneware.triton_autotune.specialization import tokens_of
from stoneware.tuning import policy

_ABSENT = object()

_LOG = logging.getLogger("stoneware.triton_autotune")

Kinds = tuple[tuple[Any, ...], list[Any], int]
"""What decides how a launch is made. First the key of its plan: device, tuning state, and a token of each
value. Then the values, with addresses instead of tensors, and the device. A tuple, since every launch
makes one."""

Launcher = tuple[Callable[..., None], Callable[[Sequence[Any]], tuple[Any, ...]], Any]
"""`_driver`'s launch, a function that makes its arguments from a launch's values, and Triton's kernel; None
instead of the kernel if Triton did not compile it in this process."""


class CompiledKernel(NamedTuple):
    """`_driver`'s launch of a kernel, its description, and Triton's kernel or None."""

    launch: Callable[..., None]
    description: LaunchDescription
    kernel: Any


class FastPath:
    """What is needed to launch one decorated kernel without Triton.

    Attributes:
      fn: what was decorated.
      heuristics: below the decorator, (parameter, function) of each, the outermost first.
      parameters: Triton's KernelParam by name; none if Triton launches every call.
      stream: torch's current stream on a device; set once `kinds` has returned something.
    """

    stream: Callable[[int], int]
    _device: Callable[[], int]
    _tensor_types: frozenset[type]

    def __init__(self, fn: Any, *, uses_disk: bool) -> None:
        import triton
        from triton.runtime.autotuner import Heuristics
        from triton.runtime.jit import JITFunction

        self.fn, self._uses_disk = fn, uses_disk
        self.heuristics: list[tuple[str, Callable[..., Any]]] = []
        while type(fn) is Heuristics:
            self.heuristics += fn.values.items()
            fn = fn.fn
        # Functions of Gluon, of the interpreter and of other wrappers have their own launch.
        self._is_possible = type(fn) is JITFunction and not fn.debug
        self._jit, self._knobs = fn, triton.knobs
        self.parameters = {item.name: item for item in fn.params} if self._is_possible else {}
        self._kernels: dict[str, CompiledKernel] = {}  # of this process, by `cache.digest`

    @functools.cached_property
    def identity(self) -> Identity:
        """What the kernel computes; reads its source."""
        return identity_of(self.fn)

    def kinds(self, form: Form, values: Sequence[Any]) -> Kinds | None:
        """The kinds of a launch's values; None if Triton must make it, for example under hooks and in debug mode."""
        if not self._is_started:
            return None
        runtime = self._knobs.runtime
        if (
            is_set(runtime.launch_enter_hook)
            or is_set(runtime.launch_exit_hook)
            or runtime.debug
            or self._knobs.compilation.instrumentation_mode
            or self._jit.pre_run_hooks
        ):
            return None
        ordinal = self._device()
        tokens = [ordinal, policy.state()]
        addresses = tokens_of(values, form.is_valued, tokens, self._tensor_types)
        return None if addresses is None else (tuple(tokens), addresses, ordinal)

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

    def compiler_inputs(self, ordinal: int, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that determines the bytes of the cubin, for `cache.digest`.

        Args:
          ordinal: torch's number of the GPU.
          arguments: the value of each parameter.
          options: further options of the launch and the config, such as num_warps.

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
            **compiler_settings(triton),
        }

    def _token(self, name: str, value: Any, is_valued: bool) -> str:
        tokens: list[Any] = []
        if tokens_of([value], [is_valued], tokens, self._tensor_types) is None:
            raise NotLaunchable(f"{name}={'missing' if value is _ABSENT else value!r:.100} is Triton's to convert")
        return repr(tokens[0])

    def find(self, inputs: Mapping[str, Any]) -> CompiledKernel | None:
        """The compiled kernel, of this process or from disk; None if Triton has to compile it."""
        name = cache.digest(inputs)
        kernel = self._kernels.get(name)
        file = cache.read(name) if kernel is None and self._may_use_disk() else None
        return self._load(name, *file, None) if file else kernel

    def add(self, inputs: Mapping[str, Any], kernel: Any) -> CompiledKernel:
        """Takes over what Triton compiled, and stores it on disk; raises NotLaunchable if only Triton
        can launch it."""
        name = cache.digest(inputs)
        description, cubin = describe(kernel)
        loaded = self._load(name, description, cubin, kernel)
        if self._may_use_disk():
            cache.write(name, description, cubin, inputs)
        return loaded

    def _may_use_disk(self) -> bool:
        return self._uses_disk and may_be_kept(self._knobs)

    def _load(self, name: str, description: LaunchDescription, cubin: bytes, kernel: Any) -> CompiledKernel:
        try:
            loaded = CompiledKernel(description.load(cubin).launch, description, kernel)
        except (TypeError, ValueError, UnsupportedError) as error:
            raise NotLaunchable(str(error)) from error
        return self._kernels.setdefault(name, loaded)


class KernelPlan:
    """The plan of launches of one kind; call it to launch.

    Attributes:
      config: the triton.Config.
      epoch: that of `tuning` in which the config was decided.
    """

    def __init__(self, fast: FastPath, form: Form, config: Any) -> None:
        self.config, self.epoch = config, -1
        self._fast, self._config_kwargs = fast, config.all_kwargs()
        # To every launch the config's value of a parameter is like a default.
        values = {name: value for name, value in self._config_kwargs.items() if name in fast.parameters}
        self._form = replace(form, defaults=form.defaults | values)
        self._globals = fast.identity.global_values
        # By outcome of the heuristics, () without any; None where Triton launches.
        self._launchers: dict[tuple[Any, ...] | None, Launcher | None] = {None: None}
        self._only: Launcher | None = None  # the only one, if nothing is checked before a launch

    def __call__(
        self, grid: Any, kinds: Kinds, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        launcher, parameters = self._only, None
        if launcher is None:
            named = dict(zip(self._form.names, args))
            arguments = {**named, **kwargs, "grid": grid, "warmup": False, **self._config_kwargs}
            if self.config.pre_hook is not None:
                self.config.pre_hook(dict(arguments))
            parameters = self._form.parameters(values)
            outcome = self._outcome(arguments, parameters)
            if outcome not in self._launchers:
                kernel = self._prepare(outcome, Launch(self._form, values, grid, args, kwargs), kinds, parameters)
                if kernel is not _ABSENT:
                    return kernel
            launcher = self._launchers[outcome]
            if launcher is None:
                return self._by_triton(grid, args, kwargs)
        for name, value, scope in self._globals:
            if scope.get(name, _ABSENT) is not value:
                _check_global(name, value, scope)
        extents = grid
        if callable(grid):
            extents = grid(self._form.parameters(values) if parameters is None else parameters)
        num_axes = len(extents)
        x = extents[0]
        y = extents[1] if num_axes > 1 else 1
        z = extents[2] if num_axes > 2 else 1
        driver_launch, pack, kernel = launcher
        if type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0:
            _, addresses, ordinal = kinds
            driver_launch(ordinal, self._fast.stream(ordinal), x, y, z, *pack(addresses))
            return kernel
        # An empty grid launches nothing, like in Triton; Triton refuses values that are not ints.
        if all(type(extent) is int and 0 <= extent <= INT32_MAX for extent in (x, y, z)):
            return kernel
        return self._by_triton((x, y, z), args, kwargs)

    def _outcome(self, arguments: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, ...] | None:
        """Calls the heuristics with a launch's arguments, and adds their results to these and to the
        parameters; returns tokens of the results, None if only Triton handles one of them."""
        results = []
        for name, heuristic in self._fast.heuristics:
            arguments[name] = parameters[name] = value = heuristic(arguments)
            results.append(value)
        tokens: list[Any] = []
        return None if tokens_of(results, [True] * len(results), tokens) is None else tuple(tokens)

    def _prepare(
        self, outcome: tuple[Any, ...] | None, launch: Launch, kinds: Kinds, parameters: dict[str, Any]
    ) -> Any:
        """Finds the kernel in memory or on disk and returns _ABSENT; otherwise lets Triton compile and
        launch it, and returns Triton's kernel."""
        kernel, launcher = _ABSENT, None
        _, addresses, ordinal = kinds
        try:
            arguments = dict(zip(launch.form.names, launch.values)) | self._config_kwargs
            options = {name: value for name, value in arguments.items() if name not in self._fast.parameters}
            inputs = self._fast.compiler_inputs(ordinal, parameters, options)
            compiled = self._fast.find(inputs)
            if compiled is None:
                kernel = self._by_triton(launch.grid, launch.args, launch.kwargs)
                compiled = self._fast.add(inputs, kernel)
            pack = packer(compiled.description, launch.form.names, addresses, parameters)
            launcher = compiled.launch, pack, compiled.kernel
        except NotLaunchable as error:
            _LOG.info("Triton launches %s each time: %s", self._fast.fn, error)
        self._launchers[outcome] = launcher
        if not self._fast.heuristics and self.config.pre_hook is None:
            self._only = launcher
        return kernel

    def _by_triton(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._fast.fn.run(*args, grid=grid, warmup=False, **kwargs, **self._config_kwargs)


def _check_global(name: str, value: Any, scope: Mapping[str, Any]) -> None:
    now = scope.get(name, _ABSENT)
    if now is _ABSENT or now != value:
        state = "is gone" if now is _ABSENT else f"is {now!r}"
        raise RuntimeError(
            f"the global {name} must stay as it was when the kernel was compiled, and {state} "
            f"instead of {value!r}; pass it as a tl.constexpr argument"
        )
