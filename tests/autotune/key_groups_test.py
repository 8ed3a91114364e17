"""Keys of ops without groups are written and read as before there were groups."""

from __future__ import annotations

import sys

import pytest

from stoneware.kernels.key import Key, key_from_json

PLAIN = {
    "op": "matmul",
    "a_dtype": "bf16",
    "b_dtype": "bf16",
    "out_dtype": "bf16",
    "scales": "none",
    "layout": "nt",
    "n": 64,
    "k": 32,
    "m": 16,
}


def test_a_key_without_groups_has_no_such_field_in_json():
    key = key_from_json(PLAIN)
    assert key.num_groups == 0
    assert key.to_json() == PLAIN and list(key.to_json()) == list(PLAIN)


def test_a_key_with_groups_comes_back():
    key = Key(**{**PLAIN, "op": "grouped_mm"}, num_groups=8)
    assert key_from_json(key.to_json()) == key
    assert key.sizes == (8, 64, 32, 16) and key.kind.with_sizes(key.sizes) == key
    assert key.kind.num_groups == key.family.batch == 0, "groups are a size, as n is"
    assert key.shape == "m=16 n=64 k=32 groups=8"


def test_the_products_of_a_batch_are_part_of_its_kind_and_family():
    key = Key(**PLAIN, num_groups=8)
    assert key.sizes == (64, 32, 16) and key.kind.num_groups == key.family.batch == 8


@pytest.mark.parametrize("num_groups", [-1, True, 1.0, "8", None], ids=repr)
def test_a_bad_number_of_groups_is_refused(num_groups):
    with pytest.raises(ValueError, match="num_groups"):
        key_from_json({**PLAIN, "num_groups": num_groups})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
