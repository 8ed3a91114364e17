"""Devices: which fingerprints are one device, whatever order they come in, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import small_package as small

from stoneware.cli import kernel_explanation
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.tuning import table_file
from stoneware.tuning.entries import bake_samples
from stoneware.tuning.samples import Run

BIG = small.sm90(small.BIG)
UNKNOWN, LOW, HIGH = (replace(small.H200, power_limit_w=watts) for watts in (0, 500, 700))


def device(name: str, power_limit_w: int, **numbers: int) -> DeviceFingerprint:
    return replace(small.H200, name=name, power_limit_w=power_limit_w, **numbers)


@pytest.mark.parametrize(
    ("fingerprints", "expected"),
    [
        ([UNKNOWN], {UNKNOWN: UNKNOWN}),
        ([UNKNOWN, LOW], {UNKNOWN: LOW, LOW: LOW}),
        ([UNKNOWN, LOW, HIGH], {UNKNOWN: UNKNOWN, LOW: LOW, HIGH: HIGH}),
        ([UNKNOWN, LOW, small.H100], {UNKNOWN: LOW, LOW: LOW, small.H100: small.H100}),
        (
            [device("b", 0), device("a", 500), device("c", 500), device("a", 500, num_sms=78)],
            {
                device("b", 0): device("a", 500),
                device("a", 500): device("a", 500),
                device("c", 500): device("a", 500),
                device("a", 500, num_sms=78): device("a", 500, num_sms=78),
            },
        ),
    ],
)
def test_one_device_is_one_in_whatever_order_they_come(fingerprints, expected):
    for ordered in itertools.permutations(fingerprints):
        assert by_hardware(ordered) == expected
        stands = set(expected.values())
        assert by_hardware([*ordered, *stands]) == expected | {one: one for one in stands}


def test_table_of_samples_does_not_depend_on_the_order_of_devices_whose_limit_is_unknown():
    """An unknown limit agrees with each of the others, and they do not agree with one another."""
    taken: list[tuple[Run, object]] = []
    for idx, (fingerprint, us) in enumerate(((UNKNOWN, 3.0), (LOW, 2.0), (HIGH, 1.0))):
        run = small.run(f"run-{idx}", device=fingerprint)
        taken.append((run, small.sample(BIG, us, run=run.id)))
    tables = {bake_samples("scaled_mm", ordered, small.manifest()) for ordered in itertools.permutations(taken)}
    [data] = tables
    devices = table_file.decode(data, "scaled_mm.table", "scaled_mm").devices
    found = {one.fingerprint.power_limit_w: next(iter(one.entries())).choices[0].median_us for one in devices}
    assert found == {0: 3.0, 500: 2.0, 700: 1.0}


@pytest.mark.parametrize("field", ["num_sms", "l2_bytes", "memory_clock_khz", "power_limit_w"])
@pytest.mark.parametrize("value", [10**400, -1, 1.0, True, None, "8"])
def test_number_that_no_device_has_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}=.* must be an int from 0 to ") as caught:
        replace(small.H200, **{field: value})
    assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="compute_capability="):
        replace(small.H200, compute_capability=(9, 10**400))


def test_explain_of_a_decorated_kernel_has_each_device_in_whatever_order_sources_come():
    for ordered in itertools.permutations((UNKNOWN, LOW, HIGH)):
        sources = [
            SimpleNamespace(table=SimpleNamespace(devices=[SimpleNamespace(fingerprint=one, names=(one.name,))]))
            for one in ordered
        ]
        assert set(kernel_explanation._devices(sources, None)) == {UNKNOWN, LOW, HIGH}
