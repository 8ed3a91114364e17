"""`stoneware link`: what a call finds without a link of its own, and the mistakes that it names."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

import stoneware as sw
from stoneware import explanation
from stoneware.cli import exit_codes, main
from stoneware.epilogue import linked
from stoneware.linking import toolchain
from stoneware.ops import ahead, fused

SIZES = ("-n", "4096", "-k", "4096", "--device", "NVIDIA H200")


def silu_times(acc, r):
    return functional.silu(acc) * r - 1


def to_fp8(acc, scale):
    return (acc * scale).to(torch.float8_e4m3fn), acc.abs().amax(-1)


def dropout(acc, seed):
    return sw.dropout(acc, 0.1, seed)


def softmax(acc):
    return acc.softmax(-1)


def run(capsys, *arguments):
    code = main.run(["link", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_what_was_linked_ahead_is_kept_and_skipped_by_the_next_run(capsys, cache):
    arguments = (f"{__name__}:silu_times", "-m", "1,16,4096", "--input", "mxn", *SIZES)
    code, document, err = run(capsys, *arguments)
    statuses = [each["status"] for each in document["links"]]
    assert code == exit_codes.OK and set(statuses) <= {"linked", "kept"}
    assert "[3/3] m=4096" in err
    assert len(list((cache / "linked").iterdir())) == statuses.count("linked") >= 2
    _, document, _ = run(capsys, *arguments)
    assert [each["status"] for each in document["links"]] == ["kept"] * 3


def test_an_input_may_be_a_seed(capsys):
    _, document, _ = run(capsys, f"{__name__}:dropout", "-m", "16", "--input", "1:int64", *SIZES)
    assert [each["status"] for each in document["links"]] == ["linked"]


@pytest.fixture
def on_h200(monkeypatch):
    """Calls on CPU tensors decide as on an H200; returns the (kernel, text) pairs that they ask for."""
    h200 = explanation.device_of("matmul", "NVIDIA H200")
    monkeypatch.setattr(fused._FusedCalls, "_check", lambda *_: h200)
    asked = []
    monkeypatch.setattr(linked, "soon", lambda *key: asked.append(key))
    return asked


@pytest.mark.parametrize("m", [1, 24])
def test_the_command_links_what_a_call_asks_for(on_h200, m):
    a, weight = torch.randn(m, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    inputs = torch.randn(m, 32, dtype=torch.bfloat16), torch.rand(m, 1), torch.tensor([3])
    sw.matmul(a, weight.t(), epilogue=silu_times, inputs=inputs[:1])
    sw.matmul(a, weight.t(), epilogue=to_fp8, inputs=inputs[1:2])
    sw.matmul(a, weight.t(), epilogue=dropout, inputs=inputs[2:])
    device = explanation.device_of("matmul", "NVIDIA H200")
    metas = [tensor.to("meta") for tensor in inputs]
    expected = [
        ahead.link_of("matmul", function, [meta], device, out_dtype="bf16", m=m, n=32, k=64)
        for function, meta in zip((silu_times, to_fp8, dropout), metas)
    ]
    assert list(map(tuple, expected)) == list(dict.fromkeys(on_h200))


def test_the_order_of_a_sum_or_product_does_not_make_another_epilogue():
    device = explanation.device_of("matmul", "NVIDIA H200")
    r = torch.empty(24, 32, dtype=torch.bfloat16, device="meta")

    def text(function):
        return ahead.link_of("matmul", function, [r], device, out_dtype="bf16", m=24, n=32, k=64).text

    assert text(lambda acc, r: r + acc.relu()) == text(lambda acc, r: acc.relu() + r)
    assert text(lambda acc, r: r * acc) == text(lambda acc, r: acc * r)
    assert text(lambda acc, r: torch.add(r, acc, alpha=2)) != text(lambda acc, r: torch.add(acc, r, alpha=2))


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("softmax", *SIZES), exit_codes.USAGE, "must be an epilogue as module:function"),
        (("no_such_module:f", *SIZES), exit_codes.USAGE, "no_such_module is not found"),
        ((f"{__name__}:nothing", *SIZES), exit_codes.USAGE, "has no function nothing"),
        ((f"{__name__}:softmax", "-n", "8", "-k", "16", "--device", "cpu"), exit_codes.USAGE, "must be a GPU"),
        (("torch:relu", "-n", "4096", "-k", "4096", "--device", "A100"), exit_codes.USAGE, "='A100' must be a GPU of"),
        ((f"{__name__}:softmax", *SIZES, "--num-groups", "2"), exit_codes.USAGE, "--num-groups must be left out"),
        ((f"{__name__}:silu_times", *SIZES, "--input", "mxq"), exit_codes.USAGE, "--input='mxq' must be SHAPE"),
        ((f"{__name__}:silu_times", *SIZES, "--input", "n:int8"), exit_codes.USAGE, "and a dtype of e4m3"),
        ((f"{__name__}:silu_times", *SIZES, "--input", "7"), exit_codes.USAGE, "must broadcast"),
    ],
)
def test_mistakes_are_named(capsys, arguments, code, part):
    found, document, _ = run(capsys, *arguments, "-m", "16")
    assert found == code and part in document["error"]["message"]


def test_an_epilogue_that_no_kernel_can_have_is_a_finding(capsys):
    code, document, _ = run(capsys, f"{__name__}:softmax", "-m", "16", *SIZES)
    [only] = document["links"]
    assert code == exit_codes.FINDINGS and only["status"] == "failed" and "_softmax" in only["reason"]


def test_without_the_libraries_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "why_missing", lambda: "linking needs NVRTC")
    code, document, _ = run(capsys, "torch:relu", "-m", "16", *SIZES)
    assert code == exit_codes.ENVIRONMENT and document["error"]["message"] == "linking needs NVRTC"
