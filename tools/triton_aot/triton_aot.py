"""Compiles one Triton function ahead of time: FILE.py -> .cubin + .json, with no GPU and no torch.

    triton_aot --src FILE.py --function matmul --archs sm_80,sm_90 \\
        --signature "*bf16:16, *bf16:16, *bf16:16, i32, i32:16, i32:1, 128, 64" \\
        --num_warps 4 --num_stages 3 --op matmul --id matmul_triton_{arch}_bf16 \\
        --config '{"tile": [128, 64]}' --out_dir DIR

writes DIR/matmul_triton_sm80_bf16.cubin and .json, and those of sm90. If an architecture is refused,
nothing is written.

The signature names one entry per parameter of the function, in order, in the syntax of
triton.tools.compile:

    *bf16  i32  fp32    a pointer or a scalar, passed at the launch
    *bf16:16  i32:16    the same, promised to be a multiple of 16 (a pointer: 16-byte aligned)
    i32:1               promised to be 1: compiled in, not passed
    128  0.5            a constant of that value: compiled in, not passed

The outputs of an architecture depend on the text of FILE.py and the flags alone: not on its path,
the working folder, HOME, TMPDIR or other environment variables (they are dropped before Triton is
imported), the other architectures, nor on a cache (a fresh one is used and removed). Triton writes
source paths into its line tables, so those are off.

A kernel that spills registers, uses more shared memory than the GPU has, or needs scratch memory
from its launcher is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags, logging

# Read before Triton is imported: what may stay of the caller's environment. Triton and LLVM read
# dozens of variables (TRITON_PTXAS_PATH, TRITON_OVERRIDE_ARCH, DISABLE_LLVM_OPT, ...) that would
# change the cubin.
_KEPT_ENVIRONMENT = ("PATH", "TMPDIR", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")

# Not $TMPDIR: the length of this path must be the same on every machine.
_SCRATCH_PARENT = "/tmp"

_ADDR_NO_RANDOMIZE = 0x0040000  # sys/personality.h

# Dynamic shared memory that one block may opt in to: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability", row "Maximum amount of shared memory per thread block".
SHARED_BYTES_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}

# One letter per kernel parameter, as the launcher packs it.
_SCALAR_LETTERS = {"i32": "i", "u32": "i", "i64": "q", "u64": "q", "fp32": "f", "f32": "f"}
_POINTEES = frozenset(
    [
        "i8",
        "i16",
        "i32",
        "i64",
        "u8",
        "u16",
        "u32",
        "u64",
        "fp16",
        "bf16",
        "fp32",
        "fp64",
        "fp8e4nv",
        "fp8e5",
        "fp8e4b15",
    ]
)
_PTX_BYTES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}
_WARP_THREADS = 32


class AotError(Exception):
    """The kernel cannot be compiled as asked; the message has rule, value and remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the Triton function as the signature describes it.

    Attributes:
      name: in the function.
      type: Triton's type name, or "constexpr".
      hint: 16 if the value is a multiple of 16, else None.
      value: of a constant, else None.
    """

    name: str
    type: str
    hint: int | None = None
    value: int | float | None = None

    @property
    def letter(self) -> str:
        """P, i, q or f; empty for a constant, which the launcher does not pass."""
        if self.type == "constexpr":
            return ""
        return "P" if self.type.startswith("*") else _SCALAR_LETTERS[self.type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled kernel and what its launcher must know."""

    cubin: bytes
    symbol: str
    parameters: str
    block_threads: int
    shared_bytes: int
    registers: int
    triton_version: str


def _number(text: str) -> int | float | None:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return None


def parse_signature(signature: str, names: Sequence[str], function: str) -> list[Parameter]:
    """Pairs the entries of `signature` with the function's parameters.

    Raises:
      AotError: the counts differ, or an entry is not one of those listed in the module's docstring.
    """
    entries = [entry.strip() for entry in signature.split(",")]
    if len(entries) != len(names):
        shown = ", ".join(f"{name}={entry}" for name, entry in zip(names, entries))
        raise AotError(
            f"the signature has {len(entries)} entries and must have one for each of the "
            f"{len(names)} parameters of "
            f"{function}({', '.join(names)}); it pairs up as {shown}"
        )
    return [_parse_entry(name, entry) for name, entry in zip(names, entries)]


