"""The user's store: what was added is read back; nothing but a bad row is ever lost."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import sample_strategies as data
from hypothesis import given, settings
from hypothesis import strategies as st
from store_files import RUN, edit, killed_while_adding, proved, read, rows_by_sql, samples_of_lines, state, texts

from stoneware.errors import StoreError
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import store, store_file
from stoneware.tuning.samples import lines_of
from stoneware.tuning.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning" / "samples.sqlite3"


@pytest.fixture
def four(path: Path) -> list[str]:
    """A store with four samples, each in a row of its own add; returns them as text."""
    samples = [data.sample(m=m) for m in (1, 16, 512)] + [data.kernel_sample()]
    for sample in samples:
        Store(path).add(RUN, [sample])
    return texts(samples)


def test_a_store_that_was_never_written_is_empty_and_reading_makes_nothing(path):
    own = Store(path)
    assert own.samples() == [] and own.ops() == [] and own.problems() == []
    assert own.stamp() == ()
    assert not path.parent.exists()


def test_importing_and_reading_no_store_does_not_import_sqlite3(path):
    program = (
        "import sys; from stoneware.tuning.store import Store\n"
        f"Store({str(path)!r}).samples(); print('sqlite3' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["False"]


def test_samples_come_back_sorted_with_their_run_and_by_op(path, four):
    own = Store(path)
    pairs = own.samples()
    assert [run for run, _ in pairs] == [RUN] * 4
    assert texts(sample for _, sample in pairs) == four
    assert [sample.key.m for _, sample in own.samples("scaled_mm")] == [1, 16, 512]
    assert [sample.op for _, sample in own.samples(data.KERNEL_OP)] == [data.KERNEL_OP]
    assert own.samples("matmul") == []
    assert own.ops() == [data.KERNEL_OP, "scaled_mm"]
    assert own.problems() == []


def test_a_later_add_replaces_the_run_and_the_same_sample_and_no_other(path):
    own = Store(path)
    own.add(RUN, [data.sample(median_us=10), data.sample(kernel="tiny")])
    ended = data.run(sm_clock_mhz_after=1965)
    own.add(ended, [data.sample(median_us=12)])
    other_run = data.run("later")
    own.add(other_run, [data.sample(median_us=11, run="later")])
    assert {(run, sample.config.kernel, sample.median_us) for run, sample in own.samples()} == {
        (ended, "big", 12),
        (ended, "tiny", 10),
        (other_run, "big", 11),
    }


def test_the_stamp_changes_with_every_add_and_with_nothing_else(path, monkeypatch):
    insert = Store._insert

    def insert_within_one_tick(self, database, lines):
        insert(self, database, lines)
        os.utime(database, ns=(0, 0))  # a file system whose clock stands still

    monkeypatch.setattr(Store, "_insert", insert_within_one_tick)
    own, stamps = Store(path), [()]
    for count in range(20):
        Store(path).add(RUN, [data.sample(median_us=10 + count % 2)])
        stamps.append(own.stamp())
    assert len(set(stamps)) == len(stamps)
    own.samples()
    assert own.stamp() == stamps[-1]


def test_reading_makes_no_file_not_even_for_a_moment(path, four):
    # A file that is made and removed changes the time of its folder.
    before = path.parent.stat().st_mtime_ns
    assert read(path) == four
    assert path.parent.stat().st_mtime_ns == before


def test_of_a_sample_that_was_stored_again_the_last_counts_and_no_row_changes(path):
    lines = []
    for median_us in (10, 12, 12, 11):
        Store(path).add(RUN, [data.sample(median_us=median_us)])
        before, lines = lines, [line for *_, line in rows_by_sql(path)]
        assert lines[: len(before)] == before
    assert read(path) == texts([data.sample(median_us=11)])
    assert len(lines) == 6, "the run and the candidate once, and four samples"


def test_a_sample_of_another_run_is_refused(path):
    with pytest.raises(ValueError, match="run='other' of a sample must be"):
        Store(path).add(RUN, [data.sample(run="other")])
    assert not path.exists()


@settings(max_examples=60, deadline=None)
@given(runs=data.runs(), samples=st.lists(data.samples(), max_size=12), seed=st.randoms())
def test_whatever_is_added_is_read_back(runs, samples, seed):
    last = {}
    for sample in samples:
        candidate, line = lines_of([sample])
        last[candidate.name, line.text.partition(',"samples":')[0]] = sample
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.sqlite3")
        for sample in samples:
            Store(path).add(runs[sample.run], [sample])
        expected = texts(last.values())
        assert read(path) == expected
        for run, sample in Store(path).samples():
            assert run == runs[sample.run]
        seed.shuffle(samples)
        for sample in last.values():
            Store(path).add(runs[sample.run], [sample])
        assert read(path) == expected


# Rows and databases that are not what was written.


@pytest.mark.parametrize(
    "change",
    [
        "line = replace(line, ',10.0,', ',20.0,')",
        "line = ''",
        "line = NULL",
        "line = 17",
        "line = x'ff00ff'",
        "line = 1e300",
        "line = substr(line, 1, 200)",
        "line = line || ' '",
        "digest = NULL",
        "name = 'matmul'",
        "line = (SELECT line FROM lines LIMIT 1)",
    ],
)
def test_a_row_that_was_edited_is_skipped_with_its_place_and_mended_by_measuring_again(path, four, change):
    place = sqlite3.connect(path).execute("SELECT number FROM lines WHERE line LIKE '%\"m\":16,%'").fetchone()[0]
    edit(path, f"UPDATE lines SET {change} WHERE number = {place}")
    own = Store(path)
    kept = [text for text in four if '"m":16,' not in text]
    assert texts(sample for _, sample in own.samples()) == kept
    (problem,) = own.problems()
    assert f"{path}: row {place}: skipped: " in problem
    own.add(RUN, [data.sample(m=512)])
    assert read(path) == kept, "an edited row came back"
    own.add(RUN, [data.sample(m=16)])
    assert read(path) == four
    assert own.problems() == [problem], "the row is kept"


def test_what_is_skipped_is_logged_once_with_its_place(path, four, caplog):
    edit(path, "UPDATE lines SET line = 'x' WHERE number = 3")
    with caplog.at_level(logging.WARNING, "stoneware.tuning"):
        for _ in range(3):
            Store(path).samples()
    assert [f"{path}: row 3: skipped" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("name", [RUN.id, lines_of([data.sample()])[0].name])
def test_samples_whose_run_or_candidate_is_lost_are_reported_and_back_once_it_is_stored_again(path, four, name):
    edit(path, f"DELETE FROM lines WHERE name = '{name}'")
    own = Store(path)
    assert len(own.samples()) < 4
    (problem,) = [problem for problem in own.problems() if name in problem]
    assert f"{path}: row " in problem
    own.add(RUN, [data.sample(m=2)])
    assert read(path) == sorted(four + texts([data.sample(m=2)])) and own.problems() == []


def test_candidates_and_runs_are_stored_again_far_from_their_first_rows(path):
    own = Store(path)
    for m in range(1, 251):
        own.add(RUN, [data.sample(m=m)])
    names = [name for name, *_ in rows_by_sql(path, most=1000)]
    assert names.count(RUN.id) == names.count(lines_of([data.sample()])[0].name) == 3
    edit(path, "DELETE FROM lines WHERE number <= 100")
    assert len(read(path)) == len(names[100:]) - 4


def test_a_long_command_is_stored_once(path):
    run = data.run(command="stoneware tune" + " --shapes 16x4096x4096" * 1000)
    for m in range(1, 20):
        Store(path).add(run, [data.sample(m=m)])
    assert {found for found, _ in Store(path).samples()} == {run}
    assert path.stat().st_size < 2 * len(run.command) + 20 * 2000


def test_problems_with_a_dozen_candidates_take_less_than_4_kb_each(path):
    own = Store(path)
    for m in range(1, 101):
        own.add(RUN, [data.sample(m=m, kernel=f"matmul_sm90_bf16_bf16_bf16_128x128x64_{one}") for one in range(14)])
    assert path.stat().st_size < 100 * 4096


def layout_2(path: Path, samples, *, has_run: bool = True) -> None:
    """Writes a database like Stoneware 0.1 did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    edit(path, "PRAGMA user_version = 2", "CREATE TABLE records (id TEXT PRIMARY KEY, payload TEXT)")
    rows = [("run", RUN.id, canonical_json(RUN.to_json()))] if has_run else []
    for sample in samples:
        fields = {**vars(sample), "key": sample.key.to_json(), "config": sample.config.to_json()}
        body = f"{canonical_json(replace(RUN, command='').to_json())}\n{canonical_json(fields)}"
        rows.append(("sample", [sample.key.to_json(), sample.config.to_json(), sample.run], body))
    for kind, identity, body in rows:
        id = data.sha256(canonical_json([kind, 2, identity]))[:32]
        proof = data.sha256(f"{id} {kind} 2 {body}")[:32]
        edit(path, f"INSERT INTO records VALUES ('{id}', '{proof} {kind} 2 {body}')")


