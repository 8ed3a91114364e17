"""Files of the package that are damaged, edited or of another build are refused, by name."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import types

import pytest
import small_package as small

from stoneware.errors import TableError
from stoneware.kernels import aot_kernels, manifest
from stoneware.runtime import package_files
from stoneware.runtime.device import DRIVER_MODULE

KERNEL = small.triton().kernel
DEEP = "[" * 200_000

DESCRIPTION = {
    "symbol": "scaled_mm",
    "parameters": "P" * 6 + "i" * 9 + "PP",
    "block_threads": 128,
    "shared_bytes": 1024,
    "config": {"tile": [1, 1, 1]},
}


@pytest.fixture
def driver(monkeypatch):
    """A driver module whose kernels are the arguments they are made of."""
    module = types.ModuleType(DRIVER_MODULE)
    module.Kernel = lambda *arguments: types.SimpleNamespace(launch=arguments)
    monkeypatch.setitem(sys.modules, DRIVER_MODULE, module)
    return module


@pytest.fixture
def load(package, driver):
    """Installs a kernel with this launch description and loads it."""

    def run(text: str, *, description_sha256: str | None = None, **changes):
        data = text.encode()
        record = {
            "id": KERNEL,
            "op": "scaled_mm",
            "backend": "triton_aot",
            "arch": "sm_90",
            "config": {"tile": [64, 128, 128]},
            "sha256": hashlib.sha256(b"cubin").hexdigest(),
            "size_bytes": 5,
            "description_sha256": description_sha256 or hashlib.sha256(data).hexdigest(),
            **changes,
        }
        (package / "kernel_manifest.json").write_text(small.manifest_text([record]))
        (package / "cubins").mkdir(exist_ok=True)
        (package / "cubins" / f"{KERNEL}.cubin").write_bytes(b"cubin")
        (package / "cubins" / f"{KERNEL}.json").write_bytes(data)
        small.forget()
        aot_kernels.load.cache_clear()
        return aot_kernels.load(KERNEL, 15)

    yield run
    aot_kernels.load.cache_clear()


def test_edited_manifest_is_refused_with_both_digests(package):
    path = package / "kernel_manifest.json"
    manifest.read_manifest(path)
    path.write_text(path.read_text().replace('"swap_ab": true', '"swap_ab": false', 1))
    with pytest.raises(TableError) as caught:
        manifest.read_manifest(path)
    message = str(caught.value)
    for part in (f"{path}: expected content with the digest ", "found content with ", "reinstall the"):
        assert part in message


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"schema": 1, "digest": "", "kernels": 3}'])
def test_manifest_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(TableError, match="m.json: .*; reinstall"):
        manifest.read_manifest(tmp_path / "m.json")


@pytest.fixture
def alarm():
    """Ends what waits for longer than 10 s."""

    def late(*unused):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_in_the_place_of_the_manifest_is_refused_and_not_waited_for(tmp_path, alarm):
    os.mkfifo(tmp_path / "m.json")
    with pytest.raises(TableError, match="m.json: .*must be a regular file, and is a pipe .*reins"):
        manifest.read_manifest(tmp_path / "m.json")


@pytest.mark.parametrize("suffix", ["cubin", "json"])
def test_a_pipe_in_the_place_of_a_kernel_is_refused_and_not_waited_for(load, package, suffix, alarm):
    load(json.dumps(DESCRIPTION))
    aot_kernels.load.cache_clear()
    file = package / "cubins" / f"{KERNEL}.{suffix}"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TableError, match=f"{KERNEL}.{suffix}: .*is a pipe .*; reinstall"):
        aot_kernels.load(KERNEL, 15)


def test_kernel_takes_its_tile_from_the_manifest(load):
    kernel = load(json.dumps(DESCRIPTION))
    assert (kernel.tile, kernel.num_scratch) == ((64, 128, 128), 2)


def test_edited_launch_description_is_refused(load):
    listed = hashlib.sha256(json.dumps(DESCRIPTION).encode()).hexdigest()
    with pytest.raises(TableError, match=rf"{KERNEL}.json: its sha256=.* must be {listed}"):
        load(json.dumps({**DESCRIPTION, "shared_bytes": 0}), description_sha256=listed)


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "[]",
        "null",
        "{}",
        "\x00",
        *(
            json.dumps({**DESCRIPTION, **changes})
            for changes in (
                {"symbol": 7},
                {"symbol": ""},
                {"parameters": None},
                {"parameters": ["P"] * 17},
                {"parameters": "P" * 14 + "zP"},
                {"block_threads": "128"},
                {"block_threads": 0},
                {"block_threads": True},
                {"shared_bytes": -1},
                {"shared_bytes": 1.5},
                {"shared_bytes": 2**40},
            )
        ),
    ],
)
def test_malformed_launch_description_is_refused_by_name(load, text):
    with pytest.raises(TableError, match=rf"{KERNEL}.json: .*; reinstall"):
        load(text)


@pytest.mark.parametrize("tile", [None, [1, 2], [64, 128, "128"], [64, 0, 128], 64])
def test_malformed_tile_is_refused(load, tile):
    with pytest.raises(TableError, match="tile="):
        load(json.dumps(DESCRIPTION), config={"tile": tile})


def test_description_that_the_driver_module_refuses_is_a_damaged_file(load, driver):
    def refuse(*arguments):
        raise ValueError("no such symbol")

    driver.Kernel = refuse
    with pytest.raises(TableError, match=rf"{KERNEL}.json: .*no such symbol; reinstall"):
        load(json.dumps(DESCRIPTION))


def test_importlib_metadata_is_asked_only_where_a_distribution_names_the_group(tmp_path, monkeypatch):
    distribution = tmp_path / "acme-1.0.dist-info"
    distribution.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone")])
    assert not package_files.may_have_entry_points("stoneware.tuning_tables")
    (distribution / "entry_points.txt").write_text("[console_scripts]\nacme = acme:main\n")
    assert not package_files.may_have_entry_points("stoneware.tuning_tables")
    (distribution / "entry_points.txt").write_text("[stoneware.tuning_tables]\nacme = acme.tables\n")
    assert package_files.may_have_entry_points("stoneware.tuning_tables")
    archive = tmp_path / "packages.zip"
    archive.write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(archive)])
    assert package_files.may_have_entry_points("stoneware.tuning_tables")
