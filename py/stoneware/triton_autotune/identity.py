"""The name of a kernel under `sw.autotune`, and the digest of its source.

Timings are stored under the name; if the digest differs, they are stale. Neither depends on the line of
the function, on the file's path, or on the version of Triton: moving a function keeps its timings, editing
it makes them stale. Triton is not imported here.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from stoneware.runtime.canonical import canonical_json

INTERACTIVE = "interactive"
"""The module part of the name of a kernel without a file: in a notebook or at a prompt."""

_SCALARS = (bool, int, float, str, bytes, type(None))


def python_function(fn: Any) -> FunctionType:
    """The function under decorators such as triton.jit and triton.heuristics.

    Raises:
      TypeError: `fn` contains no function.
    """
    inner = fn
    while not inspect.isfunction(inner):
        if not hasattr(inner, "fn"):
            raise TypeError(
                f"fn={fn!r} must be a function under @triton.jit, but its innermost part is a "
                f"{type(inner).__name__}; put @stoneware.autotune above @triton.jit"
            )
        inner = inner.fn
    return inner


def op_name(fn: Any) -> str:
    """The kernel's name in samples and tables: "package.module:function".

    A kernel of the program itself, whose module is `__main__`, has the name that an import would give it:
    NAME of `python -m NAME`, otherwise the file's stem (train.py: "train:kernel"). Two programs with the
    same stem share a name; the kernel's digest separates their timings.
    """
    function = python_function(fn)
    module = function.__module__
    if module == "__main__":
        module = _name_of_main()
    return f"{module}:{function.__qualname__}"


def _name_of_main() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return spec.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return os.path.splitext(os.path.basename(file))[0] if file else INTERACTIVE


@dataclass(frozen=True)
class Identity:
    """What a kernel computes.

    Attributes:
      sha256: of the function's source and of the functions and global values that it uses.
      global_values: (name, value, dict of the module) of global values that are compiled in. If one
        changes, the compiled kernel is stale.
    """

    sha256: str
    global_values: tuple[tuple[str, Any, dict[str, Any]], ...]


def identity_of(fn: Any) -> Identity:
    """The identity of the function under `fn`, an object of triton.jit or of decorators around it."""
    while not inspect.isfunction(fn.fn):
        fn = fn.fn
    global_values: list[tuple[str, Any, dict[str, Any]]] = []
    sha256 = _digest(fn, (), global_values)
    return Identity(sha256, tuple(global_values))


def _digest(jit: Any, callers: tuple[FunctionType, ...], global_values: list) -> str:
    function = jit.fn
    if function in callers:
        return f"recursion {callers.index(function) - len(callers)}"
    callers = (*callers, function)
    source = source_of(jit)
    scope = function.__globals__
    uses = []
    for name, value in _references(function, source):
        uses.append([name, _value_text(value, callers, global_values)])
        # Like Triton, this does not notice when an attribute of a module changes.
        if name in scope and scope[name] is value and _is_data(value):
            global_values.append((name, value, scope))
    parts = {
        "source": source,
        # The source may give a default by name; its value was fixed when the function was made.
        "defaults": [
            [name, _value_text(parameter.default, callers, global_values)]
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        ],
        "noinline": bool(getattr(jit, "noinline", False)),
        "uses": sorted(uses),
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def _is_data(value: Any) -> bool:
    return isinstance(value, _SCALARS) or type(value).__name__ in ("constexpr", "dtype")


def source_of(jit: Any) -> str:
    """The function's text from its `def` on, without indentation and decorators."""
    source = getattr(jit, "src", None)  # Triton's, which may have been replaced on purpose
    if isinstance(source, str):
        return source
    text = textwrap.dedent(inspect.getsource(jit.fn))
    match = re.search(r"^def\s+\w+\s*\(", text, re.MULTILINE)
    return text[match.start() :] if match else text


def _references(function: FunctionType, source: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every global and nonlocal that the function's body uses."""
    scope: Mapping[str, Any] = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    seen = set()
    for node in ast.walk(ast.parse(source)):
        names = _dotted(node)
        if not names or names[0] in own or names[0] not in scope:
            continue
        dotted, value = names[0], scope[names[0]]
        for name in names[1:]:
            if inspect.isfunction(getattr(value, "fn", None)) or not hasattr(value, name):
                break
            dotted, value = f"{dotted}.{name}", getattr(value, name)
        if dotted not in seen and not isinstance(value, ModuleType):
            seen.add(dotted)
            yield dotted, value


def _dotted(node: ast.AST) -> list[str]:
    """["a", "b"] of the expression a.b; [] of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(names)]


def _value_text(value: Any, callers: tuple[FunctionType, ...], global_values: list) -> str:
    """A text that is the same in every process and differs when the value does."""
    if isinstance(value, _SCALARS):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_value_text(item, callers, global_values) for item in value)}]"
    if type(value).__name__ == "constexpr":
        return f"constexpr {_value_text(value.value, callers, global_values)}"
    if type(value).__name__ == "dtype":
        return f"dtype {value}"
    if isinstance(value, dict):
        items = [(str(name), _value_text(item, callers, global_values)) for name, item in value.items()]
        return f"dict {sorted(items)}"
    if isinstance(value, type):
        # The methods and fields of a Triton aggregate are compiled into the kernel.
        is_aggregate = getattr(value, "__triton_aggregate__", False)
        members = getattr(value, "hash_attrs", ()) if is_aggregate else ()
        inner = [_value_text(member, callers, global_values) for member in members]
        fields = sorted(map(str, getattr(value, "__annotations__", {}).items()))
        return f"class {value.__module__}.{value.__qualname__} {inner} {fields}"
    is_jit = inspect.isfunction(getattr(value, "fn", None))
    owner = value.fn if is_jit else value
    module = getattr(owner, "__module__", None) or type(owner).__module__
    if module == "triton" or module.startswith("triton."):
        return "triton's own"  # its version is not part of the kernel
    if is_jit or inspect.isfunction(value):
        jit = value if is_jit else SimpleNamespace(fn=value)
        return _digest(jit, callers, global_values)
    text = repr(value)
    has_address = " at 0x" in text
    return f"{type(value).__module__}.{type(value).__qualname__}" if has_address else text
