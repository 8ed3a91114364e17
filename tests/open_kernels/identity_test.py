"""An open kernel, linked with the epilogue that changes nothing, has the machine code of the closed kernel.

STONEWARE_TEST_OP names the op whose kernels are linked, STONEWARE_TEST_IDENTITY the epilogue's LTO-IR and
STONEWARE_TEST_CUBINS the folder of the closed kernels. nvJitLink needs no GPU.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib

import nvidia.cu13
import pytest
from cuda.bindings import nvjitlink
from elftools.elf.elffile import ELFFile

from stoneware.runtime import package_files

# Where the bindings look for the library, apart from site-packages, which Bazel does not have.
os.environ["CUDA_PATH"] = nvidia.cu13.__path__[0]


def _files() -> dict[str, list[str]]:
    """The files with open kernels of the op, and the ids of these."""
    manifest = json.loads(package_files.path("kernel_manifest.json").read_text())
    ops = {kernel["id"]: kernel["op"] for kernel in manifest["kernels"]}
    kernels = {
        file["name"]: [id for id in file["kernels"] if ops[id] == os.environ["STONEWARE_TEST_OP"]]
        for file in manifest["open"]
    }
    return {name: ids for name, ids in kernels.items() if ids}


FILES = _files()


@functools.cache
def fatbin(file: str) -> bytes:
    return package_files.path("open_kernels", file).read_bytes()


def link(options: list[str], *fatbins: bytes) -> bytes:
    """The linked cubin, or with the option -ptx its PTX; raises AssertionError with the linker's messages."""
    options = ["-arch=sm_90a", "-lto", *options]
    linker = nvjitlink.create(len(options), options)
    try:
        for data in fatbins:
            nvjitlink.add_data(linker, nvjitlink.InputType.FATBIN, data, len(data), "")
        nvjitlink.complete(linker)
        if "-ptx" in options:
            linked = bytearray(nvjitlink.get_linked_ptx_size(linker))
            nvjitlink.get_linked_ptx(linker, linked)
        else:
            linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
            nvjitlink.get_linked_cubin(linker, linked)
        return bytes(linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise AssertionError(log.decode()) from error
    finally:
        nvjitlink.destroy(linker)


def machine_code(cubin: bytes, kernel: str) -> bytes:
    section = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{kernel}")
    assert section is not None
    return section.data()


@pytest.mark.parametrize(("file", "kernel"), [(file, kernel) for file in FILES for kernel in FILES[file]])
def test_with_the_identity_it_is_the_closed_kernel(file, kernel):
    identity = pathlib.Path(os.environ["STONEWARE_TEST_IDENTITY"]).read_bytes()
    closed = pathlib.Path(os.environ["STONEWARE_TEST_CUBINS"], f"{kernel}.cubin").read_bytes()
    linked = link([f"-kernels-used={kernel}"], fatbin(file), identity)
    is_same = machine_code(linked, kernel) == machine_code(closed, kernel)
    assert is_same, "the open and the closed kernel must differ in calls of the epilogue alone (epilogue_sm90.h)"


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_calls_the_epilogue(file):
    ptx = link(["-ptx"], fatbin(file)).decode()
    texts = {text.split("(")[0]: text for text in ptx.split(".entry ")[1:]}
    assert set(texts) == set(FILES[file])
    assert [kernel for kernel, text in texts.items() if "stoneware_epilogue" not in text] == []