def _parse_entry(name: str, entry: str) -> Parameter:
    value = _number(entry)
    if value is not None:
        return Parameter(name=name, type="constexpr", value=value)
    type_name, colon, hint_text = entry.partition(":")
    is_known = type_name[1:] in _POINTEES if type_name.startswith("*") else type_name in _SCALAR_LETTERS
    if not is_known:
        raise AotError(
            f"parameter {name}: the type {type_name!r} is unknown; take a pointer (* and one of "
            f"{', '.join(sorted(_POINTEES))}), a scalar ({', '.join(sorted(_SCALAR_LETTERS))}), "
            "or a number"
        )
    if colon and hint_text not in ("1", "16"):
        raise AotError(f"parameter {name}: the hint {hint_text!r} of {entry!r} must be 1 or 16; drop it or correct it")
    if hint_text == "1":
        if type_name.startswith("*") or type_name == "fp32":
            raise AotError(f"parameter {name}: {entry!r} promises the value 1, which only an integer can have; drop :1")
        return Parameter(name=name, type="constexpr", value=1)
    return Parameter(name=name, type=type_name, hint=16 if colon else None)


def _check_ptx_parameters(ptx: str, letters: str) -> str:
    """The letters of every parameter that the kernel has, those that Triton adds included.

    Triton 3.6 appends two pointers, to global and to profiling scratch memory; they are null here,
    since kernels that need either are refused.
    """
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    declared = re.findall(r"\.param \.(\w+)", entry.group(1)) if entry else []
    letters += "P" * (len(declared) - len(letters))
    sizes = [_PTX_BYTES.get(kind) for kind in declared]
    expected = [8 if letter in "Pq" else 4 for letter in letters]
    if sizes != expected:
        raise AotError(
            f"the compiled kernel takes parameters of the PTX types {declared}, which do not fit "
            "the signature's letters "
            f"{letters!r}; this Triton passes arguments in another way than 3.6, so adapt "
            "_check_ptx_parameters"
        )
    return letters


@contextlib.contextmanager
def _placed_ptxas(knobs: Any, capability: int, folder: pathlib.Path) -> Iterator[None]:
    """Has Triton run a copy of its ptxas in `folder`, a path of fixed length.

    See _fix_addresses_of_children: the lengths of ptxas's own path and of its arguments count too.
    """
    is_blackwell = capability >= 100  # as get_ptxas in triton/backends/nvidia/compiler.py
    tool = knobs.nvidia.ptxas_blackwell if is_blackwell else knobs.nvidia.ptxas
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if is_blackwell else "TRITON_PTXAS_PATH"
    os.environ[variable] = str(shutil.copy(tool.path, folder / "ptxas"))
    try:
        yield
    finally:
        del os.environ[variable]


def _fix_addresses_of_children() -> None:
    """Turns address space randomisation off for the programs that Triton starts.

    ptxas 12.9 and 13.0 allocate registers for sm_100 in an order that follows addresses of its heap:
    with randomisation the same PTX gives one of two cubins by chance, without it one of two by the
    lengths of the paths involved, and with those fixed too always the same.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.personality(_ADDR_NO_RANDOMIZE) == -1:
        logging.warning(
            "personality(ADDR_NO_RANDOMIZE) is refused here (%s): cubins for sm_100 may differ "
            "between builds; let the sandbox permit that system call",
            os.strerror(ctypes.get_errno()),
        )


def _read_ptxas_log(log: str) -> tuple[int, int]:
    """Registers per thread, and bytes spilled per thread, from `ptxas -v`."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if registers is None or not spills:
        raise AotError(f"ptxas -v must report registers and spills; it printed: {log.strip()[:2000]!r}")
    return int(registers.group(1)), max(int(spill) for spill in spills)


