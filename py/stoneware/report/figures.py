"""Names and figures of the report's page: shapes and layers in words, and the roofline as SVG."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from stoneware.kernels.key import AnyKey, Key
from stoneware.report import verdict
from stoneware.report.measures import MeasuredProblem, Roofs
from stoneware.specs import OPS, spec_of
from stoneware.tuning.choose import is_vendor

_PART_OF_MODEL = re.compile(r"_(?:expert_|dense_)?(?:q_kv_down|gate_up|kv_up|q_up|qkv|down|up|o)(?:_ep\d+)?$")

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, _WIDTH - 12, 12, _HEIGHT - 46


def row_sizes(key: AnyKey) -> tuple[int, ...]:
    """The sizes that the problems of a row share: (n, k), or (groups or batch, n, k)."""
    return (key.num_groups, *key.sizes[:-1]) if isinstance(key, Key) and key.is_batch else key.sizes[:-1]


def row_label(key: AnyKey) -> str:
    """The same in words: n × k."""
    return " × ".join(map(str, row_sizes(key)))


def layers(key: AnyKey) -> list[str]:
    """The layers of models with this NK shape, by the op's list."""
    if not isinstance(key, Key) or key.op not in OPS:
        return []
    shapes = (key.n, key.k), (key.num_groups, key.n, key.k)
    return [name for name, shape in spec_of(key.op).layers.items() if shape in shapes]


def models(key: AnyKey) -> list[str]:
    """The models of `layers`: their names without the last part, such as _qkv."""
    return list(dict.fromkeys(_PART_OF_MODEL.sub("", layer) for layer in layers(key)))


class Axes(NamedTuple):
    """The ends of a roofline's logarithmic axes, in operations per byte and in 10^12 operations per second."""

    low: float
    high: float
    least: float
    most: float


def axes(points: Sequence[MeasuredProblem], highest_roof: float) -> Axes:
    """Axes for all the points, so that figures of some of them can be compared."""
    intensities, tflops = [point.intensity for point in points], [point.tflops for point in points]
    return Axes(min(intensities) / 2, max(intensities) * 2, min(tflops) / 2, 1.5 * max(highest_roof, *tflops))


def roofline(points: Sequence[MeasuredProblem], roofs: Roofs, axes: Axes) -> str:
    """Achieved operations per second against arithmetic intensity, under the roofs; SVG."""
    low, high, least, most = axes

    def x(intensity: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * math.log(intensity / low) / math.log(high / low), 1)

    def y(tflops: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * math.log(tflops / least) / math.log(most / least), 1)

    lines = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline">']
    for value in _powers_of_10(low, high):
        lines.append(f'<path class="grid" d="M{x(value)} {_TOP}V{_BOTTOM}"/>')
        lines.append(f'<text x="{x(value)}" y="{_BOTTOM + 18}" text-anchor="middle">{value:,g}</text>')
    for value in _powers_of_10(least, most):
        lines.append(f'<path class="grid" d="M{_LEFT} {y(value)}H{_RIGHT}"/>')
        lines.append(f'<text x="{_LEFT - 7}" y="{y(value) + 4}" text-anchor="end">{value:,g}</text>')
    lines += [
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 39}" text-anchor="middle">'
        "operations per byte (a, b and the result moved once)</text>",
        f'<text transform="translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">TFLOP/s</text>',
    ]
    corners = [low, *([roofs.ridge] if low < roofs.ridge < high else []), high]
    path = "L".join(f"{x(corner)} {y(max(roofs.at(corner), least))}" for corner in corners)
    lines.append(f'<path class="roof" d="M{path}"/>')
    for point in points:
        roof = roofs.at(point.intensity)
        css_class = f"m{verdict.band(point.key, verdict.COARSE_BANDS)}"
        css_class += " torch" if is_vendor(point.chosen.config) else ""
        css_class += " above" if point.tflops > roof else ""
        hint = f"{point.key.shape}: {point.tflops:.3g} TFLOP/s, {point.tflops / roof:.0%} of the roof"
        of_models = " ".join(models(point.key))
        mark = f' data-find="{html.escape(of_models)}"' if of_models else ""
        lines.append(
            f'<circle{mark} class="{css_class}" cx="{x(point.intensity)}" cy="{y(point.tflops)}">'
            f"<title>{html.escape(hint)}</title></circle>"
        )
    return "\n".join([*lines, "</svg>"])


def _powers_of_10(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
