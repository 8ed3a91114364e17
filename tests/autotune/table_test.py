"""The table: parsed entry by entry, of ops and of decorated kernels; what is wrong in it is refused."""

from __future__ import annotations

import json

import pytest
import small_package as small
from small_kernel import NEW, OLD, OP, kernel_config, kernel_sample, write_kernel

from stoneware.errors import TableError
from stoneware.tuning import table_file, table_view
from stoneware.tuning.bake import bake

BIG, TINY = small.cutlass(small.BIG), small.cutlass(small.TINY)


def test_only_the_entry_that_is_asked_is_parsed(tmp_path, monkeypatch):
    samples = [
        small.sample(TINY, 10.0, m=m, scales=scales)
        for m in (1, 16) for scales in ("row", "tensor")
    ]
    baked = small.bake_samples(tmp_path, samples)
    parsed = []
    whole = table_view.json.loads
    monkeypatch.setattr(
        table_view.json, "loads", lambda text: parsed.append(text) or whole(text))
    device = baked.devices[0]
    assert device.num_entries == 8
    assert parsed == []
    assert device.entry(small.key(m=16)).choices[0].config == TINY
    assert len(parsed) == 1
    device.entry(small.key(m=1))
    assert len(parsed) == 2, "each entry by itself"
    assert device.entry(small.key(m=116)) is device.entry(small.key(m=6)) is None
    assert len(parsed) == 2


def test_every_entry_comes_back(tmp_path):
    samples = [
        small.sample(config, us, m=m, n=n, spread_us=0.25)
        for m in (1, 16, 512) for n in (2112, 4096) for config, us in ((TINY, 9.5), (BIG, 12.5))
    ]
    device = small.bake_samples(tmp_path, samples).devices[0]
    entries = {entry.key: entry for entry in device.entries()}
    assert len(entries) == 12, "each shape with both outputs"
    for sample in samples:
        [choice] = [one for one in entries[sample.key].choices if one.config == sample.config]
        assert (choice.median_us, choice.spread_us, choice.run) == (
            sample.median_us, sample.spread_us, "run-1")
        assert device.entry(sample.key) == entries[sample.key]
    assert device.entry(small.key(m=2)) is None
    assert device.entry(small.key(out_dtype="fp32")) is None


def test_decorated_kernel_is_baked_and_read_under_a_name_without_a_colon(tmp_path):
    files = write_kernel(tmp_path, [
        kernel_sample(64, 9.0), kernel_sample(128, 7.0), kernel_sample(256, 5.0, status="hung"),
    ])
    assert files[0].name == "acme.kernels.softmax.jsonl"
    assert table_file.file_name(OP) == "acme.kernels.softmax.table"
    baked = table_file.decode(bake(OP, files, kernels=[OP]), "x", OP)
    entry = baked.devices[0].entry(kernel_sample(64, 1.0).key)
    assert [choice.config for choice in entry.choices] == [kernel_config(128), kernel_config(64)]
    assert entry.choices[0].kernel_sha256 == NEW


def test_samples_of_two_sources_of_a_kernel_stay_apart(tmp_path):
    runs = [small.run("run-1", date="2026-11-22"), small.run("run-2", date="2026-11-21")]
    files = write_kernel(tmp_path, [
        kernel_sample(64, 9.0), kernel_sample(128, 7.0),
        kernel_sample(64, 1.0, sha256=OLD, run="run-2"),
    ], runs=runs)
    device = table_file.decode(bake(OP, files, kernels=[OP]), "x", OP).devices[0]
    key = kernel_sample(64, 1.0).key

    def chosen(sha256):
        choice = device.entry(key, sha256).choices[0]
        return choice.config, choice.is_drifted

    assert chosen(NEW) == (kernel_config(128), False)
    assert chosen(OLD) == (kernel_config(64), False)
    assert chosen("c" * 64) == (kernel_config(128), True), "the newest, and drifted"
    assert device.num_entries == 1


def test_kernel_that_is_not_named_is_refused_with_file_line_and_remedy(tmp_path):
    files = write_kernel(tmp_path, [kernel_sample(64, 1.0)])
    with pytest.raises(TableError) as caught:
        bake(OP, files, kernels=["acme:other"])
    for part in (f"{files[0]}:1: kernel {OP!r} is none", "acme:other", "or name it"):
        assert part in str(caught.value)


def test_kernel_in_a_file_of_another_op_is_refused(tmp_path):
    files = small.write_device(tmp_path, [kernel_sample(64, 1.0)])
    with pytest.raises(TableError) as caught:
        bake("scaled_mm", files, small.manifest())
    assert f"jsonl:1: op={OP!r} in a file of scaled_mm; move the sample to " in str(caught.value)


def test_other_op_than_ours_and_missing_manifest_are_refused():
    message = "op='conv' must be one of scaled_mm, matmul, grouped_mm, or a decorated kernel"
    with pytest.raises(ValueError, match=message):
        bake("conv", [], small.manifest())
    with pytest.raises(ValueError, match="manifest=None"):
        bake("scaled_mm", [])


def test_sample_of_the_kernel_as_it_is_now_comes_before_a_newer_one_of_other_bytes(tmp_path):
    runs = [small.run("old", date="2026-11-21"), small.run("new", date="2026-11-22")]
    baked = small.bake_samples(tmp_path, [
        small.sample(TINY, 10.0, run="old"),
        small.sample(TINY, 5.0, run="new", kernel_sha256="0" * 64),
    ], runs=runs)
    [choice] = small.entry_at(baked, m=16).choices
    assert (choice.run, choice.is_drifted) == ("old", False)