def load_function(src: pathlib.Path, function: str) -> Any:
    """The @triton.jit function `function` of the file `src`.

    Raises:
      AotError: no such file or function is there.
    """
    for name in set(os.environ) - set(_KEPT_ENVIRONMENT):
        del os.environ[name]
    _fix_addresses_of_children()
    # A fixed module name, since Triton mangles it into the names of functions.
    spec = importlib.util.spec_from_file_location("triton_aot_source", src)
    if spec is None or spec.loader is None or not src.is_file():
        raise AotError(f"--src={src} must be a Python file; none is there")
    module = importlib.util.module_from_spec(spec)
    # inspect.getsource, by which Triton reads the function, looks the module up here.
    sys.modules[spec.name] = module
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)

    from triton.runtime.jit import JITFunction

    found = getattr(module, function, None)
    if not isinstance(found, JITFunction):
        known = sorted(name for name, value in vars(module).items() if isinstance(value, JITFunction))
        raise AotError(
            f"--function={function} must be a @triton.jit function of {src.name}; it has {', '.join(known) or 'none'}"
        )
    return found


def compile_kernel(jit_function: Any, *, signature: str, arch: str, num_warps: int, num_stages: int) -> Compiled:
    """Compiles what load_function returned for `arch`, such as "sm_90".

    Raises:
      AotError: the kernel cannot be compiled as asked.
    """
    if arch not in SHARED_BYTES_LIMIT:
        raise AotError(f"{arch} of --archs must be one of {', '.join(SHARED_BYTES_LIMIT)}")
    if num_warps < 1 or num_warps & (num_warps - 1):
        raise AotError(f"--num_warps={num_warps} must be a power of 2")
    if num_stages < 1:
        raise AotError(f"--num_stages={num_stages} must be at least 1")

    function = jit_function.fn.__name__
    parameters = parse_signature(signature, jit_function.arg_names, function)
    kernel, ptxas_log = _compile(
        jit_function, signature, parameters, int(arch.removeprefix("sm_")), num_warps, num_stages
    )
    _check_limits(kernel.metadata, ptxas_log, function, arch, num_warps, num_stages)
    import triton

    return Compiled(
        cubin=kernel.asm["cubin"],
        symbol=kernel.metadata.name,
        parameters=_check_ptx_parameters(kernel.asm["ptx"], "".join(parameter.letter for parameter in parameters)),
        block_threads=kernel.metadata.num_warps * _WARP_THREADS,
        shared_bytes=kernel.metadata.shared,
        registers=_read_ptxas_log(ptxas_log)[0],
        triton_version=triton.__version__,
    )


def _compile(
    jit_function: Any, signature: str, parameters: Sequence[Parameter], capability: int, num_warps: int, num_stages: int
) -> tuple[Any, str]:
    """Triton's compiled kernel, and what ptxas printed."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    knobs.compilation.disable_line_info = True  # the line table holds the source's path
    # The only way to detect spills: they are printed to stdout, and captured there.
    knobs.nvidia.dump_ptxas_log = True
    source = ASTSource(
        fn=jit_function,
        signature={parameter.name: parameter.type for parameter in parameters},
        constexprs={parameter.name: parameter.value for parameter in parameters if parameter.type == "constexpr"},
        attrs={(idx,): [["tt.divisibility", 16]] for idx, parameter in enumerate(parameters) if parameter.hint == 16},
    )
    log = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="triton_aot_", dir=_SCRATCH_PARENT) as scratch_dir:
        knobs.cache.dir = scratch_dir
        tempfile.tempdir = scratch_dir  # of Triton's own temporary files
        with _placed_ptxas(knobs, capability, pathlib.Path(scratch_dir)):
            try:
                with contextlib.redirect_stdout(log):
                    kernel = triton.compile(
                        source,
                        target=GPUTarget("cuda", capability, _WARP_THREADS),
                        options={"num_warps": num_warps, "num_stages": num_stages},
                    )
            except Exception as error:
                file = pathlib.Path(jit_function.fn.__code__.co_filename).name
                raise AotError(
                    f"Triton {triton.__version__} cannot compile {jit_function.fn.__name__} of {file} "
                    f"for sm_{capability} with the signature {signature!r}: {type(error).__name__}: "
                    f"{error}\n{log.getvalue()}"
                ) from error
        return kernel, log.getvalue()


def _check_limits(metadata: Any, ptxas_log: str, function: str, arch: str, num_warps: int, num_stages: int) -> None:
    """Raises AotError for a kernel that the launcher cannot run, or that is slow without a word."""
    scratch_bytes = metadata.global_scratch_size + metadata.profile_scratch_size
    if scratch_bytes:
        raise AotError(
            f"{function} needs {scratch_bytes} bytes of scratch memory and must need none, since "
            "the launcher gives none; "
            "Triton asks for it for device-side descriptors: load through pointers"
        )
    limit = SHARED_BYTES_LIMIT[arch]
    if metadata.shared > limit:
        raise AotError(
            f"{function} takes shared_bytes={metadata.shared}, and {arch} has {limit} per block; "
            f"lower --num_stages (now {num_stages}) or the tile"
        )
    _, spill_bytes = _read_ptxas_log(ptxas_log)
    if spill_bytes:
        raise AotError(
            f"{function} spills {spill_bytes} bytes per thread on {arch} and must spill none; "
            f"lower the tile or raise --num_warps (now {num_warps})"
        )


def describe(compiled: Compiled, *, kernel_id: str, op: str, arch: str, config: dict[str, Any]) -> str:
    """The text of the kernel's .json: canonical, so that equal kernels have equal bytes."""
    document = {
        "schema": 1,
        "id": kernel_id,
        "op": op,
        "backend": "triton_aot",
        "arch": arch,
        "config": config,
        "symbol": compiled.symbol,
        "parameters": compiled.parameters,
        "block_threads": compiled.block_threads,
        "shared_bytes": compiled.shared_bytes,
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "size_bytes": len(compiled.cubin),
        "triton": compiled.triton_version,
    }
    return json.dumps(document, sort_keys=True, indent=1) + "\n"


