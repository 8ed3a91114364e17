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
_LINE = re.compile(r"^\s*(?:(\.L\w+):|/\*[0-9a-f]{4,}\*/\s+([^;]*);)", re.MULTILINE)
_JUMP = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")


def functions(cubin: bytes) -> list[str]:
    """The functions of a cubin, kernels and others."""
    symbols = ELFFile(io.BytesIO(cubin)).get_section_by_name(".symtab").iter_symbols()
    return sorted(symbol.name for symbol in symbols if symbol["st_info"]["type"] == "STT_FUNC")


def matmul_instructions(cubin: bytes) -> dict[str, int]:
    """How many there are of each matmul instruction: of wgmma by its shape and its transposed operands."""
    found: collections.Counter[str] = collections.Counter()
    for name, _, _, _, operands in _MATMUL.findall(_disassembly(cubin)):
        transposed = "".join(sorted(re.findall(r"\.tnsp[AB]", operands)))
        found[name + transposed] += 1
    return dict(found)


def matmul_loops(cubin: bytes) -> list[list[str]]:
    """The instructions of each loop that has a matmul instruction."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for label, instruction in _LINE.findall(_disassembly(cubin)):
        if label:
            labels[label] = len(instructions)
            continue
        instructions.append(instruction)
        jump = _JUMP.search(instruction)
        if jump is not None and jump[1] in labels:  # backwards
            body = instructions[labels[jump[1]] :]
            if any("MMA" in name for name in body):
                loops.append(body)
    return loops


def _disassembly(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_NVDISASM, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True).stdout.decode(errors="replace")
