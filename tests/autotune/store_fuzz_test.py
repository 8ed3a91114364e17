"""Damage of every kind to files of samples: no crash, and no good entry is lost.

What is untouched is computed from the bytes, and not asked of the code under test.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_strategies as data

from stoneware.errors import StoreError, TableError
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import differences, merge, record, samples as sample_format, table_file
from stoneware.tuning.entries import make_table
from stoneware.tuning.samples import DeviceRecord, Sample
from stoneware.tuning.store import Store

NUM_MUTATIONS = 300

RUN = data.run()

GARBAGE = [
    b"", b"{", b"[" * 100_000, b"{}", b"null", b"NaN", b"-Infinity", b"1" * 10_000, b"\xff\xfe",
    b"\xef\xbb\xbf{}", b'{"key":' * 2000, b"\0" * 50, b'"\\ud800"', b'{"median_us":1e999}',
    b"\xe2\x80\xa8", b"\r", b"true",
]


def flip_bytes(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 1, 5, 40])):
        content[rng.randrange(len(content))] = rng.randrange(256)


def flip_bits(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 3])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_in_header(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(min(len(content), 120))] = rng.randrange(256)


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)):]


def overwrite(rng: random.Random, content: bytearray) -> None:
    begin = rng.randrange(len(content))
    length = min(rng.choice([16, 512, 4096, 9000]), len(content) - begin)
    content[begin:begin + length] = rng.choice([
        bytes(length), b"\xff" * length, rng.randbytes(length)
    ])


def overwrite_page(rng: random.Random, content: bytearray) -> None:
    page = rng.randrange(len(content) // 4096 + 1) * 4096
    other = rng.randrange(len(content) // 4096 + 1) * 4096
    content[page:page + 4096] = content[other:other + 4096]


def splice(rng: random.Random, content: bytearray) -> None:
    begin = rng.randrange(len(content))
    content[begin:begin + rng.randrange(3000)] = rng.choice(GARBAGE)


def swap(rng: random.Random, content: bytearray) -> None:
    first, second = sorted(rng.randrange(len(content)) for _ in range(2))
    length = rng.randrange(1, 2000)
    a, b = content[first:first + length], content[second:second + length]
    content[second:second + length], content[first:first + length] = a, b


def garbage_line(rng: random.Random, content: bytearray) -> None:
    lines = bytes(content).split(b"\n")
    lines.insert(rng.randrange(len(lines)), rng.choice(GARBAGE))
    content[:] = b"\n".join(lines)


def swap_lines(rng: random.Random, content: bytearray) -> None:
    lines = bytes(content).split(b"\n")
    rng.shuffle(lines)
    content[:] = b"\n".join(lines)


def wrong_value(rng: random.Random, content: bytearray) -> None:
    """One value of one JSON line becomes another type, or its key comes twice."""
    lines = bytes(content).split(b"\n")
    idx = rng.randrange(len(lines))
    try:
        document = json.loads(lines[idx])
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict) or not document:
        return
    name = rng.choice(sorted(document))
    value = rng.choice([None, True, -1, 10**400, 1e308, "x", [], {}, [[]], {"op": 1}, "\ud800"])
    if rng.random() < 0.2:
        lines[idx] = lines[idx][:-1] + f',"{name}":1}}'.encode()
    else:
        if document[name] and isinstance(document[name], dict) and rng.random() < 0.7:
            name, document_part = rng.choice(sorted(document[name])), document[name]
            document_part[name] = value
        else:
            document[name] = value
        lines[idx] = json.dumps(document).encode()
    content[:] = b"\n".join(lines)


Mutation = Callable[[random.Random, bytearray], None]
OF_BYTES: list[Mutation] = [
    flip_bytes, flip_bits, flip_in_header, cut, overwrite, overwrite_page, splice, swap,
]
OF_TEXT: list[Mutation] = [*OF_BYTES, garbage_line, swap_lines, wrong_value]


def mutated(seed: int, content: bytes, mutations: list[Mutation]) -> bytes:
    rng = random.Random(seed)
    changed = bytearray(content)
    for mutation in rng.choices(mutations, k=rng.choice([1, 1, 1, 2, 4])):
        if changed:
            mutation(rng, changed)
    return bytes(changed)


def text_of(sample: Sample) -> str:
    return canonical_json(sample.to_json())


def many_samples() -> list[Sample]:
    samples = [data.sample(m=m, median_us=m) for m in range(1, 60)]
    samples += [data.kernel_sample(m=m) for m in range(1, 10)]
    # Longer than a page, and than two.
    return samples + [
        data.sample(m=m, kernel="tiny", status="failed", detail=f"{m} " * 1500 * m)
        for m in range(1, 4)
    ]


class Pieces:
    """Where the row of a sample is in a file: all of its pieces, with what leads to each."""

    CELL_BYTES = 48
    """The sizes, types and id that stand before a row's text; then come 4 bytes that name the next
    overflow page, which begins with 4 bytes that name the next."""

    def __init__(self, content: bytes, sample: Sample) -> None:
        payload = record.of_sample(RUN, sample).payload
        # The revision is part of the header; these samples were added once.
        self.pieces: list[tuple[int, bytes]] = []
        begin = 0
        while begin < len(payload):
            least, most = 1, len(payload) - begin
            while least < most:
                middle = (least + most + 1) // 2
                if payload[begin:begin + middle] in content:
                    least = middle
                else:
                    most = middle - 1
            place = content.index(payload[begin:begin + least])
            lead = self.CELL_BYTES if begin == 0 else 4
            low, high = max(0, place - lead), place + least + 4
            self.pieces.append((low, content[low:high]))
            begin += least

    def are_in(self, content: bytes) -> bool:
        """Whether nothing of the row was touched; only one in one piece may have moved."""
        if len(self.pieces) == 1:
            return self.pieces[0][1][:-4] in content
        return all(content[low:low + len(piece)] == piece for low, piece in self.pieces)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> tuple[bytes, list[tuple[str, Pieces]]]:
    """The bytes of a store, and each sample of it with its place in them."""
    path = tmp_path_factory.mktemp("original") / "samples.sqlite3"
    samples = many_samples()
    for begin in range(0, len(samples), 10):
        Store(path).add(RUN, samples[begin:begin + 10])
    content = path.read_bytes()
    return content, [(text_of(sample), Pieces(content, sample)) for sample in samples]


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS))
def test_a_damaged_store_loses_no_row_that_was_not_touched(tmp_path, original, seed):
    content, rows = original
    path = tmp_path / "samples.sqlite3"
    changed = mutated(seed, content, OF_BYTES)
    path.write_bytes(changed)
    untouched = {text for text, pieces in rows if pieces.are_in(changed)}
    known = {text for text, _ in rows}

    own = Store(path)
    found = [text_of(sample) for _, sample in own.samples()]
    assert untouched <= set(found) and len(found) == len(set(found))
    assert set(found) <= known, "a sample that nobody took"
    assert path.read_bytes() == changed
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if len(found) < len(rows) and changed:
        assert own.problems(), "samples are missing, and nobody says so"

    new = data.sample(m=1000)
    try:
        own.add(RUN, [new])
    except StoreError as error:
        assert "STONEWARE_CACHE_DIR" in str(error)
        assert path.read_bytes() == changed
    else:
        after = {text_of(sample) for _, sample in Store(path).samples()}
        assert after >= {*untouched, text_of(new)} and after <= {*known, text_of(new)}
        kept = [file.read_bytes() for file in tmp_path.glob("*.damaged-1")]
        assert kept in ([], [changed])


@pytest.fixture(scope="module")
def with_log(tmp_path_factory) -> Path:
    """A folder with a store and the log and index of a process that was killed."""
    import sqlite3

    folder = tmp_path_factory.mktemp("log")
    path = folder / "live" / "samples.sqlite3"
    samples = many_samples()
    Store(path).add(RUN, samples[:30])
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    for sample in samples[30:]:
        row = record.of_sample(RUN, sample)
        connection.execute("INSERT INTO records VALUES (?, ?)", (row.id, row.payload.decode()))
    shutil.copytree(path.parent, folder / "killed")
    connection.close()
    return folder / "killed"


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS // 3))
def test_a_damaged_log_loses_no_row_that_was_not_touched(tmp_path, with_log, seed):
    path = tmp_path / "store" / "samples.sqlite3"
    shutil.copytree(with_log, path.parent)
    wal = Path(f"{path}-wal")
    changed = mutated(seed, wal.read_bytes(), OF_BYTES)
    wal.write_bytes(changed)
    database = path.read_bytes()
    samples = many_samples()
    # Those in the log that are in one piece; the others are followed over its frames at best.
    untouched = {
        text_of(sample) for sample in samples
        if (payload := record.of_sample(RUN, sample).payload) in changed or payload in database
    }
    assert untouched
    own = Store(path)
    found = {text_of(sample) for _, sample in own.samples()}
    assert untouched <= found <= set(map(text_of, samples))
    assert wal.read_bytes() == changed and path.read_bytes() == database
    own.add(RUN, [data.sample(m=1000)])
    assert untouched <= {text_of(sample) for _, sample in Store(path).samples()}


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS))
def test_a_damaged_file_of_samples_loses_no_line_that_was_not_touched(tmp_path, seed):
    path = tmp_path / "scaled_mm.jsonl"
    samples = many_samples()[:20]
    sample_format.write_samples(path, samples)
    content = path.read_bytes()
    changed = mutated(seed, content, OF_TEXT)
    path.write_bytes(changed)
    lines = set(content.split(b"\n")) - {b""}
    untouched = sorted(line.decode() for line in changed.split(b"\n") if line in lines)
    found, problems = sample_format.read_samples_leniently(path)
    good = sorted(text_of(sample) for sample in found)
    # A changed digit is a sample, too: no digest is kept of a line that people may edit.
    for text in untouched:
        good.remove(text)
    damaged = [line for line in changed.split(b"\n") if line not in lines]
    assert len(good) + len(problems) <= len(damaged)
    for problem in problems:
        place, line, _ = problem.removeprefix(f"{path}:").partition(": skipped")
        assert line and place.isdigit(), problem
    try:
        assert len(sample_format.read_samples(path)) == len(found) and not problems
    except TableError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("value", [
    "null", "true", "-1", str(10**400), "1e999", "NaN", "-Infinity", '"x"', '"\\ud800"', "[]", "{}",
    "[[[]]]", "[" * 100_000, "1.5", '{"op":"x:y"}',
])
def test_no_value_of_any_field_crashes_reading_or_costs_another_line(tmp_path, value):
    path = tmp_path / "scaled_mm.jsonl"
    good = [data.sample(m=7), data.kernel_sample(m=7)]
    lines = [text_of(sample) for sample in good]
    for sample in good:
        document = sample.to_json()
        for part in (document, document["key"], document["config"]):
            for name in part:
                old, part[name] = part[name], "PLACE"
                lines.append(canonical_json(document).replace('"PLACE"', value))
                part[name] = old
    path.write_text("\n".join(lines) + "\n")
    found, problems = sample_format.read_samples_leniently(path)
    assert [text_of(sample) for sample in found[:2]] == lines[:2]
    assert len(found) + len(problems) == len(lines) and problems
    with pytest.raises(TableError, match="scaled_mm.jsonl:[0-9]+: not a sample"):
        sample_format.read_samples(path)


def test_a_key_that_comes_twice_in_a_line_is_a_problem(tmp_path):
    path = tmp_path / "scaled_mm.jsonl"
    line = text_of(data.sample())
    path.write_text(f"{line}\n{line[:-1]},\"median_us\":1.0}}\n")
    found, (problem,) = sample_format.read_samples_leniently(path)
    assert len(found) == 1 and f"{path}:2: " in problem and "'median_us' comes twice" in problem


@pytest.mark.parametrize("name", ["runs.json", "device.json"])
@pytest.mark.parametrize("seed", range(NUM_MUTATIONS // 3))
def test_a_damaged_document_of_a_folder_is_a_problem_and_no_crash(tmp_path, name, seed):
    runs = [data.run(f"run-{idx}") for idx in range(5)]
    samples = [data.sample(run=run.id) for run in runs]
    sample_format.write_samples(tmp_path / "scaled_mm.jsonl", samples)
    sample_format.write_runs(tmp_path / "runs.json", runs)
    sample_format.write_device(tmp_path / "device.json", DeviceRecord(fingerprint=data.H200))
    changed = mutated(seed, (tmp_path / name).read_bytes(), OF_TEXT)
    (tmp_path / name).write_bytes(changed)
    source = merge.read_source(tmp_path)
    found = {sample.run for _, _, samples in source.devices for sample in samples}
    if name == "device.json":
        assert found == {run.id for run in runs}
    else:
        blocks = [json.dumps(run.to_json(), indent=1, sort_keys=True) for run in runs]
        whole = {
            run.id for run, block in zip(runs, blocks)
            if block.replace("\n", "\n  ").encode() in changed
        }
        assert whole <= found
    if len(found) < len(runs):
        assert source.problems
    assert isinstance(differences.verify(tmp_path), list)


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS))
def test_a_damaged_table_is_refused_whole_and_no_crash(tmp_path, seed):
    path = tmp_path / "scaled_mm.table"
    samples = [(RUN, data.sample(m=m)) for m in range(1, 20)]
    content = table_file.encode(make_table("scaled_mm", samples, None))
    changed = mutated(seed, content, OF_TEXT)
    path.write_bytes(changed)
    if changed == content:
        assert differences.verify(path) == []
        return
    with pytest.raises(TableError, match="scaled_mm.table"):
        table_file.decode(changed, path, "scaled_mm")
    (problem,) = differences.verify(path)
    assert str(path) in problem
