"""How a kernel that Triton compiled is launched without Triton, and when that is not possible.

A launch is one call of `_driver`, with the arguments in the order of the cubin's parameters.
Triton itself launches whatever needs more than that: scratch memory, tensor descriptors, clusters,
cooperative or programmatic launches, profiler hooks, debug mode.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.runtime import native
from stoneware.runtime.device import DRIVER_MODULE
from stoneware.triton_autotune.cache import LaunchDescription
from stoneware.triton_autotune.specialization import Specialization

_LETTERS = {"i32": "i", "i64": "q", "u64": "P", "fp32": "f"}
"""The letter of a scalar of Triton's type; a u64 is passed like an address, as unsigned 64 bits."""

_PTX_BYTES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}
_WARP_THREADS = 32

# Of Triton's knobs.runtime: chains of functions that profilers add to each load,
_LOAD_HOOKS = ("kernel_load_start_hook", "kernel_load_end_hook")
# and functions, or None, that watch or change how a kernel is compiled.
_COMPILE_HOOKS = ("jit_cache_hook", "jit_post_compile_hook", "add_stages_inspection_hook")
# Of knobs.compilation: always compile, dump or replace what is compiled.
_COMPILE_SWITCHES = ("override", "dump_ir", "always_compile", "use_ir_loc", "enable_asan", "listener")
_ONLY_TRITONS = (
    "global_scratch_size",
    "profile_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
    "tensordesc_meta",
    "instrumentation_mode",
    "debug",
)


class NotLaunchable(Exception):
    """Only Triton can launch this kernel; the message says why."""


def _is_set(hook: Any) -> bool:
    """Whether a hook of Triton's is set; a chain is if it has a function."""
    return hook is not None and bool(getattr(hook, "calls", True))


def must_ask_triton(runtime_knobs: Any, compilation_knobs: Any) -> bool:
    """Whether a launch has to go through Triton now: hooks, debug mode, instrumentation."""
    return bool(
        _is_set(runtime_knobs.launch_enter_hook)
        or _is_set(runtime_knobs.launch_exit_hook)
        or runtime_knobs.debug
        or compilation_knobs.instrumentation_mode
    )


def may_be_kept(knobs: Any) -> bool:
    """Whether Triton's knobs allow kernels to be read from disk and kept there."""
    return not (
        any(getattr(knobs.runtime, name, None) is not None for name in _COMPILE_HOOKS)
        or any(_is_set(getattr(knobs.runtime, name, None)) for name in _LOAD_HOOKS)
        or any(getattr(knobs.compilation, name, None) for name in _COMPILE_SWITCHES)
    )


def compiler_settings(triton: Any) -> dict[str, Any]:
    """Everything besides the kernel that changes what Triton compiles.

    `triton_key` would read all of Triton's files (262 ms). Instead: its version, and the size and
    time of its library, which change with every build of it. Its tools come with it, unless a
    variable or knob names others, and these are included. No tool is started.
    """
    import triton._C.libtriton as library

    groups = (triton.knobs.compilation, triton.knobs.language, triton.knobs.nvidia)
    status = os.stat(library.__file__)
    return {
        "triton": triton.__version__,
        "library": [status.st_size, status.st_mtime_ns],
        "environment": sorted(map(list, library.get_cache_invalidating_env_vars().items())),
        "knobs": sorted(
            # As they were set: reading a tool's knob would start the tool.
            [descriptor.key, str(group.__dict__.get(name, os.environ.get(descriptor.key)))]
            for group in groups
            for name, descriptor in group.knob_descriptors.items()
        ),
        "override_arch": str(triton.knobs.runtime.override_arch),
    }


