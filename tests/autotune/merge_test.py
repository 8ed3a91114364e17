"""Merging is a union, the same to the byte however it is done; diff and verify say what differs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import sample_strategies as data
from hypothesis import given, settings
from hypothesis import strategies as st

from stoneware.errors import TableError
from stoneware.kernels import manifest
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import differences, merge
from stoneware.tuning import samples as sample_format
from stoneware.tuning.entries import bake_samples
from stoneware.tuning.samples import DeviceRecord, Run, Sample, samples_text
from stoneware.tuning.store import Store

RUN = data.run()


def write_folder(
    folder: Path,
    samples: Iterable[Sample],
    runs: Iterable[Run] = (RUN,),
    device: DeviceFingerprint = data.H200,
    aliases: tuple[str, ...] = (),
) -> Path:
    folder.mkdir(parents=True)
    by_op: dict[str, list[Sample]] = {}
    for sample in samples:
        by_op.setdefault(sample.op, []).append(sample)
    for op, group in by_op.items():
        sample_format.write_samples(folder / merge.file_name(op), group)
    sample_format.write_runs(folder / "runs.json", runs)
    sample_format.write_device(folder / "device.json", DeviceRecord(fingerprint=device, aliases=aliases))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def texts(folder: Path) -> list[str]:
    return sorted(samples_text([sample]) for _, taken in merge.read_source(folder).devices for _, sample in taken)


@st.composite
def sources(draw: st.DrawFn) -> list[tuple]:
    """Three sources, (device, aliases, runs, samples) each, that agree in their runs."""
    runs = draw(data.runs())
    made = []
    for aliases in draw(st.permutations([("H200",), ("h200", "NVIDIA H200"), ()])):
        samples = draw(st.lists(data.samples(), max_size=6))
        # The samples of a folder were taken on its device, except for the power limit and the name.
        device = runs[samples[0].run].device if samples else data.H100
        samples = [
            sample
            for sample in samples
            if runs[sample.run].device.num_sms == device.num_sms and runs[sample.run].device.l2_bytes == device.l2_bytes
        ]
        made.append((device, aliases, runs, samples))
    return made


def written(root: Path, made) -> list[Path]:
    return [
        write_folder(root / f"source{idx}", samples, runs.values(), device, aliases)
        for idx, (device, aliases, runs, samples) in enumerate(made)
    ]


@settings(max_examples=60, deadline=None)
@given(made=sources(), keep=st.sampled_from(["all", "newest"]))
def test_merging_is_commutative_associative_and_idempotent_to_the_byte(made, keep):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = written(root, made)

        def merged(name: str, *inputs: Path) -> Path:
            merge.merge(inputs, root / name, keep=keep)
            (root / name).mkdir(exist_ok=True)
            return root / name

        if not any(samples for *_, samples in made):
            assert merge.merge(paths, root / "out").folders == []
            return
        a, b, c = paths
        expected = content(merged("all", a, b, c))
        for idx, order in enumerate(itertools.permutations(paths)):
            assert content(merged(f"order{idx}", *order)) == expected, "not commutative"
        pairs = [(merged("ab", a, b), c), (a, merged("bc", b, c)), (merged("ac", a, c), b)]
        for idx, (left, right) in enumerate(pairs):
            groups = [path for path in (left, right) if any(path.iterdir())]
            assert content(merged(f"group{idx}", *groups)) == expected, "not associative"
        again = merged("again", root / "all", root / "all", a)
        assert content(again) == expected, "not idempotent"
        merge.merge([root / "all"], root / "all", keep=keep)
        assert content(root / "all") == expected, "not idempotent in its place"


@settings(max_examples=60, deadline=None)
@given(made=sources())
def test_merging_keeps_every_sample_once_and_no_unused_run(made):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = written(root, made)
        out = root / "out"
        result = merge.merge(paths, out)
        wanted = {samples_text([sample]) for *_, samples in made for sample in samples}
        assert result.num_samples == len(wanted) and result.problems == []
        if wanted:
            assert set(texts(out)) == wanted and len(texts(out)) == len(wanted)
            assert differences.verify(out) == []
        used = {sample.run for *_, samples in made for sample in samples}
        kept = [sample_format.read_runs(path) for path in out.rglob("runs.json")]
        assert {id for runs in kept for id in runs} == used
        for path in result.folders:
            assert path.parent == out


def test_a_file_that_is_not_a_store_is_refused_as_an_input(tmp_path):
    bad = tmp_path / "bad.sqlite3"
    bad.write_bytes(b"not a database" * 1000)
    with pytest.raises(TableError, match=r"bad.sqlite3 must be a store, and is none or is damaged: .*; pass a "):
        merge.merge([bad], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_store_and_a_folder_merge_and_files_are_named_after_op_and_device(tmp_path):
    store = Store(tmp_path / "samples.sqlite3")
    other_run = data.run("other", device=data.H100)
    store.add(RUN, [data.sample(m=1), data.kernel_sample()])
    store.add(other_run, [data.sample(m=3, run="other")])
    folder = write_folder(tmp_path / "committed" / "x", [data.sample(m=2)], aliases=("H200",))
    result = merge.merge([store.path, folder.parent], tmp_path / "out")
    assert sorted(content(tmp_path / "out")) == [
        "nvidia_h100_80gb_hbm3/device.json",
        "nvidia_h100_80gb_hbm3/runs.json",
        "nvidia_h100_80gb_hbm3/scaled_mm.jsonl",
        "nvidia_h200/device.json",
        "nvidia_h200/package.kernels.matmul_kernel.jsonl",
        "nvidia_h200/runs.json",
        "nvidia_h200/scaled_mm.jsonl",
    ]
    assert result.num_samples == 4 and result.problems == []
    record = sample_format.read_folder(tmp_path / "out" / "nvidia_h200")[0]
    assert record == DeviceRecord(fingerprint=data.H200, aliases=("H200",))
    assert texts(tmp_path) == texts(store.path), "a folder with a store in it is that store"


@pytest.mark.parametrize(
    "op", ["../../etc/x:y", "a:<locals>.f", ".hidden:f", "a/b:c\n", "x" * 400 + ":f", "ä:f", "..:.."]
)
def test_no_op_names_a_file_outside_of_its_folder_or_a_hidden_one(op):
    name = merge.file_name(op)
    assert name == os.path.basename(name) and not name.startswith(".")
    assert len(name.encode()) < 255 and name.isprintable() and name.endswith(".jsonl")


def test_devices_of_the_same_hardware_share_a_folder_and_their_names(tmp_path):
    grid = data.variant(data.H200, name="GRID H200", power_limit_w=0)
    a = write_folder(tmp_path / "a", [data.sample()], aliases=("H200",))
    b = write_folder(tmp_path / "b", [data.sample(run="b")], [data.run("b", device=grid)], grid, ("h200",))
    (folder,) = merge.merge([a, b], tmp_path / "out").folders
    record = sample_format.read_folder(folder)[0]
    assert set(record.names) == {"GRID H200", "NVIDIA H200", "H200", "h200"}
    assert record.fingerprint.power_limit_w == 700


def test_power_limits_that_differ_get_folders_of_their_own(tmp_path):
    less = data.variant(data.H200, power_limit_w=600)
    a = write_folder(tmp_path / "a", [data.sample()])
    b = write_folder(tmp_path / "b", [data.sample(run="b")], [data.run("b", device=less)], less)
    folders = merge.merge([a, b], tmp_path / "out").folders
    limits = {sample_format.read_folder(path)[0].fingerprint.power_limit_w for path in folders}
    assert limits == {600, 700} and len(folders) == 2


def test_newest_keeps_of_each_candidate_the_newest_run(tmp_path):
    old, new = data.run("old", date="2026-01-01"), data.run("new", date="2026-02-01")
    samples = [
        data.sample(run="old", median_us=1),
        data.sample(run="new", median_us=2),
        data.sample(run="old", kernel="tiny"),
        data.sample(run="old", m=99),
        data.sample(run="old", kernel_sha256=data.sha256("other bytes")),
    ]
    folder = write_folder(tmp_path / "a", samples, [old, new])
    assert merge.merge([folder], tmp_path / "all").num_samples == 5
    merge.merge([folder], tmp_path / "newest", keep="newest")
    assert texts(tmp_path / "newest") == sorted(samples_text([sample]) for sample in samples[1:])
    with pytest.raises(ValueError, match="keep='oldest' must be one of all, newest, current"):
        merge.merge([folder], tmp_path / "x", keep="oldest")


def test_current_keeps_what_is_built_with_the_same_bytes(tmp_path, monkeypatch):
    old, new = data.run("old", date="2026-01-01"), data.run("new", date="2026-02-01")
    current = data.sample(run="new", median_us=2, kernel_sha256=data.sha256("its bytes"))
    samples = [
        data.sample(run="old", median_us=1, kernel_sha256=data.sha256("its bytes")),
        current,
        data.sample(run="new", kernel_sha256=data.sha256("other bytes")),
        data.sample(run="old", kernel="removed"),
    ]
    record = KernelRecord(
        id=current.config.kernel,
        op="scaled_mm",
        backend=current.config.backend,
        arch="sm_90a",
        config={},
        sha256=data.sha256("its bytes"),
        size_bytes=1,
    )
    monkeypatch.setattr(manifest, "packaged", lambda: Manifest({record.id: record}))
    merge.merge([write_folder(tmp_path / "a", samples, [old, new])], tmp_path / "current", keep="current")
    assert texts(tmp_path / "current") == [samples_text([current])]


def test_two_runs_with_one_id_are_an_error_that_names_both_sources(tmp_path):
    a = write_folder(tmp_path / "a", [data.sample()])
    b = write_folder(tmp_path / "b", [data.sample(m=2)], [data.run(driver="999")])
    for order in ([a, b], [b, a]):
        with pytest.raises(TableError) as caught:
            merge.merge(order, tmp_path / "out")
        assert all(part in str(caught.value) for part in (RUN.id, str(a), str(b), "999"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{}, {"command": ""}])
def test_a_run_that_was_copied_before_its_end_or_lost_its_command_is_the_same_run(tmp_path, changes):
    ended = data.run(sm_clock_mhz_after=1965, memory_clock_mhz_after=3201)
    a = write_folder(tmp_path / "a", [data.sample()], [data.run(**changes)])
    b = write_folder(tmp_path / "b", [data.sample(m=2)], [ended])
    for idx, order in enumerate(([a, b], [b, a])):
        (folder,) = merge.merge(order, tmp_path / f"out{idx}").folders
        assert sample_format.read_runs(folder / "runs.json") == {RUN.id: ended}


# What is there already, and what is damaged.


def test_merging_in_place_replaces_what_was_read_and_touches_nothing_else(tmp_path):
    root = tmp_path / "tuning_data"
    a = write_folder(root / "my_h200", [data.sample()])
    (a / "README").write_text("mine")
    store = Store(tmp_path / "samples.sqlite3")
    store.add(RUN, [data.sample(m=2)])
    merge.merge([root, store.path], root)
    assert sorted(content(root)) == [
        "my_h200/README",
        "nvidia_h200/device.json",
        "nvidia_h200/runs.json",
        "nvidia_h200/scaled_mm.jsonl",
    ]
    assert len(texts(root)) == 2


def test_a_folder_that_is_no_source_is_not_overwritten(tmp_path):
    a = write_folder(tmp_path / "a", [data.sample()])
    write_folder(tmp_path / "out" / "nvidia_h200", [data.sample(m=2)])
    before = content(tmp_path / "out")
    with pytest.raises(ValueError, match="in none of the sources.*add it to the sources"):
        merge.merge([a], tmp_path / "out")
    assert content(tmp_path / "out") == before


def test_a_bad_line_is_skipped_and_reported_and_never_written_over(tmp_path):
    folder = write_folder(tmp_path / "in" / "nvidia_h200", [data.sample(m=m) for m in (1, 2, 3)])
    file = folder / "scaled_mm.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][:-9], lines[3]]) + "\n")
    result = merge.merge([folder], tmp_path / "out")
    assert result.num_samples == 2
    (problem,) = result.problems
    assert f"{file}:3: not a sample" in problem
    before = content(tmp_path / "in")
    with pytest.raises(TableError, match="scaled_mm.jsonl:3: .*fix it first"):
        merge.merge([tmp_path / "in"], tmp_path / "in")
    assert content(tmp_path / "in") == before


def test_a_bad_run_costs_its_own_samples_only(tmp_path):
    runs = [data.run("a"), data.run("b"), data.run("c")]
    folder = write_folder(tmp_path / "x", [data.sample(run=id) for id in "abc"], runs)
    text = (folder / "runs.json").read_text()
    (folder / "runs.json").write_text(text.replace('"id": "c"', '"id": 7'))
    source = merge.read_source(folder)
    assert {run.id for _, taken in source.devices for run, _ in taken} == {"a", "b"}
    assert any(str(folder / "runs.json") in problem for problem in source.problems)
    assert (
        f"{folder}/scaled_mm.jsonl: not complete: {folder}/runs.json lacks the runs of 1 of 3 samples, such as 'c'; "
        f"{sample_format.REMEDY}"
    ) in source.problems


def test_samples_without_their_runs_are_one_line_a_file_with_the_first_of_the_runs(tmp_path):
    folder = write_folder(
        tmp_path / "x", [data.sample(run=id, m=m) for id in "abc" for m in (1, 2)], [data.run(id) for id in "abc"]
    )
    sample_format.write_runs(folder / "runs.json", [data.run("b")])
    assert merge.read_source(folder).problems == [
        f"{folder}/scaled_mm.jsonl: not complete: {folder}/runs.json lacks the runs of 4 of 6 samples, such as 'a'; "
        f"{sample_format.REMEDY}"
    ]


@pytest.mark.parametrize("last_write", range(1, 12))
def test_a_kill_between_any_two_writes_leaves_every_sample_readable(tmp_path, last_write, monkeypatch):
    root = tmp_path / "tuning_data"
    old, new = data.run("old", date="2026-01-01"), data.run("new", date="2026-02-01")
    write_folder(root / "nvidia_h200", [data.sample(run="old"), data.kernel_sample(run="old")], [old])
    more = write_folder(tmp_path / "more", [data.sample(run="new"), data.kernel_sample(run="new")], [new])
    merge.merge([root, more], tmp_path / "expected", keep="newest")
    wanted = texts(tmp_path / "expected")
    real, count = os.replace, 0

    def replace(source, target):
        nonlocal count
        count += 1
        if count > last_write:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with contextlib.suppress(KeyboardInterrupt):
        merge.merge([root, more], root, keep="newest")
    monkeypatch.undo()
    assert merge.read_source(root).problems == []
    merge.merge([root, more], root, keep="newest")
    assert texts(root) == wanted
    assert content(root) == content(tmp_path / "expected")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "scaled_mm.jsonl"
    sample_format.write_samples(path, [data.sample()])
    before = path.read_bytes()

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        sample_format.write_samples(path, [data.sample(m=2)])
    assert path.read_bytes() == before


def test_a_path_without_samples_is_a_named_error(tmp_path):
    (tmp_path / "file.txt").write_text("x")
    missing = tmp_path / "missing"
    for path in (missing, tmp_path, tmp_path / "file.txt"):
        what = "no such file or folder" if path == missing else "no samples"
        with pytest.raises(TableError, match=f"{path}: {what}: a source is a folder"):
            merge.read_source(path)


# diff and verify.


def test_diff_finds_what_is_missing_and_what_is_chosen_otherwise(tmp_path):
    a = write_folder(
        tmp_path / "a",
        [
            data.sample(m=1, kernel="big", median_us=10),
            data.sample(m=1, kernel="tiny", median_us=20),
            data.sample(m=2),
            data.sample(m=3),
            data.sample(m=5),
        ],
    )
    b = write_folder(
        tmp_path / "b",
        [
            data.sample(m=1, kernel="big", median_us=30),
            data.sample(m=1, kernel="tiny", median_us=20),
            data.sample(m=2, median_us=17),
            data.sample(m=4),
            data.sample(m=5),
        ],
    )
    found = differences.diff(a, b)
    assert [item.key.m for item in found.only_a] == [3]
    assert [item.key.m for item in found.only_b] == [4]
    (changed,) = found.changed
    assert (changed.config_a.kernel, changed.median_us_a) == ("big", 10)
    assert (changed.config_b.kernel, changed.median_us_b) == ("tiny", 20)
    assert found.num_common == 3 and found.fraction == pytest.approx(1 / 3) and found
    assert json.loads(json.dumps(found.as_dict()))["changed"][0]["median_us_b"] == 20
    same = differences.diff(a, a)
    assert not same and same.fraction == 0 and same.num_common == 4


def a_table(folder: Path, median_us: float = 10.0) -> Path:
    path = folder / "scaled_mm.table"
    path.write_bytes(bake_samples("scaled_mm", [(RUN, data.sample(median_us=median_us))], None))
    return path


def test_diff_compares_a_table_with_the_samples_it_came_from(tmp_path):
    folder = write_folder(tmp_path / "a", [data.sample()])
    found = differences.diff(a_table(tmp_path), folder)
    assert not found and found.num_common == 1


def test_verify_says_nothing_of_what_is_good(tmp_path):
    folder = write_folder(tmp_path / "a", [data.sample(), data.sample(m=2), data.kernel_sample()])
    store = Store(tmp_path / "samples.sqlite3")
    store.add(RUN, [data.sample()])
    for path in (folder, store.path, a_table(tmp_path)):
        assert differences.verify(path) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda lines: lines[::-1], "not sorted"),
        (lambda lines: [line.replace(",", ", ") for line in lines], "not canonical"),
        (lambda lines: [*lines, lines[-1]], "a sample is there twice"),
        (lambda lines: [lines[0], "{", lines[1]], "scaled_mm.jsonl:2: not a sample"),
        (lambda lines: [line.replace('"scaled_mm"', '"other"') for line in lines], "other.jsonl"),
        (lambda lines: [line.replace(RUN.id, "another") for line in lines], "'another'"),
    ],
)
def test_verify_names_file_and_fault(tmp_path, change, part):
    folder = write_folder(tmp_path / "a", [data.sample(), data.sample(m=2)])
    file = folder / "scaled_mm.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")
    problems = differences.verify(folder)
    assert any(part in problem and str(file) in problem for problem in problems), problems


def test_verify_finds_a_damaged_table_a_bad_row_and_a_run_of_another_device(tmp_path):
    path = a_table(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"10.0", b"11.0"))
    (problem,) = differences.verify(path)
    assert str(path) in problem
    (problem,) = differences.verify(tmp_path / "missing.table")
    assert "missing.table" in problem
    folder = write_folder(tmp_path / "a", [data.sample()], device=data.H100)
    (problem,) = differences.verify(folder)
    assert RUN.id in problem and str(folder) in problem


def test_the_committed_samples_merge_into_themselves(tmp_path):
    committed = Path(merge.__file__).parents[1] / "tuning_data"
    if not committed.exists():
        pytest.skip("the wheel carries tables only")
    shutil.copytree(committed, tmp_path / "copy")
    before = content(tmp_path / "copy")
    assert differences.verify(tmp_path / "copy") == []
    merge.merge([tmp_path / "copy"], tmp_path / "copy")
    assert content(tmp_path / "copy") == before
