"""The kernel of `sw.dropout` on GPUs: compiled by NVRTC at its first call, and kept on the disk like epilogues.

Where NVRTC or nvJitLink is missing, torch's operators compute the same bits, with some hundred kernels.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch

from stoneware.epilogue import link, philox
from stoneware.errors import LinkError, UnsupportedError
from stoneware.kernels.launch_description import LaunchDescription
from stoneware.linking import cubins, toolchain
from stoneware.runtime.device import cuda_device

_LOG = logging.getLogger("stoneware.epilogue")

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_PARAMETERS = "PPPPqqqqqf"
"""Of DROPOUT_KERNEL in dropout_kernel.h."""

_BLOCK_THREADS = 256


def run(x: torch.Tensor, p: float, seed: int | torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor | None:
    """The dropout of a CUDA tensor; None if no kernel can run it.

    Args:
      x, p, seed, offset: of `sw.dropout`, which has checked them.
    """
    if x.dtype not in _NAMES or not x.is_cuda or not x.numel():
        return None
    columns = x.shape[-1] if x.ndim else 1
    rows = x.numel() // columns
    blocks = -(-rows * (-(-columns // 16) * 4) // _BLOCK_THREADS)
    if max(rows, columns, blocks) >= 2**31:
        return None
    from torch._C import _cuda_getCurrentRawStream as current_stream

    ordinal = x.device.index
    kernel = _kernel(x.dtype, cuda_device(ordinal).compute_capability)
    if kernel is None:
        return None
    dense = x.contiguous()
    y = torch.empty_like(dense)
    addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in (seed, offset)]
    numbers = [0 if isinstance(value, torch.Tensor) else value for value in (seed, offset)]
    kernel.launch(
        ordinal,
        current_stream(ordinal),
        *(blocks, 1, 1),
        *(dense.data_ptr(), y.data_ptr(), *addresses, *numbers),
        *(rows, columns, philox.threshold(p), philox.scale(p)),
    )
    return y if dense is x else torch.empty_like(x).copy_(y)


@functools.cache
def _kernel(dtype: torch.dtype, compute_capability: tuple[int, int]) -> Any | None:
    """The driver module's Kernel; None if it cannot be compiled or loaded here, which is logged."""
    try:
        data = cubin("sm_{}{}".format(*compute_capability))
        symbol = f"stoneware_dropout_{_NAMES[dtype]}"
        return LaunchDescription(
            symbol=symbol, parameters=_PARAMETERS, block_threads=_BLOCK_THREADS, shared_bytes=0
        ).load(data)
    except (LinkError, UnsupportedError) as error:
        _LOG.warning("dropout runs as torch's operators, since its kernel cannot be compiled: %s", error)
        return None


def cubin(arch: str) -> bytes:
    """The kernels for an arch such as "sm_90", from the disk or compiled.

    Raises:
      LinkError: NVRTC or nvJitLink refuses.
      UnsupportedError: nothing can be linked here.
    """
    folder = Path(philox.__file__).parent
    text = link.device_code() + "".join(
        (folder / name).read_text(encoding="ascii") for name in ("philox.h", "dropout_kernel.h")
    )
    name = cubins.digest("dropout", arch, text)
    data = cubins.read(name)
    if data is None:
        toolchain.load_linker_in_background()
        lto_ir = toolchain.compile_lto_ir(text, arch=arch, name="dropout.cu")
        data = toolchain.link([toolchain.Library("dropout", lto_ir)], arch=arch)
        cubins.write(name, data)
    return data
