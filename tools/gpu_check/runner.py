"""Checks and measures a built Stoneware wheel on this machine: python3 gpu_check.pyz COMMAND --out
DIR

The file carries everything but Python (3.11 or later), torch and the NVIDIA driver: the wheels, the
GPU tests, pytest and the measuring programs. Nothing is installed, built or fetched; all of it is
unpacked into a temporary folder that is removed at the end.

commands
  check    the tests of tests/gpu, under pytest            -> check.json, check.log
  bench    every family of matmuls beside torch's          -> bench.json, bench.md, bench.log
  sample   stoneware tune: every candidate at every shape   -> samples/, sample.log
  autotune sw.autotune beside triton.autotune              -> autotune.json, autotune.md, autotune.log
  all      all of these; one that fails does not keep the next from running

Arguments after -- go to the program of the command: gpu_check.pyz check --out DIR -- -k values.
The exit code is 0 if every command's was; summary.json says which were not.
"""

# The program of the archive: standard library only, since nothing else is on the path yet.
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from typing import Any

COMMANDS = ("check", "bench", "sample", "autotune")
MIN_PYTHON = (3, 11)

_MAX_STARTS = 20
"""How often check is started, each time going on after what ended the process."""
_LOST_CONTEXT_EXIT_CODE = 3  # of tests/gpu/conftest.py
_NO_TESTS_EXIT_CODE = 5  # of pytest


class RunnerError(Exception):
    """The machine cannot run the checks; the message has rule, value and remedy."""


def wheel_fits(file_name: str, python: tuple[int, int]) -> bool:
    """Whether a wheel's Python and ABI tags fit: cp311-cp311 exactly, cp312-abi3 from there up."""
    python_tag, abi_tag = file_name.removesuffix(".whl").split("-")[-3:-1]
    digits = python_tag.removeprefix("cp")
    if not python_tag.startswith("cp") or not digits.isdigit():
        return python_tag.startswith("py3")
    built_for = (int(digits[0]), int(digits[1:]))
    return python >= built_for if abi_tag == "abi3" else python == built_for


def choose_wheel(folder: pathlib.Path, python: tuple[int, int]) -> pathlib.Path:
    """The wheel of the archive that fits the running Python.

    Raises:
      RunnerError: none fits.
    """
    wheels = sorted(folder.glob("*.whl"))
    fitting = [wheel for wheel in wheels if wheel_fits(wheel.name, python)]
    if not fitting:
        raise RunnerError(
            f"Python {python[0]}.{python[1]} must be one that a wheel of this archive fits: "
            f"{', '.join(wheel.name for wheel in wheels) or 'there is none'}; run it with another "
            "Python"
        )
    return fitting[-1]


def check_machine() -> None:
    """Raises RunnerError unless Python, torch and a GPU are there."""
    if sys.version_info[:2] < MIN_PYTHON:
        raise RunnerError(
            f"Python {platform.python_version()} must be {'.'.join(map(str, MIN_PYTHON))} or later"
        )
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 9:
        raise RunnerError(
            f"torch in {sys.executable} must see a CUDA GPU and sees none; check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build"
        )
    if done.returncode:
        raise RunnerError(
            f"{sys.executable} must be able to import torch; run the archive with the Python in "
            f"which torch is installed. It said: {done.stderr.strip()[-500:]}"
        )


