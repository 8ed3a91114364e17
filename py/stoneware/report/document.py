"""The report in JSON values: every number of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from stoneware.kernels.key import AnyKey
from stoneware.report import measures, verdict
from stoneware.report.measures import MeasuredProblem
from stoneware.report.sources import DeviceMeasurements


def document(devices: Iterable[DeviceMeasurements]) -> dict[str, Any]:
    """The document of `stoneware report --json`."""
    return {
        "devices": [
            {
                "device": device.fingerprint.to_json(),
                "aliases": list(device.aliases),
                "sources": device.origins,
                "digests": device.digests,
                "statuses": device.statuses,
                "runs": device.runs_in_use,
                "verdict": [
                    {
                        "title": section.title,
                        "num_problems": len(section.problems),
                        "share_ours": section.share_ours,
                        **{
                            name: {"count": len(speedups), "geomeans": verdict.means(speedups)}
                            for name in ("same_scales", "any_scales")
                            for speedups in [getattr(section, name)]
                        },
                    }
                    for section in verdict.sections(device.problems)
                ],
                "families": [
                    _kind(device, kind, problems) for kind, problems in measures.kinds(device.problems).items()
                ],
            }
            for device in devices
        ]
    }


def _kind(device: DeviceMeasurements, kind: AnyKey, problems: Sequence[MeasuredProblem]) -> dict[str, Any]:
    points = measures.roofline(problems)
    speedups = [problem.speedup for problem in problems if problem.speedup is not None]
    return {
        "family": kind.to_json(),
        "title": verdict.title(kind),
        "num_problems": len(problems),
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
            for problem in problems
        ],
        "roofs": asdict(measures.roofs(device.fingerprint, points)) if points else None,
        "roofline": [{"intensity": point.intensity, "tflops": point.tflops} for point in points],
    }
