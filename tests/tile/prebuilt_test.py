"""The linked functions that the wheel has, made by nvcc, do what NVRTC makes of the same sources."""

from __future__ import annotations

import machine_code
import pytest
import tile_layer

import stoneware as sw
from stoneware.linking import cubins, toolchain
from stoneware.runtime import package_files
from stoneware.tile import module, source

FOLDER = package_files.path("tile", "matmuls")
FILES = sorted(FOLDER.iterdir()) if FOLDER.exists() else []


def described(name: str):
    a, b, left, right, shape, threads, arch_and_direction = name.removesuffix(".fatbin").split("_", 6)
    m, n, k = map(int, shape.split("x"))
    arch = arch_and_direction.rsplit("_", 1)[0]
    return sw.tile.matmul(m=m, n=n, k=k, a=a, b=b, layouts=(left, right), threads=int(threads), arch=arch)


def test_the_wheel_has_some_with_every_direction():
    matmuls = {described(file.name) for file in FILES}
    assert len(matmuls) >= 6
    assert {file.name for file in FILES} == {source.file_name(mm, name) for mm in matmuls for name in mm.plans}


@pytest.mark.parametrize("name", sorted({file.name.rsplit("_", 1)[0] for file in FILES}))
def test_they_are_linked_without_nvrtc_to_the_same_instructions(name, monkeypatch):
    mm = described(f"{name}_forward.fatbin")
    compiled: list[str] = []
    compile_lto_ir = toolchain.compile_lto_ir

    def recorded(text, *, name="source.cu", **arguments):
        compiled.append(name)
        return compile_lto_ir(text, name=name, **arguments)

    monkeypatch.setattr(toolchain, "compile_lto_ir", recorded)
    monkeypatch.setattr(cubins, "read", lambda name: None)

    def linked():
        module._library.cache_clear()
        compiled.clear()
        return sw.tile.link(tile_layer.source(mm), [mm])

    prebuilt = linked()
    assert compiled == ["source.cu"]
    monkeypatch.setattr(source, "file_name", lambda mm, direction: f"{direction} that is in no wheel")
    by_nvrtc = linked()
    assert len(compiled) == 1 + len(mm.plans)
    instructions = machine_code.matmul_instructions(prebuilt.cubin)
    assert instructions == machine_code.matmul_instructions(by_nvrtc.cubin) != {}
    assert machine_code.functions(prebuilt.cubin) == ["layer"]
