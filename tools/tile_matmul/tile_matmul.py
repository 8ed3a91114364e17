"""Writes the source of one linked function of a tile matmul, for the rule tile_matmul.

    tile_matmul --fields '{"m": 64, ...}' --direction dA --name NAME --out FILE

Needs no GPU, no torch and no compiler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from stoneware.tile import source
from stoneware.tile.api import matmul
from stoneware.tile.plan import DIRECTIONS

_FIELDS = flags.DEFINE_string("fields", None, "Arguments of sw.tile.matmul, as JSON.", required=True)
_DIRECTION = flags.DEFINE_enum("direction", None, DIRECTIONS, "The function to write.", required=True)
_NAME = flags.DEFINE_string("name", None, "What the file in the wheel must be called.", required=True)
_OUT = flags.DEFINE_string("out", None, "Path of the source to write.", required=True)


def main(argv: Sequence[str]) -> int:
    direction = _DIRECTION.value
    try:
        found = matmul(**json.loads(_FIELDS.value))
        if direction in found.unsupported:
            raise ValueError(
                f'{found.unsupported[direction]}; without gradients, set backward = "off" or '
                'serves = ["forward"] in the tile_matmul'
            )
        name = source.file_name(found, direction)
        if name != _NAME.value:
            raise ValueError(f"name={_NAME.value!r} must be {name!r}, which is looked up; correct tile_matmul.bzl")
    except (TypeError, ValueError) as error:
        print(f"tile_matmul: {error}", file=sys.stderr)
        return 1
    Path(_OUT.value).write_text(source.linked_function(found, direction), encoding="utf-8")
    return 0


if __name__ == "__main__":
    app.run(main)
