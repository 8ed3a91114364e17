"""The wheel has common epilogues linked: such a call needs neither a link nor the libraries that link."""

from __future__ import annotations

import logging
import shutil

import epilogues
import pytest
import torch
from torch.nn import functional

from stoneware import explanation
from stoneware.epilogue import link, linked, shipped
from stoneware.errors import UnsupportedError
from stoneware.ops import ahead, fused_lead, operation_of
from stoneware.runtime import package_files

H200 = explanation.device_of("matmul", "NVIDIA H200")


def of_call(function, *inputs, op="matmul", m=16, n=6144):
    """What a call on an H200 links; its kernel is among those that the table chooses most."""
    return ahead.link_of(op, function, inputs, H200, out_dtype="bf16", m=m, n=n, k=4096)


def test_the_list_of_texts_is_up_to_date():
    remedy = "the texts must be those of the list; run `./bazelw run //tools/linked_epilogues:epilogues`"
    found = package_files.Path(epilogues.__file__).parent.joinpath("texts.json").read_text()
    assert found == epilogues.as_file(), remedy


@pytest.fixture
def no_libraries(monkeypatch):
    def fail(*_, **__):
        raise UnsupportedError("linking needs NVRTC")

    monkeypatch.setattr(link, "link", fail)
    monkeypatch.setattr("stoneware.linking.toolchain.installed", fail)


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("op", ["matmul", "scaled_mm"])
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda acc: functional.gelu(acc), ()),
        (lambda acc, skip: skip + acc, (bf16(16, 6144),)),
        (lambda acc, bias, skip: skip + functional.gelu(acc + bias), (bf16(6144), bf16(16, 6144))),
        (lambda acc, gate: functional.silu(acc) * gate, (bf16(16, 6144),)),
        (lambda acc: functional.silu(acc.view(16, -1, 2)[..., 0]) * acc.view(16, -1, 2)[..., 1], ()),
        (lambda acc, s: (acc * s).to(torch.float8_e4m3fn), (torch.empty(16, 1, device="meta"),)),
    ],
)
def test_a_common_epilogue_of_a_usual_call_is_there_without_the_libraries(no_libraries, cache, op, function, inputs):
    of_usual = of_call(function, *inputs, op=op)
    assert of_usual.is_kept
    assert linked.now(*of_usual) is linked.soon(*of_usual) is not None
    assert not list(cache.iterdir())


def test_a_residual_of_one_row_is_there_too(no_libraries):
    assert of_call(lambda acc, r: acc + r, bf16(1, 6144), m=1).is_kept


@pytest.mark.parametrize("op", ["matmul", "scaled_mm"])
def test_a_large_result_has_a_kernel_that_multiplies_meanwhile(op):
    def kernel(m, n):
        return of_call(functional.gelu, op=op, m=m, n=n).kernel

    assert "_pingpong2x" in kernel(4096, 14336)
    assert "_pingpong2x" not in kernel(16, 6144)


def test_the_lead_over_a_large_fused_call_is_that_over_the_kernel_that_runs():
    matmul = operation_of("matmul")
    problem = matmul.spec.make_problem(m=4096, n=14336, k=4096, dtype="bf16")
    choices = [choice for answer in matmul.answers(problem.key, H200, 40) for choice in answer.entry.choices]
    own_us = {choice.config.kernel: choice.median_us for choice in reversed(choices)}[
        of_call(functional.gelu, m=4096, n=14336).kernel
    ]
    assert fused_lead.lead_us(matmul, problem, H200) == pytest.approx(own_us - choices[0].median_us)


def test_any_other_epilogue_is_linked_here(cache):
    other = of_call(lambda acc: torch.relu(acc) * 3)
    assert not other.is_kept
    other.make()
    assert other.is_kept and len(list((cache / "linked").iterdir())) == 1


def test_what_the_wheel_has_is_what_is_linked_here():
    kernel, text = of_call(torch.tanh)
    assert linked.kept(kernel, text) == link.link(kernel, linked._open_kernel(kernel), text)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_archive_is_reported_once_and_costs_a_link(tmp_path, monkeypatch, caplog, damage):
    of_damaged = of_call(torch.sigmoid)
    path = tmp_path / "linked_epilogues" / "matmul.zip"
    path.parent.mkdir()
    shutil.copyfile(package_files.path("linked_epilogues", "matmul.zip"), path)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-100:]
    else:
        data[200 : len(data) // 2 : 50] = bytes(len(data[200 : len(data) // 2 : 50]))
    path.write_bytes(data)
    original = package_files.path
    monkeypatch.setattr(package_files, "path", lambda *parts: path if "linked_epilogues" in parts else original(*parts))
    monkeypatch.setattr(shipped, "_reported", set())
    with caplog.at_level(logging.WARNING):
        found = [ahead.Link(each.kernel, each.text).is_kept for each in [of_damaged] for _ in range(2)]
        names = {text: linked.kept(of_damaged.kernel, text) for text in epilogues.texts().values()}
    assert found[0] == found[1] and any(data is None for data in names.values())
    [message] = [record.getMessage() for record in caplog.records]
    assert str(path) in message and "damaged" in message and "they are linked here" in message
