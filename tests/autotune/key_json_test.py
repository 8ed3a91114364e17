"""Keys of our ops in JSON: what a key without the newer fields says, and what is refused."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from stoneware.kernels.key import Key, key_from_json

OLD = {
    "op": "scaled_mm",
    "a_dtype": "e4m3",
    "b_dtype": "e4m3",
    "out_dtype": "bf16",
    "scales": "row",
    "layout": "nt",
    "n": 4096,
    "k": 4096,
    "m": 16,
}


def test_key_from_before_slow_accumulation_reads_and_writes_unchanged():
    key = key_from_json(OLD)
    assert key.accumulation == "fast"
    assert key == Key(**OLD)
    assert key.to_json() == OLD
    assert list(key.to_json()) == list(OLD)


def test_slow_accumulation_is_another_family_and_survives_json():
    fast = key_from_json(OLD)
    slow = dataclasses.replace(fast, accumulation="slow")
    assert slow.family != fast.family
    assert slow.to_json() == {**OLD, "accumulation": "slow"}
    assert key_from_json(slow.to_json()) == slow


def test_block_scales_are_another_family_and_survive_json():
    block = dataclasses.replace(key_from_json(OLD), scales="block")
    assert block.family != key_from_json(OLD).family
    assert key_from_json(block.to_json()) == block


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("accumulation", "exact", "fast, slow"),
        ("accumulation", None, "fast, slow"),
        ("scales", "column", "row, tensor, none, block"),
    ],
)
def test_unknown_values_are_refused_with_those_that_are_known(field, value, known):
    with pytest.raises(ValueError, match=f"{field}={value!r} must be one of {known}"):
        key_from_json({**OLD, field: value})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
