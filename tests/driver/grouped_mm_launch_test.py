"""stoneware.ops._sm90: what grouped_mm's kernels give the driver, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

_WIDE = "grouped_mm_sm90_e4m3_e4m3_bf16_128x256x128_1x1x1_persistent2x3"
_SWAPPED = "grouped_mm_sm90_bf16_bf16_bf16_64x64x128_1x1x1_persistent1x6_swap"
_NARROW = "grouped_mm_sm90_bf16_bf16_bf16_64x16x128_1x1x1_persistent1x9_swap"

_A, _B, _D, _SCALE_A, _SCALE_B, _STREAM, _OFFSETS = (i << 20 for i in range(1, 8))

# Values of the enums in cuda.h.
_UINT8, _UINT16, _BFLOAT16 = "0", "1", "9"
_SWIZZLE_128B = "3"
_L2_NONE, _L2_128B = "0", "2"

_SCALES = {_WIDE: "row", _SWAPPED: "none", _NARROW: "none"}


def _prelude(kernel: str) -> str:
    """The rows of each tensor are longer than their contents, as those of a sliced view are."""
    return f"""
from stoneware.ops import _sm90 as module
[entry] = [entry for entry in module.kernels() if entry["id"] == "{kernel}"]
fake.set_parameter_bytes([entry["params_bytes"]])
problem = dict(tensors=["a", "b", "offs", "scale_a", "scale_b", "out"],
               m=100, n=512, k=1024, lda=2048, ldb=4096, ldd=640, num_groups=8,
               batch_stride_b=4194304, group_stride_scale_b=512, device=0, num_sms=132,
               scale_a='{_SCALES[kernel]}', scale_b='{_SCALES[kernel]}')
def call(offsets={_OFFSETS}, **changes):
    module.Plan("{kernel}", **(problem | changes))(
        {_STREAM}, [{_A}, {_B}, offsets, {_SCALE_A}, {_SCALE_B}, {_D}])
"""


def _tensor_map(kind: str, rank: int, address: int, dims: str, strides: str, box: str, l2: str = _L2_128B) -> Any:
    return {
        "type": kind,
        "rank": str(rank),
        "address": str(address),
        "dims": dims,
        "strides": strides,
        "box": box,
        "element_strides": ",".join("1" * rank),
        "interleave": "0",
        "swizzle": _SWIZZLE_128B,
        "l2_promotion": l2,
        "fill": "0",
        "context": "1",
    }


@pytest.mark.parametrize(
    ("kernel", "maps"),
    [
        (
            _WIDE,
            [
                _tensor_map(_UINT8, 3, _B, "1024,512,8", "4096,4194304", "128,256,1"),
                _tensor_map(_UINT8, 2, _A, "1024,100", "2048", "128,100"),
                _tensor_map(_UINT16, 2, _D, "512,100", "1280", "64,64", _L2_NONE),
            ],
        ),
        # A tile's 64 columns run along m, its 64 rows along n.
        (
            _SWAPPED,
            [
                _tensor_map(_BFLOAT16, 3, _B, "1024,512,8", "8192,8388608", "64,64,1"),
                _tensor_map(_BFLOAT16, 2, _A, "1024,100", "4096", "64,64"),
                _tensor_map(_UINT16, 2, _D, "512,100", "1280", "64,64", _L2_NONE),
            ],
        ),
        # A tile of 16 rows of the result is stored from registers.
        (
            _NARROW,
            [
                _tensor_map(_BFLOAT16, 3, _B, "1024,512,8", "8192,8388608", "64,64,1"),
                _tensor_map(_BFLOAT16, 2, _A, "1024,100", "4096", "64,16"),
            ],
        ),
    ],
)
def test_one_tensor_map_spans_all_rows_and_one_all_groups(kernel: str, maps: list[Any], run_with_fake: Any) -> None:
    assert (
        run_with_fake(f"""{_prelude(kernel)}
call()
report(fake.calls("cuTensorMapEncodeTiled"))
    """)
        == maps
    )


@pytest.mark.parametrize(
    ("kernel", "changes", "blocks"),
    [
        # At most m / 128 + groups tiles along m, but one for each row, and two along n.
        (_WIDE, "", 16),
        (_WIDE, "m=3", 6),
        (_WIDE, "m=100000", 132),
        (_SWAPPED, "num_groups=1", 16),  # (100 / 64 + 1) * 8
    ],
)
def test_the_grid_covers_the_most_tiles_that_offsets_can_give(
    kernel: str, changes: str, blocks: int, run_with_fake: Any
) -> None:
    (launch,), entry = run_with_fake(f"""{_prelude(kernel)}
call({changes})
report([fake.calls("cuLaunchKernelEx"), entry])
    """)
    assert launch["grid"] == f"{blocks},1,1"
    assert launch["block"] == ("384,1,1" if kernel == _WIDE else "160,1,1")
    assert launch["shared_bytes"] == str(entry["shared_bytes"])
    assert entry["shared_bytes"] <= 227 * 1024
    assert launch["stream"] == str(_STREAM)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ("num_groups=0", "cannot compute"),
        ("num_groups=1025", "cannot compute"),
        ("scale_a='none'", "cannot compute"),
        ("scale_a='tensor', scale_b='tensor'", "cannot compute"),
        ("scale_a='block_1x128', scale_b='block_128x128'", "cannot compute"),
        ("batch=2", "cannot compute"),
        ("splits=2", "cannot compute"),
        ("n=520", "n=520 must be a multiple of 16"),
        ("batch_stride_b=8", "batch_stride_b=8 must be a multiple of 16"),
        ("offsets=0", "offsets must be a device address"),
        (f"offsets={_OFFSETS + 2}", "offsets must be a device address, a multiple of 4"),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: str, part: str, run_with_fake: Any) -> None:
    error, names = run_with_fake(f"""{_prelude(_WIDE)}
report([error_of(call, {changes}), fake.calls("cuLaunchKernelEx")])
    """)
    assert error["type"] == "ValueError"
    assert part in error["message"]
    assert names == []
