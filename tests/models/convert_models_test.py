"""sw.nn.convert on the architectures of transformers: nothing crashes, and outputs are as near as fp8 allows."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy
import plain_fp8
import pytest
import tiny_models
import torch
from architectures import ARCHITECTURES, EXCLUDED
from plain_fp8 import Choices, deviation, tensors_of

from stoneware import nn

RECIPES = ("rowwise", "blockwise", "bf16")

EVERY_RECIPE = "EVERY_RECIPE" in os.environ
"""Whether each model is converted with every recipe, in three times the time, or with the next one in turn."""

MAGNITUDES = (1, 10, 50)
"""Factors of the inputs. Embeddings of ids are scaled, or images and audio themselves."""

FACTOR = 1.3
FLOOR = 2**-8
"""The largest relative error of rounding to bfloat16: outputs that differ by one rounding are nearer."""

UNCHANGED = ("decision_transformer", "falcon", "gpt-sw3", "gpt2", "openai-gpt")
"""Their linear layers are of another class than torch.nn.Linear, or of sizes that are not multiples of 16."""

STEPS, STEP_SIZE = 3, 0.03
"""The norm of the change of all weights in a step: a large step makes losses of random weights differ by chance."""

UNTRAINABLE = ("xlstm",)
"""The original's own backward fails in bfloat16 on the CPU."""

INCOMPARABLE = ("groupvit", "levit")
"""Losses differ by chance: one assigns each patch to one group, one normalizes over 2 images, where rounding counts."""

Outputs = list[torch.Tensor]


