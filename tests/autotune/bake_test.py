"""The bake: pure, honest about the vendor library, and strict about what it is given."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
import small_kernel
import small_package as small

from stoneware.errors import TableError
from stoneware.kernels.manifest import KernelRecord, Manifest, read_manifest, text_of
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import table_file
from stoneware.tuning.bake import bake
from stoneware.tuning.choose import BAND

BIG, TINY = small.sm90(small.BIG), small.sm90(small.TINY)


def test_no_samples_give_a_valid_empty_table():
    baked = table_file.decode(bake("scaled_mm", [], Manifest({})), "x", "scaled_mm")
    assert baked.devices == ()


def test_bytes_do_not_depend_on_order_folder_locale_or_hash_seed(tmp_path):
    samples = [
        small.sample(config, random.uniform(5, 50), m=m, n=n, spread_us=random.random())
        for m in (1, 16, 64, 512)
        for n in (2112, 4096)
        for config in (BIG, TINY, small.triton(), small.VENDOR)
    ]
    files = small.write_device(tmp_path / "one", samples)
    other = small.write_device(
        tmp_path / "one" / "other",
        [small.sample(BIG, 7.0, run="run-2")],
        device=small.H100,
        runs=[small.run("run-2", small.H100)],
    )
    expected = bake("scaled_mm", files + other, small.manifest())

    moved = small.write_device(tmp_path / "an" / "other" / "place", reversed(samples))
    lines = moved[0].read_text().splitlines(keepends=True)
    random.shuffle(lines)
    moved[0].write_text("".join(lines))
    assert bake("scaled_mm", [*other, *reversed(moved)], small.manifest()) == expected

    program = (
        "import sys, small_package as small; from stoneware.tuning.bake import bake; "
        "sys.stdout.buffer.write(bake('scaled_mm', sys.argv[1:], small.manifest()))"
    )
    for seed, language, options in (("1", "C", []), ("2", "de_DE.UTF-8", ["-O"])):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "LC_ALL": language,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        output = subprocess.run(
            [sys.executable, *options, "-c", program, *map(str, files + other)],
            env=environment,
            check=True,
            capture_output=True,
        ).stdout
        assert output == expected


def test_fastest_wins_and_the_others_stay_as_runners_up(tmp_path):
    baked = small.bake_samples(
        tmp_path, [small.sample(BIG, 14.0), small.sample(TINY, 10.0), small.sample(small.VENDOR, 12.0)]
    )
    entry = small.entry_at(baked, m=16)
    assert [choice.config for choice in entry.choices] == [TINY, small.VENDOR, BIG]
    assert entry.rule == "the fastest of 3"


def test_vendor_wins_where_it_is_faster(tmp_path):
    baked = small.bake_samples(tmp_path, [small.sample(BIG, 50.0, m=512), small.sample(small.VENDOR, 40.0, m=512)])
    assert small.entry_at(baked, m=512).choices[0].config == small.VENDOR


def test_near_tie_goes_to_the_canonical_config(tmp_path):
    # At m=16 the canonical config is TINY: its tile covers m and wastes the least.
    samples = [small.sample(BIG, 10.0, spread_us=0.4), small.sample(small.VENDOR, 15.0)]
    near = small.bake_samples(tmp_path / "near", [*samples, small.sample(TINY, 10.15, spread_us=0.4)])
    assert small.entry_at(near, m=16).choices[0].config == TINY
    assert "within 3%" in small.entry_at(near, m=16).rule
    far = small.bake_samples(tmp_path / "far", [*samples, small.sample(TINY, 10.5, spread_us=0.4)])
    assert small.entry_at(far, m=16).choices[0].config == BIG


def test_nothing_slower_than_default_or_vendor_by_more_than_a_tie_is_ever_picked(tmp_path):
    configs = [BIG, TINY, small.sm90(small.SMALL), small.triton(), small.VENDOR]
    samples = [
        small.sample(config, random.uniform(10, 12), spread_us=random.uniform(0, 1), m=m)
        for m in range(1, 200)
        for config in configs
    ]
    baked = small.bake_samples(tmp_path, samples)
    for m in range(1, 200):
        choices = small.entry_at(baked, m=m).choices
        timed = {choice.config: choice for choice in choices}
        canonical = TINY if m <= 16 else small.sm90(small.SMALL) if m <= 64 else BIG
        for other in (timed[small.VENDOR], timed[canonical]):
            assert choices[0].median_us <= other.median_us * (1 + BAND)


@pytest.mark.parametrize("status", ["wrong", "failed", "hung"])
def test_candidate_that_was_wrong_or_failed_is_never_chosen(tmp_path, status):
    baked = small.bake_samples(
        tmp_path,
        [
            small.sample(TINY, 1.0, status=status, detail="seen"),
            small.sample(BIG, 10.0),
            small.sample(TINY, 1.0, m=1, status=status),
        ],
    )
    assert [choice.config for choice in small.entry_at(baked, m=16).choices] == [BIG]
    assert baked.devices[0].block(small.key().kind).sizes == [(4096, 4096, 16)]


def test_newest_run_of_a_candidate_counts(tmp_path):
    runs = [small.run("a", date="2026-11-22"), small.run("b", date="2026-11-21")]
    baked = small.bake_samples(tmp_path, [small.sample(BIG, 5.0, run="b"), small.sample(BIG, 9.0, run="a")], runs=runs)
    (choice,) = small.entry_at(baked, m=16).choices
    assert (choice.run, choice.median_us) == ("a", 9.0)
    assert list(baked.runs) == ["a"]


def test_entries_have_the_dtypes_and_kernels_that_were_measured(tmp_path):
    fp16 = small.sm90(small.BIG, "fp16")
    baked = small.bake_samples(tmp_path, [small.sample(TINY, 10.0), small.sample(fp16, 30.0, out_dtype="fp16")])
    for out_dtype, config in (("bf16", TINY), ("fp16", fp16)):
        entry = small.entry_at(baked, m=16, out_dtype=out_dtype)
        assert [choice.config for choice in entry.choices] == [config]
        assert entry.key.out_dtype == out_dtype


def test_rebuilt_kernel_is_marked_as_stale(tmp_path):
    baked = small.bake_samples(tmp_path, [small.sample(TINY, 10.0, kernel_sha256="0" * 64), small.sample(BIG, 20.0)])
    assert [choice.is_stale for choice in small.entry_at(baked, m=16).choices] == [True, False]


def test_samples_stay_current_as_long_as_the_code_of_a_kernel_is_the_same():
    (record, *_) = small.kernel_records()
    rebuilt = dataclasses.replace(record, sha256="1" * 64, code_sha256=record.sha256)
    changed = dataclasses.replace(record, code_sha256="2" * 64)
    assert rebuilt.measured_sha256 == record.measured_sha256 != changed.measured_sha256


def test_unknown_kernel_is_refused_with_file_line_and_remedy(tmp_path):
    gone = small.sm90("256x128x128_2x1x1_cooperative")
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0), small.sample(gone, 1.0)])
    with pytest.raises(TableError) as caught:
        bake("scaled_mm", files, small.manifest())
    message = str(caught.value)
    assert f"{files[0]}:3: " in message
    assert gone.kernel in message
    assert "drop the samples of removed kernels" in message


def test_kernel_of_another_backend_is_unknown_too(tmp_path):
    swapped = small.Config(backend="triton_aot", kernel=BIG.kernel)
    files = small.write_device(tmp_path, [small.sample(swapped, 1.0)])
    with pytest.raises(TableError, match="not in the kernel manifest"):
        bake("scaled_mm", files, small.manifest())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"run": "gone"}, ": not complete: {folder}/runs.json lacks the runs of 1 of 1 samples, such as 'gone'"),
        ({"op": "matmul"}, ":2: op='matmul' in a file of scaled_mm"),
    ],
)
def test_sample_that_does_not_belong_is_refused(tmp_path, changes, part):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0, **changes)])
    with pytest.raises(TableError) as caught:
        bake("scaled_mm", files, small.manifest())
    assert f"{files[0]}{part.format(folder=tmp_path)}" in str(caught.value)


def test_samples_of_another_device_are_refused(tmp_path):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0)], runs=[small.run(device=small.H100)])
    with pytest.raises(TableError, match="run .* is of NVIDIA H100"):
        bake("scaled_mm", files, small.manifest())


def test_same_measurement_twice_is_refused(tmp_path):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0), small.sample(BIG, 2.0)])
    with pytest.raises(TableError, match=r"jsonl:2: the same measurement as .*jsonl:2"):
        bake("scaled_mm", files, small.manifest())


def test_incomplete_folder_and_unknown_file_are_refused(tmp_path):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0)])
    with pytest.raises(TableError, match="device.json of its folder was not given"):
        bake("scaled_mm", files[:2], small.manifest())
    with pytest.raises(ValueError, match="notes.txt: a sample file is"):
        bake("scaled_mm", [tmp_path / "notes.txt"], small.manifest())


def test_decorated_kernel_without_samples_is_refused_with_the_ops_of_the_samples(tmp_path):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0)])
    with pytest.raises(ValueError) as caught:
        bake("acme.kernels:softmax", files)
    message = str(caught.value)
    assert "op='acme.kernels:softmax' must be an op that the samples have, which are scaled_mm" in message
    assert "correct the name, or give the folder with its acme.kernels.softmax.jsonl" in message
    assert bake("acme.kernels:softmax", [])  # no samples at all are an empty table
    misnamed = small.write_device(tmp_path / "misnamed", [small_kernel.kernel_sample(64, 1.0)], name="softmax.jsonl")
    with pytest.raises(TableError, match=r"softmax.jsonl: has samples of op='acme.*; move them to acme.kernels.soft"):
        bake(small_kernel.OP, misnamed)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"out": None}, "out=None in the config"),
        ({"a": "int3"}, "a='int3' in the config"),
        ({"layout": "xy"}, "layout='xy' in the config"),
        ({"scales": "blocks"}, "scales='blocks' in the config"),
        ({"accumulation": "slwo"}, "accumulation='slwo' in the config"),
        ({"tile": [128, 0, 64]}, "tile=[128, 0, 64] of kernel"),
        ({"tile": None}, "tile=None of kernel"),
    ],
)
def test_triton_kernel_with_an_invalid_config_is_refused(config, words):
    (record,) = [kernel for kernel in small.kernel_records() if kernel.id == small.triton().kernel]
    invalid = dataclasses.replace(record, config={**record.config, **config})
    with pytest.raises(ValueError) as caught:
        bake("scaled_mm", [], Manifest({invalid.id: invalid}))
    message = str(caught.value)
    assert words in message and record.id in message and "must be " in message
    assert "set it in `config` of the kernel's triton_aot" in message


def test_samples_of_a_kernel_that_the_manifest_lists_as_left_out_are_absent(tmp_path):
    samples = [small.sample(BIG, 1.0), small.sample(TINY, 2.0)]
    files = small.write_device(tmp_path / "both", samples)
    built = {id: kernel for id, kernel in small.manifest().kernels.items() if id != BIG.kernel}
    expected = bake("scaled_mm", small.write_device(tmp_path / "one", samples[1:]), Manifest(built))
    assert bake("scaled_mm", files, Manifest(built, frozenset({BIG.kernel}))) == expected
    with pytest.raises(TableError, match="not in the kernel manifest"):
        bake("scaled_mm", files, Manifest(built))


def test_samples_of_a_kernel_that_backward_off_removes_are_absent(tmp_path):
    samples = [small.sample(BIG, 1.0), small.sample(TINY, 2.0)]
    files = small.write_device(tmp_path / "both", samples)
    kernels = dict(small.manifest().kernels)
    gone = kernels.pop(BIG.kernel)
    removed = KernelRecord(
        id=gone.id, op=gone.op, backend=gone.backend, arch=gone.arch, config=gone.config, serves={"wgrad": False}
    )
    expected = bake("scaled_mm", small.write_device(tmp_path / "one", samples[1:]), Manifest(kernels))
    assert bake("scaled_mm", files, Manifest(kernels, removed={gone.id: removed}, has_backward=False)) == expected


def test_manifest_file_may_list_kernels_as_removed(tmp_path):
    add = {"id": "add", "op": "matmul", "backend": "b", "arch": "sm_90a", "config": {}, "serves": {"wgrad": False}}
    path = tmp_path / "kernel_manifest.json"
    path.write_text(text_of({"schema": 1, "backward": "off", "kernels": [], "removed": [add]}))
    found = read_manifest(path)
    assert found.removed == {"add": KernelRecord(**add)} and not found.has_backward and found.lacks("add")
    for wrong in ({"backward": "no"}, {"removed": [{"id": "add"}]}):
        path.write_text(text_of({"schema": 1, "kernels": [], **wrong}))
        with pytest.raises(TableError, match="not a kernel manifest"):
            read_manifest(path)


def test_manifest_file_may_list_kernels_as_left_out(tmp_path):
    document = {"schema": 1, "kernels": [], "left_out": ["add"]}
    path = tmp_path / "kernel_manifest.json"
    path.write_text(text_of(document))
    assert read_manifest(path).left_out == {"add"}


def test_device_without_kernels_in_this_build_is_left_out(tmp_path, caplog):
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0)])
    only_l40 = Manifest({id: kernel for id, kernel in small.manifest().kernels.items() if kernel.arch == "sm_89"})
    assert table_file.decode(bake("scaled_mm", files, only_l40), "x", "scaled_mm").devices == ()
    assert "NVIDIA H200 are left out" in caplog.text


@pytest.mark.parametrize("backend", ["sm90", "triton_aot"])
def test_backend_without_kernels_in_this_build_is_left_out(tmp_path, caplog, backend):
    """As in a build with `--//:cuda_archs=sm_90` alone, or sm_90a alone."""
    files = small.write_device(tmp_path, [small.sample(BIG, 1.0), small.sample(small.triton(), 2.0)])
    without = Manifest({id: kernel for id, kernel in small.manifest().kernels.items() if kernel.backend != backend})
    devices = table_file.decode(bake("scaled_mm", files, without), "x", "scaled_mm").devices
    [device] = devices
    assert device.num_entries > 0
    assert f"samples of {backend} on NVIDIA H200 are left out" in caplog.text


def test_table_begins_with_canonical_json_and_the_digest_of_the_rest(tmp_path):
    data = _table_bytes(tmp_path)
    line, _, _ = data.partition(b"\n")
    header = json.loads(line)
    assert line.decode() == canonical_json(header)
    empty = data.replace(header["digest"].encode(), b"", 1)
    assert header["digest"] == hashlib.sha256(empty).hexdigest()
    assert table_file.decode(data, "x", "scaled_mm").digest == header["digest"]


def _table_bytes(tmp_path) -> bytes:
    files = small.write_device(tmp_path, [small.sample(BIG, 1.5), small.sample(TINY, 1.0)])
    return bake("scaled_mm", files, small.manifest())


def test_every_single_changed_byte_is_noticed(tmp_path):
    data = _table_bytes(tmp_path)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(TableError):
            table_file.decode(bytes(damaged), "scaled_mm.table", "scaled_mm")


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "header only",
        "longer",
        "empty",
        "future",
        "schema of another type",
        "past",
        "edited",
        "array",
        "other op",
        "digest of no character",
    ],
)
def test_damaged_table_names_file_expectation_and_remedy(tmp_path, damage):
    data, schema = _table_bytes(tmp_path), b'"schema":%d' % table_file.SCHEMA
    bad = {
        "truncated": data[: len(data) // 2],
        "header only": data.splitlines(keepends=True)[0],
        "longer": data + b"\n",
        "empty": b"",
        "future": data.replace(schema, b'"schema":%d' % (table_file.SCHEMA + 1)),
        "schema of another type": data.replace(schema, schema + b".0"),
        "past": b'{"digest":"","schema":1}\n',
        "edited": data.replace(b"1.5", b"0.5"),
        "array": b"[]",
        "other op": bake("matmul", [], Manifest({})),
        "digest of no character": b'{"digest":"\\ud800","schema":6}\n',
    }[damage]
    with pytest.raises(TableError) as caught:
        table_file.decode(bad, "tables/scaled_mm.table", "scaled_mm")
    message = str(caught.value)
    assert message.startswith("tables/scaled_mm.table: expected ")
    assert "found " in message
    assert "bake it anew" in message
    assert message.isascii(), "so that every console prints it"
