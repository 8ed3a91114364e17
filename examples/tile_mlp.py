"""A two-layer MLP as one CUDA C++ kernel for each pass, by tile matmuls: y = relu(x w1) w2.

    python examples/tile_mlp.py --rows=16384 --hidden=1024

The hidden layer never leaves the SM: a block has 64 rows of x, and walks over the hidden features, 64 at a
time. The backward kernel computes them again, and is linked with the matmuls that autograd asks for, and no
others. Without a GPU of Hopper the kernels are only linked, by the NVRTC and nvJitLink of a torch for CUDA.
"""

from __future__ import annotations

import argparse

import torch

import stoneware as sw

ROWS, WIDTH, CHUNK = 64, 128, 64  # of x in a block; of x and y; hidden features at a time
FIRST = sw.tile.matmul(m=ROWS, n=CHUNK, k=WIDTH, a="bf16", b="bf16", name="first")  # h = x w1
SECOND = sw.tile.matmul(m=ROWS, n=WIDTH, k=CHUNK, a="bf16", b="bf16", name="second")  # y = h w2

SOURCE = """
using namespace stoneware::tile;

struct Tiles {
  first::TileA x; first::TileB w1; first::TileDC dh;
  second::TileA h; second::TileB w2; second::TileDC dy;
};

__device__ void Relu(const first::TileA& x, const first::TileB& w1, second::TileA& h) {
  first::SumC sum;
  sum.Clear();
  first::forward(sum, x, w1);
  sum.ForEach([](int, int, float& value) { value = fmaxf(value, 0.0f); });
  sum.Store(h);
}

__device__ void Wait() { CommitLoads(); WaitForLoads(); Sync(); }

extern "C" __global__ void __launch_bounds__(128)
mlp_forward(const Bf16* x, const Bf16* w1, const Bf16* w2, Bf16* y, int hidden) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  const long long row = blockIdx.x * 64ll;
  tiles.x.Load(x + row * 128, 128);
  second::SumC sum;
  sum.Clear();
  for (int i = 0; i < hidden; i += 64) {
    tiles.w1.Load(w1 + i, hidden);
    tiles.w2.Load(w2 + i * 128ll, 128);
    Wait();
    Relu(tiles.x, tiles.w1, tiles.h);
    Sync();
    second::forward(sum, tiles.h, tiles.w2);
    __syncthreads();
  }
  sum.Store(y + row * 128, 128);
}

extern "C" __global__ void __launch_bounds__(128)
mlp_backward(const Bf16* x, const Bf16* w1, const Bf16* w2, const Bf16* dy, Bf16* dx, float* dw1, float* dw2,
             int hidden) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  const long long row = blockIdx.x * 64ll;
  tiles.x.Load(x + row * 128, 128);
  tiles.dy.Load(dy + row * 128, 128);
  first::SumDA dx_sum;
  dx_sum.Clear();
  for (int i = 0; i < hidden; i += 64) {
    tiles.w1.Load(w1 + i, hidden);
    tiles.w2.Load(w2 + i * 128ll, 128);
    Wait();
    Relu(tiles.x, tiles.w1, tiles.h);
    second::SumDA dh;  // dh = (dy w2^T) where h > 0
    dh.Clear();
    second::dA(dh, tiles.dy, tiles.w2);
    dh.ForEach([&](int r, int c, float& value) { value = tiles.h.At(r, c) > 0.0f ? value : 0.0f; });
    dh.Store(tiles.dh);
    Sync();
    if constexpr (first::has_dA) first::dA(dx_sum, tiles.dh, tiles.w1);
    if constexpr (first::has_dB) {
      first::SumDB sum;
      sum.Clear();
      first::dB(sum, tiles.x, tiles.dh);
      sum.ForEach([&](int r, int c, float& value) { atomicAdd(dw1 + r * 1ll * hidden + i + c, value); });
    }
    if constexpr (second::has_dB) {
      second::SumDB sum;
      sum.Clear();
      second::dB(sum, tiles.h, tiles.dy);
      sum.ForEach([&](int r, int c, float& value) { atomicAdd(dw2 + (i + r) * 128ll + c, value); });
    }
    __syncthreads();
  }
  if constexpr (first::has_dA) dx_sum.Store(dx + row * 128, 128);
}
"""
MODULE = sw.tile.Module(SOURCE, [FIRST, SECOND])
SHARED_BYTES = sum(FIRST.tile_bytes.values()) + sum(SECOND.tile_bytes.values())


