"""sw.dropout has the bits of Philox, the same in every layout, and the gradient of its mask."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch.nn import functional

import stoneware as sw
from stoneware.epilogue import link, philox, source, trace
from stoneware.errors import UnsupportedError
from stoneware.linking import toolchain
from stoneware.ops import dropout_kernel

M, N, K = 24, 64, 32
SEED, OFFSET = 0x123456789ABCDEF, 2**40 + 5

# Random123's tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Words of SEED and OFFSET, as in philox_test.cc.
ELEMENTS = {(0, 0): 2816967650, (5, 27): 1858158879, (123456, 8190): 3138216731}


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def mask(shape, p=0.5, seed=SEED, offset=OFFSET):
    return sw.dropout(ones(*shape), p, seed, offset) != 0


def word(row, column, seed=SEED, offset=OFFSET):
    """An element's word, by the layout of docs/epilogues.md, with Python's integers."""
    counter = (column // 16 * 4 + column // 2 % 4, row, *philox.halves(offset))
    return philox.philox(counter, philox.halves(seed))[column // 8 % 2 * 2 + column % 2]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_has_the_known_answers(counter, key, expected):
    assert philox.philox(counter, key) == expected
    of_tensors = philox.philox([torch.tensor([one]) for one in counter], [torch.tensor([one]) for one in key])
    assert tuple(int(one) for one in of_tensors) == expected


def test_a_product_of_words_is_exact():
    words = [0, 1, 2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 0x89ABCDEF]
    for multiplier in philox._MULTIPLIERS:
        high, low = philox._product(multiplier, torch.tensor(words))
        assert high.tolist() == [multiplier * one >> 32 for one in words]
        assert low.tolist() == [multiplier * one & 0xFFFFFFFF for one in words]


def test_elements_are_those_of_the_device_code():
    assert {at: word(*at) for at in ELEMENTS} == ELEMENTS


@pytest.mark.parametrize("seed", [SEED, 0, -1, -(2**63), 2**63 - 1])
def test_an_element_depends_on_its_row_and_its_column(seed):
    dropped = ~mask((7, 45), 0.3, seed)
    expected = [[word(row, column, seed) < philox.threshold(0.3) for column in range(45)] for row in range(7)]
    assert dropped.tolist() == expected


def test_a_mask_does_not_depend_on_size_layout_or_dtype():
    whole = mask((96, 80))
    assert torch.equal(mask((33, 41)), whole[:33, :41])
    assert torch.equal(mask((4, 24, 80)), whole.view(4, 24, 80))
    assert torch.equal(mask((80,)), whole[0])
    assert torch.equal(sw.dropout(ones(80, 96).t(), 0.5, SEED, OFFSET) != 0, whole)
    assert torch.equal(sw.dropout(ones(1, 1).expand(96, 80), 0.5, SEED, OFFSET) != 0, whole)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(sw.dropout(ones(96, 80, dtype=dtype), 0.5, SEED, OFFSET) != 0, whole)
    assert mask((0, 80)).shape == (0, 80) and mask((5, 0)).shape == (5, 0) and mask(()).shape == ()


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 0.999])
def test_the_share_of_dropped_elements_is_p(p):
    dropped = ~mask((1000, 1000), p)
    tolerance = 5 * math.sqrt(p * (1 - p) / 1e6)
    assert abs(dropped.float().mean() - p) <= tolerance
    for dim in (0, 1) if 0.1 <= p <= 0.9 else ():  # each row and each column
        assert (dropped.float().mean(dim) - p).abs().max() <= 5.5 * math.sqrt(p * (1 - p) / 1000)


def test_neighbours_seeds_and_offsets_are_independent():
    first = mask((1000, 1000)).float() - 0.5
    others = [
        mask((1000, 1000), offset=OFFSET + 1),
        mask((1000, 1000), seed=SEED + 1),
        mask((1000, 1000), seed=SEED + 2**32),
    ]
    others = [one.float() - 0.5 for one in others]
    others += [
        first.roll((rows, columns), (0, 1)) for rows, columns in ((1, 0), (0, 1), (0, 8), (8, 0), (0, 16), (1, 1))
    ]
    for other in others:
        assert abs((first * other).mean()) < 5 * 0.25 / 1000


def test_kept_values_are_scaled_and_rounded_once():
    x = torch.randn(64, 96)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = sw.dropout(x.to(dtype), 0.3, SEED)
        scaled = (x.to(dtype).float() * torch.tensor(1 / 0.7, dtype=torch.float32)).to(dtype)
        dropped = philox.is_dropped(x.shape, 0.3, SEED, 0, x.device)
        assert y.dtype == dtype and torch.equal(y, scaled.masked_fill(dropped, 0))
    assert torch.equal(sw.dropout(x, 0, SEED), x)
    assert not sw.dropout(torch.full((64, 96), math.nan), 0.999999999999, SEED).isfinite().logical_not().any()


def test_a_seed_may_be_a_tensor():
    expected = sw.dropout(ones(M, N), 0.5, -3, 2**33)
    seed, offset = torch.tensor(-3), torch.tensor([2**33])
    assert torch.equal(sw.dropout(ones(M, N), 0.5, seed, offset), expected)
    assert torch.equal(sw.dropout(ones(M, N), 0.5, seed, 2**33), expected)


def test_gradients_have_the_mask_and_are_differentiable_again():
    x = torch.randn(3, 19, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(7)
    for function in (lambda x: sw.dropout(x, 0.3, 7), lambda x: sw.dropout(x, 0.3, seed, 2)):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_backward_saves_no_mask(is_compiled):
    function = torch.compile(sw.dropout, fullgraph=True) if is_compiled else sw.dropout
    saved = []
    x = ones(M, N).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        y = function(x, 0.5, torch.tensor(1))
    assert [one.numel() for one in saved] == [1]
    y.backward(ones(M, N))
    assert torch.equal(x.grad, y)


def test_a_seed_that_changes_before_backward_is_an_error():
    seed = torch.tensor(1)
    y = sw.dropout(ones(M, N).requires_grad_(), 0.5, seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_transforms_and_compiled_calls_have_the_same_bits():
    x = torch.randn(3, M, N)

    def function(x):
        return sw.dropout(x, 0.4, SEED, OFFSET)

    expected = torch.stack([function(one) for one in x])
    assert torch.equal(torch.func.vmap(function)(x), expected)
    grad = torch.func.grad(lambda x: function(x).sum())(x[0])
    assert torch.equal(grad, function(ones(M, N)))
    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(compiled(x[0]), expected[0])
    leaf = x[0].clone().requires_grad_()
    compiled(leaf).sum().backward()
    assert torch.equal(leaf.grad, grad)
    for transform, of_x in ((torch.func.vmap(function), x), (torch.func.grad(lambda x: function(x).sum()), x[0])):
        compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(of_x), transform(of_x))


def test_numbers_of_compiled_calls_may_change():
    compiled = torch.compile(sw.dropout, fullgraph=True)
    x = torch.randn(M, N)
    for p in (0.3, 0.5, 0.1, 0.9):
        assert torch.equal(compiled(x, p, 1), sw.dropout(x, p, 1))
    for number in (3, 4, -5, 2**62 + 12345, -(2**63), 2**63 - 1):
        assert torch.equal(compiled(x, 0.5, number), sw.dropout(x, 0.5, number))
        assert torch.equal(compiled(x, 0.5, 1, number), sw.dropout(x, 0.5, 1, number))


def epilogue(acc, r, seed):
    return sw.dropout(functional.gelu(acc), 0.3, seed, OFFSET) + r


def test_an_epilogue_drops_what_the_function_drops():
    torch.manual_seed(0)
    a, w, r = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(M, N).bfloat16()
    seed = torch.tensor([SEED])
    found = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r, seed))
    acc = sw.matmul(a, w.t(), out_dtype=torch.float32)
    assert torch.equal(found, epilogue(acc, r, seed).bfloat16())
    a8, w8 = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    scales = torch.rand(M, 1), torch.rand(1, N)
    found = sw.scaled_mm(a8, w8.t(), *scales, epilogue=epilogue, inputs=(r, seed))
    acc = sw.scaled_mm(a8, w8.t(), *scales, out_dtype=torch.float32)
    assert torch.equal(found, epilogue(acc, r, seed).bfloat16())
    offs, weights = torch.tensor([10, M], dtype=torch.int32), torch.randn(2, N, K).bfloat16()
    found = sw.grouped_mm(a, weights.mT, offs, epilogue=lambda acc: sw.dropout(acc * 0 + 1, 0.3, SEED))
    assert torch.equal(found, sw.dropout(ones(M, N), 0.3, SEED).bfloat16())


def test_the_gradient_of_an_epilogue_has_its_mask():
    a, w = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(N, K).bfloat16()
    seed = torch.tensor(3)
    y = sw.matmul(a, w.t(), epilogue=lambda acc, seed: sw.dropout(acc, 0.5, seed), inputs=(seed,))
    y.sum().backward()
    kept = sw.dropout(ones(M, N), 0.5, seed)
    assert torch.equal(y == 0, kept == 0)
    expected = kept.double() @ w.double()
    assert (a.grad.double() - expected).norm() / expected.norm() < 0.006
    seed.add_(1)
    again = sw.matmul(a, w.t(), epilogue=lambda acc, seed: sw.dropout(acc, 0.5, seed), inputs=(seed,))
    assert not torch.equal(again == 0, kept == 0)


def traced(function, *inputs):
    return trace.trace(function, (M, N), inputs, torch.device("cpu"))


def written(function, *inputs):
    return source.write(traced(function, *inputs), main=0, has_pairs=[True] * len(inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda acc, seed: sw.dropout(acc, 0.3, seed),
        lambda acc, seed: sw.dropout(acc.bfloat16(), 0.3, 5, seed[0]).float(),
        lambda acc, seed: (acc, sw.dropout(acc[:, ::2] * acc[:, 1::2], 0.1, seed), sw.dropout(acc, 0.2, 3)[:, ::2]),
        lambda acc, seed: sum((sw.dropout(acc, 0.1, seed, offset) for offset in range(20)), acc),
    ],
    ids=["float32", "bfloat16", "pairs", "more than the state holds"],
)
def test_dropout_compiles_for_the_device(function):
    text = written(function, torch.zeros(1, dtype=torch.int64)).text
    assert toolchain.compile_lto_ir(link.device_code() + text, arch="sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_kernel_outside_of_epilogues_compiles_and_is_kept(arch, cache, monkeypatch):
    cubin = dropout_kernel.cubin(arch)
    assert all(f"stoneware_dropout_{dtype}".encode() in cubin for dtype in ("float32", "bfloat16", "float16"))
    assert len(list((cache / "linked").iterdir())) == 1
    monkeypatch.setattr(toolchain, "compile_lto_ir", lambda *_, **__: pytest.fail("compiled again"))
    assert dropout_kernel.cubin(arch) == cubin


def test_one_text_serves_all_seeds_and_others_have_no_device_code_of_dropout():
    first, second = (written(lambda acc, seed=seed: sw.dropout(acc, 0.5, seed)) for seed in (1, -1))
    assert first.text == second.text and first.parameters != second.parameters
    assert second.parameters[:8] == b"\xff" * 8
    assert "Philox" in first.text and "Philox" not in written(lambda acc: acc * 2).text
    # Nor does the text tell which numbers are equal.
    for seed, offset in ((0, 0), (7, 7), (7, 3)):
        one = written(lambda acc, seed=seed, offset=offset: sw.dropout(acc, 0.5, seed, offset))
        assert one.text == first.text and one.parameters[:16] == struct.pack("<qq", seed, offset)


def test_equal_seeds_have_bits_that_are_computed_once():
    text = written(lambda acc, seed: sw.dropout(acc, 0.5, seed) + sw.dropout(acc * 2, 0.1, seed), torch.tensor(1)).text
    assert text.count("= RandomOfFragment(") == 1 and text.count("__ldg(Parameter") == 1


@pytest.mark.parametrize("copy", [lambda one: one, torch.clone, lambda one: one.detach().contiguous()])
def test_a_seed_is_an_element_of_an_input(copy):
    text = written(lambda acc, state: sw.dropout(acc, 0.5, copy(state[2]), copy(state)[1]), torch.arange(3))
    assert [position for _, position in text.inputs] == [0, 0]
    assert [text.parameters[offset] for offset, _ in text.inputs] == [16, 8]


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ((3, 0.5, 1), TypeError, "x of dropout must be a torch.Tensor, not int"),
        ((torch.ones(3, dtype=torch.int32), 0.5, 1), TypeError, "x.dtype=torch.int32 of dropout must be torch.float32"),
        ((ones(3).to(torch.float8_e4m3fn), 0.5, 1), TypeError, "x.dtype=torch.float8_e4m3fn"),
        ((ones(3), 1.0, 1), ValueError, "p=1.0 of dropout must be at least 0 and less than 1; for a result of zeros"),
        ((ones(3), -0.1, 1), ValueError, "p=-0.1 of dropout"),
        ((ones(3), math.nan, 1), ValueError, "p=nan of dropout"),
        ((ones(3), "a", 1), TypeError, "p='a' of dropout must be a number"),
        ((ones(3), True, 1), TypeError, "p=True of dropout must be a number"),
        ((ones(3), 0.5, 2**63), ValueError, r"must be at least -2\*\*63 and less than 2\*\*63"),
        ((ones(3), 0.5, 1, -(2**63) - 1), ValueError, "offset=-9223372036854775809 of dropout"),
        ((ones(3), 0.5, 1.0), TypeError, "seed=1.0 of dropout must be an int or an int64 tensor"),
        ((ones(3), 0.5, None), TypeError, "seed=None of dropout must be an int or an int64 tensor"),
        ((ones(3), 0.5, torch.tensor(1.0)), TypeError, "seed.dtype=torch.float32 of dropout must be torch.int64"),
        ((ones(3), 0.5, torch.tensor([1, 2])), ValueError, r"seed.shape=\[2\] of dropout must have one element"),
        ((ones(3), 0.5, torch.empty(1, dtype=torch.int64, device="meta")), ValueError, "both must be on one device"),
        ((ones(1).expand(2**31, 1), 0.5, 1), UnsupportedError, "must have fewer than 2147483648 rows and columns"),
    ],
)
def test_errors_state_the_rule(arguments, error, part):
    with pytest.raises(error, match=part):
        sw.dropout(*arguments)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (
            lambda acc, r: functional.dropout(acc, 0.5),
            r"aten::empty_like, with which torch's dropout begins; use sw.dropout\(x, p, seed\), or torch.zeros_like",
        ),
        (lambda acc, r: acc * torch.rand_like(acc), "aten::rand_like; use sw.dropout"),
        (lambda acc, r: torch.bernoulli(acc), "torch's random numbers .* aten::bernoulli; use sw.dropout"),
        (lambda acc, r: acc.exponential_() + acc, "aten::exponential_; use sw.dropout"),
        (lambda acc, r: torch.rand(()) * acc, "aten::rand; use sw.dropout"),
        (lambda acc, r: acc + torch.normal(0.0, 1.0, ()), "aten::normal; use sw.dropout"),
        (
            lambda acc, r: sw.dropout(r[0], 0.5, 1) + acc,
            r"of the result's shape \[24, 64\].*but gets \[64\]; expand it",
        ),
        (
            lambda acc, r: sw.dropout(acc, 0.5, torch.tensor(1)),
            "seed of dropout .* is another tensor; pass it in inputs=",
        ),
        (lambda acc, r: sw.dropout(acc.amax(-1, keepdim=True), 0.5, 1), "maximum of a row"),
        (lambda acc, r: sw.dropout(torch.ones(M, N), 0.5, 1) + acc, "inputs="),
    ],
)
def test_what_no_epilogue_can_do_is_refused(function, part):
    with pytest.raises(UnsupportedError, match=part):
        traced(function, torch.zeros(M, N))


def test_a_seed_cannot_be_computed():
    for function in (lambda acc, seed: sw.dropout(acc, 0.5, seed + 1), lambda acc, seed: sw.dropout(acc, 0.5, -seed)):
        with pytest.raises(UnsupportedError, match="such as a seed .*; compute it before .* another offset="):
            traced(function, torch.tensor(1))
