"""The program of the rule tile_matmul writes a source, or says what to change in the target.

STONEWARE_TEST_TILE_MATMUL names the program.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess


def write(folder: pathlib.Path, dtype: str, direction: str) -> subprocess.CompletedProcess[str]:
    """Runs the program for a matmul of 64x64x64, whose layouts fit any dtype."""
    fields = {"m": 64, "n": 64, "k": 64, "a": dtype, "b": dtype, "layouts": ["row", "col"], "threads": 128}
    name = f"{dtype}_{dtype}_row_col_64x64x64_128_sm_90a_{direction}.fatbin"
    return subprocess.run(
        [
            os.environ["STONEWARE_TEST_TILE_MATMUL"],
            f"--fields={json.dumps({**fields, 'arch': 'sm_90a'})}",
            f"--direction={direction}",
            f"--name={name}",
            f"--out={folder / 'source.cu'}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_source_is_written_for_a_direction_that_the_matmul_has(tmp_path):
    for dtype, direction in (("e4m3", "forward"), ("bf16", "dA")):
        result = write(tmp_path, dtype, direction)
        assert result.returncode == 0, result.stderr
        assert "cc/tile/" in (tmp_path / "source.cu").read_text()


def test_gradient_of_fp8_is_refused_with_the_attributes_that_leave_it_out(tmp_path):
    result = write(tmp_path, "e4m3", "dA")
    assert result.returncode == 1
    assert "dA must have operands of 16 or 32 bits, and they are fp8" in result.stderr
    assert 'set backward = "off" or serves = ["forward"] in the tile_matmul' in result.stderr
    assert "Traceback" not in result.stderr
