"""Scratch memory of launches, cached for each device and stream."""

from __future__ import annotations

import threading

import torch

_LEAST_BYTES = 1 << 20
"""So that plans of different sizes share one piece."""

_kept: dict[tuple[int, int], torch.Tensor] = {}
_changing = threading.Lock()


def workspace(num_bytes: int, tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a launch on torch's current stream of a tensor's device; of any content.

    Launches of one stream run one after the other, so they share it. A launch that is captured into
    a CUDA graph has memory of its own, from the graph's pool: the graph may later run on another
    stream, at the same time as a launch on this one.

    Args:
      num_bytes: at least 1.
      tensor: on a GPU.

    Returns:
      uint8 [at least num_bytes], at a multiple of 256 bytes.
    """
    device = tensor.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return workspace(num_bytes, tensor)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    kept = _kept.get((device.index, stream))
    if kept is not None and kept.numel() >= num_bytes:
        return kept
    # The memory of a smaller one goes back to torch's allocator, which hands it out again in the
    # order of the stream, after what is queued.
    grown = torch.empty(max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()), dtype=torch.uint8, device=device)
    with _changing:
        _kept[device.index, stream] = grown
    return grown


def forget() -> None:
    """Gives all that is kept back to torch's allocator."""
    with _changing:
        _kept.clear()
