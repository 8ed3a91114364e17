"""Sessions that are interrupted or killed keep what they stored, and the next one continues."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_session import Bench, problems

from stoneware.sessions.session import Ranks
from stoneware.tuning.store import Store

NUM_KILLS = 20
KERNELS = ["ok_10.0", "wrong", "ok_11.0"]
M_VALUES = range(1, 301)


class Noting(Store):
    """Writes a line for each sample once it is stored."""

    def __init__(self, path: Path, noted: Path) -> None:
        super().__init__(path)
        self._noted = noted

    def add(self, run, samples) -> None:
        super().add(run, samples)
        with self._noted.open("a", encoding="ascii") as file:
            file.writelines(f"{s.key.m} {s.config.kernel}\n" for s in samples)


def stored_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()  # the last may be half a line


def wait_for_more(noted: Path, pid: int) -> None:
    """Returns when the session has noted another sample, or has ended."""
    known = len(stored_lines(noted))
    while len(stored_lines(noted)) == known and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def in_a_process(bench: Bench, noted: Path, run: str) -> int:
    """Starts the session in a process of its own; returns its id. A fork, which spares the import
    of torch; the measuring process is started as ever."""
    pid = os.fork()
    if pid:
        return pid
    try:
        store = Noting(bench.store.path, noted)
        bench.session(KERNELS, run=run, store=store).measure(problems(*M_VALUES), Ranks())
    finally:
        os._exit(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_killing_the_session_at_20_random_moments_loses_no_finished_sample(tmp_path):
    bench, noted = Bench(tmp_path), tmp_path / "noted"
    seed = random.randrange(1 << 32)
    print(f"random.Random({seed})")
    moments = random.Random(seed)
    for kill_idx in range(NUM_KILLS):
        pid = in_a_process(bench, noted, f"run-{kill_idx}")
        # From the start of the process, or of a problem: on a busy machine a start takes long, and
        # kills by the clock alone would meet nothing else.
        if kill_idx % 2:
            wait_for_more(noted, pid)
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        # Those that always race have a sample in each run that measured a part of their problem.
        kept = {f"{s.key.m} {s.config.kernel}" for _, s in bench.store.samples()}
        assert not set(stored_lines(noted)) - kept
    assert 0 < len(kept) < 5 * len(M_VALUES), "the kills met no session at work"
    pid = in_a_process(bench, noted, "run-last")
    os.waitpid(pid, 0)
    wanted = {(m, kernel) for m in M_VALUES for kernel in [*KERNELS, "ok_15.0", "ok_20.0"]}
    pairs = [(s.key.m, s.config.kernel) for _, s in bench.store.samples()]
    assert set(pairs) == wanted
    assert bench.store.problems() == []
    once = [pair for pair in pairs if pair[1] == "wrong"]
    assert len(once) == len(set(once)), "a finished sample was measured again"


def test_ctrl_c_ends_the_session_and_its_process_and_a_second_start_goes_on(tmp_path):
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        sys.path[:0] = [sys.argv[1]]
        from fake_session import Bench, problems
        from stoneware.measuring.progress import Reporter
        from stoneware.sessions.session import Ranks
        from stoneware.measuring.settings import Settings

        class Telling(Reporter):
            def end(self, problem, cost, outcome):
                print("ended", problem, flush=True)
            def finish(self, outcome):
                print("finished:", outcome, flush=True)
        session = Bench(Path(sys.argv[2])).session(["ok_10.0", sys.argv[3]], reporter=Telling(),
            settings=Settings(hang_limit_s=1000.0))
        start = session._start
        def telling():
            worker = start()
            print("process", worker._process.pid, flush=True)
            return worker
        session._start = telling
        session.measure(problems(1, 2, 3), Ranks())
    """)

    def started(kernel: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path), kernel],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    bench = Bench(tmp_path)
    bench.session(["ok_10.0"], run="before").measure(problems(1), Ranks())
    first = started("hang")
    child = int(first.stdout.readline().split()[1])
    while "1 hang" not in bench.measured:  # until it waits for the candidate that hangs
        assert first.poll() is None, first.stderr.read()
    first.send_signal(signal.SIGINT)
    said, errors = first.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and first.returncode == -signal.SIGINT
    assert "finished: interrupted; what was stored is kept" in said
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert (1, "hang") not in bench.samples and (1, "ok_10.0") in bench.samples

    second = started("ok_12.0")
    said, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert "finished: 3 problems measured" in said
    assert bench.measured["1 ok_12.0"] == 1


def test_a_measuring_process_ends_when_its_parent_is_killed(tmp_path):
    """The real child's guard, in a process that hangs and does not see the end of its input."""
    program = textwrap.dedent("""
        import signal, subprocess, sys
        child = "\\n".join([
            "import signal, sys",
            "from stoneware.sessions.child import _end_with_parent",
            "_end_with_parent()",
            "print('guarded', flush=True)",
            "signal.pause()",
        ])
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        print(process.pid, flush=True)
        signal.pause()
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child = int(parent.stdout.readline())
    handle = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    import select

    ended, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ended, f"process {child} outlives its parent"
