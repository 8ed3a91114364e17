"""The measuring process seen from its parent: started, spoken to, watched, killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoneware.errors import StonewareError

COMMAND = (sys.executable, "-P", "-m", "stoneware.measuring.child")
"""A fresh interpreter, not a fork: CUDA does not survive one. -P: its path is its parent's."""

_KNOWN_EVENTS = ("ready", "at", "samples", "done", "error", "lost")
_TAIL_BYTES = 2000
_CHUNK_BYTES = 1 << 16

_LOG = logging.getLogger("stoneware.measuring")


class WorkerError(StonewareError, RuntimeError):
    """The measuring process cannot be started."""


class WorkerHung(Exception):
    """It said nothing for longer than its limit."""


class WorkerDied(Exception):
    """It ended without being told to; the message has exit code or signal, and what it said."""


class Worker:
    """One measuring process.

    Args:
      command: the program.
      hello: its first line of input, see child.py.
      start_limit_s: how long it may take until it is ready.

    Raises:
      WorkerError: it did not become ready; the message has what it said.
    """

    def __init__(
        self, command: Sequence[str], hello: Mapping[str, Any], start_limit_s: float
    ) -> None:
        self._stderr = tempfile.TemporaryFile()
        # A session of its own: Ctrl-C at the terminal reaches the parent alone, which ends it.
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._unread = b""
        try:
            self.send(hello)
            for event in self.events(start_limit_s):
                if event["event"] == "ready":
                    return
        except BaseException as error:
            self.kill()
            if not isinstance(error, (WorkerHung, WorkerDied)):
                raise
            raise WorkerError(
                f"the measuring process must start within {start_limit_s:g} s and did not: "
                f"{error}; start it by hand to see more: {' '.join(command[1:])}"
            ) from error

    def send(self, task: Mapping[str, Any]) -> None:
        """Gives it a line of input.

        Raises:
          WorkerDied: it has ended.
        """
        try:
            self._process.stdin.write(json.dumps(task).encode("ascii") + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerDied(self._epitaph()) from error

    def events(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """What it says, until the caller has enough.

        Raises:
          WorkerHung: it said nothing for `limit_s`.
          WorkerDied: it ended.
        """
        while True:
            deadline = time.monotonic() + limit_s
            while b"\n" not in self._unread:
                if not self._selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerHung(f"no progress for {limit_s:g} s")
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    raise WorkerDied(self._epitaph())
                self._unread += chunk
            line, self._unread = self._unread.split(b"\n", 1)
            event = _parsed(line)
            if event is not None:
                yield event

    def close(self) -> None:
        """Lets it end by itself, and kills it if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Ends it and what it started, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            # The driver holds a process whose kernel it cannot stop; a new one may still work.
            _LOG.warning(
                "measuring process %d does not end, the driver holds it; if the GPU stays busy, "
                "restart the machine", self._process.pid,
            )
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _epitaph(self) -> str:
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _TAIL_BYTES))
        said = self._stderr.read().decode("utf-8", "replace").strip()
        return f"the measuring process ended with {how}" + (f": {said}" if said else "")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None, and a line in the log, if it is none."""
    try:
        event = json.loads(line)
        if event["event"] in _KNOWN_EVENTS:
            return event
    except (ValueError, TypeError, KeyError, RecursionError):
        pass  # said below
    _LOG.warning("the measuring process said something that is no event: %r", line[:200])
    return None
