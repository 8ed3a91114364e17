"""Epilogues are linked into open kernels, kept on the disk, checked, and never in the way."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from conftest import OPEN_BUILTINS
from torch.nn import functional

import stoneware as sw
from stoneware import explanation
from stoneware.epilogue import linked, source, trace
from stoneware.errors import LinkError, UnsupportedError
from stoneware.kernels import manifest
from stoneware.linking import cubins, toolchain
from stoneware.ops import fused
from stoneware.runtime import regular_file

KERNELS = sorted(manifest.packaged().open)
KERNEL = KERNELS[0]


def text(factor=1.0):
    expression = trace.trace(
        lambda acc, r: functional.silu(acc * factor) + r, (24, 64), (torch.zeros(24, 64),), torch.device("cpu")
    )
    return source.write(expression, main=0, has_pairs=[True]).text


@pytest.mark.parametrize("kernel", KERNELS[:: max(1, len(KERNELS) // 8)])
def test_an_epilogue_is_linked_into_a_kernel(kernel):
    assert linked.cubin(kernel, text()).startswith(b"\x7fELF")


def test_a_linked_cubin_is_kept_and_found_again(cache, monkeypatch):
    first = linked.cubin(KERNEL, text())
    assert len(list((cache / "linked").iterdir())) == 1
    monkeypatch.setattr(toolchain, "link", lambda *_, **__: pytest.fail("linked again"))
    assert linked.cubin(KERNEL, text()) == first


@pytest.mark.parametrize("damage", [b"", b"nonsense", None], ids=["empty", "nonsense", "flipped"])
def test_a_damaged_cubin_is_reported_and_linked_anew(cache, caplog, monkeypatch, damage):
    monkeypatch.setattr(cubins.FILES, "reported", set())
    first = linked.cubin(KERNEL, text())
    [file] = (cache / "linked").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data) if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert linked.cubin(KERNEL, text()) == first
    assert str(file) in caplog.text
    assert linked.cubins.read(file.stem) == first


def test_a_folder_that_cannot_be_written_costs_the_disk_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert linked.cubin(KERNEL, text()).startswith(b"\x7fELF")


def test_what_is_linked_depends_on_kernel_text_and_versions(monkeypatch):
    names = {
        linked._name_on_disk(KERNELS[0], text()),
        linked._name_on_disk(KERNELS[1], text()),
        linked._name_on_disk(KERNELS[0], text(2.0)),
    }
    monkeypatch.setattr(toolchain, "installed", lambda: "other versions")
    names.add(linked._name_on_disk(KERNELS[0], text()))
    assert len(names) == 4


def test_no_two_lists_of_parts_have_one_digest():
    assert cubins.digest_of_parts(["ab", "c"]) != cubins.digest_of_parts(["a", "bc"])


def test_a_link_in_the_background_is_ready_after_waiting():
    assert linked.soon(KERNEL, text(3.0)) is None
    assert linked.wait(120)
    assert linked.soon(KERNEL, text(3.0)) is not None


def test_a_forked_child_links_for_itself():
    linked.soon(KERNEL, text(5.0))  # starts the thread, which the child does not have
    child = os.fork()
    if child == 0:
        linked.soon(KERNEL, text(6.0))
        is_done = linked.wait(120) and linked.soon(KERNEL, text(6.0)) is not None
        os._exit(0 if is_done else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert linked.wait(120)


def test_what_cannot_be_linked_is_logged_once_and_stays_unfused(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert linked.soon(KERNEL, "this is no CUDA C++") is None
            assert linked.wait(120)
    assert sum("stays unfused" in record.message for record in caplog.records) == 1
    assert linked.has_failed(KERNEL, "this is no CUDA C++")
    with pytest.raises(LinkError, match="NVRTC cannot compile"):
        linked.now(KERNEL, "this is no CUDA C++")


def test_many_threads_link_one_epilogue():
    found = []
    threads = [threading.Thread(target=lambda: found.append(linked.now(KERNEL, text(4.0)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(map(id, found))) == 1


def test_sixteen_processes_link_one_epilogue_and_killed_ones_leave_nothing_wrong(cache, tmp_path):
    written, expected = tmp_path / "text.cu", linked.cubin(KERNEL, text(8.0))
    [file] = (cache / "linked").iterdir()
    file.unlink()
    written.write_text(text(8.0))
    program = (
        f"{OPEN_BUILTINS}import hashlib, pathlib, sys\nfrom stoneware.epilogue import linked\n"
        "print('started', flush=True)\n"
        "print(hashlib.sha256(linked.cubin(sys.argv[1], pathlib.Path(sys.argv[2]).read_text())).hexdigest())"
    )
    command = [sys.executable, "-c", program, KERNEL, str(written)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    for position, process in enumerate(processes[::2]):
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        time.sleep(0.05 * position)  # somewhere in the link, or behind it
        process.kill()
    outputs = [process.communicate(timeout=120)[0] for process in processes[1::2]]
    assert {output.split()[1] for output in outputs} == {hashlib.sha256(expected).hexdigest()}
    assert all(process.returncode == 0 for process in processes[1::2])
    for process in processes[::2]:
        process.communicate()
    assert cubins.read(file.stem) == expected
    drafts = [path for path in (cache / "linked").iterdir() if path != file]
    assert all(path.name.startswith(regular_file.DRAFT_PREFIX) for path in drafts)


def test_without_the_libraries_an_epilogue_stays_unfused(monkeypatch, caplog):
    def installed():
        raise UnsupportedError("linking needs NVRTC")

    monkeypatch.setattr(toolchain, "installed", installed)
    with caplog.at_level(logging.WARNING):
        assert linked.soon(KERNEL, text(7.0)) is None and linked.soon(KERNEL, text(7.0)) is None
    assert caplog.text.count("linking needs NVRTC") == 1


@pytest.fixture
def too_old(monkeypatch):
    """Makes a library one of CUDA 12.8, such as torch for CUDA 12 brings."""

    def make(module, **functions):
        old = types.SimpleNamespace(**{name: lambda result=result: result for name, result in functions.items()})
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{module}", old)
        toolchain._nvrtc.cache_clear()
        toolchain._nvjitlink.cache_clear()

    yield make
    toolchain._nvrtc.cache_clear()
    toolchain._nvjitlink.cache_clear()


def test_a_library_that_is_missing_is_named_in_one_line(too_old):
    def fail():
        raise RuntimeError('Failure finding "libnvrtc.so"\n  listdir("/usr/lib"):\n    libc.so')

    too_old("nvrtc", nvrtcVersion=None)
    sys.modules["cuda.bindings.nvrtc"].nvrtcVersion = fail
    with pytest.raises(UnsupportedError) as caught:
        toolchain._nvrtc()
    assert 'RuntimeError: Failure finding "libnvrtc.so"; install torch' in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "version", "name"),
    [("nvjitlink", {"version": (12, 8)}, "nvJitLink"), ("nvrtc", {"nvrtcVersion": (0, 12, 8)}, "NVRTC")],
)
def test_a_library_that_is_too_old_is_refused_with_the_remedy(too_old, module, version, name):
    too_old(module, **version)
    expected = rf"{name} must be of CUDA 13\.0 or later, and is of 12\.8; install torch for CUDA 13"
    with pytest.raises(UnsupportedError, match=expected):
        linked.now(KERNEL, text(9.0))


def test_a_linker_that_is_too_old_costs_the_fusion_alone(too_old, cache, caplog, monkeypatch):
    kept = linked.cubin(KERNEL, text(10.0))
    files = {file: file.read_bytes() for file in cache.rglob("*.cubin")}
    too_old("nvjitlink", version=(12, 8))
    h200 = explanation.device_of("matmul", "NVIDIA H200")
    monkeypatch.setattr(fused._FusedCalls, "_check", lambda *_: h200)
    monkeypatch.setattr(linked, "_logged", set())
    a, weight = torch.randn(24, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    acc = a.float() @ weight.float().t()
    with caplog.at_level(logging.WARNING, "stoneware.epilogue"):
        for function in (torch.relu, torch.tanh, functional.silu):
            for _ in range(3):
                result = sw.matmul(a, weight.t(), epilogue=function)
                assert torch.allclose(result.float(), function(acc), rtol=0.01, atol=0.01)
                assert linked.wait(120)
    [message] = [record.getMessage() for record in caplog.records if record.name == "stoneware.epilogue"]
    assert "epilogues stay unfused" in message and "nvJitLink must be of CUDA 13.0 or later" in message
    assert linked.cubin(KERNEL, text(10.0)) == kept
    assert {file: file.read_bytes() for file in cache.rglob("*.cubin")} == files