class Call(NamedTuple):
    """A call of a module inside of a model."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Expected(NamedTuple):
    """What the original returns.

    Attributes:
      choices: what its routers chose.
      rounding: the deviation from the same call in float32, of rounding alone.
    """

    outputs: Outputs
    choices: Choices
    rounding: float


class Original:
    """A model before it is converted, and what it and its modules return.

    Attributes:
      parts: by class, the first call of a module of this class.
    """

    def __init__(self, name: str) -> None:
        self.model = tiny_models.build(name)
        self.inputs = tiny_models.inputs_of(name, self.model)
        self.in_float32 = copy.deepcopy(self.model).float()
        self.parts: dict[type, Call] = {}
        handles = [
            module.register_forward_pre_hook(functools.partial(self._record, path), with_kwargs=True)
            for path, module in self.model.named_modules()
            if path
        ]
        run(self.model, self.inputs, 1)
        for handle in handles:
            handle.remove()
        self.expected = functools.cache(self._expected)

    def _record(self, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if type(module) not in self.parts:
            self.parts[type(module)] = Call(path, copy.deepcopy(args), copy.deepcopy(kwargs))

    def run(self, model: torch.nn.Module, part: type | None, magnitude: float) -> Outputs:
        """The outputs of the model, or of its module of this class."""
        dtype = torch.float32 if model is self.in_float32 else torch.bfloat16
        if part is None:
            return run(model, {name: in_dtype(value, dtype) for name, value in self.inputs.items()}, magnitude)
        return call_part(model, self.parts[part], magnitude, dtype)

    def _expected(self, part: type | None, magnitude: float) -> Expected:
        choices = Choices()
        with choices:
            outputs = self.run(self.model, part, magnitude)
        with choices.replayed():
            rounding = deviation(self.run(self.in_float32, part, magnitude), outputs)
        return Expected(outputs, choices, rounding)


@functools.lru_cache(maxsize=1)
def original(name: str) -> Original:
    return Original(name)


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor], magnitude: float) -> Outputs:
    """The outputs of a model at scaled inputs."""
    with contextlib.ExitStack() as stack:
        if any("ids" in name for name in inputs):
            embeddings = _embeddings(model)
            if embeddings is not None:
                handle = embeddings.register_forward_hook(lambda module, args, result: scaled(result, magnitude))
                stack.callback(handle.remove)
        scaled_inputs = {
            name: value if name.endswith("mask") else scaled(value, magnitude) for name, value in inputs.items()
        }
        tiny_models.seed(0)
        stack.enter_context(torch.no_grad())
        return tensors_of(model(**scaled_inputs))


def _embeddings(model: Any) -> torch.nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def scaled(value: Any, magnitude: float) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value * magnitude if value.is_floating_point() else value.clone()


def call_part(model: torch.nn.Module, call: Call, magnitude: float, dtype: torch.dtype) -> Outputs:
    """What a module of the model returns, its first floating point argument scaled."""
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    every = [*args, *kwargs.values()]
    first = next(
        (i for i, value in enumerate(every) if isinstance(value, torch.Tensor) and value.is_floating_point()), 0
    )
    every[first] = scaled(every[first], magnitude)
    every = [in_dtype(value, dtype) for value in every]
    tiny_models.seed(0)
    with torch.no_grad():
        return tensors_of(model.get_submodule(call.name)(*every[: len(args)], **dict(zip(kwargs, every[len(args) :]))))


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.bfloat16 else value
    return type(value)(in_dtype(one, dtype) for one in value) if type(value) in (list, tuple) else value


def converted_parts(done: nn.Conversion, source: Original) -> list[type]:
    """Classes of the modules that were swapped as a whole, or whose linear layers were."""
    changed = {*done.blocks, *(name.rpartition(".")[0] for name in done.swapped)} - {""}
    kinds = {type(source.model.get_submodule(name)) for name in changed}
    return [kind for kind, call in source.parts.items() if kind in kinds and call.name in changed]


def with_plain_linears(source: Original, done: nn.Conversion, recipe: str) -> torch.nn.Module:
    model = copy.deepcopy(source.model)
    experts = [name for name, kind in done.blocks.items() if kind == nn.Float8InferenceExperts.__name__]
    plain_fp8.use_plain_linears(model, done.swapped, experts, recipe)
    return model


def converted(names: Sequence[str], first: int) -> list[tuple[str, str]]:
    """Pairs of a model and a recipe; recipes take turns from number `first`."""
    turns = {name: [RECIPES[(first + place) % len(RECIPES)]] for place, name in enumerate(ARCHITECTURES)}
    return [(name, recipe) for name in names for recipe in (RECIPES if EVERY_RECIPE else turns[name])]


def test_every_architecture_of_transformers_is_converted_or_excluded():
    excluded = [name for names in EXCLUDED.values() for name in names]
    assert len(excluded) == len({*excluded}) and not {*excluded} & {*ARCHITECTURES}
    known, listed = {*tiny_models.model_types()}, {*ARCHITECTURES, *excluded}
    assert not known - listed, "add these to ARCHITECTURES, or to EXCLUDED with a reason"
    assert not listed - known, "this version of transformers lacks these"


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in UNCHANGED])
def test_linear_layers_are_swapped(name):
    assert nn.convert(copy.deepcopy(original(name).model), "rowwise", frozen=True).swapped


@pytest.mark.parametrize(("name", "recipe"), converted(ARCHITECTURES, first=0))
def test_outputs_deviate_no_more_than_those_of_plain_fp8(name, recipe):
    source = original(name)
    model = copy.deepcopy(source.model)
    done = nn.convert(model, recipe, frozen=True)
    plain = with_plain_linears(source, done, recipe)
    failures = []
    for part in (None, *converted_parts(done, source)):
        for magnitude in MAGNITUDES:
            outputs, choices, reference = source.expected(part, magnitude)
            with choices.replayed():
                found = deviation(source.run(model, part, magnitude), outputs)
            with choices.replayed():
                reference = max(reference, deviation(source.run(plain, part, magnitude), outputs))
            if not found <= FACTOR * reference + FLOOR:
                what = "the model" if part is None else f"{part.__name__} {source.parts[part].name}"
                failures.append(
                    f"{what} at {magnitude}: deviates by {found:.4f}, and {reference:.4f} with plain linears"
                )
    assert not failures, "\n".join(failures)


@contextlib.contextmanager
def convolutions_in_float32() -> Iterator[None]:
    """oneDNN's gradient of a convolution in bfloat16 reads memory that nothing has written (torch 2.13)."""

    def in_float32(
        convolution: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        args, kwargs = in_dtype(args, torch.float32), dict(zip(kwargs, in_dtype([*kwargs.values()], torch.float32)))
        return convolution(x.float(), *args, **kwargs).to(x.dtype)

    with contextlib.ExitStack() as stack:
        for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
            changed = functools.partial(in_float32, getattr(torch.nn.functional, name))
            stack.enter_context(mock.patch.object(torch.nn.functional, name, changed))
        yield


def train(name: str, model: torch.nn.Module, choices: list[Choices]) -> tuple[list[float], list[Choices], set[str]]:
    """Trains on one batch: the loss of each step, what routers chose, and the names of parameters with a gradient."""
    inputs = tiny_models.inputs_of(name, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    losses, chosen = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        mode = choices[step].replayed() if choices else Choices()
        tiny_models.seed(step)  # of dropout
        numpy.random.seed(step)  # of SpecAugment's masks
        with mode, convolutions_in_float32():
            outputs = tensors_of(model(**inputs))
        chosen.append(mode)
        generator = torch.Generator().manual_seed(2)
        loss = sum(
            ((output.float() - torch.randn(output.shape, generator=generator)) ** 2).mean()
            for output in outputs if output.requires_grad
        )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, chosen, {key for key, parameter in model.named_parameters() if parameter.grad is not None}


@functools.lru_cache(maxsize=1)
def trained_original(name: str) -> tuple[list[float], list[Choices], set[str]]:
    return train(name, copy.deepcopy(original(name).model).train(), [])


@pytest.mark.parametrize(
    ("name", "recipe"), converted([name for name in ARCHITECTURES if name not in UNTRAINABLE], first=1)
)
def test_converted_models_train(name, recipe):
    expected, choices, with_gradient = trained_original(name)
    model = copy.deepcopy(original(name).model).train()
    nn.convert(model, recipe)
    losses, _, ours = train(name, model, choices)
    assert ours == with_gradient
    assert torch.tensor(losses).isfinite().all()
    for loss, theirs in zip(losses, expected) if name not in INCOMPARABLE else ():
        assert abs(loss - theirs) <= 0.1 * theirs, f"losses {losses} are not near {expected}"
