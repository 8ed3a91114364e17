"""The spec of matmul and its heuristic. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoneware.kernels.config import VENDOR as VENDOR_BACKEND
from stoneware.kernels.config import Config
from stoneware.kernels.key import LAYOUTS, Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import by_tile_m
from stoneware.specs.matmul_problem import DTYPES, OP, WIDE_DTYPE, Problem
from stoneware.specs.op_spec import SHAPE_FORM, OpSpec
from stoneware.specs.scaled_mm import M_VALUES, WEIGHTS

VENDOR = Config(backend=VENDOR_BACKEND, kernel="torch.mm")


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """The configs to try without a measurement, best first; the first is the canonical config."""
    return [
        VENDOR,
        *(
            config
            for backend in ("sm90", "triton_aot")
            for config in by_tile_m(key, compute_capability, manifest.select(op=key.op, backend=backend))
        ),
    ]


def _problems(sizes: Sequence[int], *, out_dtypes: Sequence[str], layouts: Sequence[str]) -> Iterator[Problem]:
    *batch, m, n, k = sizes
    for out_dtype in out_dtypes:
        dtype = "bf16" if out_dtype == WIDE_DTYPE else out_dtype
        for layout in layouts:
            yield Problem.dense(
                m=m, n=n, k=k, dtype=dtype, out_dtype=out_dtype, layout=layout, batch=batch[0] if batch else 1
            )


SPEC = OpSpec(
    name=OP,
    inputs={"a": "Tensor", "b": "Tensor", "bias": "Tensor?"},
    arguments=(("out_dtype", "ScalarType?"), ("accumulate", "bool")),
    must_be_aligned=False,  # the vendor library takes unaligned tensors
    problem=Problem,
    make_problem=Problem.dense,
    takes=("has_bias", "batch", "layout"),
    preferred=preferred,
    preferred_reason={
        VENDOR.backend: "no measurement applies; torch's own kernel comes first, because it runs on every GPU",
        "sm90": "no measurement applies; the Hopper kernel with the smallest tile that covers m",
        "triton_aot": "no measurement applies; the Triton kernel with the smallest tile that covers m",
    },
    forms={3: SHAPE_FORM, 4: "BxMxNxK, a batch of B matmuls, such as 128x16x512x128"},
    layers=WEIGHTS,
    m_values=lambda sizes: M_VALUES,
    choices={"out_dtypes": (*DTYPES, WIDE_DTYPE), "layouts": LAYOUTS},
    problems=_problems,
)
