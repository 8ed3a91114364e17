"""The process that measures, `python -m stoneware.sessions.child`, and its parent's view of it.

They exchange JSON lines. First the process reads {"device", "run", "settings"} and answers
{"event": "ready"}; then for each {"op", "problem", "configs"} it writes

    {"event": "at", "config": 3}            before each run of that candidate; null: of none
    {"event": "samples", "lines": [...]}    as soon as they are final, as lines of samples.py
    {"event": "done"}                       the problem is measured
    {"event": "error", "detail": "..."}     it cannot be: not a candidate but the problem fails

The process ends at the end of its input, with its parent, and when the CUDA context is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from stoneware.errors import StonewareError

COMMAND = (sys.executable, "-P", "-m", "stoneware.sessions.child")
"""A fresh interpreter, not a fork: CUDA does not survive one. -P: its path is its parent's."""

_START_LIMIT_S = 300.0
_EVENTS = ("ready", "at", "samples", "done", "error")
_LOST_CONTEXT_EXIT_CODE = 3
_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_LOG = logging.getLogger("stoneware.measuring")


class WorkerError(StonewareError, RuntimeError):
    """The measuring process cannot be started."""


class WorkerLost(Exception):
    """The measuring process hung or ended by itself; the message says how, and its last output.

    Attributes:
      status: "hung" or "failed", for the sample of the candidate that ran.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Worker:
    """A measuring process seen from its parent.

    Args:
      command: the program.
      hello: its first line of input.

    Raises:
      WorkerError: it did not become ready; the message has its output.
    """

    def __init__(self, command: Sequence[str], hello: Mapping[str, Any]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - kill() closes it
        # A separate session: Ctrl-C at the terminal reaches only the parent, which ends the child.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        self._stdin = self._process.stdin
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()
        try:
            self.send(hello)
            next(event for event in self.events(_START_LIMIT_S) if event["event"] == "ready")
        except BaseException as error:
            self.kill()
            if not isinstance(error, WorkerLost):
                raise
            raise WorkerError(
                f"the measuring process must start within {_START_LIMIT_S:g} s and did not: "
                f"{error}; run it by hand to see more: python {' '.join(command[1:])}"
            ) from error

    def send(self, message: Mapping[str, Any]) -> None:
        """Gives it a line of input; raises WorkerLost if it has ended."""
        try:
            self._stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def events(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Its events, until the caller has enough; raises WorkerLost after `limit_s` without one,
        and if it has ended."""
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                raise WorkerLost("hung", f"no progress for {limit_s:g} s") from None
            if not line:
                raise self._ended()
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
            if isinstance(event, dict) and event.get("event") in _EVENTS:
                yield event
            else:
                _LOG.warning("the measuring process wrote something that is not an event: %r", line[:200].strip())

    def kill(self) -> None:
        """Ends it and what it started, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            # The driver holds a process whose kernel it cannot stop; a new one may still work.
            _LOG.warning(
                "measuring process %d does not end, the driver holds it; if the GPU stays busy, restart the machine",
                self._process.pid,
            )
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stderr.close()

    def _ended(self) -> WorkerLost:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _TAIL_BYTES))
        output = self._stderr.read().decode("utf-8", "replace").strip()
        return WorkerLost("failed", f"the measuring process ended with {how}" + (f": {output}" if output else ""))


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Moves lines into the queue, whose `get` has a timeout, unlike a pipe's read; b"" is the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(b"")


def main(make_plan: Any = None, make_timer: Any = None) -> int:
    """Runs the program.

    Args:
      make_plan: replaces that of the ops.
      make_timer: (ordinal of the GPU) -> DeviceTimer; None times cold calls.
    """
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # What a library prints must not stand among the events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), file=events, flush=True)

    # After the pipes are in place, since this takes seconds and may fail.
    import torch

    from stoneware.kernels.config import Config
    from stoneware.measuring import candidates
    from stoneware.measuring.device_timer import DeviceTimer
    from stoneware.measuring.settings import Settings
    from stoneware.ops import operation_of
    from stoneware.runtime.device import cuda_device
    from stoneware.specs import spec_of
    from stoneware.tuning.samples import lines_of

    hello = json.loads(sys.stdin.readline())
    ordinal, settings = hello["device"], Settings(**hello["settings"])
    torch.cuda.set_device(ordinal)
    device, timer = cuda_device(ordinal), (make_timer or DeviceTimer)(ordinal)
    say("ready")

    def measure(task: Mapping[str, Any]) -> None:
        spec = spec_of(task["op"])
        problem = spec.problem(**task["problem"])
        configs = [Config.from_json(data) for data in task["configs"]]
        positions = {config: idx for idx, config in enumerate(configs)}
        candidates.Race(
            problem=problem,
            device=device,
            timer=timer,
            settings=settings,
            run_id=hello["run"],
            make_plan=make_plan or operation_of(task["op"]).make_plan,
            announce=lambda config: say("at", config=positions.get(config)),
            emit=lambda samples: say("samples", lines=[line.text for line in lines_of(samples)]),
        ).run(configs)

    for line in sys.stdin:
        try:
            measure(json.loads(line))
        except candidates.ContextLostError as error:
            print(error, file=sys.stderr, flush=True)
            # Not sys.exit: torch would try to clean up a context that is gone.
            os._exit(_LOST_CONTEXT_EXIT_CODE)
        except Exception as error:
            traceback.print_exc()
            say("error", detail=f"{type(error).__name__}: {error}"[:1000])
        else:
            say("done")
        torch.cuda.empty_cache()
    return 0


def _end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends: while a GPU kernel hangs, the process
    does not see the end of its input."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


if __name__ == "__main__":
    sys.exit(main())
