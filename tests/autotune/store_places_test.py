"""Places that cannot be written, and where the user's store is."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sample_strategies as data
from store_files import RUN, killed_while_adding, read, state

from stoneware.errors import StoreError
from stoneware.tuning import store
from stoneware.tuning.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning" / "samples.sqlite3"


def as_user(program: str, *arguments: str) -> str:
    """Runs a program as nobody where we are root, whom no permission stops."""
    setup = (
        # All imports come first: afterwards their folders may be closed.
        f"import os, sqlite3, sys; sys.path[:0] = {sys.path!r}\n"
        "import sample_strategies as data\n"
        "from stoneware.tuning.store import Store\nfrom stoneware.errors import StoreError\n"
        "if os.getuid() == 0:\n"
        "  try: os.setgid(65534); os.setuid(65534)\n"
        "  except OSError as error: raise SystemExit(77)\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", setup + program, *arguments], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("root without another user: nothing is read-only here")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def open_folder():
    """A folder that others may enter; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for sub in folder.iterdir():
        sub.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_read_only_folder_is_read_and_a_write_is_a_named_error(open_folder, was_killed):
    path = open_folder / "tuning" / "samples.sqlite3"
    samples = [data.sample(m=m) for m in (1, 16)]
    Store(path).add(RUN, samples)
    if was_killed:
        killed_while_adding(path)
    for file in path.parent.iterdir():
        file.chmod(0o444)
    path.parent.chmod(0o555)
    before = state(path)
    said = as_user(
        "own = Store(sys.argv[1])\n"
        "print(len(own.samples()), own.problems())\n"
        "try: own.add(data.run(), [data.sample(m=2)])\n"
        "except StoreError as error: print(error)",
        str(path),
    )
    assert said.startswith("2 []\n")
    assert "Permission denied" in said and "STONEWARE_CACHE_DIR" in said and str(path) in said
    assert state(path) == before


@pytest.mark.parametrize("end", ["", "-journal", "-wal"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_stops_nobody(tmp_path, end):
    own = Store(tmp_path / "samples.sqlite3")
    own.add(RUN, [data.sample()])
    if not end:
        own.path.unlink()
    os.mkfifo(f"{own.path}{end}")
    assert own.samples() == []
    [problem] = own.problems()
    assert f"{own.path}: cannot be read" in problem and "pipe (FIFO)" in problem
    assert f"{own.path}{end}" in problem
    with pytest.raises(StoreError, match="must be a regular file, and is a pipe"):
        own.add(RUN, [data.sample(m=2)])


def test_a_reader_does_not_wait_for_ever_for_a_writer_that_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(store.store_file, "READER_WAIT_S", 0.1)
    own = Store(tmp_path / "samples.sqlite3")
    own.add(RUN, [data.sample()])
    writer = sqlite3.connect(own.path, isolation_level=None)
    with store.store_file.turn(str(own.path)):
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("DELETE FROM lines")
        assert own.samples() == []
        assert "another process has held its lock" in own.problems()[0]
        writer.execute("ROLLBACK")
    writer.close()
    assert len(own.samples()) == 1 and own.problems() == []


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path):
    (tmp_path / "file").write_text("")
    own = Store(tmp_path / "file" / "tuning" / "samples.sqlite3")
    assert own.samples() == [] and own.stamp() == ()
    [problem] = own.problems()
    assert "Not a directory" in problem and "STONEWARE_CACHE_DIR" in problem
    with pytest.raises(StoreError, match="Not a directory.*STONEWARE_CACHE_DIR"):
        own.add(RUN, [data.sample()])


def test_a_folder_in_the_place_of_the_file_is_a_named_error(path):
    path.mkdir(parents=True)
    assert Store(path).samples() == []
    assert str(path) in Store(path).problems()[0]
    with pytest.raises(StoreError, match="STONEWARE_CACHE_DIR"):
        Store(path).add(RUN, [data.sample()])
    assert path.is_dir()


FILL = """
import resource, sys
sys.path[:0] = {path!r}
import sample_strategies as data
from stoneware.errors import StoreError
from stoneware.tuning.store import Store
own = Store(sys.argv[1])
for limit in (150_000, 40_000):
    # Lower than the database already is, the second time.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        for m in range(1, 10_000):
            own.add(data.run(), [data.sample(m=m, median_us=limit)])
            print(limit, m, flush=True)
    except StoreError as error:
        print(error, file=sys.stderr)
    else:
        raise SystemExit("no error")
"""


def test_a_full_disk_is_a_named_error_and_what_was_stored_stays(path):
    """A limit on the size of files stands in for the disk: the same writes fail half way."""
    done = subprocess.run([sys.executable, "-c", FILL.format(path=sys.path), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.strip().splitlines()
    assert len(errors) == 2
    assert all("cannot be written" in error and "free space" in error for error in errors)
    stored = {int(m): float(limit) for limit, m in map(str.split, done.stdout.splitlines())}
    assert len(stored) > 20
    found = {sample.key.m: sample.median_us for _, sample in Store(path).samples()}
    assert stored.items() <= found.items()
    assert Store(path).problems() == []
    Store(path).add(RUN, [data.sample(m=20_000)])
    assert len(read(path)) == len(found) + 1


# Where the store is.


def test_the_users_store_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "own"))
    assert store.user_store().path == tmp_path / "own" / "samples.sqlite3"
    assert store.user_store() is store.user_store()
    monkeypatch.delenv("STONEWARE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store.user_store().path == tmp_path / "cache" / "stoneware/tuning/samples.sqlite3"


def test_without_a_home_there_is_no_store(monkeypatch):
    monkeypatch.delenv("STONEWARE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert store.user_store() is None
