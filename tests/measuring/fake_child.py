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


def say_samples(task: dict, run: str, configs: list[dict], status: str) -> None:
    """Writes samples of right ones with the time that is in their names."""
    problem = task["problem"]
    key = {
        "op": task["op"],
        "a_dtype": problem["a_dtype"],
        "b_dtype": problem["b_dtype"],
        "out_dtype": problem["out_dtype"],
        "scales": problem["scale_a"],
        "layout": "nt",
        "n": problem["n"],
        "k": problem["k"],
        "m": problem["m"],
    }
    lines, samples = [], []
    for config in configs:
        kernel = config["kernel"]
        lines.append({"candidate": kernel, "config": config, "kernel_sha256": ""})
        us = float(kernel.partition("_")[2] or 50.0)
        figures = [us, 0.1, 10, 0.0, 0, 0] if status == "ok" else [0.0, 0.0, 0, 0.0, 0, 0, status, ""]
        samples.append([kernel, *figures])
    lines.append({"key": key, "run": run, "samples": samples})
    say(event="samples", lines=[json.dumps(line) for line in lines])


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
            say_samples(task, run, [config], status)
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
    if right:
        say_samples(task, run, [config for _, config in right], "ok")
    say(event="done")


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    say(event="ready")
    for line in sys.stdin:
        measure(json.loads(line), hello["run"], sys.argv[1])


if __name__ == "__main__":
    main()
