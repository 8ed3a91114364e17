"""A measuring process without a GPU: speaks child.py's protocol; kernel names specify its behaviour.

    ok_12.5        right, 12.5 us
    wrong          a wrong value
    hang           never ends when it first runs
    hang_timing    never ends when it is timed
    sigkill        takes its process down with SIGKILL when it first runs, with exit_7 by itself
    lost           destroys the CUDA context
    vanish         takes its process down when it is timed
    garbage        right, but the process prints something that is not an event

Every candidate that runs for the first time is written to the file of argv[1]. Imports the standard
library alone, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def hang() -> None:
    while sys.stdin.read(1):  # until the parent ends
        pass
    sys.exit(0)


def sample(task: dict, run: str, config: dict, status: str, us: float = 0.0) -> dict:
    problem = task["problem"]
    return {
        "key": {
            "op": task["op"],
            "a_dtype": problem["a_dtype"],
            "b_dtype": problem["b_dtype"],
            "out_dtype": problem["out_dtype"],
            "scales": problem["scale_a"],
            "layout": "nt",
            "n": problem["n"],
            "k": problem["k"],
            "m": problem["m"],
        },
        "config": config,
        "median_us": us,
        "spread_us": 0.1 if us else 0.0,
        "count": 10 if us else 0,
        "status": status,
        "run": run,
    }


def measure(task: dict, run: str, log: str) -> None:
    right = []
    for idx, config in enumerate(task["configs"]):
        kernel = config["kernel"]
        say(event="at", config=idx)
        with open(log, "a", encoding="ascii") as file:
            file.write(f"{task['problem']['m']} {kernel}\n")
        if kernel == "hang":
            hang()
        elif kernel == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kernel == "exit_7":
            sys.exit("no more memory on the planet")
        elif kernel in ("wrong", "failed", "lost"):
            status = "wrong" if kernel == "wrong" else "failed"
            say(event="samples", samples=[sample(task, run, config, status)])
            if kernel == "lost":
                os._exit(3)
        else:
            if kernel == "garbage":
                print("not an event\n{}\n[1]\n" + "x" * 100_000, flush=True)
                sys.stdout.buffer.write(b"\xff\xfe\n")
                sys.stdout.buffer.flush()
            right.append((idx, config))
    for idx, config in right:
        say(event="at", config=idx)
        if config["kernel"] == "hang_timing":
            hang()
        if config["kernel"] == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
    say(event="at", config=None)
    samples = [
        sample(task, run, config, "ok", float(config["kernel"].partition("_")[2] or 50.0)) for _, config in right
    ]
    say(event="samples", samples=samples)
    say(event="done")


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    say(event="ready")
    for line in sys.stdin:
        measure(json.loads(line), hello["run"], sys.argv[1])


if __name__ == "__main__":
    main()
