"""The manifest lists exactly the kernels in the wheel; tables and launch descriptions load."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from stoneware.kernels.config import BACKENDS_WITHOUT_KERNELS
from stoneware.specs import OPS
from stoneware.tuning import table_file

_SM90_MODULE = "stoneware/ops/_sm90."
_DRIVER_MODULE = "stoneware/runtime/_driver."
_ELF_MACHINE_CUDA = 190  # EM_CUDA of elf.h
_ELF_MACHINE_OFFSET = 18
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_MAX_MODULE_BYTES = 6_000_000
_MAX_OPEN_BYTES = 2_500_000
_MAX_LINKED_BYTES = 1_500_000
_SAMPLES = Path("py/stoneware/tuning_data/nvidia_h200")


def embedded_cubins(module: bytes) -> list[int]:
    """Offsets of the CUDA ELF files with code inside an extension module, which nothing compresses.

    nvcc puts one without code into every host object, for the code-less device side of the source.
    """
    offsets = []
    for match in re.finditer(rb"\x7fELF\x02\x01", module):
        offset = match.start()
        if struct.unpack_from("<H", module, offset + _ELF_MACHINE_OFFSET) != (_ELF_MACHINE_CUDA,):
            continue
        cubin = ELFFile(io.BytesIO(module[offset:]))
        if any(section.name.startswith(".text") for section in cubin.iter_sections()):
            offsets.append(offset)
    return offsets


def embedded_images(module: bytes) -> list[int]:
    """Offsets of the fat binaries, of CUDA ELF files, inside an extension module.

    Each begins with a magic number, a version, the header's size and the content's.
    """
    return [
        match.start()
        for match in re.finditer(re.escape(_FATBIN_MAGIC), module)
        if struct.unpack_from("<HH", module, match.end()) == (1, 16)
    ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def by_backend(wheel, backend: str) -> dict[str, dict]:
    return {k["id"]: k for k in wheel.manifest if k["backend"] == backend}


def test_manifest_is_canonical_and_has_both_backends(wheel):
    text = wheel.members["stoneware/kernel_manifest.json"].decode()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    assert json.loads(text)["schema"] == 1
    ids = [kernel["id"] for kernel in wheel.manifest]
    assert ids == sorted(set(ids))
    assert {kernel["backend"] for kernel in wheel.manifest} == {"sm90", "triton_aot"}
    assert {kernel["op"] for kernel in wheel.manifest} == {*OPS, "quantize"}
    fields = {"id", "op", "backend", "arch", "config", "serves", "sha256", "code_sha256", "size_bytes"}
    assert all(
        set(k) == fields | ({"description_sha256"} if k["backend"] == "triton_aot" else set()) for k in wheel.manifest
    )


def test_manifest_has_the_digest_of_its_content(wheel):
    text = wheel.members["stoneware/kernel_manifest.json"]
    digest = json.loads(text)["digest"]
    assert digest == sha256(text.replace(f'"digest": "{digest}"'.encode(), b'"digest": ""', 1))


def test_manifest_lists_exactly_the_cubin_files(wheel):
    shipped = {path: (sha256(data), len(data)) for path, data in wheel.members.items() if path.endswith(".cubin")}
    listed = {
        f"stoneware/cubins/{id}.cubin": (kernel["sha256"], kernel["size_bytes"])
        for id, kernel in by_backend(wheel, "triton_aot").items()
    }
    assert shipped == listed


def test_manifest_lists_exactly_the_images_inside_the_module(wheel):
    [module] = [data for path, data in wheel.modules.items() if path.startswith(_SM90_MODULE)]
    kernels = by_backend(wheel, "sm90")
    assert len(module) <= _MAX_MODULE_BYTES
    assert embedded_cubins(module) == []
    offsets = embedded_images(module)
    assert len(offsets) == len(kernels) >= 6
    found = {
        id: [offset for offset in offsets if sha256(module[offset : offset + kernel["size_bytes"]]) == kernel["sha256"]]
        for id, kernel in kernels.items()
    }
    assert {id: places for id, places in found.items() if len(places) != 1} == {}
    assert sorted(place for [place] in found.values()) == offsets


def test_manifest_lists_exactly_the_files_of_open_kernels(wheel):
    folder = "stoneware/open_kernels/"
    shipped = {path: (sha256(data), len(data)) for path, data in wheel.members.items() if path.startswith(folder)}
    listed = json.loads(wheel.members["stoneware/kernel_manifest.json"])["open"]
    assert shipped == {folder + file["name"]: (file["sha256"], file["size_bytes"]) for file in listed}
    compressed = sum(entry.compress_size for entry in wheel.entries if entry.filename.startswith(folder))
    assert compressed <= _MAX_OPEN_BYTES


def test_linked_epilogues_are_cubins_and_keep_to_their_budget(wheel):
    folder = "stoneware/linked_epilogues/"
    archives = {path: data for path, data in wheel.members.items() if path.startswith(folder)}
    assert set(archives) == {f"{folder}{op}.zip" for op in ("matmul", "scaled_mm")}
    assert sum(map(len, archives.values())) <= _MAX_LINKED_BYTES
    for data in archives.values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            cubins = [archive.read(name) for name in archive.namelist()]
        assert cubins
        for cubin in cubins:
            assert struct.unpack_from("<H", cubin, _ELF_MACHINE_OFFSET) == (_ELF_MACHINE_CUDA,)


def _sums(kernel):
    """Sums of a tile in each thread of a warp group."""
    rows, columns, _ = kernel["config"]["tile"]
    return rows * columns // 128


def test_every_kernel_built_from_ptx_is_open_once(wheel):
    listed = json.loads(wheel.members["stoneware/kernel_manifest.json"])["open"]
    kernels = [kernel for file in listed for kernel in file["kernels"]]
    # CUTLASS has neither these schedules nor grouped_mm here. Gradients of weights, sums in fp32 and clusters that
    # share k have no epilogue. Where warp groups take turns, only tiles whose sums leave it registers have one.
    from_ptx = [
        id
        for id, kernel in by_backend(wheel, "sm90").items()
        if (kernel["config"]["schedule"] in {"persistent", "splitk"} or kernel["op"] == "grouped_mm")
        and kernel["config"].get("layout") != "tn"
        and kernel["config"]["out"] != "fp32"
        and kernel["config"].get("shares") != "grid"
        and not (kernel["config"].get("pingpong") and (kernel["op"] == "grouped_mm" or _sums(kernel) > 128))
    ]
    assert sorted(kernels) == sorted(from_ptx)


def test_module_without_kernels_has_none(wheel):
    [driver] = [data for path, data in wheel.modules.items() if path.startswith(_DRIVER_MODULE)]
    assert embedded_images(driver) == embedded_cubins(driver) == []


def test_every_cubin_file_has_a_launch_description_that_fits_it(wheel):
    descriptions = {path for path in wheel.members if path.startswith("stoneware/cubins/") and path.endswith(".json")}
    kernels = by_backend(wheel, "triton_aot")
    assert descriptions == {f"stoneware/cubins/{id}.json" for id in kernels}
    for id, kernel in kernels.items():
        text = wheel.members[f"stoneware/cubins/{id}.json"]
        description = json.loads(text)
        of_the_build = ("code_sha256", "description_sha256", "serves")
        in_both = {key: value for key, value in kernel.items() if key not in of_the_build}
        assert {key: description[key] for key in in_both} == in_both
        assert sha256(text) == kernel["description_sha256"]
        assert set(description["parameters"]) <= set("Piqf")
        assert description["symbol"].encode() in wheel.members[f"stoneware/cubins/{id}.cubin"]


@pytest.mark.parametrize("op", OPS)
def test_table_loads_has_what_was_measured_and_names_kernels_of_the_manifest(wheel, op):
    ids = {kernel["id"] for kernel in wheel.manifest if kernel["op"] == op}
    loaded = table_file.decode(wheel.members[f"stoneware/tables/{op}.table"], wheel.path, op)
    is_measured = (_SAMPLES / f"{op}.jsonl").exists()
    assert ("NVIDIA H200" in [device.fingerprint.name for device in loaded.devices]) == is_measured
    configs = {choice.config for device in loaded.devices for entry in device.entries() for choice in entry.choices}
    compiled = {config.kernel for config in configs if config.backend not in BACKENDS_WITHOUT_KERNELS}
    assert bool(compiled) == is_measured
    assert compiled <= ids
