"""Frozen dataclasses without generated code do what the standard ones do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from stoneware.runtime.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Ours:
    """A class of ours."""

    name: str
    sizes: tuple[int, ...] = ()
    notes: list = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='' must not be empty")
        object.__setattr__(self, "sizes", tuple(self.sizes))


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Standard:
    """The same."""

    name: str
    sizes: tuple[int, ...] = ()
    notes: list = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """Positional fields."""

    first: int
    second: int = 2


def test_values_defaults_text_and_functions_of_the_standard_library():
    ours, standard = Ours(name="a", sizes=[1, 2]), Standard(name="a", sizes=(1, 2))
    assert repr(ours) == repr(standard).replace("Standard", "Ours")
    assert dataclasses.asdict(ours) == dataclasses.asdict(standard)
    assert [field.name for field in dataclasses.fields(ours)] == ["name", "sizes", "notes"]
    assert dataclasses.replace(ours, name="b") == Ours(name="b", sizes=(1, 2))
    assert Ours(name="a").notes is not Ours(name="a").notes
    assert copy.copy(ours) == ours == pickle.loads(pickle.dumps(ours))


def test_equality_hash_and_order_are_by_value_and_class():
    assert Pair(1) == Pair(1, 2) == Pair(first=1, second=2) != Pair(1, 3)
    assert hash(Pair(1)) == hash(Pair(1, 2))
    assert Pair(1) != (1, 2) and Ours(name="a") != Standard(name="a")
    assert sorted([Ours(name="b"), Ours(name="a")])[0].name == "a"
    with pytest.raises(TypeError, match="not supported between"):
        Ours(name="a") < Standard(name="b")


def test_fields_are_frozen_and_arguments_are_checked():
    pair = Pair(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
        pair.first = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
        del pair.first
    for arguments, values in (((), {}), ((1, 2, 3), {}), ((1,), {"first": 1}), ((1,), {"x": 1})):
        with pytest.raises(TypeError, match="Pair takes"):
            Pair(*arguments, **values)
    with pytest.raises(TypeError, match="Ours takes"):
        Ours("a")
    with pytest.raises(ValueError, match="must not be empty"):
        Ours(name="")
    with pytest.raises(ValueError, match="frozen=False"):
        dataclass(frozen=False)


@dataclass(frozen=True, kw_only=True)
class Derived(Ours):
    """Fields of its own after those of its base; a base's default is replaced."""

    kind: ClassVar[str] = "derived"
    colour: str
    sizes: tuple[int, ...] = (7,)


def test_a_derived_class_has_the_fields_of_both():
    derived = Derived(name="a", colour="red")
    assert repr(derived) == "Derived(name='a', sizes=(7,), notes=[], colour='red')"
    assert [field.name for field in dataclasses.fields(Derived)] == ["name", "sizes", "notes", "colour"]
    assert [field.name for field in dataclasses.fields(Ours)] == ["name", "sizes", "notes"]
    assert dataclasses.replace(derived, name="b") == Derived(name="b", colour="red")
    assert dataclasses.asdict(derived) == {"name": "a", "sizes": (7,), "notes": [], "colour": "red"}
    assert derived.kind == "derived"
    with pytest.raises(ValueError, match="must not be empty"):
        Derived(name="", colour="red")
