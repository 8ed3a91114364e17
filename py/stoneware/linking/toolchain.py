"""NVRTC and nvJitLink, by their bindings in the package cuda-bindings. No GPU and no driver are needed.

Both release the GIL while they work, so a thread can link while others launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from stoneware.errors import LinkError, UnsupportedError

LEAST_VERSION = (13, 0)
"""Of nvJitLink: LTO-IR of this build is of CUDA 13.0, which older linkers do not read."""

_REMEDY = (
    "install torch for CUDA 13, which brings both, or: pip install cuda-bindings~=13.0 nvidia-cuda-nvrtc "
    "nvidia-nvjitlink"
)


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Library(NamedTuple):
    """LTO-IR to link.

    Attributes:
      name: for the linker's messages.
      data: its bytes: of NVRTC, or a fatbin of nvcc's.
      is_fatbin: whether it is the latter.
    """

    name: str
    data: bytes
    is_fatbin: bool = False


class _Loaded(NamedTuple):
    bindings: Any
    version: tuple[int, ...]


def versions() -> str:
    """The versions of NVRTC and of nvJitLink; raises UnsupportedError if they cannot be used."""
    return f"NVRTC {_dotted(_nvrtc().version)}, nvJitLink {_dotted(_nvjitlink().version)}"


@functools.cache
def installed() -> str:
    """The versions of both libraries' distributions, or of the libraries themselves where these have none: a
    cubin from the disk needs no library, and loading one takes longer than reading the cubin."""
    from importlib import metadata

    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in ("nvidia-cuda-nvrtc", "nvidia-nvjitlink"))
    except metadata.PackageNotFoundError:
        return versions()


def why_missing() -> str | None:
    """Why nothing can be linked here, with the remedy; None if it can."""
    try:
        versions()
    except UnsupportedError as error:
        return str(error)
    return None


def load_linker_in_background() -> None:
    """Loads nvJitLink while the caller compiles. If it cannot be loaded, the link that follows raises."""

    def load() -> None:
        with contextlib.suppress(UnsupportedError):
            _nvjitlink()

    threading.Thread(target=load, name="stoneware-load", daemon=True).start()


def compile_lto_ir(
    source: str,
    *,
    arch: str,
    name: str = "source.cu",
    headers: Mapping[str, str] = _NO_HEADERS,
    options: Iterable[str] = (),
) -> bytes:
    """Compiles CUDA C++ to LTO-IR.

    Args:
      source: the text.
      arch: such as "sm_90a".
      name: of the text, in messages.
      headers: all that it may include: path -> text.
      options: further options of NVRTC.

    Raises:
      LinkError: NVRTC refuses the text; the message has its log.
      UnsupportedError: NVRTC is not installed, or too old.
    """
    return _compile(source, ["-dlto", *options], "LTOIR", arch=arch, name=name, headers=headers)


def compile_ptx(
    source: str,
    *,
    arch: str,
    name: str = "source.cu",
    headers: Mapping[str, str] = _NO_HEADERS,
    options: Iterable[str] = (),
) -> str:
    """Compiles CUDA C++ to PTX; the arguments and errors are those of `compile_lto_ir`."""
    return _text(_compile(source, options, "PTX", arch=arch, name=name, headers=headers))


def _compile(
    source: str, options: Iterable[str], output: str, *, arch: str, name: str, headers: Mapping[str, str]
) -> bytes:
    nvrtc = _nvrtc().bindings

    def call(function: Any, *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if int(result) != 0:
            raise LinkError(f"{function.__name__} failed with {result.name}; {_REMEDY}")
        return values[0] if values else None

    texts, paths = [text.encode() for text in headers.values()], [path.encode() for path in headers]
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), len(headers), texts, paths)
    try:
        all_options = [f"-arch={arch}", "-rdc=true", "-std=c++17", *options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(all_options), [option.encode() for option in all_options])
        if int(result) != 0:
            log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise LinkError(f"NVRTC cannot compile {name} for {arch}:\n{_text(log)}")
        data = bytearray(call(getattr(nvrtc, f"nvrtcGet{output}Size"), program))
        call(getattr(nvrtc, f"nvrtcGet{output}"), program, data)
        return bytes(data)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class LinkedCubin(NamedTuple):
    """A linked cubin, and what the linker says of it, such as a warning."""

    cubin: bytes
    log: str


def link(libraries: Sequence[Library], *, arch: str, options: Iterable[str] = ()) -> bytes:
    """`link_with_log` without the log."""
    return link_with_log(libraries, arch=arch, options=options).cubin


def link_with_log(libraries: Sequence[Library], *, arch: str, options: Iterable[str] = ()) -> LinkedCubin:
    """Links LTO-IR to a cubin.

    Args:
      libraries: what to link.
      arch: such as "sm_90a".
      options: further options of nvJitLink.

    Raises:
      LinkError: nvJitLink refuses; the message has its log.
      UnsupportedError: nvJitLink is not installed, or too old.
    """
    nvjitlink = _nvjitlink().bindings
    all_options = [f"-arch={arch}", "-lto", *options]
    linker = nvjitlink.create(len(all_options), all_options)
    try:
        for library in libraries:
            kind = nvjitlink.InputType.FATBIN if library.is_fatbin else nvjitlink.InputType.LTOIR
            nvjitlink.add_data(linker, kind, library.data, len(library.data), library.name)
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
        return LinkedCubin(bytes(cubin), _text(log))
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        names = ", ".join(library.name for library in libraries)
        raise LinkError(f"nvJitLink cannot link {names} for {arch}: {error}\n{_text(log)}") from error
    finally:
        nvjitlink.destroy(linker)


def _text(log: bytes | bytearray) -> str:
    return log.decode(errors="replace").rstrip("\0\n")


@functools.cache
def _nvrtc() -> _Loaded:
    return _load("NVRTC", "nvrtc", lambda bindings: bindings.nvrtcVersion()[1:])


@functools.cache
def _nvjitlink() -> _Loaded:
    return _load("nvJitLink", "nvjitlink", lambda bindings: bindings.version())


def _load(name: str, module: str, version_of: Callable[[Any], Iterable[int]]) -> _Loaded:
    """A library by its bindings; asking for its version loads it."""
    try:
        bindings = importlib.import_module(f"cuda.bindings.{module}")
        version = tuple(version_of(bindings))
    except Exception as error:  # the bindings raise what their search for the library does
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedError(
            f"linking needs NVRTC and nvJitLink of CUDA {_dotted(LEAST_VERSION)} or later, but {name} cannot be "
            f"loaded: {reason}; {_REMEDY}"
        ) from error
    if version < LEAST_VERSION:
        raise UnsupportedError(
            f"{name} must be of CUDA {_dotted(LEAST_VERSION)} or later, and is of {_dotted(version)}; {_REMEDY}"
        )
    return _Loaded(bindings, version)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
