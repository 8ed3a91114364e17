"""The process that measures, supervised by session.tune: `python -m stoneware.measuring.child`.

It speaks JSON lines. First it reads {"device", "run", "settings"} and answers {"event": "ready"};
then for each {"problem", "configs", "always", "known", "careful"} it writes

    {"event": "at", "config": 3}            before that candidate runs alone, or when it is late;
                                            null when several are timed against each other;
                                            if "careful", before each call that is timed
    {"event": "samples", "samples": [...]}  as soon as they are final
    {"event": "done"}                       the problem is measured
    {"event": "error", "detail": "..."}     it cannot be: not a candidate but the problem fails
    {"event": "lost", "detail": "..."}      a candidate destroyed the CUDA context; the process ends

It ends at the end of its input, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

LOST_CONTEXT_EXIT_CODE = 3

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(make_plan: Any = None) -> int:
    """Runs the program; `make_plan` in place of the ops' own is for tests."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # What a library prints must not stand among the events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # After the pipes are in place, since this takes seconds and may fail.
    import torch

    from stoneware.measuring.device_timer import DeviceTimer
    from stoneware.measuring.settings import Settings
    from stoneware.runtime.device import cuda_device

    hello = json.loads(sys.stdin.readline())
    ordinal = hello["device"]
    torch.cuda.set_device(ordinal)
    worker = _Worker(
        events, cuda_device(ordinal), DeviceTimer(ordinal), Settings.from_json(hello["settings"]),
        hello["run"], make_plan,
    )
    _say(events, event="ready")
    for line in sys.stdin:
        if not worker.measure(json.loads(line)):
            # Not sys.exit: torch would try to clean up a context that is gone.
            os._exit(LOST_CONTEXT_EXIT_CODE)
        torch.cuda.empty_cache()
    return 0


class _Worker:
    def __init__(
        self, events: TextIO, device: Any, timer: Any, settings: Any, run_id: str, make_plan: Any
    ) -> None:
        self._events, self._device, self._timer = events, device, timer
        self._settings, self._run_id, self._make_plan = settings, run_id, make_plan

    def measure(self, task: Mapping[str, Any]) -> bool:
        """Measures one problem; False if the CUDA context is lost."""
        from stoneware.kernels.config import Config
        from stoneware.measuring import candidates, workloads

        configs = [Config.from_json(data) for data in task["configs"]]
        positions = {config: idx for idx, config in enumerate(configs)}
        try:
            candidates.measure(
                workloads.problem_from_json(task["problem"]),
                configs,
                self._device,
                self._timer,
                self._settings,
                self._run_id,
                always=[configs[idx] for idx in task["always"]],
                known={Config.from_json(data): us for data, us in task["known"]},
                make_plan=self._make_plan,
                is_careful=task["careful"],
                announce=lambda config: _say(
                    self._events, event="at", config=positions.get(config)
                ),
                emit=lambda samples: _say(
                    self._events, event="samples",
                    samples=[sample.to_json() for sample in samples],
                ),
            )
        except candidates.ContextLostError as error:
            _say(self._events, event="lost", detail=str(error))
            return False
        except Exception as error:
            traceback.print_exc()
            _say(self._events, event="error", detail=f"{type(error).__name__}: {error}"[:1000])
            return True
        _say(self._events, event="done")
        return True


def _say(events: TextIO, **event: Any) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends: a hung GPU kernel would keep it from
    seeing that its input has ended."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


if __name__ == "__main__":
    sys.exit(main())
