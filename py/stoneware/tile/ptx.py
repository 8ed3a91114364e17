"""Reads a kernel's signature and its calls from the PTX of a module that is not linked yet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stoneware.runtime.fast_dataclass import dataclass

_BODY = re.compile(
    r"^[ \t]*(?:\.(?:visible|weak|extern|common)\s+)*\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*"
    r"(?:\(((?:[^()]|\([^)]*\))*)\))?([^;{]*)(;|\{)",
    re.MULTILINE,
)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b[^,]*?\s)?([\w$]+)(\[\d+\])?")
_THREADS = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")
_COMMENT = re.compile(r"//[^\n]*")
_END = "\n}"
_WORD = re.compile(r"[\w$]+")

_LETTERS = {"u64": "P", "s64": "P", "b64": "P", "u32": "i", "s32": "i", "b32": "i", "f32": "f"}
"""The letter of a parameter, like `_driver.Kernel`'s; 64 bits are passed like an address."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel, or another function of a module.

    Attributes:
      is_kernel: whether it is launched.
      parameters: of a kernel: a letter each, "?" for one that is neither a pointer nor a number of 32 or 64 bits.
      most_threads: of a block, by __launch_bounds__; 0 without.
      calls: names of functions that it calls or whose address it takes.
    """

    is_kernel: bool
    parameters: str
    most_threads: int
    calls: frozenset[str]


def functions(ptx: str) -> dict[str, Function]:
    """The functions that a module defines, by name."""
    ptx = _COMMENT.sub("", ptx)
    matches = list(_BODY.finditer(ptx))
    names = {match.group(2) for match in matches}
    found = {}
    for match in matches:
        kind, name, parameters, directives, end = match.groups()
        if end == ";":  # a declaration
            continue
        words = set(_WORD.findall(ptx[match.end() : ptx.find(_END, match.end())]))
        threads = _THREADS.search(directives)
        most = 0
        if threads is not None:
            x, y, z = (int(number or 1) for number in threads.groups())
            most = x * y * z
        found[name] = Function(
            is_kernel=kind == "entry",
            parameters="".join(
                "?" if array else _LETTERS.get(type_, "?")
                for _, type_, _, array in _PARAMETER.findall(parameters or "")
            ),
            most_threads=most,
            calls=frozenset(words & names) - {name},
        )
    return found


def reachable(functions: Mapping[str, Function], start: str) -> frozenset[str]:
    """Names of the functions that one calls, directly or not; those that the module does not define included."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        function = functions.get(waiting.pop())
        if function is not None:
            new = function.calls - seen
            seen |= new
            waiting += new
    return frozenset(seen)
