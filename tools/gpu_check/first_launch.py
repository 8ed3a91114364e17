"""What the first launch of a tuned kernel costs a new process, and the second: a line of JSON.

    python -m tools.gpu_check.first_launch --decorator triton.autotune --mode off --size 512

Before the clock runs the process has imported torch, Triton and Stoneware, decorated the kernel, made the operands
and started CUDA; it stops when the GPU has finished. triton.autotune has cache_results=True.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import triton

import stoneware
from tools.gpu_check import tuned_matmul
from tools.gpu_check.first_call import timed_ms

OURS, TRITON = "stoneware.autotune", "triton.autotune"


def decorated(name: str) -> Any:
    """The kernel under one of the two decorators."""
    if name == OURS:
        return stoneware.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY)(tuned_matmul.matmul)
    return triton.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY, cache_results=True)(tuned_matmul.matmul)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decorator", required=True, choices=[OURS, TRITON])
    parser.add_argument("--mode", default="off", help="of sw.tuning")
    parser.add_argument("--size", type=int, default=512, help="M, N and K")
    options = parser.parse_args(arguments)
    from triton.runtime import cache, driver

    a, b, c = tuned_matmul.operands(*[options.size] * 3)
    kernel = decorated(options.decorator)
    arguments_of_kernel = tuned_matmul.arguments(a, b, c)
    torch.cuda.synchronize()

    def launch() -> None:
        kernel[tuned_matmul.grid](*arguments_of_kernel)

    with stoneware.tuning(options.mode):
        first_ms, second_ms = timed_ms(launch), timed_ms(launch)
    result = {
        "first_launch_ms": first_ms,
        "second_launch_ms": second_ms,
        "error": tuned_matmul.error(a, b, c),
        "config": str(kernel.best_config),
        "asked_triton_key": cache.triton_key.cache_info().misses > 0,
        "made_triton_driver": driver._active is not None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
