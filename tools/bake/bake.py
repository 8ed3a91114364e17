"""Bakes the tuning table of one op, or of one decorated kernel, from committed samples.

    bake --op scaled_mm --manifest kernel_manifest.json --out scaled_mm.table FILES...
    bake --op acme.kernels:softmax --out FILE FILES...

FILES are `<op>.jsonl`, `runs.json` and `device.json` of any number of devices, each in its own
folder; without any, the table is valid and empty. Needs no GPU and no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from stoneware.errors import TableError
from stoneware.kernels.manifest import read_manifest
from stoneware.tuning.bake import bake

_OP = flags.DEFINE_string("op", None, "The op whose table is baked.", required=True)
_MANIFEST = flags.DEFINE_string("manifest", None, "Path of kernel_manifest.json; for our ops.")
_OUT = flags.DEFINE_string("out", None, "Path of the table to write.", required=True)


def main(argv: Sequence[str]) -> int:
    # A bake makes no cycles; looking for them takes a third of its time with half a million samples.
    gc.disable()
    try:
        manifest = _MANIFEST.value and read_manifest(_MANIFEST.value, remedy="build it with the kernel_manifest rule")
        table = bake(_OP.value, argv[1:], manifest or None)
    except (TableError, ValueError) as error:
        print(f"bake: {error}", file=sys.stderr)
        return 1
    try:
        Path(_OUT.value).write_bytes(table)
    except OSError as error:
        print(
            f"bake: --out={_OUT.value} must be a file in a folder that exists and can be written: "
            f"{error.strerror}; make the folder, or pass another file",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