def backward_needs(x: bool, w1: bool, w2: bool) -> dict[str, frozenset[str]]:
    """What the backward kernel needs for these gradients; it computes h again, and dh from dy."""
    inputs = {"a": x, "b": w1}
    first = sw.tile.needs_of(FIRST, [name for name, is_needed in inputs.items() if is_needed])
    return {"first": first, "second": frozenset({"dA"} | ({"dB"} if w2 else set()))}


class Mlp(torch.autograd.Function):
    """relu(x w1) w2 for x [rows, 128], w1 [128, hidden] and w2 [hidden, 128] in bf16; rows and hidden are
    multiples of 64."""

    @staticmethod
    def forward(ctx, x, w1, w2):
        y = torch.empty_like(x)
        kernel = MODULE.kernel("mlp_forward", shared_bytes=SHARED_BYTES, needs={"forward"})
        kernel(x, w1, w2, y, w1.shape[1], grid=(x.shape[0] // ROWS,))
        ctx.save_for_backward(x, w1, w2)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w1, w2 = ctx.saved_tensors
        dx, dw1, dw2 = torch.empty_like(x), *(torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2))
        needs = backward_needs(*ctx.needs_input_grad)
        kernel = MODULE.kernel("mlp_backward", shared_bytes=SHARED_BYTES, needs=needs)
        kernel(x, w1, w2, dy.contiguous(), dx, dw1, dw2, w1.shape[1], grid=(x.shape[0] // ROWS,))
        gradients = dx, dw1.to(w1.dtype), dw2.to(w2.dtype)
        return tuple(d if is_needed else None for d, is_needed in zip(gradients, ctx.needs_input_grad))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Links the kernels, and on a GPU of Hopper compares them with torch; returns the relative errors there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args(arguments)
    for name, needs in (
        ("mlp_forward", {"first": {"forward"}, "second": {"forward"}}),
        ("mlp_backward", backward_needs(True, False, False)),
        ("mlp_backward", backward_needs(True, True, True)),
    ):
        linked = MODULE.link(name, needs=needs)
        matmuls = ", ".join(f"{matmul}.{direction}" for matmul, direction in linked.matmuls)
        print(f"{name}: {matmuls}: {len(linked.cubin):,} bytes")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no GPU of Hopper, so nothing runs")
        return {}
    shapes = (options.rows, WIDTH), (WIDTH, options.hidden), (options.hidden, WIDTH)
    tensors = [torch.randn(shape, device="cuda").div(shape[0] ** 0.5 if i else 1) for i, shape in enumerate(shapes)]
    x, w1, w2 = (tensor.to(torch.bfloat16).requires_grad_() for tensor in tensors)
    dy = torch.randn_like(x)
    gradients = torch.autograd.grad(Mlp.apply(x, w1, w2), (x, w1, w2), dy)
    own = dict(zip(("y", "dx", "dw1", "dw2"), (Mlp.apply(x, w1, w2), *gradients)))
    x, w1, w2 = (tensor.detach().double().requires_grad_() for tensor in (x, w1, w2))
    y = torch.relu(x @ w1) @ w2
    expected = dict(zip(own, (y, *torch.autograd.grad(y, (x, w1, w2), dy.double()))))
    errors = {name: float((own[name].double() - expected[name]).norm() / expected[name].norm()) for name in own}
    print("relative errors:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    return errors


if __name__ == "__main__":
    main()