class Runner:
    """Unpacks the archive and runs its programs, each with a log of its own."""

    def __init__(self, archive: pathlib.Path, root: pathlib.Path, out_dir: pathlib.Path) -> None:
        self._root = root
        self._out_dir = out_dir
        with zipfile.ZipFile(archive) as file:
            file.extractall(root)
        self.wheel = choose_wheel(root / "wheels", sys.version_info[:2])
        self.wheel_sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        site = root / "site"
        for wheel in [self.wheel, *sorted((root / "pure_wheels").glob("*.whl"))]:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(site), str(root), os.environ.get("PYTHONPATH", "")])
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def check(self, extra: Sequence[str]) -> int:
        outcomes = self._out_dir / "check.jsonl"
        outcomes.unlink(missing_ok=True)
        exit_code = 0
        for start_idx in range(_MAX_STARTS):
            code = self._run(
                "check",
                [
                    "-m", "pytest", str(self._root / "tests" / "gpu"), "-v", "-ra", "--tb=short",
                    "-p", "no:cacheprovider", f"--outcomes={outcomes}", *extra,
                ],
                is_continued=start_idx > 0,
            )  # fmt: skip
            if start_idx > 0 and code == _NO_TESTS_EXIT_CODE:
                break  # the test that ended the process before was the last one
            exit_code = exit_code or code
            if code >= 0 and code != _LOST_CONTEXT_EXIT_CODE:
                break
            print(f"check: exit code {code}; going on after the test that ended the process")
        summary = summarise_outcomes(outcomes)
        text = json.dumps({"exit_code": exit_code, **summary}, indent=1)
        (self._out_dir / "check.json").write_text(text + "\n")
        print(f"check: {summary['counts']}")
        for failure in summary["failures"]:
            print(f"check: FAILED {failure['test']}")
        if not summary["counts"].get("passed"):
            print("check: no test passed, so nothing is shown; this counts as a failure")
            return exit_code or 1
        return exit_code or int(bool(summary["failures"]))

    def bench(self, extra: Sequence[str]) -> int:
        return self._run(
            "bench",
            [
                "-m",
                "tools.gpu_check.bench",
                f"--out={self._out_dir}",
                f"--wheel_sha256={self.wheel_sha256}",
                f"--command={_typed_command()}",
                *extra,
            ],
        )

    def sample(self, extra: Sequence[str]) -> int:
        return self._run(
            "sample",
            [
                "-m",
                "stoneware",
                "tune",
                f"--store={self._out_dir / 'samples.sqlite3'}",
                f"--out={self._out_dir / 'samples'}",
                *extra,
            ],
        )

    def autotune(self, extra: Sequence[str]) -> int:
        return self._run(
            "autotune",
            [
                "-m",
                "tools.gpu_check.autotune_bench",
                f"--out={self._out_dir}",
                f"--command={_typed_command()}",
                *extra,
            ],
        )

    def _run(self, name: str, arguments: Sequence[str], *, is_continued: bool = False) -> int:
        """Runs a Python program; its output goes to the console and to <name>.log."""
        log_path = self._out_dir / f"{name}.log"
        with log_path.open("a" if is_continued else "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self._root,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                log.write(line)
            return process.wait()


def _typed_command() -> str:
    """The command to run this again; folders of this machine are left out of what is published."""
    words = ["python3", pathlib.Path(sys.argv[0]).name]
    for word in sys.argv[1:]:
        words.append("DIR" if words[-1] == "--out" else word)
    return shlex.join("--out=DIR" if word.startswith("--out=") else word for word in words)


def summarise_outcomes(path: pathlib.Path) -> dict[str, Any]:
    """Counts of outcomes, the failures with their text, and the reasons of skips.

    A test that was started and has no outcome took its process down: it counts as "crashed".
    """
    last: dict[str, dict[str, str]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        outcome = json.loads(line)
        known = last.get(outcome["test"])
        if known is None or known["outcome"] != "failed":
            last[outcome["test"]] = outcome
    counts: dict[str, int] = {}
    failures, skips = [], {}
    for test, outcome in sorted(last.items()):
        kind = "crashed" if outcome["outcome"] == "started" else outcome["outcome"]
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("failed", "crashed"):
            failures.append({"test": test, "outcome": kind, "message": outcome["message"]})
        elif kind == "skipped":
            skips[test] = outcome["message"]
    return {"counts": counts, "failures": failures, "skipped": skips}


def _parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    extra_arguments: list[str] = []
    arguments = list(argv)
    if "--" in arguments:
        split = arguments.index("--")
        arguments, extra_arguments = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="gpu_check.pyz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the results")
    parsed = parser.parse_args(arguments)
    if extra_arguments and parsed.command == "all":
        parser.error("arguments after -- need one command, not all: each program has its own")
    return parsed, extra_arguments


def main(argv: Sequence[str], archive: pathlib.Path) -> int:
    arguments, extra = _parse_arguments(argv)
    out_dir = arguments.out.resolve()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"gpu_check: --out={arguments.out} must be a folder, there or to be made: "
            f"{error.strerror}; pass another",
            file=sys.stderr,
        )
        return 2
    commands = COMMANDS if arguments.command == "all" else (arguments.command,)
    root = pathlib.Path(tempfile.mkdtemp(prefix="gpu_check_"))
    results: dict[str, dict[str, float]] = {}
    try:
        check_machine()
        runner = Runner(archive, root, out_dir)
        print(f"wheel {runner.wheel.name}, sha256 {runner.wheel_sha256}", flush=True)
        for idx, command in enumerate(commands, start=1):
            print(f"[{idx}/{len(commands)}] {command}: log in {out_dir / command}.log", flush=True)
            start = time.monotonic()
            exit_code = getattr(runner, command)(extra)
            seconds = round(time.monotonic() - start, 1)
            results[command] = {"exit_code": exit_code, "seconds": seconds}
            print(f"[{idx}/{len(commands)}] {command}: exit code {exit_code} after {seconds} s")
    except RunnerError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(root, ignore_errors=True)
    summary = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _typed_command(),
        "wheel": runner.wheel.name,
        "wheel_sha256": runner.wheel_sha256,
        "results": results,
    }
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return max(int(result["exit_code"] != 0) for result in results.values())
