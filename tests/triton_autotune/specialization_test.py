"""What we take a call for is what Triton specialises on, compared with Triton's own code.

The property that keeps launches right: arguments of equal tokens get equal kernels from Triton.
"""

from __future__ import annotations

import inspect
import sys

import fake_gpu
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import KernelParam, create_function_from_signature

from stoneware.triton_autotune.specialization import tokens_of

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
EDGES = [
    edge + step
    for edge in (0, 1, 16, 2**31, -(2**31), 2**32, 2**63, -(2**63), 2**64)
    for step in (-17, -16, -1, 0, 1, 15, 16)
    if -(2**63) <= edge + step < 2**64
]
INTS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-70, 70),
    st.integers(-(2**58), 2**58).map(lambda value: value * 16),
)
TENSORS = st.builds(fake_gpu.Tensor, st.integers(0, 2**40).map(lambda value: value * 4), st.sampled_from(DTYPES))
PLAIN = st.one_of(INTS, TENSORS, st.none(), st.booleans(), st.floats(allow_nan=False), st.sampled_from([0.0, -0.0]))
CONSTANTS = st.one_of(
    INTS,
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.sampled_from([tl.float16, tl.float32, torch.float16, -0.0, 0.0, 1, True, 1.0]),
)
ANNOTATIONS = st.sampled_from(["", "", "", "const ", tl.int64, tl.int32, tl.float32, "*fp16"])


def parameter(annotation, do_not_specialize, do_not_specialize_on_alignment):
    hint = inspect.Parameter.empty if annotation == "" else annotation
    if annotation == "const ":
        hint = tl.const
    return KernelParam(
        0,
        inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint),
        do_not_specialize,
        do_not_specialize_on_alignment,
    )


PARAMETERS = st.builds(parameter, ANNOTATIONS, st.booleans(), st.booleans())


def by_triton(kernel_param: KernelParam, value):
    signature = inspect.Signature([kernel_param._param])
    binder = create_function_from_signature(signature, [kernel_param], BACKEND)
    return tuple(binder(value)[1][0])


def arguments(value, is_valued, tokens):
    return tokens_of([value], [is_valued], tokens, (fake_gpu.Tensor,))


@settings(max_examples=600, deadline=None)
@given(PARAMETERS, st.booleans(), PLAIN, PLAIN)
def test_equal_tokens_mean_an_equal_specialization(kernel_param, is_valued, first, other):
    tokens: tuple[list, list] = ([], [])
    answers = [arguments(value, is_valued, kinds) for value, kinds in zip((first, other), tokens)]
    if None in answers or tokens[0] != tokens[1]:
        return
    assert hash(tuple(tokens[0])) == hash(tuple(tokens[1]))
    assert by_triton(kernel_param, first) == by_triton(kernel_param, other)


@pytest.mark.parametrize("step", [1, 16])
@given(st.integers(-(2**60), 2**60))
def test_divisibility_by_16_and_the_value_1_are_seen(step, start):
    """Neighbours, which random pairs seldom are."""
    kernel_param = parameter("", False, False)
    tokens: tuple[list, list] = ([], [])
    for value, kinds in zip((start, start + step), tokens):
        assert arguments(value, False, kinds) is not None
    if tokens[0] == tokens[1]:
        assert by_triton(kernel_param, start) == by_triton(kernel_param, start + step)
    else:
        assert by_triton(kernel_param, start) != by_triton(kernel_param, start + step)


@settings(max_examples=600, deadline=None)
@given(CONSTANTS, CONSTANTS)
def test_constants_of_equal_tokens_are_the_same_constant(first, other):
    tokens: tuple[list, list] = ([], [])
    answers = [arguments(value, True, kinds) for value, kinds in zip((first, other), tokens)]
    if None not in answers and tokens[0] == tokens[1]:
        assert type(first) is type(other)
        assert repr(first) == repr(other)


@pytest.mark.parametrize("same", [(1, True), (1, 1.0), (0.0, -0.0), (0, False)])
def test_constants_that_python_takes_for_equal_are_told_apart(same):
    tokens: tuple[list, list] = ([], [])
    for value, kinds in zip(same, tokens):
        assert arguments(value, True, kinds) is not None
    assert tuple(tokens[0]) != tuple(tokens[1])


class Subclass(fake_gpu.Tensor):
    pass


class CpuTensor(fake_gpu.Tensor):
    is_cuda = False


@pytest.mark.parametrize(
    "value",
    [Subclass(), (1, 2), [1], 2**64, -(2**63) - 1, "text", object(), tl.constexpr(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_covered_gets_no_token(value):
    assert arguments(value, False, []) is None


def test_a_tensor_on_the_cpu_gets_no_token():
    for tensor in (torch.zeros(3), CpuTensor()):
        assert tokens_of([tensor], [False], [], (type(tensor),)) is None


def test_what_is_passed_is_the_value_or_the_address():
    tensor = fake_gpu.Tensor(address=4100)
    values = [tensor, 7, None, 0.5, True]
    assert tokens_of(values, [False] * 5, [], (fake_gpu.Tensor,)) == [4100, 7, None, 0.5, True]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
