"""How good predictions are on a device that was measured: the regret of their choices.

    prediction_regret --manifest kernel_manifest.json --samples py/stoneware/tuning_data/nvidia_h200

At each shape the kernels of ours that have a sample with status "ok" are ranked by the model of
`autotune/predict.py` and by the op's rule of thumb. The regret of a ranking is the measured time of
its first, with the knobs of its launch at their defaults, over the best measured time of any of the
kernels with any knobs; 1 is perfect. The vendor library is left out: nobody predicts it.

An H200's samples are no held-out set: the model was revised once after looking at scaled_mm's, and
one of its constants, REPEATED_ROW_CLOCKS, is from matmul's.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from absl import app, flags

from stoneware.errors import TableError
from stoneware.kernels import registry
from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest, read_manifest
from stoneware.tuning import samples as sample_files
from stoneware.tuning.bake import BACKENDS_WITHOUT_KERNELS, OPS
from stoneware.tuning.predict import PREDICTED_DEVICES, PredictedDevice, predict

_MANIFEST = flags.DEFINE_string("manifest", None, "Path of kernel_manifest.json.", required=True)
_SAMPLES = flags.DEFINE_string("samples", None, "Folder of a device's samples.", required=True)
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the figures to, besides.")

Ranking = Callable[[Key, Manifest], list[Config]]


@dataclass(frozen=True, kw_only=True)
class Regret:
    """The regret of one ranking in one family of problems.

    Attributes:
      op, scales: the family.
      backend: whose kernels are ranked; "all" for ours together.
      ranking: "model" or "rule of thumb".
      num_shapes, num_kernels: how many of each; where one kernel is all there is, regret is only
        that of its knobs.
      geomean, percentile_90, worst: of the regret over the shapes; the 90th percentile by nearest
        rank.
      worst_shape: where it is worst.
    """

    op: str
    scales: str
    backend: str
    ranking: str
    num_shapes: int
    num_kernels: int
    geomean: float
    percentile_90: float
    worst: float
    worst_shape: str


def regrets(
    op: str, measured: Mapping[Key, Mapping[Config, float]], device: PredictedDevice,
    manifest: Manifest,
) -> list[Regret]:
    """The regret of each ranking, for each kind of scales and each backend that was measured."""
    rule_of_thumb = registry.spec(op)
    rankings: dict[str, Ranking] = {
        "model": lambda key, kernels: [
            config for config, _ in predict(key, device, kernels.kernels.values())
        ],
        "rule of thumb": lambda key, kernels: rule_of_thumb.preferred(
            key, device.fingerprint.compute_capability, kernels
        ),
    }
    backends = sorted({config.backend for times in measured.values() for config in times})
    rows = []
    for scales in sorted({key.scales for key in measured}):
        for backend in ("all", *backends):
            subset = {
                key: {
                    config: time_us for config, time_us in times.items()
                    if backend in ("all", config.backend)
                }
                for key, times in measured.items() if key.scales == scales
            }
            for name, ranking in rankings.items():
                rows.append(_regret(op, scales, backend, name, ranking, subset, manifest))
    return rows


def _regret(
    op: str, scales: str, backend: str, name: str, ranking: Ranking,
    measured: Mapping[Key, Mapping[Config, float]], manifest: Manifest,
) -> Regret:
    by_shape = []
    for key, times in sorted(measured.items()):
        first = next((config for config in ranking(key, manifest) if config in times), None)
        if first is not None:
            by_shape.append((times[first] / min(times.values()), key.shape))
    by_shape.sort()
    values = [regret for regret, _ in by_shape]
    return Regret(
        op=op, scales=scales, backend=backend, ranking=name, num_shapes=len(values),
        num_kernels=len({config.kernel for times in measured.values() for config in times}),
        geomean=round(math.exp(sum(map(math.log, values)) / len(values)), 4),
        percentile_90=round(values[math.ceil(0.9 * len(values)) - 1], 4),
        worst=round(values[-1], 4), worst_shape=by_shape[-1][1],
    )


def _measured(path: pathlib.Path, manifest: Manifest) -> dict[Key, dict[Config, float]]:
    measured: dict[Key, dict[Config, float]] = {}
    for _, sample in sample_files.read_samples(path):
        config = sample.config
        if sample.status != "ok" or config.backend in BACKENDS_WITHOUT_KERNELS:
            continue
        if config.kernel in manifest.kernels:
            measured.setdefault(sample.key, {})[config] = sample.median_us
    return measured


def main(argv: Sequence[str]) -> int:
    folder = pathlib.Path(_SAMPLES.value)
    try:
        manifest = read_manifest(_MANIFEST.value, remedy="build //py/stoneware:kernel_manifest")
        record = sample_files.read_device(folder / "device.json")
        runs = sample_files.read_runs(folder / "runs.json")
        measured = {
            op: _measured(folder / f"{op}.jsonl", manifest)
            for op in OPS if (folder / f"{op}.jsonl").exists()
        }
    except TableError as error:
        print(f"prediction_regret: {error}", file=sys.stderr)
        return 1
    device = next(
        (
            device for device in PREDICTED_DEVICES
            if device.fingerprint.same_hardware(record.fingerprint)
        ),
        None,
    )
    if device is None:
        print(
            f"prediction_regret: {record.fingerprint} must be one of PREDICTED_DEVICES in "
            "py/stoneware/tuning/predict.py; add its facts there", file=sys.stderr,
        )
        return 1
    rows = [
        row for op, times in measured.items() if times
        for row in regrets(op, times, device, manifest)
    ]
    header = f"{'op':10} {'scales':7} {'kernels of':13} {'ranking':14} geomean  90th %  worst"
    print(f"{header}\n{'-' * len(header)}")
    for row in rows:
        print(
            f"{row.op:10} {row.scales:7} {row.backend:13} {row.ranking:14} "
            f"{row.geomean:7.3f} {row.percentile_90:7.3f} {row.worst:6.3f}  "
            f"{row.num_kernels} kernels, {row.num_shapes} shapes; worst at {row.worst_shape}"
        )
    if _JSON_OUT.value:
        document = {
            "command": "prediction_regret --manifest FILE --samples DIR --json_out FILE",
            "device": record.fingerprint.to_json(),
            "regrets": [asdict(row) for row in rows],
            "runs": sorted(runs),
        }
        pathlib.Path(_JSON_OUT.value).write_text(
            json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    app.run(main)
