"""Launches every kernel of the installed wheel that this GPU runs, and checks each result.

    python -m tools.gpu_check.launch_every_kernel --json_out FILE --kernels REGEX

Made for compute-sanitizer (runner.py sanitize), under which a launch is slow:

- Each kernel has two problems of few tiles; the last tile is cut off along m, n and k. One has
  enough k to use every stage of shared memory twice, and goes through the public op; kernels that
  split k have it with 1, 2 and the most splits. In the other a block goes from tile to tile: its
  plan is made for a GPU of a few SMs.
- Nothing but our kernels runs on the GPU. Operands are drawn on the CPU and copied, the float64
  reference is computed there. So no tool needs to be told whose kernels to look at; and initcheck,
  which knows nothing of what other kernels write, saw every byte that ours may read.
- The result lies inside a larger buffer of NaN, which must stay NaN.

The kernels of sw.quantize have no problems of an op: each call of it is made that takes one of them, at a
shape of few tiles, and compared with plain torch on the CPU, bit for bit.

The exit code is 0 if every kernel was launched and every result is right.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from absl import app, flags

import stoneware
from stoneware.kernels import aot_kernels, manifest, split_k, tile_rule
from stoneware.kernels.config import SPLITS, Config
from stoneware.kernels.key import ELEMENT_BYTES
from stoneware.kernels.manifest import KernelRecord
from stoneware.measuring import operands
from stoneware.measuring.operands import Operands
from stoneware.nn import fused_blocks
from stoneware.ops import operation_of
from stoneware.quantizing import fused, layout, reference
from stoneware.quantizing import kernels as quantizing_kernels
from stoneware.runtime.device import Device, cuda_device
from stoneware.specs import spec_of
from stoneware.specs.scaled_mm_problem import BLOCK
from tools.gpu_check import machine

_MAX_SHARED_BYTES = 227 * 1024
"""The most of a block on sm_90, and so of any GPU here (CUDA C++ Programming Guide, technical
specifications per compute capability): no kernel has more stages than fit into it."""

_PART = 16
"""Elements of the last tile along n and k: what TMA needs of fp8."""

_PAD_A, _PAD_B, _PAD_OUT = 16, 32, 32
"""Elements that rows of operands and result skip, as views do."""

_CLUSTERS_AT_ONCE = 2
"""The size of the GPU that the second problem's plan is made for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Attributes:
      problem: what is computed.
      splits: how many blocks share the k of a tile.
      num_sms: of the GPU that the plan is made for; 0 for those of this one, by the public op.
      counts: of grouped_mm, rows of each group; they add up to the problem's m.
    """

    problem: Any
    splits: int = 1
    num_sms: int = 0
    counts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            str(self.problem)
            + (f", groups {self.counts}" if self.counts else "")
            + (f", {self.splits} splits" if self.splits > 1 else "")
            + (f", on {self.num_sms} SMs" if self.num_sms else "")
        )


QUANTIZED_SHAPES = ((144, 272), (528, 400), (16, 4112), (16, 16400), (4112, 272))
"""For sw.quantize: tiles that are cut off, short and long columns, rows for each kernel of rows, and many runs; k for
the layers that quantize."""


def launches_of(kernel: KernelRecord) -> list[Launch]:
    """What the module's docstring says, for one kernel.

    Raises:
      KeyError: the op is unknown.
    """
    tiling = tile_rule.tiling_of(kernel)
    part = BLOCK if kernel.config.get("scales") == "block" else _PART
    stage_bytes = (tiling.m + tiling.n) * tiling.k * ELEMENT_BYTES[kernel.config["a"]]
    long_k = (_MAX_SHARED_BYTES // stage_bytes + 1) * tiling.k + part
    few = _problem(kernel, (tiling.m + 1, 0, _PART + 1, 1), tiling.n + _PART, long_k, is_first=True)
    in_turn = _problem(
        kernel,
        (0, tiling.m * tiling.cluster_m + 1, 3),
        2 * tiling.n * tiling.cluster_n + _PART,
        tiling.k + part,
        is_first=False,
    )
    m, n = few.problem.m, few.problem.n
    runs = [splits for splits in SPLITS if split_k.why_not(kernel, m, n, long_k, splits) is None]
    uneven = [splits for splits in runs if splits & (splits - 1)]
    splits_to_run = sorted({1, *runs[1:2], *uneven[-1:], runs[-1]})
    num_sms = _CLUSTERS_AT_ONCE * tiling.cluster_m * tiling.cluster_n
    return [
        *(dataclasses.replace(few, splits=splits) for splits in splits_to_run),
        dataclasses.replace(in_turn, num_sms=num_sms),
    ]


def _problem(kernel: KernelRecord, counts: tuple[int, ...], n: int, k: int, *, is_first: bool) -> Launch:
    """A problem of the kernel's op and dtypes, of views; without groups m is the largest count. The
    first of a kernel has a bias and row scales, the second neither."""
    config, spec = kernel.config, spec_of(kernel.op)
    has_groups, layout = "num_groups" in spec.takes, config.get("layout", "nt")
    m = sum(counts) if has_groups else max(counts)
    if layout[0] == "t":
        m = -(-m // 8) * 8  # a column-major a is moved in units of 16 bytes along m
    values = {
        "num_groups": len(counts),
        "has_bias": is_first,
        "layout": layout,
        "scales": config.get("scales") or ("row" if is_first or has_groups else "tensor"),
    }
    options = {name: value for name, value in values.items() if name in spec.takes}
    if kernel.op == "scaled_mm":
        options |= {"b_dtype": config["b"], "use_fast_accum": config.get("accumulation") != "slow"}
    problem = spec.make_problem(m=m, n=n, k=k, dtype=config["a"], out_dtype=config["out"], **options)
    strides = {"lda": problem.lda + _PAD_A, "ldb": problem.ldb + _PAD_B}
    if has_groups:
        strides["group_stride_b"] = n * strides["ldb"]
    return Launch(
        problem=dataclasses.replace(problem, ldd=problem.ldd + _PAD_OUT, **strides), counts=counts if has_groups else ()
    )


def make(launch: Launch) -> Operands:
    """The operands on the CPU."""
    tensors = operands.guarded(operands.make(launch.problem, "cpu"))
    if launch.counts:
        offs = torch.tensor(launch.counts).cumsum(0).to(torch.int32)
        tensors = tensors.replace(offs=offs)
    return tensors


def copied(tensors: Operands, device: torch.device | str) -> Operands:
    """The operands on a device, with what their views skip and with the same strides: every byte of
    a tensor's memory is copied, by one copy and no kernel."""

    def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _like(_memory(tensor).to(device, copy=True), tensor)

    out_base = copy(tensors.out_base)
    inputs = {name: copy(tensor) for name, tensor in tensors.tensors.items() if name != "out"}
    return dataclasses.replace(tensors, out_base=out_base, tensors={**inputs, "out": _like(out_base, tensors.out)})


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, as one row."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((size,), (1,), 0)


