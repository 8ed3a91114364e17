"""Runs scaled_mm from the wheel at a few shapes: which kernel, by which step of the look-up, how right, how fast.

    quickstart [--shapes 16x4096x4096,...]

On a GPU each result is timed and compared with torch._scaled_mm. On other machines the reference backend
computes, and a second table shows which kernels an NVIDIA H200 would run, and how long they took
if that shape was measured. The exit code is 1 if a result is wrong.
"""

from __future__ import annotations

import logging as python_logging
from collections.abc import Callable, Sequence

import torch
from absl import app, flags

import stoneware as sw
from stoneware.explanation import Explanation
from stoneware.kernels import manifest
from stoneware.measuring import operands
from stoneware.measuring.device_timer import DeviceTimer
from stoneware.ops.scaled_mm import vendor
from stoneware.runtime.device import Device, cuda_device
from stoneware.specs import tolerance
from stoneware.specs.scaled_mm_problem import OP, Problem

ELSEWHERE = "NVIDIA H200"
"""The device that is described where there is no GPU."""

TIMINGS = 20
SECONDS_PER_SHAPE = 1.0
NONE = "-"

_SHAPES = flags.DEFINE_list(
    "shapes",
    # Four that were measured, one whose nearest m answers, one whose nearest shape does.
    ["1x4096x4096", "16x2112x7168", "64x4096x4096", "512x2112x7168", "300x4096x4096", "17x5120x5120"],
    "Shapes as MxNxK.",
)


def parse_shape(text: str) -> Problem:
    """The problem "MxNxK": e4m3 times e4m3 to bf16 with a scale per row and column."""
    try:
        m, n, k = map(int, text.lower().split("x"))
        return Problem.dense(m=m, n=n, k=k)
    except ValueError as error:
        raise app.UsageError(
            f"--shapes={text} must be MxNxK, as 16x4096x4096; separate sizes by x, shapes by a comma: {error}"
        ) from error


def kernel_name(explanation: Explanation) -> str:
    """Backend and kernel, without what all rows share: "sm90 64x16x256_1x1x1_..."."""
    config = explanation.config
    kernel = config.kernel.rpartition(f"_{explanation.problem.out_dtype}_")[2]
    swizzle = f" swizzle {config.max_swizzle}" if config.max_swizzle != 1 else ""
    splits = f" {config.splits} splits" if config.splits != 1 else ""
    return f"{config.backend} {kernel}{swizzle}{splits}"


def explain(problem: Problem, device: str | None = None) -> Explanation:
    return sw.explain(OP, m=problem.m, n=problem.n, k=problem.k, device=device)


def run(tensors: operands.Operands) -> operands.Comparison:
    """Calls sw.scaled_mm once and compares every element with float64."""
    sw.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out)
    return operands.compare(tensors.out, operands.reference(tensors), tensors.problem)


def time_beside_torch(tensors: operands.Operands, device: Device, timer: DeviceTimer) -> tuple[str, ...]:
    """Device times of ours and of torch._scaled_mm in microseconds, and how many times faster."""
    a, b, out, scales = tensors.a, tensors.b, tensors.out, tensors.scales
    calls: dict[str, Callable[[], object]] = {"ours": lambda: sw.scaled_mm(a, b, *scales, out=out)}
    if vendor.BACKEND.supports(tensors.problem, device) is None:
        calls["torch"] = lambda: torch._scaled_mm(a, b, *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)
    timings = timer.time(calls, rounds=TIMINGS, max_seconds=SECONDS_PER_SHAPE)
    ours_us = timings["ours"].median_us
    if "torch" not in timings:
        return f"{ours_us:.1f}", NONE, NONE
    torch_us = timings["torch"].median_us
    return f"{ours_us:.1f}", f"{torch_us:.1f}", f"{torch_us / ours_us:.2f}x"


class Rows:
    """Prints one aligned line per problem: its shape, kernel and step, then `titles`."""

    def __init__(self, explanations: Sequence[Explanation], titles: Sequence[str]) -> None:
        self._kernel_width = max(len(kernel_name(explanation)) for explanation in explanations)
        self._widths = [max(len(title), 8) for title in titles]
        self._print("m", "n", "k", "kernel", "step", titles)

    def add(self, explanation: Explanation, cells: Sequence[str]) -> None:
        problem = explanation.problem
        self._print(problem.m, problem.n, problem.k, kernel_name(explanation), explanation.step, cells)

    def _print(self, m: object, n: object, k: object, kernel: str, step: str, cells: Sequence[str]) -> None:
        shape = f"{m:>5} {n:>6} {k:>6}"
        rest = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, self._widths))
        print(f"{shape}  {kernel:<{self._kernel_width}}  {step:<13}{rest}", flush=True)


def run_here(problems: Sequence[Problem], device: Device | None) -> int:
    """Prints the table of this machine, with times if it has a GPU; returns how many are wrong."""
    timer = DeviceTimer(device.ordinal) if device else None
    explanations = [explain(problem) for problem in problems]
    rows = Rows(explanations, ["error", "us", "torch us", "faster"] if device else ["error"])
    num_wrong = 0
    for problem, explanation in zip(problems, explanations):
        tensors = operands.make(problem, "cuda" if device else "cpu")
        comparison = run(tensors)
        num_wrong += not comparison.is_right
        times = time_beside_torch(tensors, device, timer) if device else ()
        rows.add(explanation, [f"{comparison.error:.1e}", *times])
    return num_wrong


def name_left_out() -> None:
    """Prints what it means for the tables that this build leaves kernels out, if it does."""
    left_out = manifest.packaged().left_out
    if left_out:
        print(
            f"\nThis build has the small kernel set. `//:wheel` has {len(left_out)} more kernels, and may "
            "choose one of them."
        )


def describe_elsewhere(problems: Sequence[Problem]) -> None:
    """Prints which kernels ELSEWHERE would run, and the times in the table of the wheel."""
    explanations = [explain(problem, ELSEWHERE) for problem in problems]
    rows = Rows(explanations, ["us"])
    for explanation in explanations:
        chosen = explanation.decision.chosen if explanation.step == "exact" else None
        rows.add(explanation, [f"{chosen.median_us:.1f}" if chosen else NONE])


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    if not _SHAPES.value:
        raise app.UsageError("--shapes= must name at least one shape as MxNxK, as 16x4096x4096")
    # The printed table already has the backend.
    python_logging.getLogger("stoneware").setLevel(python_logging.ERROR)
    problems = [parse_shape(text) for text in _SHAPES.value]
    device = cuda_device(torch.cuda.current_device()) if torch.cuda.is_available() else None

    print(f"Stoneware {sw.__version__}, torch {torch.__version__}")
    print("scaled_mm: fp8 e4m3 x e4m3 -> bf16, one scale per row of a and per column of b")
    print(f"\nOn this machine: {device or 'a CPU, no GPU is here'}")
    num_wrong = run_here(problems, device)
    if device is None:
        print(f"\nOn an {ELSEWHERE}: nothing runs, the tuning table of this build answers")
        describe_elsewhere(problems)
    name_left_out()
    print(f"\nerror: relative, against float64; right is below {tolerance.MAX_ERROR:g}")
    if num_wrong:
        print(f"WRONG: {num_wrong} of {len(problems)} results; please report this with the table.")
        return 1
    if device is None:
        print("Next: build the wheels with `./bazelw build //:wheel`; README.md has the calls.")
    else:
        print("Next: check every kernel here with `./bazelw build //:gpu_check`; see docs/benchmarks.md.")
    return 0


if __name__ == "__main__":
    app.run(main)
