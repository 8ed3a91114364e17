"""Messages print the value that breaks a rule, and not a megabyte of it."""

from __future__ import annotations

import pytest
import torch
from operands import scaled_operands

import stoneware as sw
from stoneware.errors import LONGEST_VALUE, quoted
from stoneware.kernels import key
from stoneware.kernels.config import Config, KernelConfig
from stoneware.runtime import environment
from stoneware.sessions import model

HUGE = "x" * (1 << 20)
LIST = [HUGE]


def scaled_mm(**options):
    x = scaled_operands(16, 32, 32)
    return sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, **options)


CASES = {
    "backend": lambda: scaled_mm(backend=HUGE),
    "backend of another type": lambda: scaled_mm(backend=LIST),
    "config": lambda: scaled_mm(config=HUGE),
    "backend of a config": lambda: scaled_mm(backend="reference", config=Config(backend=HUGE, kernel="k")),
    "out_dtype": lambda: scaled_mm(out_dtype=HUGE),
    "use_fast_accum": lambda: scaled_mm(use_fast_accum=HUGE),
    "matmul's out_dtype": lambda: sw.matmul(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16(), out_dtype=HUGE),
    "scales": lambda: sw.quantize(torch.ones(2, 2), HUGE),
    "transpose": lambda: sw.quantize(torch.ones(2, 2), transpose=HUGE),
    "op": lambda: sw.explain(HUGE, m=8, n=8, k=8),
    "m": lambda: sw.explain("matmul", m=HUGE, n=8, k=8),
    "m of 5,000 digits": lambda: sw.explain("matmul", m=10**5000, n=8, k=8),
    "layout": lambda: sw.explain("matmul", m=8, n=8, k=8, layout=HUGE),
    "scales of explain": lambda: sw.explain("scaled_mm", m=8, n=16, k=16, scales=HUGE),
    "device": lambda: sw.explain("matmul", m=8, n=8, k=8, device=HUGE),
    "device of another type": lambda: sw.explain("matmul", m=8, n=8, k=8, device=LIST),
    "mode": lambda: sw.tuning(HUGE),
    "overlay": lambda: sw.tuning("off", overlay=LIST),
    "overlay's path": lambda: sw.tuning("off", overlay=HUGE),
    "batch_invariant": lambda: sw.batch_invariant(HUGE),
    "kernel": lambda: Config(backend="vendor", kernel=LIST),
    "num_warps": lambda: KernelConfig(num_warps=HUGE),
    "scales of a key": lambda: key.key_from_json({**KEY, "scales": HUGE}),
    "dtype of a key": lambda: key.key_from_json({**KEY, "a_dtype": LIST}),
    "tokens": lambda: model.tune(torch.nn.Linear(2, 2).bfloat16(), LIST),
}
KEY = {
    "op": "scaled_mm", "a_dtype": "e4m3", "b_dtype": "e4m3", "out_dtype": "bf16", "scales": "row", "layout": "nt",
    "n": 16, "k": 16, "m": 1,
}  # fmt: skip


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_message_does_not_repeat_a_huge_value(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", ["STONEWARE_CACHE_DIR", "STONEWARE_TUNING", "STONEWARE_BATCH_INVARIANT"])
def test_nor_that_of_a_variable(name, monkeypatch):
    monkeypatch.setenv(name, HUGE[:100_000])
    read = {
        "STONEWARE_CACHE_DIR": environment.tuning_folder,
        "STONEWARE_TUNING": environment.tuning_mode,
        "STONEWARE_BATCH_INVARIANT": environment.batch_invariant,
    }[name]
    with pytest.raises(ValueError, match=f"{name}='xxx") as caught:
        read()
    assert len(str(caught.value)) < 2000


def test_a_value_is_printed_whole_or_with_both_of_its_ends():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    assert quoted("é\n") == repr("é\n") and quoted(7) == "7"
    whole = "y" * (LONGEST_VALUE - 2)
    assert quoted(whole) == repr(whole)
    cut = quoted("a" + whole + "b")
    assert len(cut) == LONGEST_VALUE and cut.startswith("'ay") and "yyy...yyy" in cut and cut.endswith("yb'")
    assert quoted(10**5000) == "<int that cannot be printed>" and quoted(Silent()) == "<Silent that cannot be printed>"