def _like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run(launch: Launch, kernel: KernelRecord, tensors: Operands, device: Device) -> None:
    """Launches the kernel, and waits for it."""
    if launch.num_sms:
        plan(launch, kernel, device)(*tensors.arguments)
    else:
        call_op(kernel.op, launch.problem, config_of(launch, kernel), tensors)
    torch.cuda.synchronize()


def config_of(launch: Launch, kernel: KernelRecord) -> Config:
    return Config(backend=kernel.backend, kernel=kernel.id, splits=launch.splits)


def plan(launch: Launch, kernel: KernelRecord, device: Device) -> Callable[..., None]:
    """The launch's plan for a GPU that has its SMs and is otherwise this one."""
    if launch.num_sms:
        fingerprint = dataclasses.replace(device.fingerprint, num_sms=launch.num_sms)
        device = dataclasses.replace(device, fingerprint=fingerprint)
    return operation_of(kernel.op).make_plan(launch.problem, config_of(launch, kernel), device)


def call_op(op: str, problem: Any, config: Config, tensors: Operands) -> None:
    """The public op, into `tensors.out`."""
    options = {name: getattr(problem, name) for name, _ in spec_of(op).arguments}
    if "out_dtype" in options:
        options["out_dtype"] = tensors.out.dtype
    getattr(stoneware, op)(**tensors.tensors, **options, config=config)


def what_is_wrong(tensors: Operands, out_base: torch.Tensor) -> str:
    """Compares what a launch left in `out_base`, on the CPU, with float64; "" if all is right.

    Args:
      tensors: on the CPU, as they were before.
    """
    out_base = _memory(out_base).cpu()
    result = dataclasses.replace(
        tensors.replace(out=_like(out_base, tensors.out)), out_base=_like(out_base, tensors.out_base)
    )
    comparison = operands.compare(result.out, operands.reference(tensors), tensors.problem)
    if not comparison.is_right:
        return str(comparison)
    return "" if result.is_guard_unharmed() else "it wrote outside of out"


