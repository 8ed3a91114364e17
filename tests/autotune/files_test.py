"""Files that anybody may have edited, and places where something else lies: bounded, and named."""

from __future__ import annotations

import json
import os
import time

import pytest
import sample_strategies as data

from stoneware.errors import TableError
from stoneware.kernels.config import KernelConfig
from stoneware.runtime import regular_file
from stoneware.runtime.canonical import canonical_json, printable
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import differences, merge
from stoneware.tuning import samples as sample_format
from stoneware.tuning.samples import DeviceRecord, Sample


def line_of(sample: Sample) -> str:
    return sample_format.samples_text([sample]).removesuffix("\n")


@pytest.fixture
def folder(tmp_path):
    """The folder of a device, with one sample."""
    there = tmp_path / "there"
    there.mkdir()
    sample_format.write_samples(there / "scaled_mm.jsonl", [data.sample()])
    sample_format.write_runs(there / "runs.json", [data.run()])
    sample_format.write_device(there / "device.json", DeviceRecord(fingerprint=data.H200))
    return there


# Writing.


def test_writing_touches_no_file_but_its_own(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "scaled_mm.jsonl"
    draft = tmp_path / "scaled_mm.jsonl.draft"
    draft.symlink_to(precious)
    for _ in range(2):
        sample_format.write_samples(path, [data.sample()])
    assert precious.read_text() == "mine" and draft.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted([precious, path, draft])


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    for path, error in (
        (tmp_path / "none" / "x", FileNotFoundError),
        (tmp_path / "file" / "x", NotADirectoryError),
        (tmp_path, IsADirectoryError),
    ):
        with pytest.raises(error) as caught:
            regular_file.write(path, b"x")
        assert caught.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_new_file_has_the_permissions_that_the_user_gives_to_files(tmp_path):
    before = os.umask(0o027)
    try:
        regular_file.write(tmp_path / "x", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    read_handle, write_handle = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/proc/self/fd/{write_handle}")
    regular_file.write(link, b"x")
    assert os.read(read_handle, 9) == b"x" and link.is_symlink()


def test_a_file_behind_stdout_is_written_to_and_the_systems_link_stays(tmp_path):
    with (tmp_path / "page").open("wb") as file:
        folder, link = tmp_path / "fd", tmp_path / "stdout"
        folder.symlink_to("/proc/self/fd")  # as /dev has it
        link.symlink_to(f"fd/{file.fileno()}")
        regular_file.write(link, b"x")
    assert link.is_symlink() and (tmp_path / "page").read_bytes() == b"x"


# Reading: its time grows with the file's length alone, and its memory is bounded.


def _many_keys() -> str:
    names = ",".join(f'"k{idx}":1' for idx in range(100_000))
    return f"{{{names},{names}}}"


@pytest.mark.parametrize(
    "text",
    [
        _many_keys(),
        '{"a":' * 100_000,
        '{"a":' * 800 + "[" + "1," * 500_000 + "1]",
        '{"runs": [\n  {\n"a":' * 30_000,
        "[[],".ljust(5 << 20, "["),
    ],
    ids=["keys", "deep", "deep and long", "runs", "a long line"],
)
@pytest.mark.parametrize("name", ["scaled_mm.jsonl", "runs.json", "device.json"])
def test_no_small_file_takes_long(folder, text, name):
    (folder / name).write_text(text)
    begin = time.process_time()
    assert all(str(folder / name) in problem or "skipped" in problem for problem in differences.verify(folder))
    assert time.process_time() - begin < 10


def test_a_file_longer_than_all_that_are_written_is_not_read(folder, tmp_path):
    for name in ("scaled_mm.jsonl", "runs.json", "device.json"):
        path = folder / name
        before = path.read_bytes()
        os.truncate(path, 20 << 30)  # sparse
        assert any(
            (str(path) in problem and "File too large" in problem) or "at most" in problem
            for problem in differences.verify(folder)
        )
        path.write_bytes(before)
    path = tmp_path / "scaled_mm.table"
    path.touch()
    os.truncate(path, 20 << 30)
    [problem] = differences.verify(path)
    assert str(path) in problem and "at most" in problem


# Values.


@pytest.mark.parametrize("name", ["\ud800:x", "x:\x1b[2J", "x" * 5000 + ":f", "a:b\nc", ""])
def test_a_bad_name_of_an_op_costs_its_line_alone(folder, tmp_path, name):
    candidate, line = line_of(data.kernel_sample()).splitlines()
    document = json.loads(line)
    document["key"]["op"] = name
    with (folder / "scaled_mm.jsonl").open("a") as file:
        file.write(f"{candidate}\n{canonical_json(document)}\n")
    merged = merge.merge([folder], tmp_path / "out")
    assert merged.num_samples == 1
    [problem] = merged.problems
    assert f"{folder / 'scaled_mm.jsonl'}:4: not a sample: op=" in problem and problem.isprintable()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x" * 5000),
        ("name", "\ud800"),
        ("name", "\x1b]0;x\x07"),
        ("name", 7),
        ("l2_bytes", 10**400),
        ("num_sms", 10**400),
        ("memory_clock_khz", -1),
        ("compute_capability", [10**400, 0]),
        ("compute_capability", 9),
    ],
)
def test_a_bad_device_is_named_with_its_file(folder, tmp_path, field, value):
    fingerprint = {**data.H200.to_json(), field: value}
    (folder / "device.json").write_text(canonical_json({"schema": 3, "fingerprint": fingerprint, "aliases": []}))
    with pytest.raises(TableError, match=f"device.json: not a device: .*{field}"):
        sample_format.read_folder(folder)
    assert differences.verify(folder)
    run = {**data.run().to_json(), "device": fingerprint}
    (folder / "runs.json").write_text(canonical_json({"schema": 3, "runs": [run]}))
    with pytest.raises(TableError, match=f"runs.json: not a run: .*{field}"):
        sample_format.read_runs(folder / "runs.json")
    assert merge.merge([folder], tmp_path / "out").num_samples == 0


