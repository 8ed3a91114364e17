"""What the first call costs a process: run once, in a fresh process, and printed as one JSON line.

    python -m tools.gpu_check.first_call --call stoneware

CUDA is started and the operands exist before the clock runs. The process also reports what the call
did to the outside: files opened for writing and programs started, which must be none, and whether
Triton was imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

from absl import app, flags

_CALL = flags.DEFINE_enum("call", "stoneware", ["stoneware", "torch"], "Whose scaled_mm.")
_M = flags.DEFINE_integer("m", 16, "Rows of a.")
_N = flags.DEFINE_integer("n", 4096, "Columns of b.")
_K = flags.DEFINE_integer("k", 4096, "Columns of a.")

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


def _timed_ms(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    import torch

    torch.cuda.init()
    m, n, k = _M.value, _N.value, _K.value
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    scale_a = torch.ones(m, 1, device="cuda")
    scale_b = torch.ones(1, n, device="cuda")
    torch.cuda.synchronize()

    watch = OutsideWatch()
    if _CALL.value == "torch":
        import_ms = 0.0

        def call() -> object:
            return torch._scaled_mm(
                a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
            )

    else:
        begin = time.perf_counter()
        import stoneware

        scaled_mm = stoneware.scaled_mm
        import_ms = (time.perf_counter() - begin) * 1e3

        def call() -> object:
            return scaled_mm(a, b, scale_a, scale_b)

    first_ms = _timed_ms(call, torch.cuda.synchronize)
    second_ms = _timed_ms(call, torch.cuda.synchronize)
    watch.is_on = False
    result = {
        "import_ms": import_ms,
        "first_call_ms": first_ms,
        "second_call_ms": second_ms,
        "outside": watch.seen,
        "triton_imported": "triton" in sys.modules,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