@pytest.mark.parametrize("has_run", [True, False])
def test_a_store_of_stoneware_0_1_is_read_and_rewritten_by_the_next_add(path, has_run):
    samples = [data.sample(m=m) for m in (1, 16)] + [data.kernel_sample()]
    layout_2(path, samples, has_run=has_run)
    before = path.read_bytes()
    run = RUN if has_run else replace(RUN, command="")
    assert sorted(read(path)) == texts(samples) and {found for found, _ in Store(path).samples()} == {run}
    assert path.read_bytes() == before
    [problem] = Store(path).problems()
    assert "an older Stoneware wrote it" in problem and "damaged" not in problem
    Store(path).add(RUN, [data.sample(m=2)])
    assert read(path) == texts([*samples, data.sample(m=2)]) and Store(path).problems() == []
    assert Path(f"{path}.damaged-1").read_bytes() == before


def test_a_row_of_stoneware_0_1_that_was_edited_is_skipped(path):
    layout_2(path, [data.sample(m=m) for m in (1, 16)])
    edit(path, "UPDATE records SET payload = payload || ' ' WHERE rowid = 2")
    assert read(path) == texts([data.sample(m=16)])
    assert any(f"{path}: row 2: skipped: its digest" in problem for problem in Store(path).problems())


def test_lines_of_an_unknown_kind_are_reported_skipped_and_kept(path, four):
    line = '{"new":"fields"}'
    edit(path, f"INSERT INTO lines VALUES (99, 'x', '{store_file.digest('x', line)}', '{line}')")
    own = Store(path)
    assert texts(sample for _, sample in own.samples()) == four
    (problem,) = own.problems()
    assert f"{path}: row 99: " in problem and "new" in problem
    edit(path, "CREATE TABLE more (x)")
    Store(path).add(RUN, [data.sample(m=2)])
    assert Path(f"{path}.damaged-1").exists()
    assert line in [line for *_, line in rows_by_sql(path)]


