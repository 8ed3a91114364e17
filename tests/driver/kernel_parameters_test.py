"""Each kernel's parameter has one size on both sides: in its cubin and in the host code that fills it.

nvcc compiles the one and clang the other, from the same templates. No CUDA call.
"""

from __future__ import annotations

import os
import pathlib
import struct

import pytest

from stoneware.ops import _sm90

CUBINS = pathlib.Path(os.environ["STONEWARE_TEST_CUBINS"])
ENTRIES = {entry["id"]: entry for entry in _sm90.kernels()}

# .nv.info is a list of attributes: a format, a kind, and 2 bytes of value or, of the format EIFMT_SVAL,
# of the size of the value that follows. EIATTR_KPARAM_INFO has a parameter's size in the upper 14
# bits of its third word.
_EIFMT_SVAL = 4
_EIATTR_KPARAM_INFO = 0x17


def section(cubin: bytes, wanted: str) -> bytes:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, num_sections, names_idx = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<II16xQQ", cubin, table + idx * entry_bytes) for idx in range(num_sections)]
    for name, _, offset, size in headers:
        start = headers[names_idx][2] + name
        if cubin[start : cubin.index(b"\0", start)].decode() == wanted:
            return cubin[offset : offset + size]
    raise AssertionError(f"no section {wanted}")


def parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    info = section(cubin, f".nv.info.{kernel}")
    sizes = []
    at = 0
    while at < len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _EIFMT_SVAL:
            if kind == _EIATTR_KPARAM_INFO:
                sizes.append(struct.unpack_from("<8xI", info, at)[0] >> 18)
            at += value
    return sizes


@pytest.mark.parametrize("kernel", ENTRIES)
def test_cubin_and_host_code_agree_on_the_size_of_the_parameter(kernel):
    sizes = parameter_sizes((CUBINS / f"{kernel}.cubin").read_bytes(), kernel)
    assert sizes == [ENTRIES[kernel]["params_bytes"]]
