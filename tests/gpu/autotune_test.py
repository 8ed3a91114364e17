"""sw.autotune on a GPU: correct values on each launch path; streams, graphs, threads, processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import stoneware as sw  # noqa: E402
from stoneware.tuning import policy as tuning_module  # noqa: E402
from stoneware.tuning.store import user_store  # noqa: E402
from tools.gpu_check import tuned_matmul  # noqa: E402

MOST_ERROR = 1e-3


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "tuning"))
    monkeypatch.delenv("STONEWARE_TUNING", raising=False)
    tuning_module.forget_plans()


@pytest.fixture
def kernel(device):
    return sw.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY)(tuned_matmul.matmul)


class Launches:
    """Counts the launches that go through Triton; the others are ours."""

    def __init__(self, monkeypatch) -> None:
        self.by_triton = 0
        run = type(tuned_matmul.matmul).run

        def counted(function, *args, **kwargs):
            self.by_triton += not kwargs.get("warmup")
            return run(function, *args, **kwargs)

        monkeypatch.setattr(type(tuned_matmul.matmul), "run", counted)


def assert_right(kernel, a, b, c, times=3):
    for _ in range(times):
        c.fill_(float("nan"))
        kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))
        assert tuned_matmul.error(a, b, c) < MOST_ERROR, (a.shape, b.shape)


def test_values_are_right_while_divisibility_changes_from_call_to_call(kernel, monkeypatch):
    """A kernel compiled for multiples of 16 reads wrong elements with other strides or pointers."""
    launches = Launches(monkeypatch)
    sizes = [(64, 64, 64), (64, 64, 63), (64, 65, 64), (1, 64, 64), (33, 17, 48), (128, 256, 1)]
    num_calls = 0
    for _ in range(3):
        for m, n, k in sizes:
            a, b, c = tuned_matmul.operands(m, n, k)
            assert_right(kernel, a, b, c, times=2)
            num_calls += 2
    assert 0 < launches.by_triton <= len(sizes), "the rest must have been ours"
    assert num_calls > launches.by_triton


def test_values_are_right_on_views(kernel):
    """With other strides, transposes, and pointers that are not 16-byte aligned."""
    whole_a, whole_b, _ = tuned_matmul.operands(130, 130, 130)
    for a, b in (
        (whole_a[:64, :64], whole_b[:64, :64]),
        (whole_a[1:65, 1:65], whole_b[3:67, 1:65]),
        (whole_a.t()[:64, :64], whole_b.t()[:64, :64]),
        (whole_a[::2, ::2], whole_b[::2, ::2]),
    ):
        c = torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=torch.float16)
        assert_right(kernel, a, b, c)


def test_on_miss_times_the_configs_and_the_next_decorator_measures_nothing(kernel, caplog):
    a, b, c = tuned_matmul.operands(256, 256, 256)
    with sw.tuning("on_miss"):
        assert_right(kernel, a, b, c)
    samples = [sample for _, sample in user_store().samples(kernel.op)]
    assert len(samples) == len(tuned_matmul.CONFIGS)
    assert {sample.status for sample in samples} <= {"ok", "failed"}
    assert all(0.5 < sample.median_us < 1e4 for sample in samples if sample.status == "ok")
    again = sw.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY)(tuned_matmul.matmul)
    with sw.tuning("error_on_miss"):
        assert_right(again, a, b, c)
    assert len(user_store().samples(kernel.op)) == len(samples)
    assert again.best_config is kernel.best_config


def test_a_config_that_does_not_fit_is_kept_as_failed(device):
    configs = [*tuned_matmul.CONFIGS[:2], triton.Config({"BM": 256, "BN": 256, "BK": 128}, num_warps=8, num_stages=5)]
    kernel = sw.autotune(configs, tuned_matmul.KEY)(tuned_matmul.matmul)
    a, b, c = tuned_matmul.operands(256, 256, 256)
    with sw.tuning("on_miss"):
        assert_right(kernel, a, b, c)
    samples = [sample for _, sample in user_store().samples(kernel.op)]
    assert sorted(sample.status for sample in samples) == ["failed", "ok", "ok"]


def test_a_capture_measures_nothing_and_replays_on_new_values(kernel, caplog):
    a, b, c = tuned_matmul.operands(96, 96, 96)
    kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING), sw.tuning("on_miss"), torch.cuda.graph(graph):
        kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))
        kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))
    assert sum("captured" in record.message for record in caplog.records) == 1
    assert user_store().samples(kernel.op) == []
    for _ in range(3):
        a.copy_(torch.randn_like(a))
        c.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert tuned_matmul.error(a, b, c) < MOST_ERROR


def test_runs_on_the_current_stream(kernel):
    """On two streams whose operands arrive late: a launch elsewhere would read the old ones."""
    a, b, c = tuned_matmul.operands(96, 96, 96)
    assert_right(kernel, a, b, c)
    for _ in range(2):
        stream, late = torch.cuda.Stream(), torch.randn_like(a)
        a.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            a.copy_(late)
            kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))
            result = c.clone()
        stream.synchronize()
        assert tuned_matmul.error(late, b, result) < MOST_ERROR


def test_threads_get_right_values(kernel):
    errors: list[BaseException] = []

    def work(idx: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(20):
                    a, b, c = tuned_matmul.operands(32 + idx + step % 3, 48, 64)
                    kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))
                    assert tuned_matmul.error(a, b, c) < MOST_ERROR
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(idx,)) for idx in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_runs_on_the_current_device(kernel):
    for ordinal in (0, 1, 0, 1):
        with torch.cuda.device(ordinal):
            assert_right(kernel, *tuned_matmul.operands(64, 64, 64), times=2)


@triton.jit
def add_atomically(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.atomic_add(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_a_kernel_that_adds_is_measured_without_changing_its_result(device, option):
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256, 512)]
    kernel = sw.autotune(configs, ["n"], **{option: ["y_ptr"]})(add_atomically)
    x = torch.randn(10_000, device="cuda")
    y = torch.zeros_like(x)
    with sw.tuning("on_miss"):
        kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, y, x.numel())
    torch.testing.assert_close(y, x)
    assert len(user_store().samples(kernel.op)) == 3


def test_scalars_of_every_type_arrive(device, monkeypatch):
    """int32, int64, unsigned 64-bit, float and None; launched by Triton and by the driver."""
    launches = Launches(monkeypatch)
    kernel = sw.autotune([triton.Config({"UNUSED": 0})], [])(write_scalars)
    for small, large, huge, real in ((7, 2**40 + 3, 2**63 + 5, 0.1), (-9, -(2**40) - 3, 2**64 - 7, -1e-30)):
        for _ in range(2):
            out = torch.zeros(4, device="cuda", dtype=torch.float64)
            bits = torch.zeros(2, device="cuda", dtype=torch.int64)
            kernel[(1,)](out, bits, None, small, large, huge, real)
            assert bits.tolist() == [large, huge - 2**64]
            assert out[0] == small
            assert out[1] == torch.tensor(real, dtype=torch.float32).double()
    assert launches.by_triton == 1


@triton.jit
def write_scalars(out_ptr, bits_ptr, none_ptr, small, large, huge, real, UNUSED: tl.constexpr):
    tl.store(out_ptr, small.to(tl.float64))
    tl.store(out_ptr + 1, real.to(tl.float64))
    tl.store(bits_ptr, large.to(tl.int64))
    tl.store(bits_ptr + 1, huge.to(tl.int64))
    if none_ptr is not None:
        tl.store(out_ptr + 2, 1.0)


SECOND_PROCESS = textwrap.dedent("""
    import json, sys
    import torch
    import stoneware as sw
    from tools.gpu_check import tuned_matmul
    from triton.runtime import cache, driver

    kernel = sw.autotune(tuned_matmul.CONFIGS, tuned_matmul.KEY)(tuned_matmul.matmul)
    a, b, c = tuned_matmul.operands(256, 256, 256)
    torch.cuda.synchronize()

    def launch():
        kernel[tuned_matmul.grid](*tuned_matmul.arguments(a, b, c))

    if sys.argv[1] == "tune":
        with sw.tuning("on_miss"):
            launch()
    elif sys.argv[1] == "capture":  # the first launch of all
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        graph.replay()
    else:
        launch()
    asked = {
        "triton_key": cache.triton_key.cache_info().misses,
        "driver": driver._active is not None,
        "gluon": any(name.startswith("triton.experimental.gluon") for name in sys.modules),
    }
    torch.cuda.synchronize()
    error = tuned_matmul.error(a, b, c)
    print(json.dumps({"asked": asked, "error": error, "config": str(kernel.best_config)}))
""")


@pytest.mark.parametrize("how", ["launch", "capture"])
def test_a_second_process_launches_what_was_kept_and_asks_triton_nothing(tmp_path, how, device):
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    results = []
    for argument in ("tune", how):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS, argument],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    tuned, second = results
    assert tuned["asked"]["triton_key"] == 1
    assert second["asked"] == {"triton_key": 0, "driver": False, "gluon": False}
    assert second["config"] == tuned["config"]
    assert max(tuned["error"], second["error"]) < MOST_ERROR


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
