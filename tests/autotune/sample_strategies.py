"""Samples and runs for tests of the store and of merging: examples, and hypothesis strategies."""

from __future__ import annotations

import hashlib
from typing import Any

import h200
from h200 import H200
from hypothesis import strategies as st

from stoneware.kernels.config import Config, KernelConfig
from stoneware.kernels.key import KernelKey, Key
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning.samples import Run, Sample

H100 = DeviceFingerprint(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_sms=132,
    l2_bytes=52428800,
    memory_clock_khz=2619000,
    power_limit_w=700,
)
KERNEL_OP = "package.kernels:matmul_kernel"


def variant(device: DeviceFingerprint, **changes: Any) -> DeviceFingerprint:
    return DeviceFingerprint.from_json({**device.to_json(), **changes})


def run(id: str = "2026-11-21T043241Z-nvidia_h200", **changes: Any) -> Run:
    return h200.run(id, **changes)


def sample(m: int = 16, kernel: str = "big", median_us: float = 10.0, **changes: Any) -> Sample:
    values: dict[str, Any] = dict(
        key=Key(
            op="scaled_mm",
            a_dtype="e4m3",
            b_dtype="e4m3",
            out_dtype="bf16",
            scales="row",
            layout="nt",
            n=4096,
            k=7168,
            m=m,
        ),
        config=Config(backend="sm90", kernel=kernel),
        median_us=median_us,
        spread_us=0.5,
        count=80,
        status="ok",
        error=0.002,
        kernel_sha256=sha256(kernel),
        run=run().id,
    )
    return Sample(**{**values, **changes})


def kernel_sample(m: int = 16, **changes: Any) -> Sample:
    values: dict[str, Any] = dict(
        key=KernelKey(op=KERNEL_OP, names=("M", "N", "EVEN"), values=(m, 4096, True), dtypes=(("a", "fp16"),)),
        config=KernelConfig(kwargs=(("BLOCK_M", 64), ("BLOCK_N", 128)), num_warps=8),
        kernel_sha256=sha256("source"),
    )
    return sample(**{**values, **changes})


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Few values of each, so that many samples agree in some of what they are told apart by.
_RUN_IDS = ("2026-11-21-a", "2026-11-22-b", "2026-11-23-c")
_DEVICES = (
    H200,
    variant(H200, name="GRID H200"),
    variant(H200, power_limit_w=600),
    variant(H200, power_limit_w=0),
    H100,
)
_TEXT = st.text(max_size=30)
_KEY_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.0, 1.0, -0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXT,
)
_TIMES = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)


@st.composite
def kernel_keys(draw: st.DrawFn) -> KernelKey:
    names = draw(st.lists(st.sampled_from(["M", "N", "K", "flag"]), unique=True, max_size=3))
    return KernelKey(
        op=draw(st.sampled_from([KERNEL_OP, "package:kernels.matmul", "a:<locals>/b c"])),
        names=tuple(names),
        values=tuple(draw(_KEY_VALUES) for _ in names),
        dtypes=draw(st.sampled_from([(), (("a", "fp16"), ("b", "fp16"))])),
    )


KEYS = st.one_of(
    st.builds(
        Key,
        op=st.sampled_from(["scaled_mm", "matmul"]),
        a_dtype=st.just("bf16"),
        b_dtype=st.just("bf16"),
        out_dtype=st.sampled_from(["bf16", "fp32"]),
        scales=st.just("none"),
        layout=st.sampled_from(["nt", "nn"]),
        n=st.integers(1, 2),
        k=st.integers(1, 2),
        m=st.integers(1, 2**31 - 1),
    ),
    kernel_keys(),
)
_CONFIGS = st.builds(
    Config,
    backend=st.sampled_from(["sm90", "vendor"]),
    kernel=st.sampled_from(["big", "tiny"]),
    max_swizzle=st.sampled_from([1, 8]),
)
_KERNEL_CONFIGS = st.builds(
    KernelConfig,
    kwargs=st.dictionaries(st.sampled_from(["BLOCK_M", "SPLIT"]), _KEY_VALUES, max_size=2).map(
        lambda kwargs: tuple(kwargs.items())
    ),
    num_warps=st.sampled_from([4, 8]),
)


@st.composite
def samples(draw: st.DrawFn, run_id: str | None = None) -> Sample:
    key = draw(KEYS)
    is_ok = draw(st.booleans())
    return Sample(
        key=key,
        config=draw(_KERNEL_CONFIGS if isinstance(key, KernelKey) else _CONFIGS),
        median_us=draw(_TIMES) if is_ok else 0.0,
        spread_us=draw(_TIMES),
        count=80,
        status="ok" if is_ok else draw(st.sampled_from(["wrong", "failed", "hung"])),
        kernel_sha256=draw(st.sampled_from(["", sha256("a"), sha256("b")])),
        run=run_id or draw(st.sampled_from(_RUN_IDS)),
        # Some are longer than a page of the database.
        detail=draw(st.one_of(st.just(""), _TEXT, st.integers(1, 20_000).map(lambda n: "x" * n))),
    )


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Run]:
    """Every run that `samples` can name."""
    return {
        id: run(id, device=draw(st.sampled_from(_DEVICES)), date=f"2026-11-2{idx}T00:00:00+00:00")
        for idx, id in enumerate(_RUN_IDS)
    }
