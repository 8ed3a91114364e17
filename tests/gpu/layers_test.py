"""The layers of sw.nn on a GPU: values and gradients against float64, in graphs and compiled."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
import torch.utils.checkpoint

import stoneware as sw
from stoneware import nn
from stoneware.nn import mlp
from stoneware.nn.recipes import RECIPES
from stoneware.ops import fused

FP8_ERROR, BF16_ERROR = 2**-4, 2**-8
"""Error of one matmul, relative, in the Frobenius norm."""

K, N = 1024, 1536


@pytest.fixture(autouse=True)
def _needs_hopper(device):
    if device.compute_capability != (9, 0):
        pytest.skip(f"{device} is no Hopper GPU, for which the kernels of fp8 training are built")


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def gradients(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in layer.named_parameters()}}


def in_float64(layer):
    twin = torch.nn.Linear(layer.in_features, layer.out_features, device="cuda", dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    return twin


@pytest.mark.parametrize("kind", ["bf16", *RECIPES])
@pytest.mark.parametrize("shape", [(16,), (333,), (4, 512)])
def test_training_is_near_float64(kind, shape):
    if kind == "bf16":
        layer = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    else:
        layer = nn.Float8Linear(K, N, recipe=kind, device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(*shape, K, device="cuda").bfloat16(), torch.randn(*shape, N, device="cuda").bfloat16()
    found, expected = gradients(layer, x, dy), gradients(in_float64(layer), x.double(), dy)
    for name, value in expected.items():
        limit = BF16_ERROR if name == "bias" or kind == "bf16" else 2 * FP8_ERROR if kind == "tensorwise" else FP8_ERROR
        assert error(found[name], value) < limit, name


class LlamaRMSNorm(torch.nn.Module):
    """As transformers writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Attention(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q_proj = torch.nn.Linear(K, K, bias=bias)
        self.k_proj, self.v_proj = (torch.nn.Linear(K, K // 4, bias=bias) for _ in range(2))
        self.o_proj = torch.nn.Linear(K, K, bias=False)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, 64)
        q, k, v = (one.view(shape).transpose(-3, -2) for one in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, N, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(N, K, bias=False), torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(torch.nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.norms = torch.nn.ModuleList(LlamaRMSNorm(K) for _ in range(2))
        self.attention, self.mlp = Attention(bias), MLP()

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
@pytest.mark.parametrize("shape", [(2, 512), (3, 111)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_block_trains_near_float64(recipe, shape, bias):
    block = Block(bias).cuda().bfloat16()
    exact = copy.deepcopy(block).double()
    blocks = nn.convert(block, recipe).blocks
    assert blocks["mlp"] == "SwiGLU" and ("attention" in blocks) == (recipe == "rowwise")
    x, dy = (torch.randn(*shape, K, device="cuda").bfloat16() for _ in range(2))
    torch.full((2**24,), float("nan"), device="cuda")  # memory that a call may get
    found, wanted = gradients(block, x, dy), gradients(exact, x.double(), dy.double())
    for name, value in wanted.items():
        # A key's bias changes no softmax, so its exact gradient is 0.
        of = wanted["attention.q_proj.bias"] if name == "attention.k_proj.bias" else value
        assert (found[name].double() - value).norm() <= (0.03 if recipe == "bf16" else 0.25) * of.norm(), name


def test_a_block_has_the_same_bits_with_activation_checkpointing_and_in_a_graph():
    block = Block().cuda().bfloat16()
    nn.convert(block, "rowwise")
    twin = copy.deepcopy(block)
    x, dy = (torch.randn(2, 512, K, device="cuda").bfloat16() for _ in range(2))
    wanted = gradients(block, x, dy)
    block.zero_grad()
    given = x.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(block, given, use_reentrant=False)
    y.backward(dy)
    for name, one in (("y", y), ("x", given.grad), *((name, p.grad) for name, p in block.named_parameters())):
        assert torch.equal(one, wanted[name]), name
    graphed = torch.cuda.make_graphed_callables(twin, (torch.randn_like(x).requires_grad_(),))
    for name, one in gradients(graphed, x, dy).items():
        assert torch.equal(one, wanted[name]), name


def model_of(recipe, dropout):
    layers = LlamaRMSNorm(K), torch.nn.Linear(K, N), torch.nn.SiLU(), torch.nn.Dropout(dropout), torch.nn.Linear(N, K)
    model = torch.nn.Sequential(*layers).cuda().bfloat16()
    done = nn.convert(model, recipe)
    assert len(done.swapped) == 2 and [*done.blocks.values()] == ["RMSNorm"]
    return model


def steps_of(call, model, batches):
    """The losses of three steps, each of which accumulates the gradients of all batches."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    for _ in range(3):
        for x in batches:
            loss = call(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        # Not to None: the gradients of a graph lie in its own memory, which the next replay overwrites.
        optimizer.zero_grad(set_to_none=False)
    return losses


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_a_model_trains_in_cuda_graphs_as_it_does_without(recipe):
    model = model_of(recipe, dropout=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    twin = copy.deepcopy(model)
    for parameter, own in zip(twin.parameters(), model.parameters()):
        parameter.grad = torch.zeros_like(own)
    batches = [torch.randn(64, K, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn_like(batches[0]).requires_grad_(),))
    assert steps_of(graphed, model, batches) == steps_of(twin, twin, batches)


def test_dropout_draws_anew_at_each_replay():
    model = model_of("rowwise", dropout=0.5)
    x = torch.randn(64, K, device="cuda").bfloat16().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(model, (x.clone().detach().requires_grad_(),))
    first, second = graphed(x).clone(), graphed(x).clone()
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["bf16", *RECIPES])
@pytest.mark.parametrize("m", [512, 500])
def test_a_compiled_layer_has_no_break_and_near_values(kind, m):
    torch._dynamo.reset()
    if kind == "bf16":
        layer = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    else:
        layer = nn.Float8Linear(K, N, recipe=kind, device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(m, K, device="cuda").bfloat16(), torch.randn(m, N, device="cuda").bfloat16()
    found = gradients(torch.compile(layer, fullgraph=True), x, dy)
    for value, expected in zip(found.values(), gradients(twin, x, dy).values()):
        assert error(value, expected) < BF16_ERROR


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("m", [1, 16, 500])
def test_a_frozen_layer_in_a_graph(recipe, m):
    linear = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    layer = nn.Float8InferenceLinear.from_linear(linear, recipe)
    x = torch.randn(m, K, device="cuda").bfloat16()
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert error(y, in_float64(linear)(x.double())) < FP8_ERROR
    dy = torch.randn(m, N, device="cuda").bfloat16()
    found, expected = gradients(layer, x, dy), gradients(in_float64(linear), x.double(), dy)
    assert error(found["x"], expected["x"]) < FP8_ERROR


class Unfused(torch.nn.Module):
    """The layers of a fused block, by the block's own code."""

    def __init__(self, block, kind):
        super().__init__()
        self.block, self.kind = [block], kind

    def forward(self, x):
        return self.kind.forward(self.block[0], x)


def launches(call):
    """The names of the kernels of a call."""
    call()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.name.startswith(("Memcpy", "Memset"))]


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("shape", [(1,), (16,), (2, 77), (3000,)])
def test_a_frozen_feed_forward_has_joined_weights_and_at_most_six_launches(recipe, shape):
    block = MLP().cuda().bfloat16().eval().requires_grad_(False)
    exact, x = copy.deepcopy(block).double(), torch.randn(*shape, K, device="cuda").bfloat16()
    assert nn.convert(block, recipe).blocks == {"": "SwiGLU"}
    torch.full((2**24,), float("nan"), device="cuda")  # memory that a call may get
    y, own = block(x), Unfused(block, MLP)(x)
    assert error(y, exact(x.double())) < 2 * FP8_ERROR and error(y, own) < FP8_ERROR
    # Two casts and two matmuls; torch's own matmul may copy the scales of a.
    assert len(launches(lambda: block(x))) <= 6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, block(x)) and error(y, exact(x.double())) < 2 * FP8_ERROR


ACTIVATIONS = {
    "gelu": torch.nn.GELU,
    "gelu by tanh": functools.partial(torch.nn.GELU, approximate="tanh"),
    "relu": torch.nn.ReLU,
    "silu": torch.nn.SiLU,
    "mish": torch.nn.Mish,
}


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (16,), (2, 77), (3000,)])
def test_a_feed_forward_has_its_activation_in_the_kernel(recipe, name, bias, shape, monkeypatch):
    layers = torch.nn.Linear(K, N, bias=bias), ACTIVATIONS[name](), torch.nn.Linear(N, K, bias=bias)
    block = torch.nn.Sequential(*layers).cuda().bfloat16().eval()
    exact, x = copy.deepcopy(block).double(), torch.randn(*shape, K, device="cuda").bfloat16()
    assert nn.convert(block, recipe, frozen=True).blocks == {"": "MLP"}
    # Whatever the table predicts.
    monkeypatch.setattr(fused, "lead_us", lambda *arguments: 0.0)
    mlp.frozen.cache_clear()
    mlp.plain.cache_clear()
    own = Unfused(block, torch.nn.Sequential)
    unlinked = block(x)
    sw.prepare(block, x)
    torch.full((2**24,), float("nan"), device="cuda")  # memory that a call may get
    y, wanted = block(x), exact(x.double())
    limit = 2 * BF16_ERROR if recipe == "bf16" else 2 * FP8_ERROR
    assert error(y, wanted) < limit and error(unlinked, wanted) < limit and error(y, own(x)) < limit
    names, own_names = launches(lambda: block(x)), launches(lambda: own(x))
    assert len(names) < len(own_names) and not any("elementwise" in name for name in names), (names, own_names)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, block(x)) and error(y, exact(x.double())) < limit


@torch.no_grad()
def test_layers_of_fixed_bits_leave_the_activation_to_torch():
    block = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.GELU(), torch.nn.Linear(N, K)).cuda().bfloat16().eval()
    x = torch.randn(16, K, device="cuda").bfloat16()
    nn.convert(block, "rowwise", frozen=True)
    sw.prepare(block, x)
    with sw.batch_invariant():
        y = block(x)
        assert torch.equal(y, Unfused(block, torch.nn.Sequential)(x))
        assert torch.equal(y[:3], block(x[:3]))


