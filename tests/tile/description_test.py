"""What can be described, what is refused and why, and which instruction computes each direction."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

import stoneware as sw

BF16 = {"m": 64, "n": 64, "k": 64, "a": "bf16", "b": "bf16"}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"m": 20}, ValueError, "m=20 must be a positive multiple of 16; round it up"),
        ({"n": 0}, ValueError, "n=0 must be a positive multiple of 16"),
        ({"k": 16.0}, TypeError, "k=16.0 must be an int, not float"),
        ({"k": 48, "a": "e4m3", "b": "e4m3"}, ValueError, "k=48 must be a positive multiple of 32"),
        ({"a": "fp32"}, ValueError, "a='fp32' must be one of bf16, fp16, e4m3, e5m2, tf32"),
        ({"b": "fp16"}, ValueError, "a='bf16' and b='fp16' must have one dtype"),
        ({"acc": "f16"}, ValueError, "acc='f16' must be one of f32"),
        ({"arch": "sm_75"}, ValueError, "arch='sm_75' must be one of sm_80,"),
        ({"arch": "sm_80", "a": "e4m3", "b": "e4m3"}, ValueError, "arch='sm_80' must be at least sm_89 for a='e4m3'"),
        ({"layouts": ("row", "n")}, ValueError, r"layouts=\('row', 'n'\) must be those of a and b"),
        ({"layouts": "row"}, TypeError, "layouts='row' must be two layouts, not a str"),
        ({"a": "e4m3", "b": "e4m3"}, ValueError, r'layouts must be \("row", "col"\) for fp8'),
        ({"threads": 48}, ValueError, "threads=48 must be a positive multiple of 32"),
        ({"threads": 2048}, ValueError, "threads=2048 must be at most 1024"),
        ({"m": 256, "n": 256}, ValueError, "forward has 512 sums of 256x256 in each of 128 threads"),
        ({"m": 16, "n": 16}, ValueError, "4 warps cannot share equally"),
        ({"k": 1024}, ValueError, "the tiles of a and b have 262144 bytes"),
        ({"name": "my matmul"}, ValueError, "name='my matmul' must be a name of C"),
        ({"enable_backward": "dA"}, TypeError, "enable_backward='dA' must be None, a bool or a set"),
        ({"enable_backward": {"dC"}}, ValueError, r"enable_backward=\['dC'\] must have only 'dA', 'dB'"),
    ],
)
def test_an_invalid_description_is_refused_with_rule_value_and_remedy(fields, error, message):
    with pytest.raises(error, match=message) as caught:
        sw.tile.matmul(**{**BF16, **fields})
    assert ";" in str(caught.value)


ROW_COL = {"layouts": ("row", "col")}
FP8 = {"a": "e4m3", "b": "e5m2", **ROW_COL}
TF32 = {"a": "tf32", "b": "tf32"}


@pytest.mark.parametrize(
    ("fields", "forward", "d_a", "d_b"),
    [
        ({}, "wgmma", "wgmma", "wgmma"),
        ({"layouts": ("col", "col")}, "wgmma", "wgmma", "wgmma"),
        ({"arch": "sm_90"}, "mma", "mma", "mma"),
        ({"arch": "sm_120"}, "mma", "mma", "mma"),
        ({"m": 32}, "mma", "mma", "wgmma"),  # wgmma computes 64 rows at a time
        ({"k": 32}, "wgmma", "wgmma", "mma"),
        ({"threads": 64}, "mma", "mma", "mma"),  # and needs 128 threads
        ({"threads": 256, "n": 256}, "wgmma", "wgmma", "wgmma"),
        (FP8, "wgmma", None, None),
        ({**FP8, "arch": "sm_89"}, "mma", None, None),
        # wgmma reads tf32 along the summed axis only.
        (TF32, "mma", "wgmma", "mma"),
        ({**TF32, **ROW_COL}, "wgmma", "mma", "mma"),
    ],
)
def test_the_instruction_of_each_direction(fields, forward, d_a, d_b):
    mm = sw.tile.matmul(**{**BF16, **fields})
    expected = {"forward": forward, "dA": d_a, "dB": d_b}
    assert {name: plan.instruction for name, plan in mm.plans.items()} == {k: v for k, v in expected.items() if v}
    assert set(mm.unsupported) == {name for name, value in expected.items() if value is None}


def test_the_bytes_of_tiles_have_the_padding_of_their_types():
    assert sw.tile.matmul(**BF16).tile_bytes == {"A": 8192, "B": 8192, "dC": 8192}
    small = sw.tile.matmul(m=16, n=16, k=16, a="bf16", b="bf16", threads=32)
    assert small.tile_bytes == {"A": 1024, "B": 1024, "dC": 1024}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mm: pickle.loads(pickle.dumps(mm))])
def test_a_copy_is_an_equal_description(copied):
    mm = sw.tile.matmul(**BF16, enable_backward={"dA"})
    other = copied(mm)
    assert other == mm and hash(other) == hash(mm) and other.plans == mm.plans and other.header == mm.header


def test_equal_descriptions_are_equal_and_one_name_changes_no_function():
    mm, other = sw.tile.matmul(**BF16), sw.tile.matmul(**BF16, name="other")
    assert mm == sw.tile.matmul(**BF16, layouts=["row", "row"]) != other
    from stoneware.tile import source

    assert source.symbol(mm, "dA") == source.symbol(other, "dA")
    assert source.symbol(mm, "dA") != source.symbol(sw.tile.matmul(**{**BF16, "n": 128}), "dA")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((), {"forward"}),
        (("a",), {"forward", "dA"}),
        (("b",), {"forward", "dB"}),
        (("a", "b"), {"forward", "dA", "dB"}),
    ],
)
def test_needs_follow_the_inputs_that_need_gradients(inputs, expected):
    assert sw.tile.needs_of(sw.tile.matmul(**BF16), inputs) == expected


def test_the_package_imports_neither_torch_nor_nvrtc():
    program = "import sys, stoneware as sw; sw.tile.matmul; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "cuda", "numpy"} & set(loaded)
