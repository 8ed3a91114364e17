"""Records the attributes that a module's code reads, and refuses those that can change later."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from stoneware.nn.proofs.no_proof import NoProof


class AttributeReads:
    """Records the attributes that a trace reads from its module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.kind = module, type(module)
        self.names: set[str] = set()

    def __enter__(self) -> AttributeReads:
        names = self.names

        def read(module: Any, name: str) -> Any:
            names.add(name)
            return super(recorder_class, module).__getattribute__(name)  # type: ignore[arg-type]  # a class, made below

        recorder_class = type(self.kind.__name__, (_Silent, self.kind), {"__getattribute__": read})
        self.module.__class__ = recorder_class
        return self

    def __exit__(self, *exception: object) -> None:
        self.module.__class__ = self.kind

    def check(self, *, is_guarded: bool, path: str = "", reads: Reads | None = None) -> None:
        """Refuses code that reads mutable attributes.

        Args:
          is_guarded: whether setting an attribute ends the proof.
          path: of the module in the block.
          reads: gets what may change.
        """
        module = self.module
        methods: dict[str, Any] = {"forward": self.kind.forward}
        for name in self.names - _MODULE_ATTRIBUTES:
            if name.startswith("__") or hasattr(torch.nn.Module, name):
                continue
            if name in vars(module):
                value = vars(module)[name]
                is_constant = is_guarded and (is_immutable(value) or _is_function(value, module, reads is not None))
            else:
                value, method = None, getattr(self.kind, name, None)
                is_method = callable(method) and (reads is None or isinstance(method, FunctionType))
                is_constant = name in module._parameters or name in module._modules or is_method
                if is_method:
                    methods[name] = method
            if not is_constant:
                raise NoProof(f"its code reads the attribute {name}, which can change later")
            if reads is not None and (name in vars(module) or name in methods):
                reads.attributes[path, name] = value
        if reads is not None:
            reads.methods.update({(path, name): method for name, method in methods.items()})


class Reads(NamedTuple):
    """What code reads that may change later.

    Attributes:
      attributes: (submodule, attribute) -> value; see `MLPParts`.
      methods: (submodule, method) -> function.
    """

    attributes: dict[tuple[str, str], Any]
    methods: dict[tuple[str, str], Any]


class _Silent:
    """Hides a derived class from the module's own __init_subclass__."""

    def __init_subclass__(cls) -> None:
        pass


_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    return value is None or isinstance(value, (int, float, str, torch.dtype))


def is_same(value: Any, other: Any) -> bool:
    """Whether they are one object, or constants that are equal in all bits, as in a pickle."""
    if value is other:
        return True
    # 0.0 == -0.0 and 1 == True, but their texts differ.
    return type(value) is type(other) and is_immutable(value) and repr(value) == repr(other)


def _is_function(value: Any, module: torch.nn.Module, is_strict: bool) -> bool:
    """Whether it is a function, and with `is_strict` one without a state that may change."""
    if not is_strict:
        return callable(value)
    if isinstance(value, functools.partial):  # whose keywords are in `MLPParts.keywords`
        is_constant = all(map(is_immutable, (*value.args, *value.keywords.values())))
        return is_constant and _is_function(value.func, module, is_strict)
    if isinstance(value, MethodType):
        return value.__self__ is module
    is_builtin = isinstance(value, BuiltinFunctionType)
    return is_builtin or (isinstance(value, FunctionType) and not value.__closure__)