@pytest.mark.parametrize("schema", ["3.0", "true", '"3"', "null", "2", "4"])
@pytest.mark.parametrize("name", ["runs.json", "device.json"])
def test_a_schema_that_is_not_the_very_number_is_refused(folder, name, schema):
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace('"schema": 3', f'"schema": {schema}'))
    assert any(f"{name}: not " in problem and "schema=" in problem for problem in differences.verify(folder))


def test_samples_of_an_op_and_of_a_decorated_kernel_in_one_file_are_told_apart(folder):
    with (folder / "scaled_mm.jsonl").open("a") as file:
        file.write(line_of(data.kernel_sample()) + "\n")
    problems = differences.verify(folder)
    assert any(f"holds samples of {data.KERNEL_OP}" in problem for problem in problems)


def test_what_is_not_printable_is_shown_as_an_escape():
    assert printable("ä\x1b[2J\ud800\n\u202e") == r"ä\x1b[2J\ud800\n\u202e"
    assert DeviceFingerprint(**{**data.H200.to_json(), "name": "ä"}).name == "ä"


@pytest.mark.parametrize(
    "value",
    [
        "null",
        "true",
        "-1",
        str(10**400),
        "1e999",
        "NaN",
        "-Infinity",
        '"x"',
        '"\\ud800"',
        "[]",
        "{}",
        "[[[]]]",
        "[" * 100_000,
        "1.5",
        '{"op":"x:y"}',
    ],
)
def test_no_value_of_any_field_crashes_reading_or_costs_another_line(tmp_path, value):
    path = tmp_path / "scaled_mm.jsonl"
    good = [data.sample(m=7), data.kernel_sample(m=7)]
    candidates, lines = zip(*(line_of(sample).splitlines() for sample in good))
    lines = [*candidates, *lines]
    for line in list(lines):
        document = json.loads(line)
        listed = document.get("samples", [[]])[0]
        for part in (document, document.get("key", {}), listed, document.get("config", {})):
            for name in part if isinstance(part, dict) else range(len(part)):
                old, part[name] = part[name], "PLACE"
                lines.append(canonical_json(document).replace('"PLACE"', value))
                part[name] = old
    path.write_text("\n".join(lines) + "\n")
    problems = []
    found = sample_format.read_samples(path, problems)
    assert [sample for _, sample in found[:2]] == good
    # A candidate's line may be good with another value: one that no sample names.
    assert len(lines) - len(found) - 2 >= len(problems) > 0
    with pytest.raises(TableError, match="scaled_mm.jsonl:[0-9]+: not a sample"):
        sample_format.read_samples(path)


def test_a_file_of_an_older_schema_is_one_problem_with_its_remedy(folder):
    path = folder / "scaled_mm.jsonl"
    lines = path.read_text().splitlines()[1:] * 3
    path.write_text("".join(f"{line}\n" for line in lines))
    [problem] = differences.verify(folder)
    assert f"{path}: not samples: no line names a candidate, as schema 3 must" in problem
    assert "stoneware merge STORE --out FOLDER" in problem
    with pytest.raises(TableError, match="schema 3 must"):
        sample_format.read_samples(path)


def test_an_id_is_the_same_whatever_else_is_in_the_file(tmp_path):
    taken = [data.kernel_sample(config=KernelConfig(num_warps=1, num_stages=stages)) for stages in range(1, 40)]
    path = tmp_path / "kernel.jsonl"
    sample_format.write_samples(path, taken)
    lines = path.read_text().splitlines()
    assert {sample for _, sample in sample_format.read_samples(path)} == set(taken)
    assert all(line_of(sample).splitlines()[0] in lines for sample in taken)


def test_a_key_that_comes_twice_in_a_line_is_a_problem(tmp_path):
    path = tmp_path / "scaled_mm.jsonl"
    line = line_of(data.sample())
    path.write_text(f'{line}\n{line.splitlines()[1][:-1]},"run":"x"}}\n')
    problems = []
    assert len(sample_format.read_samples(path, problems)) == 1
    (problem,) = problems
    assert f"{path}:3: " in problem and "'run' comes twice" in problem


def test_a_file_without_an_end_is_not_read_into_memory():
    with pytest.raises(OSError, match="longer than its size, 0 bytes"):
        regular_file.read("/proc/self/maps")