class Report:
    """What was launched, and what was wrong.

    Attributes:
      launched: ids of kernels.
      failures: kernel, problem and message of each launch that was wrong or failed.
    """

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self.num_launches = 0
        self.failures: list[dict[str, str]] = []

    def launch(self, kernel: str, problem: str, run: Callable[[], str]) -> None:
        """Has `run` launch a kernel and say what is wrong with its result, "" if nothing is."""
        try:
            message = run()
            self.num_launches += 1
            self.launched.add(kernel)
        except Exception as error:  # reported, and the next kernel is tried
            message = f"{type(error).__name__}: {error}"
        if message:
            print(f"FAILED {kernel}: {problem}: {message}", flush=True)
            self.failures.append({"kernel": kernel, "problem": problem, "message": message})

    def to_json(self, kernels: Sequence[KernelRecord]) -> dict[str, Any]:
        """As runner.py reads it; `kernels` are those that were to be launched."""
        not_launched = sorted({kernel.id for kernel in kernels} - self.launched)
        return {
            "kernels": len(kernels) - len(not_launched),
            "launches": self.num_launches,
            "failures": self.failures,
            "not_launched": not_launched,
        }


def run_all(
    kernels: Sequence[KernelRecord],
    device: Device,
    torch_device: torch.device | str,
    run: Callable[[Launch, KernelRecord, Operands, Device], None],
    report: Report,
) -> None:
    """Runs every launch of every kernel, whatever becomes of the others."""

    def checked(launch: Launch, kernel: KernelRecord) -> str:
        tensors = make(launch)
        # After a fault without memcheck the context is lost, and with it every copy to it.
        on_device = copied(tensors, torch_device)
        run(launch, kernel, on_device, device)
        return what_is_wrong(tensors, on_device.out_base)

    for idx, kernel in enumerate(kernels, start=1):
        print(f"[{idx}/{len(kernels)}] {kernel.id}", flush=True)
        for launch in launches_of(kernel):
            report.launch(kernel.id, str(launch), functools.partial(checked, launch, kernel))


def quantize_all(where: torch.device | str, report: Report) -> None:
    """Makes every call that takes a kernel of sw.quantize; the kernels that it loads are launched."""
    load = aot_kernels.load

    def recorded(kernel_id: str, num_arguments: int) -> Any:
        report.launched.add(kernel_id)
        return load(kernel_id, num_arguments)

    def checked(call: Callable[[], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor], limit: float) -> str:
        pairs = [(found.cpu().float(), want.float()) for found, want in zip(call(), expected, strict=True)]
        is_right = all((found - want).norm() <= limit * want.norm() for found, want in pairs)
        return "" if is_right else "other values"

    aot_kernels.load = recorded
    try:
        with torch.no_grad():
            for problem, *call_and_result in _quantizing_calls(where):
                print(f"[quantize] {problem}", flush=True)
                report.launch("quantize", problem, functools.partial(checked, *call_and_result))
    finally:
        aot_kernels.load = load


def _quantizing_calls(where: torch.device | str) -> Iterator[tuple[Any, ...]]:
    """(problem, call on the GPU, results by plain torch on the CPU, limit of their relative error), of 0: same bits."""
    dtypes = (torch.bfloat16, torch.float16)
    for call in itertools.product(layout.SCALES, (False, "both"), dtypes, layout.MAX, QUANTIZED_SHAPES):
        scales, transpose, in_dtype, dtype, shape = call
        if dtype == torch.float8_e5m2 and scales != "tensor":
            continue
        x = torch.randn(shape).to(in_dtype)
        expected = [*reference.quantize(x, scales, dtype, False)]
        if transpose:
            expected += reference.quantize(x.t(), scales, dtype, False)
        quantize = functools.partial(stoneware.quantize, scales=scales, transpose=transpose, dtype=dtype)
        yield str(call), lambda x=x, quantize=quantize: quantize(x.to(where)), expected, 0.0
    for dtype, (_, k) in itertools.product(dtypes, QUANTIZED_SHAPES):
        feed_forward = stoneware.nn.SwiGLU(32, k, frozen=True, dtype=dtype)
        for layer in (feed_forward.gate_up_proj, feed_forward.down_proj):
            layer.quantize_(torch.randn(layer.out_features, layer.in_features).to(dtype))
        norm = torch.nn.RMSNorm(k, 1e-6, dtype=dtype)
        # The norm by the kernel that also writes fp8.
        norm_call = lambda x, norm=norm: fused_blocks.rms_norm_fp8(norm.eps)(x, norm.weight)[0]  # noqa: E731
        for layer, call, size in ((norm, norm_call, k), (feed_forward, feed_forward, 32)):
            x = torch.randn(3, size).to(dtype)
            expected = [layer(x)]
            layer.to(where)
            yield f"{type(layer).__name__} {dtype} {k}", lambda x=x, call=call: [call(x.to(where))], expected, 0.05
        # Only gradients of frozen layers have these plans.
        x, factors = torch.randn(3, k).to(dtype), torch.rand(k, 1)
        x8 = torch.randn(144, k).to(torch.float8_e4m3fn)
        scaled_rows = functools.partial(fused.scaled_rows_plan, power_of_two=False)
        rows = [*reference.quantize(x.float() * factors.t(), "row", torch.float8_e4m3fn, False)]
        for name, plan, inputs, expected in (
            ("scaled rows", scaled_rows, [x, factors], rows),
            ("transpose", fused.transpose_plan, [x8], [x8.t().contiguous(), torch.ones(k, 1)]),
        ):
            call = functools.partial(_by_plan, plan, inputs, expected, where)
            yield f"{name} {dtype} {k}", call, expected, 0.0
        # Only frozen blockwise feed-forwards have this plan.
        z = torch.randn(3, 2 * k).to(dtype)
        blocks = [*reference.quantize(fused.silu_mul(z), "block", torch.float8_e4m3fn, False)]
        block_plan = functools.partial(fused.silu_mul_plan, power_of_two=False, scales="block")
        call = functools.partial(_by_plan, block_plan, [z], blocks, where)
        yield f"activation by blocks {dtype} {k}", call, blocks, 0.02
        # Only layers that train have these.
        gate, up, dh = torch.randn(3, 16, k).to(dtype)
        silu = torch.nn.functional.silu(gate)
        gradients = [torch.ops.aten.silu_backward(dh * up, gate), dh * silu]
        for name, plan, inputs, expected in (
            ("activation", fused.activation_plan, [gate, up], [silu * up]),
            ("gradients of the activation", fused.activation_grad_plan, [gate, up, dh], gradients),
        ):
            call = functools.partial(_by_plan, plan, inputs, expected, where)
            yield f"{name} {dtype} {k}", call, expected, 0.02
        for factors in ((), (torch.rand(2 * k, 1),)):
            inputs = [torch.cat((gate, up), 1), dh, *factors]
            call = functools.partial(_feed_forward_gradients, inputs, where)
            yield f"gradients of a feed-forward {dtype} {k} {len(factors)}", call, _feed_forward_gradients(inputs), 0.05


