"""Weights that FSDP2 gathers in fp8: half of the bytes travel, and no rank quantizes the whole weight.

    ShardedWeight    a rank's rows in 16 or 32 bits, as the optimizer has them; quantized to be gathered
    GatheredWeight   all rows in fp8 and their scales, for the time of a layer's forward or backward

torch.distributed.fsdp calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of what it shards.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stoneware.nn.gathering import Gathering, Place
from stoneware.nn.recipes import BLOCK, RECIPES, Cast

_aten = torch.ops.aten

_TO = _aten.to.device, _aten.to.dtype, _aten.to.dtype_layout, _aten.to.other
"""What _to_copy is in inference mode."""

_SHARDED_RESULTS = frozenset(
    {
        _aten.alias.default, _aten.as_strided.default, _aten.clone.default, _aten.copy_.default,
        _aten.detach.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor,
        _aten.split.Tensor, _aten.view.default, _aten._pin_memory.default, _aten._to_copy.default, *_TO,
    }
)  # fmt: skip
"""What torch.distributed.fsdp and torch.nn.Module make shards with; other results are plain tensors."""

_COPIES = frozenset(
    {_aten.empty_like.default, _aten.new_zeros.default, _aten._pin_memory.default, _aten._to_copy.default, *_TO}
)
"""Those with memory of their own."""


class ShardedWeight(torch.Tensor):
    """A weight, or some rows of it, whose operators are those of the tensor that it holds.

    Args:
      tensor: [rows, k], bfloat16, float16 or float32.
      recipe: a name of `stoneware.nn.recipes`.
      place: among the weights of its model; None: it is quantized alone.

    Attributes:
      tensor, recipe, place: the arguments.
    """

    tensor: torch.Tensor
    recipe: str
    place: Place

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, recipe: str, place: Place | None = None) -> ShardedWeight:
        return _wrapper(cls, tensor, tensor.dtype)

    def __init__(self, tensor: torch.Tensor, recipe: str, place: Place | None = None) -> None:
        self.tensor, self.recipe, self.place = tensor, recipe, place or Place(Gathering(1), 0)

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["tensor"], self.recipe

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], recipe: str, size: object, stride: object) -> Any:
        return ShardedWeight(inner["tensor"], recipe)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's own is typed as a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weights = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, ShardedWeight)]
        args, kwargs = pytree.tree_map_only(ShardedWeight, lambda weight: weight.tensor, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:  # torch counts no version of a tensor below a subclass
            for weight in weights:
                weight.place.num_changes += 1
        if func not in _SHARDED_RESULTS:
            return result
        recipe, place = weights[0].recipe, weights[0].place
        if func is _aten.clone.default:  # as of a copy of the model
            place = Place(Gathering(1), 0)
        elif func in _COPIES:
            place = Place(place.gathering, place.position)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: ShardedWeight(tensor, recipe, place), result)

    @property
    def fsdp_pre_all_gather(self) -> _PreAllGather:
        return _PreAllGather(self)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: torch.Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The weight. Its parts are views of `outputs`, whose memory FSDP frees and fills again."""
        self.place.gathering.end_burst()
        values, *scales = outputs
        if out is not None:
            assert isinstance(out, GatheredWeight)  # the first call made it
            assert out.quantized.data_ptr() == values.data_ptr()
            if metadata is not None and metadata is not out.scale:
                out.scale = _for_present_stream(metadata)
            return None
        scale = scales[0].view(torch.float32) if metadata is None else _for_present_stream(metadata)
        return GatheredWeight(values.view(RECIPES[self.recipe].forward[1].dtype), scale, param_dtype), ()


class _PreAllGather:
    """What FSDP calls before it gathers a weight. It asks inspect.signature about this at each gather, which takes
    several times as long for a method."""

    def __init__(self, weight: ShardedWeight) -> None:
        self.weight = weight

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """(values, scales) of the weight's rows, to be gathered along them, as the dtype in which FSDP gathers other
        parameters: if dtypes differ, it makes several views of each tensor at each gather. Not as float16, in which
        fp8 values look like NaN, and TORCH_NCCL_NAN_CHECK finds these.

        A scale that all ranks have need not travel: it goes along as metadata, and so do all scales on one rank, where
        FSDP hands over the first tensor alone.
        """
        weight, place = self.weight, self.weight.place
        cast, dtype = RECIPES[weight.recipe].forward[1], mp_policy.param_dtype or weight.dtype
        if place.mesh is not mesh:
            place.mesh, place.num_ranks, place.group = mesh, mesh.size(), mesh.get_group()
        _check_rows(weight.recipe, cast, weight.shape, outer_size, place.num_ranks)
        values, scale = place.gathering.quantized(weight, place.group, dtype)
        sent_as = torch.uint8 if dtype is torch.float16 else dtype
        if place.num_ranks == 1 or cast.scales == "tensor":
            return (values.view(sent_as),), scale
        return (values.view(sent_as), scale.view(sent_as)), None


_PreAllGather.__signature__ = inspect.signature(_PreAllGather(None))  # type: ignore[attr-defined, arg-type]


class GatheredWeight(torch.Tensor):
    """A weight [n, k] in fp8 that takes a gradient in 16 or 32 bits; only nodes that train layers read it.

    Args:
      quantized: [n, k] fp8.
      scale: [n, 1], [1] or [n / 128, k / 128] float32.
      dtype: that it shows, and of its gradient.

    Attributes:
      quantized, scale: the arguments.
    """

    quantized: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> GatheredWeight:
        return _wrapper(cls, quantized, dtype)

    def __init__(self, quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.quantized, self.scale = quantized, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as is this
        return f"GatheredWeight({self.quantized!r}, {self.scale!r}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["quantized", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: torch.dtype, size: object, stride: object) -> Any:
        return GatheredWeight(inner["quantized"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's own is typed as a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        is_whole = func is _aten.as_strided.default and [*args[1]] == [*weight.shape]
        if is_whole or func in (_aten.detach.default, _aten.alias.default):
            return GatheredWeight(weight.quantized, weight.scale, weight.dtype)
        if func is _aten.zeros_like.default:  # the gradient of a weight that had no use
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise NotImplementedError(
            f"{func} of a weight that was gathered in fp8: only Float8Linear reads it; "
            "use the sharded parameter, or omit gather_in_fp8"
        )


def _for_present_stream(scale: torch.Tensor) -> torch.Tensor:
    """A scale of the stream that quantizes; its memory is not used again while the present stream may read it."""
    if scale.is_cuda:
        scale.record_stream(torch.cuda.current_stream(scale.device))
    return scale


def _wrapper(cls: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls, tensor.shape, strides=tensor.stride(), dtype=dtype, device=tensor.device, pin_memory=tensor.is_pinned()
    )


def _check_rows(recipe: str, cast: Cast, shape: torch.Size, whole: torch.Size, num_ranks: int) -> None:
    unit = num_ranks * (BLOCK if cast.scales == "block_2d" else 1)
    if whole[0] % unit or shape[1] != whole[1]:
        raise ValueError(
            f"weight.shape={[*whole]} must be cut along its first dimension, a multiple of {unit} for recipe "
            f"{recipe!r} on {num_ranks} ranks, to be gathered in fp8; leave the layer out of gather_in_fp8"
        )
