"""What importing a family and its first call cost a process: a JSON line for each call of each process.

    python -m tools.gpu_check.first_call --of scaled_mm,matmul --repeat 9

Each figure is from a new process, which imports torch, starts CUDA and makes the operands before the
clock runs; then it makes our call and after it torch's. A fork of a process that has torch would be
quicker to make, but its imports take half as long again, as each page it writes to is copied first.
`import_and_first_call_ms` is the number to look at: the time from a process that has no Stoneware to
its first result. Beside it stands how many full garbage collections Python ran meanwhile: with torch
loaded, one takes longer than all the rest. It also reports what the call did to the outside: files
opened for writing and programs started (there must not be any), and whether Triton was imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tools.gpu_check import processes
from tools.gpu_check.bench_cases import FAMILIES, OURS, Call
from tools.gpu_check.processes import ProcessFailed

_WRITING_MODES = frozenset("wax+")
_STARTING_EVENTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system")


class OutsideWatch:
    """Records files opened for writing and programs started, from its creation on.

    Python's audit events see only what Python code does; that native code compiles nothing is shown
    by the time of the call, and by the driver's cache, see tests/gpu.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_on = True
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if not self.is_on:
            return
        if event == "open":
            path, mode, open_flags = arguments
            is_write = (
                bool(_WRITING_MODES & set(mode))
                if isinstance(mode, str)
                else bool(open_flags & (os.O_WRONLY | os.O_RDWR))
            )
            if is_write:
                self.seen.append(f"open {path!r} for writing")
        elif event in _STARTING_EVENTS:
            self.seen.append(f"{event} {arguments[:2]!r}"[:300])


@contextlib.contextmanager
def full_collections() -> Iterator[list[int]]:
    """Has an item for each full garbage collection that began within the block."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(2)

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def timed_ms(step: Callable[[], object]) -> float:
    """Milliseconds until the GPU has finished a step."""
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def measure(family_name: str) -> Iterator[dict[str, object]]:
    """What our call costs this process, which has not started CUDA yet, and then what torch's does."""
    torch.cuda.init()
    family = FAMILIES[family_name]
    case = family.make(family.first, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    for whose in (OURS, family.rival):
        yield {"family": family_name, "call": whose, **_first(case.calls[whose], is_ours=whose == OURS)}


def _first(call: Call, *, is_ours: bool) -> dict[str, object]:
    watch = OutsideWatch()
    package_ms = 0.0
    with full_collections() as collections:
        if is_ours:

            def import_package() -> None:
                import stoneware  # noqa: F401

            package_ms = timed_ms(import_package)
        begin = time.perf_counter()
        run = call.load()
        import_ms = package_ms + (time.perf_counter() - begin) * 1e3
        first_ms = timed_ms(lambda: run(None))
    second_ms = timed_ms(lambda: run(None))
    watch.is_on = False
    return {
        "package_ms": round(package_ms, 3),
        "import_ms": round(import_ms, 3),
        "first_call_ms": round(first_ms, 3),
        "import_and_first_call_ms": round(import_ms + first_ms, 3),
        "full_collections": len(collections),
        "second_call_ms": round(second_ms, 3),
        "outside": watch.seen,
        "triton_imported": "triton" in sys.modules,
    }


def in_new_process(family_name: str) -> list[dict[str, object]]:
    """`measure` in a process of its own; with "error" instead of figures if it failed."""
    try:
        output = processes.run_module("tools.gpu_check.first_call", f"--of={family_name}", "--repeat=0")
    except ProcessFailed as error:
        return [{"family": family_name, "call": OURS, "error": str(error)}]
    return processes.json_lines(output)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", default=",".join(FAMILIES), help="whose first call")
    parser.add_argument("--repeat", type=int, default=9, help="new processes for each family; 0: this process measures")
    options = parser.parse_args(arguments)
    measured_by = in_new_process if options.repeat else measure
    for _ in range(max(options.repeat, 1)):
        for name in options.of.split(","):
            for result in measured_by(name):
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