def _by_plan(
    plan: Callable[..., Any], inputs: Sequence[torch.Tensor], like: Sequence[torch.Tensor], where: torch.device | str
) -> list[torch.Tensor]:
    on_device = [tensor.to(where) for tensor in inputs]
    outputs = [torch.empty_like(tensor, device=where) for tensor in like]
    plan(*on_device)(*on_device, *outputs)
    return outputs


def _feed_forward_gradients(inputs: Sequence[torch.Tensor], where: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The results of `fused.swiglu_grad_plan`, dequantized."""
    z, dh, *factors = (tensor.to(where) for tensor in inputs)
    m, n = dh.shape
    outputs: list[torch.Tensor] = []
    for rows, columns in ((m, 2 * n), (2 * n, m), (n, m)):
        outputs += [
            torch.empty(shape, device=where, dtype=kind)
            for shape, kind in (((rows, columns), torch.float8_e4m3fn), ((rows, 1), torch.float32))
        ]
    partials = [
        torch.empty(shape, dtype=torch.int32, device=where) for shape in quantizing_kernels.swiglu_partial_shapes(m, n)
    ]
    fused.swiglu_grad_plan(z, dh, True, *factors)(z, dh, *factors, *outputs, *partials)
    return [values.cpu().float() * scale.cpu() for values, scale in zip(outputs[::2], outputs[1::2])]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    pattern = re.compile(flags.FLAGS.kernels)
    torch.cuda.init()
    device = cuda_device(0)
    seed = torch.seed() % (1 << 62)
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})", flush=True)
    of_device = machine.runnable(manifest.packaged().kernels.values(), device.compute_capability)
    kernels = [kernel for kernel in of_device if pattern.search(kernel.id)]
    if not kernels:
        sys.exit(
            f"--kernels={pattern.pattern} must match one of the {len(of_device)} kernels that run "
            f"on {device}, and matches none; kernel_manifest.json of the wheel has their ids"
        )
    report, of_ops = Report(), [kernel for kernel in kernels if kernel.op != quantizing_kernels.OP]
    run_all(of_ops, device, "cuda", run, report)
    if len(of_ops) < len(kernels):
        quantize_all("cuda", report)
    result = report.to_json(kernels)
    pathlib.Path(flags.FLAGS.json_out).write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['launches']} launches of {result['kernels']} of {len(kernels)} kernels, "
        f"{len(report.failures)} failures"
    )
    for kernel_id in result["not_launched"]:
        print(f"NOT LAUNCHED {kernel_id}")
    sys.exit(int(bool(report.failures or result["not_launched"])))


if __name__ == "__main__":
    flags.DEFINE_string("json_out", None, "File for the report.", required=True)
    flags.DEFINE_string("kernels", "", "Only kernels whose id this regular expression finds.")
    app.run(main)
