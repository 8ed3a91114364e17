"""The CUDA context of a thread, which must be current before torch calls cuBLAS.

torch makes a device's context current with cudaSetDevice, and skips that if the device is already current.
In a new thread device 0 is current, but has no context. autograd runs backward in such a thread, and if its
first operation is a matmul, torch warns "Attempting to run cuBLAS, but there was no current CUDA
context!" (getCurrentCUDABlasHandle in aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.11 and 2.13).
"""

from __future__ import annotations

import threading

import torch


class _Thread(threading.local):
    """Attributes of the thread that reads them.

    Attributes:
      has_context: whether `make_current` was called. Once is enough for all devices: from then on torch
        makes the context current with each change of the device.
    """

    has_context = False


THREAD = _Thread()


def make_current() -> None:
    """Makes the primary context of the thread's device current, if CUDA was used before in the process."""
    if torch.cuda.is_initialized():
        # The cheapest of torch's calls that does so and is allowed during a capture, this thread's or another's.
        torch.cuda.is_current_stream_capturing()
    THREAD.has_context = True
