"""NVRTC and nvJitLink, which come with torch for CUDA: sources to LTO-IR or PTX, LTO-IR to a cubin.

Neither needs a GPU, nvcc or CUDA's headers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from stoneware.errors import UnsupportedError

_PACKAGES = "cuda-bindings nvidia-cuda-nvrtc nvidia-nvjitlink"

Headers = tuple[tuple[str, str], ...]
"""Headers by the path under which a source includes them."""


def lto_ir(source: str, headers: Headers, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Compiles a source to LTO-IR; a repeated call returns the same bytes.

    Args:
      source: CUDA C++.
      headers: that it may include.
      arch: such as "sm_90a".
      options: further options of NVRTC.

    Raises:
      ValueError: NVRTC refuses the source; the message has its log.
      UnsupportedError: NVRTC is not installed.
    """
    return _compiled(source, headers, (f"-arch={arch}", "-dlto", "-rdc=true", "-std=c++17", *options), "LTOIR")


def fast_ptx(source: str, headers: Headers, arch: str, options: tuple[str, ...] = ()) -> str:
    """The same source as PTX that is not optimized, to read its signatures and calls; raises the same errors."""
    fast = (f"-arch={arch}", "-rdc=true", "-std=c++17", "--Ofast-compile=mid", *options)
    return _compiled(source, headers, fast, "PTX").decode().rstrip("\0")


@functools.lru_cache(maxsize=256)
def _compiled(source: str, headers: Headers, options: tuple[str, ...], output: str) -> bytes:
    nvrtc = _bindings("nvrtc")

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(nvrtc, f"nvrtc{name}")(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"nvrtc{name} returned {status.name}")
        return results[0] if results else None

    texts = [text.encode() for _, text in headers]
    names = [name.encode() for name, _ in headers]
    program = call("CreateProgram", source.encode(), b"source.cu", len(headers), texts, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(call("GetProgramLogSize", program))
            call("GetProgramLog", program, log)
            raise ValueError(
                f"the source must compile for {options[0].removeprefix('-arch=')}, and NVRTC reports "
                f"{status.name}; correct it:\n{log.decode(errors='replace').rstrip(chr(0))}"
            )
        data = bytes(call(f"Get{output}Size", program))
        call(f"Get{output}", program, data)
        return data
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link(modules: Sequence[bytes], arch: str, options: Sequence[str] = ()) -> bytes:
    """Links LTO-IR to a cubin.

    Args:
      modules: LTO-IR of NVRTC, or fatbins of nvcc with LTO-IR.
      arch: such as "sm_90a".
      options: further options of nvJitLink.

    Raises:
      ValueError: nvJitLink refuses; the message has its log.
      UnsupportedError: nvJitLink is not installed.
    """
    nvjitlink = _bindings("nvjitlink")
    all_options = [f"-arch={arch}", "-lto", "-O3", "-optimize-unused-variables", *options]
    linker = nvjitlink.create(len(all_options), all_options)
    try:
        for module in modules:
            kind = nvjitlink.InputType.FATBIN if module[:4] == _FATBIN_MAGIC else nvjitlink.InputType.LTOIR
            nvjitlink.add_data(linker, kind, module, len(module), "")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        return bytes(cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        text = log.decode(errors="replace").rstrip("\0")
        raise ValueError(f"the modules must link for {arch}, and nvJitLink reports {error}:\n{text}") from error
    finally:
        nvjitlink.destroy(linker)


_FATBIN_MAGIC = b"\x50\xed\x55\xba"
"""0xba55ed50, the first word of CUDA's fatbinary header (fatbinary_section.h)."""


@functools.cache
def _bindings(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"cuda.bindings.{name} must be installed to link tile matmuls, and cannot be imported: {error}; "
            f"pip install {_PACKAGES}, or torch for CUDA 13, which requires them"
        ) from error
