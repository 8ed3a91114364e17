"""The problems whose kernels have changed since they were measured: `stoneware tune --stale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoneware.kernels.key import Key
from stoneware.runtime.device import Device
from stoneware.specs import OPS, spec_of
from stoneware.specs.problem import AnyProblem
from stoneware.tuning import sources


def problems(device: Device, *, ops: Sequence[str] | None = None, **lists: Any) -> list[AnyProblem]:
    """The problems that the tables have for this GPU only with an earlier version of the kernel that they choose.

    Every rank of a job reads the same tables. Samples that are not baked yet do not count: a session skips what its
    store has.

    Args:
      device: a GPU.
      ops: None takes all.
      lists: values of list flags of `stoneware tune`, such as scales=["row"]; a flag without any leaves none out.

    Raises:
      TableError: a table or the manifest is damaged.
    """
    of_keys = (_problem_of(key, lists) for op in ops or OPS for key in sorted(_stale_keys(op, device)))
    return [problem for problem in of_keys if problem is not None]


def _stale_keys(op: str, device: Device) -> set[Key]:
    """The keys of the entries for this GPU whose choice is stale, in each source that has one."""
    places = sources.sources(op)
    assert device.fingerprint is not None  # a GPU has one
    fingerprint = sources.with_power_limit(device.fingerprint, device.ordinal, places)
    keys: dict[bool, set[Key]] = {True: set(), False: set()}
    for source in places:
        same, _ = source.table.near(fingerprint)
        for _, measured in same:
            for kind, block in measured.blocks.items():
                assert isinstance(kind, Key)  # of an op of ours
                for sizes in block.sizes:
                    keys[block.entry(sizes).choices[0].is_stale].add(kind.with_sizes(sizes))
    return keys[True] - keys[False]


def _problem_of(key: Key, lists: Mapping[str, Sequence[str]]) -> AnyProblem | None:
    """The problem of a key, if the lists have its values."""
    spec = spec_of(key.op)
    of_key = {
        "scales": key.scales,
        "out_dtypes": key.out_dtype,
        "layouts": key.layout,
        "dtypes": key.a_dtype,
        "a_dtypes": key.a_dtype,
        "accumulations": key.accumulation,
    }
    if any(of_key[name] not in values for name, values in lists.items() if name in spec.choices):
        return None
    sizes = [key.num_groups] * (key.num_groups > 0) + [key.m, key.n, key.k]
    of_sizes = spec.problems(sizes, **{name: (of_key[name],) for name in spec.choices})
    return next((problem for problem in of_sizes if problem.key == key), None)