def test_a_database_of_a_newer_layout_is_read_as_far_as_it_goes_and_never_written(path, four):
    edit(path, "PRAGMA user_version = 99", "CREATE TABLE new (x)", "INSERT INTO new VALUES (7)")
    before = path.read_bytes()
    own = Store(path)
    with pytest.raises(StoreError, match="layout 99 is of a newer stoneware.*STONEWARE_CACHE_DIR"):
        own.add(RUN, [data.sample(m=2)])
    assert path.read_bytes() == before
    assert texts(sample for _, sample in own.samples()) == four
    assert "layout 99" in own.problems()[0]


def test_a_process_that_has_the_store_open_sees_that_a_newer_version_changed_it(path, four):
    own = Store(path)
    own.add(RUN, [data.sample(m=2)])
    edit(path, "PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="layout 99"):
        own.add(RUN, [data.sample(m=3)])
    assert path.read_bytes() == before


def test_a_database_of_something_else_is_not_touched(path):
    path.parent.mkdir()
    edit(path, "CREATE TABLE bookmarks (url)", "INSERT INTO bookmarks VALUES ('x')")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="a database of something else, with bookmarks"):
        Store(path).add(RUN, [data.sample()])
    assert path.read_bytes() == before and Store(path).samples() == []


@pytest.mark.parametrize(
    "content",
    [
        lambda old: b"\xff" * 100 + old[100:],
        lambda old: old[:4096] + b"\0" * 8 + old[4104:],
        lambda old: old[:-4096],
        lambda old: b"x" + old,
        lambda old: old[4096:],
        lambda old: old[:60] + bytes(4) + old[64:],
        lambda old: old[:60] + b"\xff" * 4 + old[64:],
        lambda old: old.replace(b"CREATE TABLE lines", b"CREATE TABLE linez"),
    ],
    ids=["no header", "no page header", "cut", "shifted", "no first page", "layout 0", "layout -1", "other table"],
)
def test_a_damaged_file_is_read_then_kept_aside_and_renewed_by_the_next_add(path, four, content):
    bad = content(path.read_bytes())
    path.write_bytes(bad)
    whole = texts(samples_of_lines(proved(rows_by_sql(path))))
    own = Store(path)
    assert texts(sample for _, sample in own.samples()) == whole
    assert path.read_bytes() == bad, "reading changed the file"
    assert any("must be written anew" in problem and str(path) in problem for problem in own.problems())
    own.add(RUN, [data.sample(m=2)])
    assert read(path) == sorted(whole + texts([data.sample(m=2)]))
    assert own.problems() == []
    assert Path(f"{path}.damaged-1").read_bytes() == bad
    path.write_bytes(bad)
    Store(path).add(RUN, [data.sample(m=2)])
    assert Path(f"{path}.damaged-2").read_bytes() == bad


