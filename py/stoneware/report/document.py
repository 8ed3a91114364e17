"""The report as JSON values: every number that the page shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from stoneware.kernels.key import AnyKey
from stoneware.report import measures, verdict
from stoneware.report.measures import Problem
from stoneware.report.sources import DeviceMeasurements


def document(devices: Iterable[DeviceMeasurements]) -> dict[str, Any]:
    """What `stoneware report --json` prints: every number of the page, as JSON values."""
    return {
        "devices": [
            {
                "device": device.fingerprint.to_json(),
                "aliases": list(device.aliases),
                "sources": device.origins,
                "digests": device.digests,
                "statuses": device.statuses,
                "runs": device.runs_in_use,
                "verdict": verdict.document(verdict.sections(device.problems)),
                "families": [
                    _family_document(device, family, members)
                    for family, members in measures.kinds(device.problems).items()
                ],
            }
            for device in devices
        ]
    }


def _family_document(device: DeviceMeasurements, family: AnyKey, members: Sequence[Problem]) -> dict[str, Any]:
    points = measures.roofline(members)
    speedups = [problem.speedup for problem in members if problem.speedup is not None]
    return {
        "family": family.to_json(),
        "title": verdict.title(family),
        "num_problems": len(members),
        "speedup_geomean": measures.geometric_mean(speedups),
        "speedup_least": min(speedups, default=None),
        "problems": [
            {
                "sizes": list(problem.key.sizes),
                "shape": problem.key.shape,
                "chosen": problem.chosen.config.to_json(),
                "chosen_us": problem.chosen.median_us,
                "chosen_spread_us": problem.chosen.spread_us,
                "run": problem.chosen.run,
                "rule": problem.rule,
                "vendor_us": problem.vendor.median_us if problem.vendor else None,
                "speedup": problem.speedup,
            }
            for problem in members
        ],
        "roofs": asdict(measures.roofs(device.fingerprint, points)) if points else None,
        "roofline": [{"intensity": point.intensity, "tflops": point.tflops} for point in points],
    }
