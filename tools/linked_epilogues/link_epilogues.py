"""Links common epilogues into the kernels that fused calls choose most; the program of the rule linked_epilogues.

    link_epilogues --op matmul --manifest kernel_manifest.json --table matmul.table --texts texts.json
        --max_bytes 740000 --out matmul.zip FILES...

FILES are those of open kernels. Kernel after kernel gets all epilogues until the archive is full. Its bytes are the
same on any machine. Needs no GPU and no torch.
"""

from __future__ import annotations

import collections
import ctypes
import io
import itertools
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import nvidia.cu13
from absl import app, flags

from stoneware.epilogue import link
from stoneware.errors import StonewareError
from stoneware.kernels import tile_rule
from stoneware.kernels.manifest import Manifest, read_manifest
from stoneware.tuning import table_file

_OP = flags.DEFINE_string("op", None, "The op whose kernels are linked.", required=True)
_MANIFEST = flags.DEFINE_string("manifest", None, "Path of kernel_manifest.json.", required=True)
_TABLE = flags.DEFINE_string("table", None, "Path of the op's tuning table.", required=True)
_TEXTS = flags.DEFINE_string("texts", None, "JSON: name -> text of each epilogue.", required=True)
_MAX_BYTES = flags.DEFINE_integer("max_bytes", None, "The largest size of the archive.", required=True)
_OUT = flags.DEFINE_string("out", None, "The archive to write.", required=True)

_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file; an archive can have no earlier one."""


def most_chosen(op: str, table: Path, manifest: Manifest) -> list[str]:
    """The open kernels of the op, by the number of problems at which a call with an epilogue chooses them. Only calls
    with a bf16 result and weights of row-major [n, k] count."""
    counts: collections.Counter[str] = collections.Counter()
    open_kernels = [kernel for id in manifest.open if (kernel := manifest.kernels[id]).op == op]
    for device in table_file.decode(table.read_bytes(), str(table), op).devices:
        fingerprint = device.fingerprint
        for kind, block in device.blocks.items():
            if (kind.layout, kind.out_dtype) != ("nt", "bf16"):
                continue
            for sizes in block.sizes:
                fast = (choice.config.kernel for choice in block.entry(sizes).choices)
                overlapping = tile_rule.overlapping_kernels(
                    open_kernels, kind.with_sizes(sizes), fingerprint.compute_capability, fingerprint.num_sms
                )
                if first := next((kernel for kernel in (*overlapping, *fast) if kernel in manifest.open), None):
                    counts[first] += 1
    return sorted(counts, key=lambda kernel: (-counts[kernel], kernel))


def with_files(archive: bytes, files: Mapping[str, bytes]) -> bytes:
    """The bytes of an archive with more files."""
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as longer:
        for name, contents in files.items():
            longer.writestr(zipfile.ZipInfo(name, _DATE), contents, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def main(argv: Sequence[str]) -> int:
    # Where the bindings look for the libraries, apart from site-packages, which Bazel does not have.
    cuda = nvidia.cu13.__path__[0]
    os.environ["CUDA_PATH"] = cuda
    # NVRTC opens this library by its name alone, and finds it if it is open already.
    [builtins] = Path(cuda, "lib").glob("libnvrtc-builtins.so.*")
    ctypes.CDLL(str(builtins))
    warnings.filterwarnings("ignore", message="Cannot determine the NVRTC version")  # for the builtins' name
    manifest = read_manifest(_MANIFEST.value, remedy="build it with the kernel_manifest rule")
    files = {Path(path).name: Path(path).read_bytes() for path in argv[1:]}
    texts = json.loads(Path(_TEXTS.value).read_text(encoding="ascii")).values()
    archive = with_files(b"", {})
    try:
        for kernel, text in itertools.product(most_chosen(_OP.value, Path(_TABLE.value), manifest), texts):
            file = manifest.open[kernel]
            name = link.digest(kernel, file.sha256, text)
            longer = with_files(archive, {name: link.link(kernel, files[file.name], text)})
            if len(longer) > _MAX_BYTES.value:
                break
            archive = longer
    except StonewareError as error:
        print(f"link_epilogues: {error}", file=sys.stderr)
        return 1
    Path(_OUT.value).write_bytes(archive)
    return 0


if __name__ == "__main__":
    app.run(main)
