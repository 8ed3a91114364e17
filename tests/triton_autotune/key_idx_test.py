"""The key of a call is that of inspect.signature, however and in which order values are passed."""

from __future__ import annotations

import inspect
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoneware.triton_autotune.signature import KernelSignature, check_names

KINDS = inspect.Parameter
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)


class Tensor:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


@st.composite
def calls(draw):
    """A signature, the key arguments, and the positional and keyword arguments of a call."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True))
    num_positional = draw(st.integers(0, len(names)))
    num_required = draw(st.integers(0, num_positional))
    parameters = [
        inspect.Parameter(
            name,
            KINDS.POSITIONAL_OR_KEYWORD if idx < num_positional else KINDS.KEYWORD_ONLY,
            default=draw(VALUES)
            if idx >= num_required and (idx < num_positional or draw(st.booleans()))
            else KINDS.empty,
        )
        for idx, name in enumerate(names)
    ]
    key = draw(st.lists(st.sampled_from(names), unique=True))
    by_position = draw(st.integers(0, num_positional))
    given_values = st.one_of(VALUES, st.builds(Tensor, st.sampled_from(["fp16", "fp32"])))
    args = [draw(VALUES if name in key else given_values) for name in names[:by_position]]
    # Some that have no default are left out too: a config gives those.
    rest = draw(st.lists(st.sampled_from(names[by_position:]), unique=True)) if (names[by_position:]) else []
    kwargs = {name: draw(VALUES if name in key else given_values) for name in rest}
    options = draw(st.dictionaries(st.sampled_from(["maxnreg", "num_ctas"]), st.integers(1, 9)))
    kwargs = dict(draw(st.permutations(list({**kwargs, **options}.items()))))
    return inspect.Signature(parameters), key, args, kwargs


@settings(deadline=None)
@given(calls())
def test_a_key_is_what_bind_and_apply_defaults_give(call):
    signature, key, args, kwargs = call
    parameters = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind_partial(*args, **parameters)
    bound.apply_defaults()

    ours = KernelSignature(signature, key)
    form = ours.form(len(args), tuple(kwargs))
    values = (*args, *kwargs.values())
    kernel_key = ours.key("module:kernel", form.parameters(values))

    wanted = tuple(bound.arguments.get(name) for name in key)
    assert kernel_key.values == wanted
    assert list(map(type, kernel_key.values)) == list(map(type, wanted))
    assert kernel_key.names == tuple(key)
    assert kernel_key.dtypes == tuple(
        (name, bound.arguments[name].dtype)
        for name in signature.parameters
        if hasattr(bound.arguments.get(name), "dtype")
    )
    assert form.parameters(values) == bound.arguments
    assert set(form.options) == set(kwargs) - set(signature.parameters)


@settings(deadline=None)
@given(calls())
def test_key_idx_are_positions_in_the_signature(call):
    signature, key, _, _ = call
    names = list(signature.parameters)
    assert [names[idx] for idx in KernelSignature(signature, key).key_idx] == key


def kernel(a, b, n, scale=2, *, m=3): ...


def key_of(key, *args, **kwargs):
    signature = KernelSignature(inspect.signature(kernel), key)
    form = signature.form(len(args), tuple(kwargs))
    return signature.key("module:kernel", form.parameters((*args, *kwargs.values()))).values


def test_one_call_written_in_different_ways_has_one_key():
    ways = [
        key_of(["n", "m"], 1, 2, 30),
        key_of(["n", "m"], 1, 2, n=30),
        key_of(["n", "m"], n=30, b=2, a=1),
        key_of(["n", "m"], m=3, n=30, b=2, a=1),
        key_of(["n", "m"], 1, 2, 30, 2, m=3),
    ]
    assert ways == [(30, 3)] * len(ways)


def test_an_argument_that_is_left_to_the_config_is_none_in_the_key():
    assert key_of(["n", "a"], b=1) == (None, None)
    form = KernelSignature(inspect.signature(kernel), []).form(0, ())
    assert form.parameters(()) == {"scale": 2, "m": 3}


@pytest.mark.parametrize("parameter", ["key", "reset_to_zero", "restore_value"])
def test_an_unknown_name_is_refused_with_the_known_ones(parameter):
    with pytest.raises(ValueError, match=rf"{parameter} must name.*'nn'.*a, b, n, scale, m"):
        names = list(inspect.signature(kernel).parameters)
        check_names(parameter, ["n", "nn"], names)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="once"):
        KernelSignature(inspect.signature(kernel), ["n", "n"])


def test_a_parameter_passed_twice_or_one_too_many_is_a_type_error():
    signature = KernelSignature(inspect.signature(kernel), ["n"])
    with pytest.raises(TypeError, match="b is passed by position and by keyword"):
        signature.form(2, ("b",))
    with pytest.raises(TypeError, match="passes 5 arguments by position.*at most 4"):
        signature.form(5, ())


def test_what_cannot_be_filed_is_refused_with_its_name():
    with pytest.raises(TypeError, match=r"n=\[1\].*leave it out of key"):
        key_of(["n"], 1, 2, [1])
    with pytest.raises(ValueError, match="n=nan.*finite"):
        key_of(["n"], 1, 2, float("nan"))


def test_integers_and_dtypes_of_libraries_are_filed_as_plain_values():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    assert key_of(["n", "scale"], 1, 2, numpy.int64(7), torch.float16) == (7, "float16")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