def describe(kernel: Any, specializations: Mapping[str, Specialization]) -> tuple[LaunchDescription, bytes]:
    """How to launch what Triton compiled, and the cubin.

    Args:
      kernel: triton.compiler.CompiledKernel.
      specializations: of each parameter by name, as `specialize` gives them.

    Raises:
      NotLaunchable: only Triton can launch it.
    """
    if not hasattr(kernel, "metadata") or not hasattr(kernel, "asm"):
        raise NotLaunchable(f"Triton gave a {type(kernel).__name__}")
    metadata, source = kernel.metadata, kernel.src
    if metadata.target.backend != "cuda":
        raise NotLaunchable(f"it is for {metadata.target.backend}")
    for name in _ONLY_TRITONS:
        if getattr(metadata, name, None):
            raise NotLaunchable(f"its {name} is {getattr(metadata, name)}")
    if metadata.num_ctas != 1:
        raise NotLaunchable(f"its num_ctas is {metadata.num_ctas}")
    signature = dict(source.signature)
    expected = {name: type_name for name, (type_name, _) in specializations.items()}
    if signature != expected:
        raise NotLaunchable(f"Triton compiled it for {signature}, expected {expected}")
    names = list(signature)
    divisible = {names[path[0]] for path, attributes in source.attrs.items() if attributes}
    if divisible != {name for name, (_, known) in specializations.items() if known == "D"}:
        raise NotLaunchable(f"Triton takes {sorted(divisible)} for multiples of 16")
    letters = {
        name: "P" if type_name.startswith("*") else _LETTERS.get(type_name)
        for name, type_name in signature.items()
        if type_name != "constexpr"
    }
    for name, letter in letters.items():
        if letter is None:
            raise NotLaunchable(f"{name} is of type {signature[name]}")
    launch = LaunchDescription(
        symbol=metadata.name,
        arguments=tuple(letters),
        parameters=_all_parameters(kernel.asm.get("ptx"), "".join(letters.values()), metadata.num_warps),
        block_threads=metadata.num_warps * _WARP_THREADS,
        shared_bytes=metadata.shared,
    )
    return launch, kernel.asm["cubin"]


def _all_parameters(ptx: str | None, letters: str, num_warps: int) -> str:
    """The letters of every parameter of the kernel, Triton's pointers to scratch included."""
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)\s*(.*?)\{", ptx or "", re.DOTALL)
    if entry is None:
        raise NotLaunchable("its PTX, which names its parameters, was not kept")
    declared = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)", entry.group(1))
    letters += "P" * (len(declared) - len(letters))
    sizes = [_PTX_BYTES.get(kind) for kind in declared]
    if sizes != [8 if letter in "Pq" else 4 for letter in letters]:
        raise NotLaunchable(f"its parameters are {declared}, expected {letters}")
    threads = re.search(r"\.reqntid (\d+)", entry.group(2))
    if threads is None or int(threads.group(1)) != num_warps * _WARP_THREADS:
        raise NotLaunchable(f"its block is {entry.group(2)!r}, expected {num_warps} warps")
    return letters


def load(launch: LaunchDescription, cubin: bytes) -> Any:
    """`_driver.Kernel.launch` of the cubin; the GPU is touched at the first launch.

    Raises:
      NotLaunchable: the driver module is missing, or refuses the description.
    """
    reason = native.why_missing(DRIVER_MODULE)
    if reason:
        raise NotLaunchable(reason)
    try:
        return (
            native.load(DRIVER_MODULE)
            .Kernel(cubin, launch.symbol, launch.parameters, launch.block_threads, launch.shared_bytes)
            .launch
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise NotLaunchable(str(error)) from error


def packer(
    launch: LaunchDescription, names: Sequence[str], passed: Sequence[Any], arguments: Mapping[str, Any]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from what `Kinds.of` gives for a call to the cubin's arguments.

    Args:
      launch: of the kernel.
      names: of the values that a call passes, in order.
      passed: what `Kinds.of` gave for one call: these values, with addresses in place of tensors.
      arguments: of that call, all by name. What the call does not pass is the same for every call.

    Raises:
      NotLaunchable: an argument is of a type that only Triton converts.
    """
    place = {name: idx for idx, name in enumerate(names)}
    fixed: list[Any] = []
    chosen = []
    for name, letter in zip(launch.arguments, launch.parameters):
        if name in place:
            idx = place[name]
            value = passed[idx]
            is_address = arguments.get(name) is not value
        elif name in arguments:
            idx, value, is_address = len(passed) + len(fixed), arguments[name], False
            fixed.append(value)
        else:
            raise NotLaunchable(f"{name} is not passed")
        wanted = (float, int) if letter == "f" else (int,)
        if type(value) not in wanted or (is_address and letter != "P"):
            raise NotLaunchable(f"{name}={value!r} is passed as {letter}")
        chosen.append(idx)
    # What is fixed and the null pointers follow what is passed, and one call in C picks all.
    nulls = (0,) * (len(launch.parameters) - len(launch.arguments))
    rest = (*fixed, *nulls)
    chosen += range(len(passed) + len(fixed), len(passed) + len(rest))
    if len(chosen) < 2:  # an itemgetter of one gives no tuple
        return lambda values: tuple((*values, *rest)[idx] for idx in chosen)
    pick = operator.itemgetter(*chosen)
    return lambda values: pick((*values, *rest))