def _parse_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AotError(f"--config={text!r} must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise AotError(f"--config={text!r} must be a JSON object, not {type(config).__name__}")
    return config


def _define_flags() -> None:
    flags.DEFINE_string("src", None, "Python file with the function.", required=True)
    flags.DEFINE_string("function", None, "Name of the @triton.jit function.", required=True)
    flags.DEFINE_string("signature", None, "Types, hints and constants, one per parameter.", required=True)
    flags.DEFINE_list("archs", None, f"Some of {', '.join(SHARED_BYTES_LIMIT)}.", required=True)
    flags.DEFINE_string("op", None, "Op that the kernel serves, such as scaled_mm.", required=True)
    flags.DEFINE_string("id", None, "Id of the kernels in the manifest; {arch} becomes sm90 and so on.", required=True)
    flags.DEFINE_string("config", "{}", "JSON object that the kernel's backend reads back: tile, dtypes, ...")
    flags.DEFINE_integer("num_warps", 4, "Warps per block, a power of 2.")
    flags.DEFINE_integer("num_stages", 3, "Depth of the software pipeline.")
    flags.DEFINE_string("out_dir", None, "Folder for ID.cubin and ID.json.", required=True)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    values = flags.FLAGS
    start = time.monotonic()
    outputs: dict[str, bytes] = {}
    kernel_id = values.id
    try:
        config = _parse_config(values.config)
        if not values.archs or (len(values.archs) > 1 and "{arch}" not in values.id):
            raise AotError(
                f"--archs={','.join(values.archs)} must name an architecture, and with several --id={values.id} must "
                "have {arch}, which makes an id for each; append _{arch} to --id, or name one"
            )
        jit_function = load_function(pathlib.Path(values.src), values.function)
        for arch in values.archs:
            kernel_id = values.id.format(arch=arch.replace("_", ""))
            compiled = compile_kernel(
                jit_function,
                signature=values.signature,
                arch=arch,
                num_warps=values.num_warps,
                num_stages=values.num_stages,
            )
            text = describe(compiled, kernel_id=kernel_id, op=values.op, arch=arch, config=config)
            outputs |= {f"{kernel_id}.cubin": compiled.cubin, f"{kernel_id}.json": text.encode("ascii")}
            logging.info(
                "%s: %d bytes, %d registers, %d bytes of shared memory, %d threads, after %.1f s",
                kernel_id,
                len(compiled.cubin),
                compiled.registers,
                compiled.shared_bytes,
                compiled.block_threads,
                time.monotonic() - start,
            )
    except AotError as error:
        logging.error("%s: %s", kernel_id, error)
        sys.exit(1)
    for name, data in outputs.items():
        (pathlib.Path(values.out_dir) / name).write_bytes(data)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