def test_a_file_that_is_no_database_is_kept_aside(path):
    path.parent.mkdir()
    path.write_text("not a database, " * 1000)
    Store(path).add(RUN, [data.sample()])
    assert read(path) == texts([data.sample()])
    assert "not a database" in Path(f"{path}.damaged-1").read_text()


def test_a_page_that_was_lost_is_found_by_a_store_that_checked_the_file_before(path, four):
    own = Store(path)
    own.add(RUN, [data.sample(m=3)])
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096 + path.read_bytes()[8192:])
    own.add(RUN, [data.sample(m=4)])
    found = read(path)
    assert texts([data.sample(m=4)])[0] in found
    assert Path(f"{path}.damaged-1").exists()


@pytest.mark.parametrize("name", ["link", "rename", "replace", "rmdir"])
def test_a_kill_between_the_steps_of_a_renewal_loses_nothing(path, four, name, monkeypatch):
    edit(path, "CREATE TABLE more (x)")

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, name, killed)
    Path(f"{path}-journal").write_bytes(b"\0" * 32)
    with pytest.raises(KeyboardInterrupt):
        Store(path).add(RUN, [])
    monkeypatch.undo()
    assert read(path) == four
    Store(path).add(RUN, [data.sample(m=2)])
    assert read(path) == sorted(four + texts([data.sample(m=2)]))
    assert Store(path).problems() == []


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER lines BEFORE INSERT ON lines BEGIN SELECT RAISE(IGNORE); END",
        "CREATE TRIGGER t AFTER INSERT ON lines BEGIN DELETE FROM lines; END",
        "CREATE TABLE '\x1b[2J' (x)",
        "CREATE VIEW more AS SELECT * FROM lines",
    ],
)
def test_what_is_planted_beside_the_table_is_kept_aside_and_undoes_no_add(path, four, statement):
    edit(path, statement)
    own = Store(path)
    assert texts(sample for _, sample in own.samples()) == four
    [problem] = own.problems()
    assert "is not what stoneware writes" in problem and problem.isprintable()
    own.add(RUN, [data.sample(m=2)])
    assert read(path) == sorted(four + texts([data.sample(m=2)])) and own.problems() == []
    edit(path, statement)  # by who does it while the process has the store open
    own.add(RUN, [data.sample(m=3)])
    assert read(path) == sorted(four + texts([data.sample(m=2), data.sample(m=3)]))
    assert Path(f"{path}.damaged-2").exists()


