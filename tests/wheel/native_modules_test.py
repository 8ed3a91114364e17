"""Extension modules need glibc alone, show no CUDA symbol, do not tell where they were built."""

from __future__ import annotations

import io
import re

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

_DRIVER_USERS = ("stoneware/ops/_sm90", "stoneware/runtime/_driver")
_MODULES = ("stoneware/ops/_call", *_DRIVER_USERS)
# All of them parts of glibc; a loader has __tls_get_addr, for what a thread has to itself.
_ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# Debian 10, RHEL 8; the target of //third_party/zig.
_NEWEST_GLIBC = (2, 28)
_CUDA_NAME = re.compile(r"_*(cu[A-Z]|cuda|nv[A-Z]|__nv)")


@pytest.fixture(params=_MODULES, ids=lambda path: path.rsplit("/", 1)[1])
def elf(wheel, request) -> ELFFile:
    found = [data for path, data in wheel.modules.items() if path.startswith(request.param + ".")]
    assert len(found) == 1, f"{request.param} must be one module in the wheel, found {len(found)}"
    return ELFFile(io.BytesIO(found[0]))


def dynamic_tags(elf: ELFFile, tag: str) -> list:
    sections = [section for section in elf.iter_sections() if isinstance(section, DynamicSection)]
    assert sections, "a module must have a dynamic section"
    return [entry for section in sections for entry in section.iter_tags(tag)]


def dynamic_symbols(elf: ELFFile) -> list:
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return [symbol for symbol in table.iter_symbols() if symbol.name]


def test_wheel_has_these_modules_and_no_other(wheel):
    assert sorted(path.split(".")[0] for path in wheel.modules) == sorted(_MODULES)


def test_modules_are_for_the_processor_of_the_tag(wheel, elf):
    assert (elf["e_type"], elf["e_machine"]) == ("ET_DYN", _MACHINES[wheel.processor])


def test_modules_need_parts_of_glibc_alone(wheel, elf):
    needed = {entry.needed for entry in dynamic_tags(elf, "DT_NEEDED")}
    assert "libc.so.6" in needed
    assert needed <= _ALLOWED_LIBRARIES | {_LOADERS[wheel.processor]}


def test_modules_show_no_cuda_symbol(elf, request):
    names = [symbol.name for symbol in dynamic_symbols(elf)]
    is_driver_user = any(name.rsplit("/", 1)[1] in request.node.name for name in _DRIVER_USERS)
    assert ("dlopen" in names) == is_driver_user, "the driver is found by dlopen, by its users alone"
    assert [name for name in names if _CUDA_NAME.match(name)] == []


def test_modules_export_their_init_function_alone(elf):
    exported = [
        symbol.name
        for symbol in dynamic_symbols(elf)
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    ]
    assert len(exported) == 1
    assert re.fullmatch(r"PyInit_\w+", exported[0])


def test_modules_run_on_glibc_2_28(elf):
    section = next(s for s in elf.iter_sections() if isinstance(s, GNUVerNeedSection))
    needed = [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]
    versions = [re.fullmatch(r"GLIBC_(\d+(?:\.\d+)+)", name) for name in needed]
    assert needed and all(versions), f"versions of other libraries than glibc: {needed}"
    newest = max(tuple(map(int, match[1].split("."))) for match in versions)
    assert newest <= _NEWEST_GLIBC


def test_modules_have_no_library_search_path(elf):
    assert dynamic_tags(elf, "DT_RPATH") + dynamic_tags(elf, "DT_RUNPATH") == []


def test_modules_carry_no_debug_information(elf):
    names = [section.name for section in elf.iter_sections()]
    assert [n for n in names if n == ".symtab" or n.startswith((".debug", ".zdebug"))] == []


def test_no_member_names_a_folder_of_the_build(wheel):
    build_folder = re.compile(
        rb"/execroot/|/sandbox/|bazel-out/|external/stoneware_|/nvcc\.\w{8}|/zig\.\w{8}"
        rb"|/(?:home|root|Users)/\w|tmpxft_"
    )
    found = {path: match[0] for path, data in wheel.members.items() if (match := build_folder.search(data))}
    assert found == {}
