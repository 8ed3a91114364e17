"""The key under which a measurement is filed and looked up: one shape of one family."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, order=True)
class Key:
    """A shape (n, k, m) in a family (op, dtypes, scales, layout); fields as in a Sample.

    `family` is the key with its shape set to 0: within it shapes can be compared, across it not.
    """

    op: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    scales: str
    layout: str
    n: int
    k: int
    m: int

    @property
    def family(self) -> Key:
        return replace(self, n=0, k=0, m=0)

    @property
    def shape(self) -> str:
        return f"m={self.m} n={self.n} k={self.k}"
