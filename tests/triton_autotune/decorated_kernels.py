"""What the tests of sw.autotune share: a kernel, a fake GPU, and a user's store of the test's."""

from __future__ import annotations

import fake_gpu
import h200
import pytest
import triton
import triton.language as tl
from fake_gpu import Tensor

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.measuring import machine
from stoneware.triton_autotune import cache
from stoneware.triton_autotune.decorator import autotune
from stoneware.triton_autotune.identity import identity_of
from stoneware.tuning import policy, sources, store
from stoneware.tuning.samples import Run, Sample

FACTOR = tl.constexpr(3)


@triton.jit
def scale(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets * stride, tl.load(x_ptr + offsets, mask=mask) * FACTOR, mask=mask)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (16, 32, 64)]


def bench_by(times_ms: dict[int, float], calls: list[int] | None = None, spread: float = 0.0):
    """A do_bench that runs a candidate and gives it the time of its BLOCK."""

    def do_bench(call, quantiles):
        call()
        block = call.arguments["BLOCK"]
        if calls is not None:
            calls.append(block)
        time_ms = times_ms[block]
        return time_ms, time_ms * (1 - spread), time_ms * (1 + spread)

    return do_bench


def run_of(number: int = 0) -> Run:
    return h200.run(f"run-{number}", fake_gpu.FINGERPRINT, f"2026-11-21T00:00:{number:02d}", triton=triton.__version__)


@pytest.fixture
def gpu(monkeypatch, tmp_path, tmp_path_factory):
    """A fake GPU, and folders of its own for everything that is kept."""
    # Of all tests, so that Triton compiles each kernel once.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    fake = fake_gpu.FakeGpu()
    fake.install(monkeypatch)
    scale.device_caches.clear()  # what other tests compiled
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "tuning"))
    monkeypatch.delenv("STONEWARE_TUNING", raising=False)
    monkeypatch.setattr(cache.FILES, "reported", set())
    monkeypatch.setattr(policy, "_memory", [])
    sources.forget_stores()
    runs = iter(range(10, 60))  # later than those of `sample`
    monkeypatch.setattr(machine, "new_run", lambda ordinal, command: run_of(next(runs)))
    return fake


OP = "decorated_kernels:scale"
FAST_32 = {16: 2.0, 32: 1.0, 64: 3.0}


def decorate(fn=scale, configs=CONFIGS, key=("n",), **options):
    return autotune(configs=list(configs), key=list(key), **options)(fn)


def call(kernel, n=33, **kwargs):
    kernel[(1,)](Tensor(), Tensor(), n, 5, **kwargs)
    return kernel.best_config.kwargs["BLOCK"]


def explained(kernel, n=33):
    return kernel.explain(Tensor(), Tensor(), n, 5)


def sample(block, median_us, n=33, run=0, spread_us=0.0, sha256=None, status="ok"):
    is_ok = status == "ok"
    return Sample(
        key=KernelKey(op=OP, names=("n",), values=(n,), dtypes=(("x_ptr", "float32"), ("y_ptr", "float32"))),
        config=KernelConfig(kwargs=(("BLOCK", block),)),
        median_us=median_us if is_ok else 0,
        spread_us=spread_us,
        count=int(is_ok),
        status=status,
        run=run_of(run).id,
        kernel_sha256=identity_of(scale).sha256 if sha256 is None else sha256,
    )


def keep(*samples):
    for item in samples:
        number = int(item.run.removeprefix("run-"))
        store.user_store().add(run_of(number), [item])
    policy.forget_plans()


def stored():
    fake = store.user_store().samples(OP)
    return {(dict(item.config.kwargs)["BLOCK"], item.status) for _, item in fake}
