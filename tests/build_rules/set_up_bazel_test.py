"""Setting Bazel up survives two starts at once and a kill at any moment.

The real lock and staging of debian_bazel.install, with the download and unpacking replaced.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

_BOOTSTRAP = pathlib.Path("tools/bootstrap").resolve()
_PATIENCE_S = 30

# Each line of `log` is a stand-in installer that ran.
_PROGRAM = """
import pathlib, sys, time
sys.path.insert(0, {bootstrap!r})
sys.dont_write_bytecode = True
import debian, debian_bazel

folder = pathlib.Path({folder!r})

def finish(staging, prefix):
    (staging / "root").mkdir()
    (staging / "root/program").touch()
    (staging / "root").rename(prefix)
    staging.rmdir()
    (prefix / "installed").touch()

def installer(staging, prefix, version, say):
    with open(folder / "log", "a") as log:
        log.write("ran\\n")
{installer}

real_install, debian_bazel._install = debian_bazel._install, installer
say = lambda text: print(text, file=sys.stderr, flush=True)
try:
    print(debian_bazel.install(folder / "bazel", "7.7.1", say))
except debian_bazel.CannotInstall as error:
    sys.exit("cannot: " + str(error))
"""


class Installation:
    """A cache folder and processes that set Bazel up in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.prefix = folder / "bazel"
        self.partial = folder / "bazel.partial"

    def start(self, installer: str = "finish(staging, prefix)") -> subprocess.Popen[str]:
        program = _PROGRAM.format(
            bootstrap=str(_BOOTSTRAP),
            folder=str(self.folder),
            installer=textwrap.indent(textwrap.dedent(installer), "    "),
        )
        return subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, installer: str = "finish(staging, prefix)") -> tuple[int, str, str]:
        process = self.start(installer)
        stdout, stderr = process.communicate(timeout=_PATIENCE_S)
        return process.returncode, stdout, stderr

    def wait_for(self, path: pathlib.Path) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not appear"
            time.sleep(0.01)

    @property
    def num_runs(self) -> int:
        return (self.folder / "log").read_text().count("ran")


@pytest.fixture
def installation(tmp_path) -> Installation:
    return Installation(tmp_path)


def test_first_start_installs_and_the_second_finds_it(installation):
    status, stdout, stderr = installation.run()
    assert (status, stdout.strip()) == (0, str(installation.prefix)), stderr
    assert "setting up Bazel 7.7.1" in stderr
    assert "is ready" in stderr
    status, stdout, stderr = installation.run("raise AssertionError('it is there')")
    assert (status, stdout.strip(), stderr) == (0, str(installation.prefix), "")
    assert installation.num_runs == 1


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [("bazel 7.7.1\n", True), ("bazel 7.7.1- (@non-git)\n", True), ("bazel 7.7.10\n", False), ("", False)],
)
def test_a_bazel_that_says_another_version_is_refused(text, is_accepted):
    sys.path.insert(0, str(_BOOTSTRAP))
    import debian_bazel

    if is_accepted:
        debian_bazel.check_version(text, "7.7.1")
        return
    with pytest.raises(debian_bazel.CannotInstall, match=f"must be 7.7.1, but says {text.strip()!r}"):
        debian_bazel.check_version(text, "7.7.1")


def test_two_starts_at_once_install_once_and_both_succeed(installation):
    slow = """
        (folder / "started").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        finish(staging, prefix)
    """
    first = installation.start(slow)
    installation.wait_for(installation.folder / "started")
    second = installation.start(slow)
    line = second.stderr.readline()
    assert line.strip() == "another bazelw is setting Bazel up; waiting for it"
    assert second.poll() is None
    (installation.folder / "go").touch()
    for process in (first, second):
        stdout, stderr = process.communicate(timeout=_PATIENCE_S)
        assert (process.returncode, stdout.strip()) == (0, str(installation.prefix)), stderr
    assert installation.num_runs == 1


def kill_when(installation: Installation, installer: str) -> None:
    process = installation.start(installer + "\n(folder / 'reached').touch()\ntime.sleep(600)\n")
    installation.wait_for(installation.folder / "reached")
    process.kill()
    process.communicate()


def test_a_start_after_a_kill_half_way_begins_afresh(installation):
    kill_when(installation, "(staging / 'half').touch()")
    assert (installation.partial / "half").exists()
    assert not installation.prefix.exists()
    status, _, stderr = installation.run("assert not any(staging.iterdir())\nfinish(staging, prefix)")
    assert status == 0, stderr
    assert not installation.partial.exists()
    assert (installation.prefix / "program").exists()
    assert installation.num_runs == 2


def test_a_start_after_a_kill_before_the_trial_begins_afresh(installation):
    """The prefix is in place but nobody has tried it: it does not count."""
    kill_when(
        installation,
        """\
(staging / "root").mkdir()
(staging / "root/untried").touch()
(staging / "root").rename(prefix)
""",
    )
    assert (installation.prefix / "untried").exists()
    status, _, stderr = installation.run()
    assert status == 0, stderr
    assert not (installation.prefix / "untried").exists()
    assert (installation.prefix / "program").exists()


@pytest.mark.parametrize(
    "failure",
    [
        "raise debian.DebianUnavailable('apt-get is not on PATH')",
        "raise OSError(28, 'No space left on device')",
        "debian_bazel.subprocess.run(['sh', '-c', 'echo broken-$((1 + 1)) >&2; exit 2'], "
        "check=True, capture_output=True, text=True)",
    ],
)
def test_a_failing_step_is_named_and_the_next_start_tries_again(installation, failure):
    status, stdout, stderr = installation.run(failure)
    assert (status, stdout) == (1, "")
    reason = stderr.splitlines()[-1]
    assert reason.startswith("cannot: ")
    assert any(words in reason for words in ("not on PATH", "No space left", "broken-2"))
    assert installation.run()[0] == 0
