"""The release check passes for equal wheels and a cached build that executes nothing, and fails otherwise.

It runs in clones of a small repository, whose bazelw is fake_bazelw.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import check
import pytest

_SAME = hashlib.sha256(b"the same").hexdigest()
_CACHED = {"executed": 0}


def git(folder: pathlib.Path, *words: str) -> str:
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.com"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path) -> pathlib.Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(os.environ["STONEWARE_TEST_FAKE_BAZELW"], folder / "bazelw")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=Start")
    return folder


@pytest.fixture
def start(repository, tmp_path):
    """Starts the check; `builds` are those of fake_bazelw."""

    def run(*flags: str, **builds: dict) -> subprocess.Popen:
        plan = {"calls": str(tmp_path / "calls"), **builds}
        return subprocess.Popen(
            [sys.executable, check.__file__, f"--folder={tmp_path / 'folder'}", "--target=//:small", *flags],
            env={
                "BUILD_WORKSPACE_DIRECTORY": str(repository),
                "FAKE_BAZELW": json.dumps(plan),
                "HOME": str(tmp_path),
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


@pytest.fixture
def release_check(start):
    """Runs the check to its end."""

    def run(*flags: str, **builds: dict) -> subprocess.CompletedProcess:
        process = start(*flags, **builds)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


def calls(tmp_path: pathlib.Path, command: str = "build") -> list[dict]:
    """The calls of fake_bazelw with this command, without those that only fetch."""
    lines = (tmp_path / "calls").read_text().splitlines()
    return [call for call in map(json.loads, lines) if call["command"] == command and "--nobuild" not in call["flags"]]


def test_it_passes_and_prints_one_digest(release_check, repository, tmp_path):
    result = release_check(cached=_CACHED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "first clone: 3 actions executed, 2 from a cache",
        f"  {_SAME}  small-1.0-py3-none-any.whl",
        "second clone: 3 actions executed, 2 from a cache",
        f"  {_SAME}  small-1.0-py3-none-any.whl",
        "second clone, cached: 0 actions executed, 2 from a cache",
        f"  {_SAME}  small-1.0-py3-none-any.whl",
        f"release check passed (cold): {git(repository, 'rev-parse', 'HEAD').strip()}",
    ]
    assert list((tmp_path / "folder").iterdir()) == []


def test_only_the_last_build_reads_a_cache(release_check, tmp_path):
    release_check(cached=_CACHED)
    first, second, cached = calls(tmp_path)
    assert [call["build"] for call in (first, second, cached)] == ["first", "second", "cached"]
    assert first["clone"] != second["clone"] == cached["clone"]
    assert "--noremote_accept_cached" in first["flags"]
    assert not second["remote_cache"]
    assert cached["remote_cache"] and "--noremote_accept_cached" not in cached["flags"]
    assert [call["clone"] for call in calls(tmp_path, "clean")] == [second["clone"]]


def test_nothing_is_built_with_a_network(release_check, tmp_path):
    result = release_check(cached=_CACHED)
    if "not permitted here" in result.stderr:
        switches = {"--nofetch", "--repository_disable_download"}
        assert all(switches <= set(call["flags"]) for call in calls(tmp_path))
    else:
        assert "loopback is the only interface" in result.stderr
        assert [call["interfaces"] for call in calls(tmp_path)] == [["lo"]] * 3


def test_another_wheel_fails(release_check):
    result = release_check(cached=_CACHED, second={"wheel": "another"})
    assert result.returncode == 1
    assert _SAME in result.stdout
    assert hashlib.sha256(b"another").hexdigest() in result.stdout
    assert "must give the same wheels" in result.stderr
    assert "passed" not in result.stdout


def test_an_action_of_the_cached_build_fails(release_check):
    result = release_check(cached={"executed": 1})
    assert result.returncode == 1
    assert "must execute no action, but it executed 1 by linux-sandbox" in result.stderr


def test_it_continues_after_a_build_that_failed(release_check, tmp_path):
    result = release_check(cached=_CACHED, second={"fails": True})
    assert result.returncode == 1
    assert "each step must succeed" in result.stderr
    assert release_check(cached=_CACHED).returncode == 0
    assert [call["build"] for call in calls(tmp_path)] == ["first", "second", "second", "cached"]


def test_it_continues_after_an_interruption(start, release_check, tmp_path):
    process = start(cached=_CACHED, second={"waits": True})
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "release check: interrupted; the same command continues where it stopped"
    assert len({call["clone"] for call in calls(tmp_path, "shutdown")[-2:]}) == 2, "no Bazel server is left"
    assert release_check(cached=_CACHED).returncode == 0
    assert [call["build"] for call in calls(tmp_path)] == ["first", "second", "second", "cached"]


def test_a_clone_with_changes_is_refused(release_check, repository):
    (repository / "BUILD.bazel").touch()
    result = release_check(cached=_CACHED)
    assert result.returncode == 1
    assert "only a commit is released" in result.stderr
    assert "BUILD.bazel" in result.stderr
