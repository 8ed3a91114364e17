"""Calls respect torch's current stream, CUDA graphs, threads and devices."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
import threading
import traceback

import fitting_kernels
import pytest
import torch

import stoneware
from stoneware.measuring import operands
from stoneware.ops import _sm90
from stoneware.ops.scaled_mm import api
from stoneware.specs.scaled_mm_problem import Problem

KERNELS = fitting_kernels.of_row_scales("bf16")
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=fitting_kernels.kernel_id)
second_gpu = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")


def assert_right(tensors: operands.Operands, result: torch.Tensor) -> None:
    comparison = operands.compare(result, operands.reference(tensors), tensors.problem)
    assert comparison.is_right, str(comparison)


@every_kernel
def test_runs_on_the_current_stream(kernel, device):
    """On a stream whose operand arrives late: a launch on another stream would read the old one."""
    tensors = operands.make(Problem.dense(m=48, n=512, k=1024), "cuda")
    late = tensors.a.clone()
    tensors.a.zero_()
    config = fitting_kernels.config(kernel)
    stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out, config=config)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensors.a.copy_(late)
        stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out, config=config)
        copy = tensors.out.clone()
    stream.synchronize()
    assert_right(tensors, copy)


@every_kernel
def test_a_captured_graph_replays_on_new_values(kernel, device):
    tensors = operands.make(Problem.dense(m=48, n=512, k=1024), "cuda")
    config = fitting_kernels.config(kernel)

    def call() -> None:
        stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out, config=config)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        tensors.a.copy_(torch.randn(48, 1024, device="cuda").to(torch.float8_e4m3fn))
        tensors.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(tensors, tensors.out)


def test_the_first_call_may_be_inside_a_capture(device):
    """In a process of its own, so that nothing is loaded: loading must not break the capture."""
    code = textwrap.dedent("""
        import torch, stoneware
        from stoneware.measuring import operands
        from stoneware.specs.scaled_mm_problem import Problem
        tensors = operands.make(Problem.dense(m=48, n=512, k=1024), "cuda")
        expected = operands.reference(tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out)
        graph.replay()
        torch.cuda.synchronize()
        comparison = operands.compare(tensors.out, expected, tensors.problem)
        assert comparison.is_right, str(comparison)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def run_in_threads(bodies) -> list[str]:
    """Runs each body in a thread of its own, all at once; returns the tracebacks."""
    failures: list[str] = []
    barrier = threading.Barrier(len(bodies))

    def guarded(body) -> None:
        try:
            barrier.wait(timeout=60)
            body()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return failures


def test_threads_with_streams_of_their_own(device):
    cases = [operands.make(Problem.dense(m=1 + 7 * i, n=512, k=1024), "cuda") for i in range(16)]
    torch.cuda.synchronize()

    def body(tensors: operands.Operands):
        def run() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out)

        return run

    failures = run_in_threads([body(tensors) for tensors in cases])
    assert not failures, "\n".join(failures)
    torch.cuda.synchronize()
    for tensors in cases:
        assert_right(tensors, tensors.out)


@every_kernel
def test_a_thread_that_has_no_context(kernel, device):
    """The plan alone in a new thread: nothing there has made the GPU's context current before."""
    problem = Problem.dense(m=48, n=512, k=1024)
    tensors = operands.make(problem, "cuda")
    torch.cuda.synchronize()
    plan = api.OPERATION.make_plan(problem, fitting_kernels.config(kernel), device)
    failures = run_in_threads([lambda: plan(*tensors.arguments)])
    assert not failures, "\n".join(failures)
    torch.cuda.synchronize()
    assert_right(tensors, tensors.out)


def test_a_context_that_takes_the_place_of_another(device):
    """Contexts of the thread's own, made and destroyed in turn, at the same address or not."""
    kernels = [kernel.id for kernel in KERNELS if kernel.backend == "sm90"]
    if not kernels:
        pytest.skip("no sm90 kernel fits this GPU")
    m, n, k = 48, 512, 1024
    tensors = operands.make(Problem.dense(m=m, n=n, k=k), "cpu")
    plan = _sm90.Plan(
        kernels[0],
        tensors=["a", "b", "out", "scale_a", "scale_b"],
        m=m,
        n=n,
        k=k,
        lda=k,
        ldb=k,
        ldd=n,
        device=0,
        num_sms=device.fingerprint.num_sms,
        scale_a="row",
        scale_b="row",
    )
    libcuda = ctypes.CDLL("libcuda.so.1")

    def check(result: int) -> None:
        assert result == 0, f"the driver returned {result}"

    def on_the_gpu(tensor: torch.Tensor) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        num_bytes = ctypes.c_size_t(tensor.numel() * tensor.element_size())
        check(libcuda.cuMemAlloc_v2(ctypes.byref(address), num_bytes))
        check(libcuda.cuMemcpyHtoD_v2(address, ctypes.c_void_p(tensor.data_ptr()), num_bytes))
        return address

    def in_a_new_context() -> None:
        context = ctypes.c_void_p()
        check(libcuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
        try:
            result = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
            a, b, d, *scales = map(on_the_gpu, (tensors.a, tensors.b.t(), result, *tensors.scales))
            plan(0, [address.value for address in (a, b, d, *scales)])
            check(libcuda.cuMemcpyDtoH_v2(ctypes.c_void_p(result.data_ptr()), d, ctypes.c_size_t(m * n * 2)))
        finally:
            check(libcuda.cuCtxDestroy_v2(context))
        assert_right(tensors, result)

    failures = run_in_threads([lambda: [in_a_new_context() for _ in range(3)]])
    assert not failures, "\n".join(failures)


@second_gpu
@every_kernel
def test_a_gpu_that_is_not_the_current_one(kernel):
    tensors = operands.make(Problem.dense(m=48, n=512, k=1024), "cuda:1")
    with torch.cuda.device(0):
        result = stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, config=fitting_kernels.config(kernel))
        assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda", 1)
    torch.cuda.synchronize(1)
    assert_right(tensors, result)


@second_gpu
def test_two_gpus_at_once(device):
    cases = [operands.make(Problem.dense(m=64, n=512, k=1024), f"cuda:{i}") for i in (0, 1) * 4]

    def body(tensors: operands.Operands):
        def run() -> None:
            for _ in range(20):
                stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales, out=tensors.out)

        return run

    failures = run_in_threads([body(tensors) for tensors in cases])
    assert not failures, "\n".join(failures)
    for tensors in cases:
        torch.cuda.synchronize(tensors.a.device)
        assert_right(tensors, tensors.out)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
