"""How a kernel that Triton compiled is launched without Triton, and when that is not possible.

A launch is one call of `_driver`, with the arguments in the order of the cubin's parameters. Triton
itself launches kernels that need more: scratch memory, tensor descriptors, clusters, cooperative or
programmatic launches, profiler hooks, debug mode.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.kernels.launch_description import LaunchDescription

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


def is_set(hook: Any) -> bool:
    """Whether a hook of Triton's is set; a chain is if it has a function."""
    return hook is not None and bool(getattr(hook, "calls", True))


def may_be_kept(knobs: Any) -> bool:
    """Whether Triton's knobs allow kernels to be read from disk and kept there."""
    return not (
        any(getattr(knobs.runtime, name, None) is not None for name in _COMPILE_HOOKS)
        or any(is_set(getattr(knobs.runtime, name, None)) for name in _LOAD_HOOKS)
        or any(getattr(knobs.compilation, name, None) for name in _COMPILE_SWITCHES)
    )


def compiler_settings(triton: Any) -> dict[str, Any]:
    """Everything except the kernel that changes what Triton compiles.

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


def describe(kernel: Any) -> tuple[LaunchDescription, bytes]:
    """How to launch what Triton compiled (a triton.compiler.CompiledKernel), and the cubin.

    Raises:
      NotLaunchable: only Triton can launch it.
    """
    if not hasattr(kernel, "metadata") or not hasattr(kernel, "asm"):
        raise NotLaunchable(f"Triton returned a {type(kernel).__name__}")
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)\s*(.*?)\{", kernel.asm.get("ptx") or "", re.DOTALL)
    if entry is None:
        raise NotLaunchable("its PTX, which names its parameters, was not kept")
    ptx_types = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)", entry.group(1))
    threads = re.search(r"\.reqntid (\d+)", entry.group(2))
    metadata = kernel.metadata
    block_threads = metadata.num_warps * _WARP_THREADS
    types = {name: type_name for name, type_name in kernel.src.signature.items() if type_name != "constexpr"}
    letters = ["P" if str(name).startswith("*") else _LETTERS.get(name, name) for name in types.values()]
    letters += ["P"] * (len(ptx_types) - len(letters))
    actual_and_expected = {
        "backend": (metadata.target.backend, "cuda"),
        "num_ctas": (metadata.num_ctas, 1),
        "parameters": (
            [_PTX_BYTES.get(kind) for kind in ptx_types],
            [{"P": 8, "q": 8, "i": 4, "f": 4}.get(letter, letter) for letter in letters],
        ),
        "threads of a block": (threads and int(threads.group(1)), block_threads),
        **{name: (getattr(metadata, name, None) or None, None) for name in _ONLY_TRITONS},
    }
    for what, (actual, expected) in actual_and_expected.items():
        if actual != expected:
            raise NotLaunchable(f"its {what}: found {actual}, expected {expected}")
    launch = LaunchDescription(
        symbol=metadata.name,
        parameters="".join(letters),
        block_threads=block_threads,
        shared_bytes=metadata.shared,
        arguments=tuple(types),
    )
    return launch, kernel.asm["cubin"]


def packer(
    launch: LaunchDescription, names: Sequence[str], values: Sequence[Any], parameters: Mapping[str, Any]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from the values of a launch, as `tokens_of` returns them, to the cubin's arguments.

    Args:
      launch: of the kernel.
      names, values: of one launch, the values' names and what `tokens_of` returned for them.
      parameters: of that launch, all by name. Those that a launch does not pass have the same value each time.

    Raises:
      NotLaunchable: an argument has a type that only Triton converts.
    """
    constants: list[Any] = []
    positions = []
    for name, letter in zip(launch.arguments, launch.parameters):
        if name in names:
            positions.append(names.index(name))
            value = values[positions[-1]]
        else:
            positions.append(len(values) + len(constants))
            value = parameters.get(name)
            constants.append(value)
        if type(value) is not int and (type(value) is not float or letter != "f"):
            raise NotLaunchable(f"{name}={value!r} is passed as {letter}")
    # Constants and null pointers follow the values, so that one call in C picks all.
    rest = (*constants, *[0] * launch.num_scratch(len(launch.arguments)))
    positions += range(len(values) + len(constants), len(values) + len(rest))
    if len(positions) < 2:  # an itemgetter of a single position returns no tuple
        return lambda values: tuple((*values, *rest)[idx] for idx in positions)
    pick = operator.itemgetter(*positions)
    return lambda values: pick((*values, *rest))