def test_a_view_in_the_place_of_the_table_is_not_asked(path):
    path.parent.mkdir()
    edit(
        path,
        "PRAGMA user_version=3",
        "CREATE VIEW lines AS WITH RECURSIVE endless(n) AS "
        "(SELECT 1 UNION ALL SELECT n FROM endless) SELECT n AS number, n AS line FROM endless",
    )
    assert Store(path).samples() == []
    Store(path).add(RUN, [data.sample()])
    assert read(path) == texts([data.sample()])


def test_the_lock_is_given_back_though_a_process_was_forked_meanwhile(path, monkeypatch):
    """Worker processes of a data loader, say, which have every open file of their parent."""
    monkeypatch.setattr(store.store_file, "WAIT_S", 0.1)
    begun, done = os.pipe()
    child = 0
    write = Store._write

    def fork_and_write(*arguments):
        nonlocal child
        child = os.fork()
        if not child:
            os.close(done)
            os.read(begun, 1)  # until the parent closes its end
            os._exit(0)
        write(*arguments)

    monkeypatch.setattr(Store, "_write", fork_and_write)
    Store(path).add(RUN, [data.sample()])
    monkeypatch.setattr(Store, "_write", write)
    try:
        Store(path).add(RUN, [data.sample(m=2)])
    finally:
        os.close(done)
        os.waitpid(child, 0)
        os.close(begun)
    assert len(read(path)) == 2


# The rollback journal. A process that was killed leaves one.


def test_what_a_killed_process_left_half_done_is_not_read_and_no_file_is_changed(path, four):
    killed_while_adding(path)
    before = state(path)
    assert read(path) == four
    assert Store(path).problems() == []
    assert state(path) == before
    Store(path).add(RUN, [data.sample(m=2)])
    assert read(path) == sorted(four + texts([data.sample(m=2)]))
    assert not Path(f"{path}-journal").exists()


@pytest.mark.parametrize("offset", [0, 20, 600, 3000])
def test_beside_a_damaged_journal_a_half_done_add_costs_no_crash(path, four, offset):
    killed_while_adding(path)
    journal = bytearray(Path(f"{path}-journal").read_bytes())
    journal[offset] ^= 0xFF
    Path(f"{path}-journal").write_bytes(journal)
    assert set(read(path)) <= set(four)
    Store(path).add(RUN, [data.sample(m=2)])
    assert set(read(path)) >= set(texts([data.sample(m=2)]))


@pytest.mark.parametrize("database", ["missing", "empty"])
def test_a_journal_without_its_database_does_not_hinder_the_next_add(path, four, database):
    killed_while_adding(path)
    path.unlink() if database == "missing" else path.write_bytes(b"")
    assert read(path) == []
    Store(path).add(RUN, [data.sample(m=2)])
    assert read(path) == texts([data.sample(m=2)])


def test_a_link_to_a_store_is_followed(path, four, tmp_path):
    (tmp_path / "link.sqlite3").symlink_to(path)
    linked = Store(tmp_path / "link.sqlite3")
    linked.add(RUN, [data.sample(m=2)])
    edit(path, "CREATE TABLE more (x)")
    linked.add(RUN, [data.sample(m=3)])
    expected = sorted(four + texts([data.sample(m=2), data.sample(m=3)]))
    assert read(path) == read(tmp_path / "link.sqlite3") == expected
    assert (tmp_path / "link.sqlite3").is_symlink()
