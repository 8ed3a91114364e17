"""Checks of sizes and strides that every op's Problem makes. Free of torch."""

from __future__ import annotations

MAX_SIZE = 2**31 - 1
"""Of sizes and leading dimensions: kernels, cuBLAS and TMA descriptors count them in int32."""


def check_int(name: str, value: object) -> None:
    """Raises TypeError unless the value is a plain int; a bool is none."""
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}; pass int({name})")


def check_sizes(problem: object) -> None:
    """Checks that m, n, k and the leading dimensions of a Problem are plain ints that kernels take.

    Raises:
      TypeError: one is no int, or a bool.
      ValueError: one is above MAX_SIZE.
    """
    for name in ("m", "n", "k", "lda", "ldb", "ldd"):
        value = getattr(problem, name)
        check_int(name, value)
        if value > MAX_SIZE:
            raise ValueError(
                f"{name}={value} must be at most 2**31-1={MAX_SIZE}; "
                + ("split the problem" if len(name) == 1 else "copy the view into a dense tensor")
            )
