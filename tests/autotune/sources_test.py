"""The sources of entries, and in which order a look-up asks them."""

from __future__ import annotations

import dataclasses
import gc
import logging
import subprocess
import sys
import weakref

import pytest
import small_package as small
from small_kernel import OP, kernel_config, kernel_sample, write_kernel

import stoneware as sw
from stoneware.kernels.key import KernelKey
from stoneware.ops.scaled_mm.api import OPERATION
from stoneware.runtime import package_files
from stoneware.runtime.device import Device
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import lookup, merge, policy, store_table, table_file
from stoneware.tuning import sources as table_sources
from stoneware.tuning.bake import bake
from stoneware.tuning.store import Store, user_store
from stoneware.tuning.table import Table

BIG, TINY, SMALL = (small.sm90(suffix) for suffix in (small.BIG, small.TINY, small.SMALL))
H200 = Device(fingerprint=small.H200)


def decide(*, m=16, n=4096, k=4096, device=H200, **changes):
    problem = dataclasses.replace(Problem.dense(m=m, n=n, k=k), **changes)
    return OPERATION.decide(problem, device)


def store_samples(*samples, run=None):
    user_store().add(run or small.run(), samples)


def bake_store():
    store_table.bake(user_store().path)


def baked(tmp_path, *samples, **device) -> Table:
    return small.bake_samples(tmp_path / "baked", samples, **device)


