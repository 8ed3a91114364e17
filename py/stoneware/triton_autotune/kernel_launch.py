"""Launching a kernel of Triton's without Triton: what it takes, and when it cannot be done.

A launch here is one call of `_driver`, with the arguments in the order of the cubin's parameters.
Triton launches itself whatever needs more than that: scratch memory, tensor descriptors, clusters,
cooperative or programmatic launches, hooks of profilers, debug mode.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.runtime import native
from stoneware.runtime.device import DRIVER_MODULE
from stoneware.triton_autotune.kernel_cache import LaunchDescription
from stoneware.triton_autotune.kernel_call import Layout
from stoneware.triton_autotune.kernel_specialization import INT32_MAX, Specialization

_LETTERS = {"i32": "i", "i64": "q", "u64": "P", "fp32": "f"}
"""Of a scalar of Triton's type; a u64 is passed as an address is, in 64 bits without a sign."""

_PTX_BYTES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}
_WARP_THREADS = 32

# Of Triton's knobs.runtime: chains of functions that profilers hook into each load.
_LOAD_HOOKS = ("kernel_load_start_hook", "kernel_load_end_hook")
# Functions, or None, that watch or change how a kernel is compiled.
_COMPILE_HOOKS = ("jit_cache_hook", "jit_post_compile_hook", "add_stages_inspection_hook")
# Of knobs.compilation: always compile, dump or replace what is compiled.
_COMPILE_SWITCHES = (
    "override", "dump_ir", "always_compile", "use_ir_loc", "enable_asan", "listener",
)


class NotLaunchable(Exception):
    """This kernel has to be launched by Triton; the message says why."""


def must_ask_triton(runtime_knobs: Any, compilation_knobs: Any) -> bool:
    """Whether a launch has to go through Triton now: hooks, debug mode, instrumentation."""
    enter, leave = runtime_knobs.launch_enter_hook, runtime_knobs.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or runtime_knobs.debug
        or compilation_knobs.instrumentation_mode
    )


def why_not_kept(knobs: Any) -> str | None:
    """None if kernels may be read from disk and kept there, else which knob forbids it."""
    for name in _COMPILE_HOOKS:
        if getattr(knobs.runtime, name, None) is not None:
            return f"triton.knobs.runtime.{name}"
    for name in _LOAD_HOOKS:
        hook = getattr(knobs.runtime, name, None)
        if hook is not None and getattr(hook, "calls", True):
            return f"triton.knobs.runtime.{name}"
    for name in _COMPILE_SWITCHES:
        if getattr(knobs.compilation, name, None):
            return f"triton.knobs.compilation.{name}"
    return None


def compiler_settings(triton: Any) -> dict[str, Any]:
    """Everything but the kernel that changes what Triton compiles; costs some 50 us.

    In the place of `triton_key`, which reads all of Triton (262 ms): its version, and size and time
    of its library, which change when someone builds another. The tools come with it; where a
    variable or knob names another, that is in here. No tool is started to ask for its version.
    """
    import os

    import triton._C.libtriton as library

    groups = (triton.knobs.compilation, triton.knobs.language, triton.knobs.nvidia)
    status = os.stat(library.__file__)
    return {
        "triton": triton.__version__,
        "library": [status.st_size, status.st_mtime_ns],
        "environment": sorted(map(list, library.get_cache_invalidating_env_vars().items())),
        "knobs": sorted(
            # As set, not as read: reading a tool's knob starts the tool.
            [descriptor.key, str(group.__dict__.get(name, os.environ.get(descriptor.key)))]
            for group in groups
            for name, descriptor in group.knob_descriptors.items()
        ),
        "override_arch": str(triton.knobs.runtime.override_arch),
    }


def describe(
    kernel: Any, specializations: Mapping[str, Specialization]
) -> tuple[LaunchDescription, bytes]:
    """How to launch what Triton compiled.

    Args:
      kernel: triton.compiler.CompiledKernel.
      specializations: of each parameter by name, what this module takes it for.

    Raises:
      NotLaunchable: only Triton can launch it.
    """
    metadata, source = kernel.metadata, kernel.src
    _check_metadata(metadata)
    signature = dict(source.signature)
    expected = {name: type_name for name, (type_name, _) in specializations.items()}
    if signature != expected:
        raise NotLaunchable(f"Triton compiled it for {signature}, expected was {expected}")
    names = list(signature)
    divisible = {names[path[0]] for path, attributes in source.attrs.items() if attributes}
    if divisible != {name for name, (_, known) in specializations.items() if known == "D"}:
        raise NotLaunchable(f"Triton takes {sorted(divisible)} for multiples of 16")
    arguments, letters = [], ""
    for name, type_name in signature.items():
        if type_name == "constexpr":
            continue
        letter = "P" if type_name.startswith("*") else _LETTERS.get(type_name)
        if letter is None:
            raise NotLaunchable(f"{name} is of type {type_name}")
        arguments.append(name)
        letters += letter
    parameters = _all_parameters(kernel.asm.get("ptx"), letters, metadata.num_warps)
    return (
        LaunchDescription(
            symbol=metadata.name,
            arguments=tuple(arguments),
            parameters=parameters,
            block_threads=metadata.num_warps * _WARP_THREADS,
            shared_bytes=metadata.shared,
        ),
        kernel.asm["cubin"],
    )


