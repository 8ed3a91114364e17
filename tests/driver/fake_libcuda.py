"""Controls of the fake libcuda (fake_libcuda.cc), for use inside a process that has loaded it."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from stoneware.errors import DriverError

_library = ctypes.CDLL("libcuda.so.1")
_library.fake_libcuda_calls.restype = ctypes.c_char_p
_library.fake_libcuda_context_stack.restype = ctypes.c_char_p


def calls(name: str) -> list[dict[str, str]]:
    """The arguments of each recorded call of `name`, in order of arrival."""
    found = []
    for line in _library.fake_libcuda_calls().decode().splitlines():
        call, *arguments = line.split(" ")
        if call == name:
            found.append(dict(argument.split("=", 1) for argument in arguments))
    return found


def call_names() -> list[str]:
    """The name of every recorded call, in order of arrival."""
    return [line.split(" ")[0] for line in _library.fake_libcuda_calls().decode().splitlines()]


def forget_calls() -> None:
    _library.fake_libcuda_forget_calls()


def fail(call: str, result: int) -> None:
    """From now on `call` returns `result`; 0 makes it succeed again."""
    _library.fake_libcuda_fail(call.encode(), result)


def set_missing(symbol: str) -> None:
    _library.fake_libcuda_set_missing(symbol.encode())


def set_parameter_bytes(sizes: Sequence[int]) -> None:
    """What cuKernelGetParamInfo says of every kernel."""
    _library.fake_libcuda_set_parameter_bytes((ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)))


def push_new_context(device: int) -> None:
    _library.fake_libcuda_push_new_context(device)


def context_stack() -> str:
    return _library.fake_libcuda_context_stack().decode()


def cubin(sm: int = 80) -> bytes:
    """The smallest thing that looks like a cubin: the ELF header that CUDA 13 writes."""
    identity = b"\x7fELF" + bytes([2, 1, 1, 0x41, 8]) + bytes(7)
    flags = sm << 8 | 4
    return identity + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 0, flags, 64, 0, 0, 0, 0, 0)


def fatbin() -> bytes:
    """The header of a fat binary with 8 bytes of content."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8)


def error_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> dict[str, Any] | None:
    """What a call raises, or None."""
    try:
        function(*arguments, **keywords)
    except DriverError as error:
        return {
            "type": "DriverError",
            "message": str(error),
            "call": error.call,
            "code": error.code,
            "code_name": error.code_name,
        }
    except Exception as error:  # the test says which type it expects
        return {"type": type(error).__name__, "message": str(error)}
    return None


def report(value: Any) -> None:
    """Hands a value to the test that started this process."""
    print(json.dumps(value))