def test_experts_are_near_their_mlps_and_pass_gradients_on():
    layer = nn.Experts(8, 512, 768, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 512, device="cuda").bfloat16().requires_grad_()
    weights, chosen = torch.rand(300, 8, device="cuda").topk(2)
    y = layer(x, chosen, weights)
    reference = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    x64 = x.detach().double().requires_grad_()
    for expert in range(8):
        gate, up = (x64 @ layer.gate_up_proj[expert].double().t()).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ layer.down_proj[expert].double().t()
        reference = reference + out * ((chosen == expert) * weights).sum(-1, keepdim=True).double()
    assert error(y, reference) < 2 * BF16_ERROR
    dy = torch.randn_like(y)
    y.backward(dy)
    reference.backward(dy.double())
    assert error(x.grad, x64.grad) < 3 * BF16_ERROR
    with torch.no_grad():
        assert error(nn.Float8InferenceExperts.from_experts(layer)(x, chosen, weights), reference) < 2 * FP8_ERROR


def test_experts_give_the_same_bits_each_time():
    layer = nn.Experts(16, 512, 768, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2000, 512, device="cuda").bfloat16().requires_grad_()
    weights, chosen = torch.rand(2000, 16, device="cuda").topk(6)
    runs = []
    for _ in range(5):
        y = layer(x, chosen, weights)
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))))
    assert all(torch.equal(one, first) for run in runs for one, first in zip(run, runs[0]))


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_is_added_to_its_buffer(recipe, dtype):
    make = nn.Linear if recipe == "bf16" else functools.partial(nn.Float8Linear, recipe=recipe)
    layer = make(K, N, device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(2, 256, K, device="cuda").bfloat16(), torch.randn(2, 256, N, device="cuda").bfloat16()
    plain = gradients(layer, x, dy)
    layer.zero_grad()
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.randn(N, K, device="cuda").to(dtype)
    expected = layer.weight.main_grad.double() + 2 * plain["weight"].double()
    for _ in range(2):
        fused = gradients(layer, x, dy)
    assert torch.equal(fused["x"], plain["x"]) and fused["weight"] is None
    assert error(layer.weight.main_grad, expected) < 2 * BF16_ERROR


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
