"""What a cubin has: names of functions, and instructions by nvdisasm, which comes with Triton."""

from __future__ import annotations

import collections
import io
import pathlib
import re
import subprocess
import tempfile

import triton
from elftools.elf.elffile import ELFFile

_NVDISASM = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_MATMUL = re.compile(r"\b((?:HGMMA|QGMMA)\.(\d+)x(\d+)x(\d+)\S*|(?:HMMA|QMMA)\.\d+\S*) ([^;]*);")


def functions(cubin: bytes) -> list[str]:
    """The functions of a cubin, kernels and others."""
    symbols = ELFFile(io.BytesIO(cubin)).get_section_by_name(".symtab").iter_symbols()
    return sorted(symbol.name for symbol in symbols if symbol["st_info"]["type"] == "STT_FUNC")


def matmul_instructions(cubin: bytes) -> dict[str, int]:
    """How many there are of each matmul instruction: of wgmma by its shape and its transposed operands."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_NVDISASM, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True).stdout.decode(errors="replace")
    found: collections.Counter[str] = collections.Counter()
    for name, _, _, _, operands in _MATMUL.findall(text):
        transposed = "".join(sorted(re.findall(r"\.tnsp[AB]", operands)))
        found[name + transposed] += 1
    return dict(found)
