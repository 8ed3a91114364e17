"""examples/tile_mlp.py links what autograd asks for; on a GPU of Hopper it also computes what torch does."""

from __future__ import annotations

import importlib
import pathlib

import machine_code
import pytest


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path("examples").resolve()))
    return importlib.import_module("tile_mlp")


def test_each_kernel_is_linked_with_what_its_gradients_need(example, capsys):
    errors = example.main(["--rows=128", "--hidden=128"])
    assert all(error < 0.02 for error in errors.values())
    lines = capsys.readouterr().out.splitlines()
    matmuls = [line.split(": ")[:2] for line in lines[:3]]
    assert matmuls == [
        ["mlp_forward", "first.forward, second.forward"],
        ["mlp_backward", "first.dA, first.forward, second.dA"],
        ["mlp_backward", "first.dA, first.dB, first.forward, second.dA, second.dB"],
    ]


@pytest.mark.parametrize(("x", "w1", "w2"), [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_asks_for_are_not_computed(x, w1, w2, example):
    linked = example.MODULE.link("mlp_backward", needs=example.backward_needs(x, w1, w2))
    directions = [("first", "dA")] * x + [("first", "dB")] * w1 + [("second", "dB")] * w2
    recomputed = [("first", "forward"), ("second", "dA")]
    assert linked.matmuls == tuple(sorted(directions + recomputed))
    plans = {"first": example.FIRST.plans, "second": example.SECOND.plans}
    expected = sum(plans[name][direction].num_instructions for name, direction in linked.matmuls)
    assert sum(machine_code.matmul_instructions(linked.cubin).values()) == expected
    assert linked.log == ""