def _check_metadata(metadata: Any) -> None:
    if metadata.target.backend != "cuda":
        raise NotLaunchable(f"it is for {metadata.target.backend}")
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid",
                 "launch_pdl", "tensordesc_meta", "instrumentation_mode", "debug"):
        if getattr(metadata, name, None):
            raise NotLaunchable(f"its {name} is {getattr(metadata, name)}")
    if metadata.num_ctas != 1:
        raise NotLaunchable(f"its num_ctas is {metadata.num_ctas}")


def _all_parameters(ptx: str | None, letters: str, num_warps: int) -> str:
    """The letters of every parameter of the kernel, Triton's pointers to scratch included."""
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)\s*(.*?)\{", ptx or "", re.DOTALL)
    if entry is None:
        raise NotLaunchable("its PTX, which names its parameters, was not kept")
    declared = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)", entry.group(1))
    letters += "P" * (len(declared) - len(letters))
    sizes = [_PTX_BYTES.get(kind) for kind in declared]
    if sizes != [8 if letter in "Pq" else 4 for letter in letters]:
        raise NotLaunchable(f"its parameters are {declared}, expected were {letters}")
    threads = re.search(r"\.reqntid (\d+)", entry.group(2))
    if threads is None or int(threads.group(1)) != num_warps * _WARP_THREADS:
        raise NotLaunchable(f"its block is {entry.group(2)!r}, expected were {num_warps} warps")
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
        return native.load(DRIVER_MODULE).Kernel(
            cubin, launch.symbol, launch.parameters, launch.block_threads, launch.shared_bytes
        ).launch
    except (TypeError, ValueError, OverflowError) as error:
        raise NotLaunchable(str(error)) from error


def packer(
    launch: LaunchDescription,
    layout: Layout,
    passed: Sequence[Any],
    addressed: Sequence[bool],
    fixed: Mapping[str, Any],
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from what `Kinds.of` gives for a call to the cubin's arguments.

    Args:
      launch: of the kernel.
      layout: of the call.
      passed: what `Kinds.of` gave for one call of this kind.
      addressed: of each value in `passed`, whether it is the address of a tensor.
      fixed: values of parameters that the call does not pass: defaults and meta-parameters.

    Raises:
      NotLaunchable: an argument is of a type that only Triton converts.
    """
    place = {name: idx for idx, name in enumerate(layout.names)}
    extra: list[Any] = []
    chosen = []
    for name, letter in zip(launch.arguments, launch.parameters):
        if name in place:
            idx = place[name]
            value, is_address = passed[idx], addressed[idx]
        elif name in fixed:
            idx, value, is_address = len(passed) + len(extra), fixed[name], False
            extra.append(value)
        else:
            raise NotLaunchable(f"{name} is not passed")
        wanted = (float, int) if letter == "f" else (int,)
        if type(value) not in wanted or (is_address and letter != "P"):
            raise NotLaunchable(f"{name}={value!r} is passed as {letter}")
        chosen.append(idx)
    tail = (0,) * len(launch.scratch)
    if not chosen:
        return lambda values: tail
    if len(chosen) == 1:
        only, rest = chosen[0], tuple(extra)
        return lambda values: ((*values, *rest)[only], *tail)
    # Null pointers and what is fixed follow what is passed, and one call of C picks all.
    rest = (*extra, *tail)
    first_null = len(passed) + len(extra)
    pick = operator.itemgetter(*chosen, *range(first_null, first_null + len(tail)))
    return lambda values: pick((*values, *rest))


def is_int32_grid(grid: Sequence[Any]) -> bool:
    """Whether every extent is a plain int that the driver takes; a 0 means that nothing runs."""
    return all(type(extent) is int and 0 <= extent <= INT32_MAX for extent in grid)