def install_package(site, name, entries, *, inner=()):
    """An installed package with tables: its files, and the metadata that pip writes. It cannot be
    imported."""
    folder = site.joinpath(f"{name}_kernels", *inner)
    folder.mkdir(parents=True)
    (site / f"{name}_kernels" / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    for op, data in entries.items():
        (folder / table_file.file_name(op)).write_bytes(data)
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    value = ".".join((f"{name}_kernels", *inner))
    (metadata / "entry_points.txt").write_text(f"[{table_sources.GROUP}]\n{name} = {value}\n")
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path for installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    table_sources.forget()
    yield folder
    table_sources.forget()


def packaged_bytes(tmp_path, *samples, folder="theirs") -> bytes:
    return bake("scaled_mm", small.write_device(tmp_path / folder, samples), small.manifest())


def test_each_source_comes_before_the_next(package, tmp_path, site):
    """m=16 is in all of them; the wheel has TINY."""
    data = packaged_bytes(tmp_path, small.sample(small.VENDOR, 1.0), small.sample(BIG, 1.0, m=8))
    install_package(site, "acme", {"scaled_mm": data})
    assert (decide().config, decide().source) == (TINY, "wheel")
    assert (decide(m=8).config, decide(m=8).source) == (BIG, "package acme")

    store_samples(small.sample(SMALL, 99.0))
    assert (decide().config, decide().source) == (SMALL, "user's store")

    policy.add_to_memory(small.run("run-2"), [small.sample(small.triton(), 99.0, run="run-2")])
    assert (decide().config, decide().source) == (small.triton(), "memory")

    with sw.tuning("off", overlay=baked(tmp_path, small.sample(BIG, 99.0))):
        assert (decide().config, decide().source) == (BIG, "overlay")
        assert [one.name for one in table_sources.sources("scaled_mm")] == [
            "overlay",
            "memory",
            "user's store",
            "wheel",
            "package acme",
        ]
    assert decide().source == "memory"
    assert OPERATION.decide(Problem.dense(m=16, n=4096, k=4096), H200, config=TINY).step == "argument"


def test_exact_shape_of_the_last_source_comes_before_the_nearest_m_of_the_first(package, tmp_path):
    store_samples(small.sample(BIG, 1.0, m=17))
    assert (decide(m=16).source, decide(m=16).step) == ("wheel", "exact")


def test_nearest_m_and_nearest_shape_are_taken_over_all_sources(package, tmp_path):
    store_samples(small.sample(BIG, 1.0, m=100), small.sample(SMALL, 1.0, m=20, n=8192))
    bake_store()
    assert (decide(m=90).config, decide(m=90).source) == (BIG, "user's store")
    assert (decide(m=15).config, decide(m=15).source) == (TINY, "wheel")
    assert (decide(m=101).config, decide(m=101).source) == (small.VENDOR, "wheel")
    assert (decide(m=999).config, decide(m=999).source) == (small.VENDOR, "wheel")
    assert decide(m=20, n=7168).source == "user's store"
    assert decide(m=16, n=4112).source == "wheel"


def test_stale_entry_of_the_store_yields_to_one_of_the_wheel(package):
    """After an upgrade the store has timings of the kernels before it."""
    store_samples(small.sample(BIG, 1.0, kernel_sha256="0" * 64), small.sample(BIG, 1.0, m=8, kernel_sha256="0" * 64))
    assert (decide().source, decide().grade) == ("wheel", "exact")
    assert (decide(m=8).source, decide(m=8).grade) == ("user's store", "stale kernel")


def test_entry_of_the_store_with_another_dtype_yields_to_one_with_the_very_dtype(package, tmp_path):
    install = small.sm90(small.BIG, "fp16")
    data = packaged_bytes(tmp_path, small.sample(install, 1.0, out_dtype="fp16"))
    (package / "tables" / "scaled_mm.table").write_bytes(data)
    small.forget()
    store_samples(small.sample(TINY, 1.0))
    assert (decide(out_dtype="fp16").source, decide(out_dtype="fp16").grade) == ("wheel", "exact")


def test_entry_of_an_overlay_with_another_dtype_yields_to_one_with_the_very_dtype(package, tmp_path):
    store_samples(small.sample(small.sm90(small.BIG, "fp16"), 1.0, out_dtype="fp16"))
    with sw.tuning("off", overlay=baked(tmp_path, small.sample(TINY, 1.0))):
        assert (decide(out_dtype="fp16").source, decide(out_dtype="fp16").grade) == ("user's store", "exact")
        assert decide(out_dtype="bf16").source == "overlay"


def test_overlay_stays_on_top_even_stale(package, tmp_path):
    overlay = baked(tmp_path, small.sample(BIG, 1.0, kernel_sha256="0" * 64))
    with sw.tuning("off", overlay=overlay):
        assert (decide().source, decide().grade) == ("overlay", "stale kernel")


def test_kernel_of_the_store_that_this_build_lacks_is_left_out(package):
    gone = small.sm90("256x256x128_2x1x1_cooperative")
    store_samples(small.sample(gone, 0.1), small.sample(BIG, 1.0))
    decision = decide()
    assert (decision.config, decision.source) == (BIG, "user's store")
    assert decision.runners_up == ()


def test_store_of_another_device_answers_after_this_ones_nearest_shape(package):
    """Such as a home folder that several machines share."""
    run = small.run("run-9", device=small.H100)
    store_samples(small.sample(BIG, 1.0, m=20, run="run-9"), run=run)
    assert (decide(m=20).source, decide(m=20).grade) == ("wheel", "nearest m")
    on_h100 = decide(m=20, device=Device(fingerprint=small.H100))
    assert (on_h100.config, on_h100.source, on_h100.grade) == (BIG, "user's store", "exact")


def test_power_limit_is_asked_where_two_devices_differ_in_nothing_else(package, monkeypatch):
    low, high = (dataclasses.replace(small.H200, power_limit_w=watts) for watts in (500, 700))
    store_samples(small.sample(BIG, 1.0, run="low"), run=small.run("low", low))
    asked = []
    monkeypatch.setattr("stoneware.runtime.nvml.power_limit_w", lambda ordinal: asked.append(ordinal) or 700)
    monkeypatch.setattr("stoneware.ops.scaled_mm.sm90.BACKEND.supports", lambda *_: None)
    h200 = dataclasses.replace(H200, ordinal=3)
    assert decide(device=h200).config == BIG
    assert asked == [], "one device is known"
    store_samples(small.sample(SMALL, 1.0, run="high"), run=small.run("high", high))
    assert decide(device=h200).config == SMALL
    assert asked == [3]


def test_without_a_store_nothing_is_opened_and_packages_are_not_asked(package):
    program = (
        "import sys, small_package as small, importlib.metadata as metadata\n"
        "from pathlib import Path\n"
        "from stoneware.runtime import package_files\n"
        f"package_files.ROOT = Path({str(package)!r})\n"
        "from stoneware.ops.scaled_mm.api import OPERATION, Problem\n"
        "from stoneware.runtime.device import Device\n"
        "def entry_points(*_, **__): raise AssertionError('packages were asked')\n"
        "metadata.entry_points = package_files.may_have_entry_points = entry_points\n"
        "device = Device(fingerprint=small.H200)\n"
        "decision = OPERATION.decide(Problem.dense(m=16, n=4096, k=4096), device)\n"
        "print(decision.source, 'sqlite3' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=small.environment(package), check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["wheel", "False"]


def test_package_is_found_by_its_metadata_and_not_imported(package, tmp_path, site):
    data = packaged_bytes(tmp_path, small.sample(BIG, 1.0, m=8))
    install_package(site, "acme", {"scaled_mm": data}, inner=("gpu", "tables"))
    assert [one.name for one in table_sources.packages("scaled_mm")] == ["package acme"]
    assert table_sources.packages("matmul") == ()
    assert "acme_kernels" not in sys.modules


def test_packages_come_in_the_order_of_their_names(package, tmp_path, site):
    for name, config in (("zeta", BIG), ("acme", SMALL)):
        data = packaged_bytes(tmp_path, small.sample(config, 1.0, m=8), folder=name)
        install_package(site, name, {"scaled_mm": data})
    assert (decide(m=8).config, decide(m=8).source) == (SMALL, "package acme")


def test_damaged_table_of_a_package_is_skipped_and_reported_once(package, tmp_path, site, caplog):
    data = packaged_bytes(tmp_path, small.sample(BIG, 1.0, m=8))
    damaged = install_package(site, "acme", {"scaled_mm": data[:-5]})
    install_package(site, "zeta", {"scaled_mm": data})
    for _ in range(2):
        assert decide(m=8).source == "package zeta"
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(damaged / "scaled_mm.table") in record.getMessage()
    assert "package acme is skipped" in record.getMessage()


def test_entry_point_of_a_package_that_is_not_there_is_reported(package, site, caplog):
    folder = install_package(site, "acme", {})
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(f"[{table_sources.GROUP}]\nacme = gone.tables\n")
    assert folder.is_dir()
    assert table_sources.packages("scaled_mm") == ()
    assert "'gone.tables'" in caplog.text


def test_entry_points_are_looked_for_once(package, monkeypatch):
    asked = []
    whole = package_files.may_have_entry_points
    monkeypatch.setattr(package_files, "may_have_entry_points", lambda group: asked.append(group) or whole(group))
    table_sources.forget()
    for m in (3, 5, 7):
        decide(m=m)
    table_sources.packages("matmul")
    assert asked == [table_sources.GROUP]


@pytest.mark.parametrize("kind", ["folder", "folder of folders", "table", "store", "Table"])
def test_overlay_may_be_samples_a_store_or_a_table(package, tmp_path, kind):
    sample = small.sample(BIG, 9.0)
    files = small.write_device(tmp_path / "all" / "h200", [sample])
    data = bake("scaled_mm", files, small.manifest())
    (tmp_path / "t.table").write_bytes(data)
    Store(tmp_path / "other.sqlite3").add(small.run(), [sample])
    overlay = {
        "folder": tmp_path / "all" / "h200",
        "folder of folders": str(tmp_path / "all"),
        "table": tmp_path / "t.table",
        "store": tmp_path / "other.sqlite3",
        "Table": table_file.decode(data, "t", "scaled_mm"),
    }[kind]
    with sw.tuning("off", overlay=overlay):
        assert (decide().config, decide().source, decide().grade) == (BIG, "overlay", "exact")


def find(key, sources, sha256=""):
    return lookup.find(key, small.H200, sources, sha256)


@pytest.fixture
def kernel_sources(tmp_path):
    """Sources of a decorated kernel: 64 is fastest at M=16, 128 at M=512."""
    files = write_kernel(
        tmp_path / "kernel",
        [
            kernel_sample(64, 1.0),
            kernel_sample(128, 2.0),
            kernel_sample(64, 9.0, m=512),
            kernel_sample(128, 5.0, m=512),
        ],
    )
    return [table_sources.Source("wheel", table_file.decode(bake(OP, files), "x", OP))]


@pytest.mark.parametrize(
    ("m", "block", "step"), [(16, 64, "exact"), (512, 128, "exact"), (100, 128, "nearest m"), (1, 64, "nearest m")]
)
def test_decorated_kernel_is_found_like_an_op(kernel_sources, m, block, step):
    found = find(kernel_sample(64, 1.0, m=m).key, kernel_sources, "a" * 64)
    assert (found.choice.config, found.step, found.grade) == (kernel_config(block), step, step)
    assert found.source == "wheel"


def test_decorated_kernel_with_other_sizes_gets_the_nearest_shape(kernel_sources):
    key = kernel_sample(64, 1.0, m=400).key
    found = find(dataclasses.replace(key, values=(400, 2048)), kernel_sources, "a" * 64)
    assert (found.choice.config, found.step) == (kernel_config(128), "nearest shape")


def test_decorated_kernel_of_other_dtypes_is_another_family(kernel_sources):
    key = dataclasses.replace(kernel_sample(64, 1.0).key, dtypes=(("x", "fp32"),))
    assert find(key, kernel_sources, "a" * 64) is None


def test_decorated_kernel_with_another_source_is_stale(kernel_sources):
    found = find(kernel_sample(64, 1.0).key, kernel_sources, "c" * 64)
    assert (found.choice.config, found.grade) == (kernel_config(64), "stale kernel")


def test_decorated_kernel_without_sizes_is_found_exactly_or_not(tmp_path):
    key = KernelKey(op=OP, names=("causal",), values=(True,), dtypes=())
    files = write_kernel(tmp_path, [kernel_sample(64, 1.0, key=key)])
    baked = table_file.decode(bake(OP, files), "x", OP)
    sources = [table_sources.Source("wheel", baked)]
    assert find(key, sources).step == "exact"
    assert find(dataclasses.replace(key, values=(False,)), sources) is None
    assert [entry.key for entry in baked.devices[0].entries()] == [key]


def test_negative_and_zero_sizes_of_a_decorated_kernel_are_compared_too(tmp_path):
    def sample(block, offset):
        key = KernelKey(op=OP, names=("offset",), values=(offset,), dtypes=())
        return kernel_sample(block, 1.0, key=key)

    files = write_kernel(tmp_path, [sample(64, -100), sample(128, 0), sample(256, 100)])
    sources = [table_sources.Source("wheel", table_file.decode(bake(OP, files), "x", OP))]
    for offset, block in ((-50, 64), (-1, 128), (1, 128), (90, 256)):
        assert find(sample(64, offset).key, sources).choice.config == kernel_config(block)


def test_device_that_nobody_measured_gets_the_heuristic(package):
    device = Device(fingerprint=small.L40)
    decision = decide(device=device)
    assert (decision.config, decision.step) == (small.VENDOR, "heuristic")
    # One scale of each kind: the vendor library refuses.
    decision = decide(device=device, scale_a="tensor", scale_b="row")
    assert decision.config == small.triton(arch="sm89")
    assert (decision.step, decision.grade) == ("heuristic", "heuristic")


def test_an_overlay_that_changes_nothing_is_said_once(package, tmp_path, caplog):
    empty, damaged = tmp_path / "empty.sqlite3", tmp_path / "damaged.sqlite3"
    empty.write_bytes(b"")
    damaged.write_bytes(b"not a database" * 1000)
    for path in (empty, damaged):
        caplog.clear()
        for _ in range(2):
            with sw.tuning("off", overlay=path):
                decide()
        said = [record.message for record in caplog.records if "changes nothing" in record.message]
        assert len(said) == 1 and str(path) in said[0]


@pytest.fixture
def folder(tmp_path):
    """A folder of samples, with BIG the fastest."""
    small.write_device(tmp_path / "h200", [small.sample(BIG, 9.0)])
    return tmp_path / "h200"


def test_folder_of_an_overlay_is_read_once_and_again_when_it_has_changed(package, folder, tmp_path, monkeypatch):
    read = []
    whole = merge.read_source
    monkeypatch.setattr(merge, "read_source", lambda path: read.append(1) or whole(path))
    (tmp_path / "link").symlink_to(folder)
    states = set()
    for path in (folder, str(folder), tmp_path / "link", folder / ".." / folder.name):
        with sw.tuning("off", overlay=path):
            assert decide().config == BIG
            states.add(policy.state())
    assert len(states) == len(read) == 1, "plans of the first are found in the others"
    for number, (config, us) in enumerate(((SMALL, 9.0), (SMALL, 8.0), (TINY, 8.0)), start=2):
        small.write_device(folder, [small.sample(config, us)])
        with sw.tuning("off", overlay=folder):
            assert (decide().config, decide().chosen.median_us) == (config, us)
        assert len(read) == number


def test_table_and_store_of_an_overlay_are_read_again_when_they_have_changed(package, tmp_path):
    path, store = tmp_path / "t.table", Store(tmp_path / "other.sqlite3")
    for position, config in enumerate((BIG, SMALL)):
        path.write_bytes(packaged_bytes(tmp_path, small.sample(config, 9.0)))
        store.add(small.run(), [small.sample(config, 9.0 - position)])
        for overlay in (path, store.path):
            with sw.tuning("off", overlay=overlay):
                assert (decide().config, decide().source) == (config, "overlay")


def test_overlays_that_were_used_long_ago_are_not_kept(package, folder):
    tables = []
    for number in range(40):
        small.write_device(folder / str(number), [small.sample(BIG, 1.0 + number)])
        with sw.tuning("off", overlay=folder / str(number)):
            assert decide().chosen.median_us == 1.0 + number
            tables.append(weakref.ref(policy.state().overlay["scaled_mm"]))
    gc.collect()
    assert sum(table() is not None for table in tables) <= 16
    assert tables[-1]() is not None


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".table", "x" * 5000 + ".sqlite3"])
def test_overlay_with_a_name_that_no_file_has_is_a_value_error(package, name):
    with pytest.raises(ValueError, match="overlay='xxx.* must be a ") as caught, sw.tuning("off", overlay=name):
        pass
    assert len(str(caught.value)) < 500
