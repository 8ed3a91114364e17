"""Links the text of an epilogue into an open kernel. Imports without torch: the build links epilogues for the wheel."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from stoneware.linking import cubins, toolchain
from stoneware.linking.toolchain import Library

ARCH = "sm_90a"


@functools.cache
def device_code() -> str:
    """What the text of every epilogue begins with."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text(encoding="ascii") for name in ("device_code.h", "fragments.h"))


def digest(kernel: str, kernels_sha256: str, text: str) -> str:
    """sha256 of what a linked cubin is made of, without the versions of NVRTC and nvJitLink.

    Args:
      kernel: id of an open kernel.
      kernels_sha256: of the file that has it.
      text: of `source.Source`.
    """
    return cubins.digest_of_parts((cubins.FORMAT, kernel, kernels_sha256, _device_code_sha256(), text, ARCH))


@functools.cache
def _device_code_sha256() -> str:
    return hashlib.sha256(device_code().encode()).hexdigest()


def link(kernel: str, kernels: bytes, text: str) -> bytes:
    """The cubin of a kernel with an epilogue.

    Args:
      kernel, text: as for `digest`.
      kernels: the file that has the kernel.

    Raises:
      LinkError: NVRTC or nvJitLink refuses.
      UnsupportedError: nothing can be linked here.
    """
    toolchain.load_linker_in_background()
    lto_ir = toolchain.compile_lto_ir(device_code() + text, arch=ARCH, name="epilogue.cu")
    libraries = [Library(kernel, kernels, is_fatbin=True), Library("epilogue", lto_ir)]
    return toolchain.link(libraries, arch=ARCH, options=[f"-kernels-used={kernel}"])
