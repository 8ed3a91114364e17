"""Where the files that the wheel carries beside its code are found."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The folder of the package `stoneware`."""

REMEDY = "reinstall the stoneware wheel (pip install --force-reinstall)"
"""What to do about a file of the package that is missing or damaged."""


def path(*parts: str) -> Path:
    """A file of the package: `path("tables", "scaled_mm.table")`."""
    return ROOT.joinpath(*parts)
