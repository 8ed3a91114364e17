"""The colours of plots, and a style sheet that replaces them in dark mode."""

from __future__ import annotations

from stoneware.report import style

INK, SOFT, GRID, PAGE, INVERSE = "#1f2328", "#59636e", "#d5dae0", "#ffffff", "#fffffe"
"""Of text, of secondary lines, of a grid, of the page, and of text on strong colours. matplotlib writes colours as
hexadecimal numbers, so all are distinct."""

GREY = "#aab0b8"
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
"""Distinct with any colour vision (Okabe and Ito, "Color Universal Design", 2008)."""

_DARK = {
    INK: "#e6e8eb",
    SOFT: "#9aa4af",
    GRID: "#3a414a",
    PAGE: "#14171b",
    INVERSE: "#10141a",
    GREY: "#7d8590",
    SERIES[0]: "#4aa3df",
    **dict(zip(style.LIGHT, style.DARK)),
}
"""Colour -> its replacement in dark mode. The other series are legible on both."""

PARAMETERS = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "axes.facecolor": PAGE,
    "figure.facecolor": PAGE,
    "savefig.facecolor": PAGE,
}
"""For `matplotlib.rc_context`."""


def with_dark_mode(svg: str) -> str:
    """A figure of matplotlib whose colours follow the reader's light or dark mode."""
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}: {dark} !important}}'
        for light, dark in _DARK.items()
        for name in ("fill", "stroke")
        if f"{name}: {light}" in svg
    )
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)
