"""Weights that are gathered one after the other are quantized in one call, and never with old numbers."""

from __future__ import annotations

import copy
import gc
import operator
import pickle

import pytest
import torch
from ranks import MIXED
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoneware as sw
from stoneware.nn import gathering
from stoneware.nn.gathered_weight import ShardedWeight
from stoneware.nn.gathering import Gathering, Place
from stoneware.nn.recipes import RECIPES


@pytest.fixture
def calls(monkeypatch):
    """How many weights each call quantized."""
    counts: list[int] = []
    plain = gathering._quantize_each
    monkeypatch.setattr(gathering, "_quantize_each", lambda recipe, count: counts.append(count) or plain(recipe, count))
    return counts


@pytest.fixture
def reductions(monkeypatch):
    """How many numbers each collective reduced; the ranks are one."""
    counts: list[int] = []
    monkeypatch.setattr(gathering.distributed, "all_reduce", lambda amax, op, group: counts.append(amax.numel()))
    return counts


def weights_of(recipe="rowwise", count=3, dtype=torch.float32):
    """Weights of one model, of different sizes."""
    model = Gathering(count)
    return [
        ShardedWeight(torch.randn(128 * (position + 1), 256, dtype=dtype), recipe, Place(model, position))
        for position in range(count)
    ]


def gather(weights, group=None, dtype=torch.bfloat16):
    """What torch.distributed.fsdp does with the weights of a module; the values are compared with those of each."""
    for weight in weights:
        values, scale = weight.place.gathering.quantized(weight, group, dtype)
        cast = RECIPES[weight.recipe].forward[1]
        expected = sw.quantize(weight.tensor.to(dtype), cast.scales, dtype=cast.dtype, power_of_two=cast.power_of_two)
        assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    weights[0].place.gathering.end_burst()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_time_is_one_call(calls, recipe, dtype):
    weights = weights_of(recipe, dtype=dtype)
    gather(weights)
    assert calls == [1, 1, 1]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2)
    gather(weights)
    assert calls == [1, 1, 1, 3]


def test_other_orders_and_parts_of_it_are_right(calls):
    weights = weights_of()
    gather(weights)
    gather(weights[:2])
    assert calls[3:] == [3]
    gather(weights)
    assert calls[4:] == [2, 1]
    gather(weights[::-1])
    gather(weights[1:])


def test_a_weight_that_changes_between_two_is_quantized_again(calls):
    weights = weights_of()
    gather(weights)
    model = weights[0].place.gathering
    model.quantized(weights[0], None, torch.bfloat16)
    with torch.no_grad():
        weights[1].add_(1)
    gather(weights[1:])
    assert calls[3:] == [3, 2]


def test_weights_of_another_group_dtype_or_recipe_are_apart(calls):
    weights = weights_of()
    weights[2].recipe = "blockwise"
    for _ in range(2):
        gather(weights)
    assert calls == [1, 1, 1, 2, 1]
    gather(weights, group="another")
    gather(weights, dtype=torch.float16)
    assert calls[5:] == [1] * 6


def test_a_call_takes_no_more_weights_than_it_has_tensors(calls):
    weights = weights_of(count=11)
    for _ in range(2):
        gather(weights)
    assert calls == [1] * 11 + [8, 3]


def test_weights_that_are_gone_are_left_out(calls):
    weights = weights_of()
    gather(weights)
    del weights[1]
    gather(weights)
    assert calls[3:] == [2]


def test_tensor_scales_that_changed_are_reduced_once_and_ahead_of_the_first_weight(reductions):
    weights = weights_of("tensorwise")
    model = weights[0].place.gathering
    model.reduce_ahead(None, ())
    assert reductions == []
    gather(weights)  # each is known from its own gather on
    del reductions[:]
    for _ in range(2):
        with torch.no_grad():
            weights[1].mul_(2)
        model.reduce_ahead(None, ())
        assert reductions == [3]
        gather(weights)
        model.reduce_ahead(None, ())
        gather(weights)
        assert reductions == [3]
        del reductions[:]


@pytest.fixture
def one_rank(tmp_path):
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_one_rank_is_enough(one_rank, recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 256))
    sw.nn.convert(model, recipe)
    twin = copy.deepcopy(model).bfloat16()
    sw.nn.gather_in_fp8(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=one_rank, mp_policy=MIXED)
    x = torch.randn(32, 256).bfloat16()
    for _ in range(2):
        y = model(x)
        y.sum().backward()
        assert torch.equal(y, twin(x))
        with torch.no_grad():
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                one.to_local().mul_(2)
                other.mul_(2)


def test_a_weight_is_copied_without_its_process_group(one_rank):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    sw.nn.convert(model, "tensorwise")
    sw.nn.gather_in_fp8(model)
    for module in (model[0], model):
        fully_shard(module, mesh=one_rank, mp_policy=MIXED)
    model(torch.randn(16, 256).bfloat16())
    weight = model[0].weight.to_local().detach()
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert isinstance(twin, ShardedWeight) and torch.equal(twin.tensor, weight.tensor)
        assert twin.place.gathering is not weight.place.gathering


def test_copies_for_a_gather_are_not_taken_for_earlier_ones():
    weights = weights_of()
    earlier = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            copies = [weight.to("cpu", torch.float32, copy=True) for weight in weights]
            gather(copies)
            earlier += copies
        with torch.no_grad():
            for weight in weights:
                weight.mul_(2)


def test_one_tensor_scale_serves_all_gathers_until_a_weight_changes(reductions):
    """It goes along as metadata: another tensor for each gather would be freed on another stream than reads it."""
    weights = weights_of("tensorwise")

    def scales():
        found = [weight.place.gathering.quantized(weight, None, torch.bfloat16)[1] for weight in weights]
        weights[0].place.gathering.end_burst()
        return found

    gather(weights)
    first = scales()
    assert all(map(operator.is_, first, scales()))
    with torch.no_grad():
        weights[0].mul_(2)
    assert not any(map(operator.is_, first, scales()))
    gather(weights)


def test_nothing_stays_in_memory_after_a_gather():
    def num_fp8():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) and one.dtype == torch.float8_e4m3fn for one in gc.get_objects())

    weights = weights_of()
    before = num_fp8()
    gather(weights)
    gather(weights[:1])
    assert num_fp8() == before
