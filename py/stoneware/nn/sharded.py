"""Linear layers whose weight is a DTensor, from a plan of torch.distributed.tensor.parallel.

Each rank multiplies its local tensors, and the result is a DTensor again. Operands are quantized with the scales
of the local part: no amax is communicated, and scales are at least as fine as those of the whole.

    weight [n, k] is      x [..., k]       y [..., n]    dx
    Shard(0)              Replicate        Shard(-1)     Partial
    Shard(1)              Shard(-1)        Partial       Shard(-1)
    Replicate             any other        like x        like x
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, weight, bias) -> y, of plain tensors."""


def linear(compute: Compute, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x @ weight.t() + bias, of DTensors of one mesh.

    x is redistributed as the weight needs it. If the weight is sharded along k, y is Partial, and torch adds
    the bias.

    Args:
      compute: the call on each rank.
      x: [..., k].
      weight: [n, k].
      bias: [n] or None, sharded like the rows of the weight.

    Raises:
      TypeError: x is not a DTensor.
      ValueError: the weight is neither sharded along a dimension nor replicated.
    """
    assert isinstance(weight, DTensor)  # the caller checked it
    if not isinstance(x, DTensor):
        raise TypeError(
            f"x is a {type(x).__name__} and weight a DTensor, both must be DTensors; parallelize the layer with "
            "ColwiseParallel or RowwiseParallel, or pass DTensor.from_local(x, weight.device_mesh, placements)"
        )
    mesh = weight.device_mesh
    cuts = [_cut(*placements, x.ndim - 1) for placements in zip(x.placements, weight.placements)]
    x_placements, y_placements, dx_placements, dw_placements = zip(*cuts)
    is_added_here = bias is not None and Shard(1) not in weight.placements
    y = compute(
        x.redistribute(mesh, x_placements).to_local(grad_placements=dx_placements),
        weight.to_local(grad_placements=dw_placements),
        _local_bias(bias, dw_placements) if is_added_here else None,
    )
    shape = (*x.shape[:-1], weight.shape[0])
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(y, mesh, y_placements, run_check=False, shape=torch.Size(shape), stride=strides)
    return whole if bias is None or is_added_here else whole + bias


def _cut(x: Placement, weight: Placement, last: int) -> tuple[Placement, Placement, Placement, Placement]:
    """The placements of x, y, dx and dw along one dimension of the mesh; `last` is k's dimension in x."""
    if weight == Shard(0):
        return Replicate(), Shard(last), Partial(), weight
    if weight == Shard(1):
        return Shard(last), Partial(), Shard(last), weight
    if weight != Replicate():
        raise ValueError(
            f"weight is placed as {weight}, it must be Shard(0), Shard(1) or Replicate(); "
            "use ColwiseParallel or RowwiseParallel"
        )
    if isinstance(x, Shard) and x.dim < last:
        return x, x, x, Partial()
    return Replicate(), Replicate(), Replicate(), weight


def _local_bias(bias: torch.Tensor | None, placements: tuple[Placement, ...]) -> torch.Tensor:
    assert isinstance(bias, DTensor)  # like the weight
    return bias.to_local(grad_placements=placements)
