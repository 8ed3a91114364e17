"""Checks and measures a built Stoneware wheel on this machine: python3 gpu_check.pyz COMMAND --out DIR

The file carries everything but Python (3.11 or later), torch and the NVIDIA driver: the wheels, the
GPU tests, pytest and the measuring programs. Nothing is installed, built or fetched; all of it is
unpacked into a temporary folder that is removed at the end.

commands
  check    the tests of tests/gpu, in processes at once     -> check.json, check.log
  bench    every family of matmuls next to torch's         -> bench.json, bench.md, bench.log
  sample   stoneware tune: every candidate at every shape   -> samples.sqlite3, sample.log
  autotune sw.autotune next to triton.autotune             -> autotune.json, .md, .log
  invariance  the bits of sw.batch_invariant, and what it costs -> batch_invariance.json, .txt, .log
  all      all of these; one that fails does not keep the next from running
  sanitize every kernel under compute-sanitizer            -> sanitize.json, sanitize.log
  held_out the look-up's choices at problems that no one tuned for -> held_out.json, .txt, .log
  layers   the layers of stoneware.nn next to torch's and torchao's -> layers.json, .md, .log
  sweep    a few matmuls at every m of a range, next to torch's -> sweep.json, .md, .log
  deep_gemm  matmuls with block scales next to DeepGEMM's -> deep_gemm.json, .md, .log

sanitize runs memcheck, racecheck and initcheck at once, each over launch_every_kernel.py. It is not
in all, since it needs NVIDIA's compute-sanitizer, of the CUDA toolkit, on the machine. What the
tools do not see is said in compute_sanitizer.py. held_out is not in all either, since it takes hours:
-- --seed S [--minutes M]. layers is not in all, since it needs transformers: -- [--parts linear,inference].
sweep takes minutes: -- [--sets fp8_row,bf16]. deep_gemm needs DeepGEMM: -- [--kinds dense,grouped].

Every report has the commit, if --commit has it, and the digests of the kernels. A measuring program that
was stopped goes on with the same command; pass another DIR to measure everything again.

Arguments after -- go to the program of the command: gpu_check.pyz check --out DIR -- -k values.
sanitize takes --tools=memcheck,racecheck and --options="...", more of compute-sanitizer's, and
hands the rest to launch_every_kernel.py: -- --tools=racecheck --kernels=splitk.
The exit code is 0 if every command's was; summary.json says which were not.
"""

# The program of the archive: standard library only, since nothing else is on the path yet.
from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.gpu_check import compute_sanitizer, document, processes
from tools.gpu_check.processes import ProcessFailed

PROGRAMS = {
    "bench": "bench",
    "autotune": "autotune_bench",
    "invariance": "batch_invariance",
    "held_out": "held_out",
    "layers": "layers",
    "sweep": "sweep",
    "deep_gemm": "deep_gemm_bench",
}
"""Command -> its measuring program, which experiment.py runs."""

COMMANDS_OF_ALL = ("check", "bench", "sample", "autotune", "invariance")
COMMANDS = (*COMMANDS_OF_ALL, "sanitize", "held_out", "layers", "sweep", "deep_gemm")
MIN_PYTHON = (3, 11)

_MAX_STARTS = 20
"""How often check is started, each time going on after what ended the process."""
_LOST_CONTEXT_EXIT_CODE = 3  # of tests/gpu/conftest.py
_NO_TESTS_EXIT_CODE = 5  # of pytest
_MAX_SHARDS = 6
_BYTES_OF_SHARD = 12 << 30
"""GPU memory that a process of check may need: the largest operands of its tests, and torch's context."""
_GPUS_LIMIT_S = 120.0


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
            f"{', '.join(wheel.name for wheel in wheels) or 'it has no wheel'}; run it with another "
            "Python"
        )
    return fitting[-1]


def check_machine() -> None:
    """Raises RunnerError unless Python, torch and a GPU are there."""
    if sys.version_info[:2] < MIN_PYTHON:
        raise RunnerError(
            f"Python {platform.python_version()} must be {'.'.join(map(str, MIN_PYTHON))} or later; run it with one"
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

    def __init__(self, archive: pathlib.Path, root: pathlib.Path, out_dir: pathlib.Path, commit: str) -> None:
        self._root, self._out_dir, self._commit = root, out_dir, commit
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
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), str(root), os.environ.get("PYTHONPATH", "")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, command: str, extra: Sequence[str]) -> int:
        """Runs a command with the arguments after --; its exit code."""
        own = {"check": self.check, "sample": self.sample, "sanitize": self.sanitize}
        if command in own:
            return own[command](extra)
        program = PROGRAMS[command]
        name = "autotune" if command == "autotune" else program
        origin = [f"--wheel_sha256={self.wheel_sha256}", f"--commit={self._commit}", f"--command={_typed_command()}"]
        return self._run(name, [f"tools.gpu_check.{program}", f"--out={self._out_dir}", *origin, *extra])

    def check(self, extra: Sequence[str]) -> int:
        machine = self._machine()  # before a test can break it
        num_shards = choose_num_shards(machine["gpus"], os.cpu_count() or 1)
        paths = [self._out_dir / f"check_{shard}.jsonl" for shard in range(num_shards)]
        with (
            (self._out_dir / "check.log").open("w", encoding="utf-8") as log,
            concurrent.futures.ThreadPoolExecutor(num_shards) as pool,
        ):
            print(f"check: {num_shards} processes, a share of the tests each", flush=True)

            def run(shard: int) -> int:
                def say(line: str) -> None:
                    text = f"[{shard}] {line}\n"  # in one piece, since the processes write at once
                    sys.stdout.write(text)
                    log.write(text)

                return self._check_shard(paths[shard], f"{shard}/{num_shards}", extra, say)

            exit_code = max(pool.map(run, range(num_shards)), key=abs)
        summary = summarise_outcomes(paths)
        if extra:
            machine["kernels"] = kernels_named(machine["kernels"], paths)
        self._write_json("check.json", {**machine, "exit_code": exit_code, **summary})
        print(f"check: {summary['counts']}")
        for failure in summary["failures"]:
            print(f"check: FAILED {failure['test']}")
        if not summary["counts"].get("passed"):
            print("check: no test passed, so nothing is shown; this counts as a failure")
            return exit_code or 1
        return exit_code or int(bool(summary["failures"]))

    def _check_shard(self, outcomes: pathlib.Path, shard: str, extra: Sequence[str], say: Callable[[str], None]) -> int:
        """Runs one share of the tests, again after each that ended its process; the first exit code that is not 0."""
        outcomes.unlink(missing_ok=True)
        arguments = [
            sys.executable, "-m", "pytest", str(self._root / "tests" / "gpu"), "-v", "-ra", "--tb=short",
            "-p", "no:cacheprovider", f"--outcomes={outcomes}", f"--shard={shard}", *extra,
        ]  # fmt: skip
        exit_code = 0
        for _ in range(_MAX_STARTS):
            code = processes.stream(arguments, say, folder=self._root, environment=self._environment)
            if code == _NO_TESTS_EXIT_CODE:
                break  # the test that ended the process before was the last one, or the share is empty
            exit_code = exit_code or code
            if code >= 0 and code != _LOST_CONTEXT_EXIT_CODE:
                break
            say(f"check: exit code {code}; going on after the test that ended the process")
        return exit_code

    def sample(self, extra: Sequence[str]) -> int:
        arguments = [f"--store={self._out_dir / 'samples.sqlite3'}", f"--commit={self._commit}", *extra]
        return self._run("sample", ["stoneware", "tune", *arguments])

    def sanitize(self, extra: Sequence[str]) -> int:
        chosen, for_program = _parse_sanitize(extra)
        program = compute_sanitizer.find()
        if program is None:
            raise RunnerError(
                "compute-sanitizer must be on PATH, or in the folder bin of a CUDA toolkit "
                "(CUDA_HOME, /usr/local/cuda), and is in none; install the CUDA toolkit, or add "
                "its folder to PATH"
            )
        machine, begin = self._machine(), time.monotonic()
        # Most of the time a tool is busy on one CPU core; the tools know nothing of each other.
        with (
            (self._out_dir / "sanitize.log").open("w", encoding="utf-8") as log,
            concurrent.futures.ThreadPoolExecutor(len(chosen.tools)) as pool,
        ):

            def run(tool: str) -> dict[str, Any]:
                def say(line: str) -> None:
                    text = f"[{tool}] {line}\n"  # in one piece, since the tools write at once
                    sys.stdout.write(text)
                    log.write(text)

                return compute_sanitizer.run_on_all(
                    program, tool, chosen.options, for_program, self._root, self._environment, say
                )

            by_tool = dict(zip(chosen.tools, pool.map(run, chosen.tools)))
        seconds = round(time.monotonic() - begin, 1)
        version = compute_sanitizer.version(program)
        self._write_json(
            "sanitize.json", {**machine, "compute_sanitizer": version, "seconds": seconds, "tools": by_tool}
        )
        for tool, result in by_tool.items():
            print(
                f"sanitize: {tool}: {result['errors']} errors, {result['warnings']} warnings in "
                f"{result['launches']} launches of {result['kernels']} kernels, "
                f"{result['seconds']} s"
            )
            for reason in result["failures"]:
                print(f"sanitize: {tool}: FAILED {reason}")
        return int(any(result["failures"] for result in by_tool.values()))

    def _write_json(self, name: str, results: Mapping[str, Any]) -> None:
        """Writes results, and before them what they were got with."""
        document.write(self._out_dir / name, json.dumps({**self.record(), **results}, indent=1) + "\n")

    def record(self) -> dict[str, Any]:
        """When, how and of which wheel."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": _typed_command(),
            "commit": self._commit,
            "wheel": self.wheel.name,
            "wheel_sha256": self.wheel_sha256,
        }

    def _machine(self) -> dict[str, Any]:
        """GPUs, driver and versions, or why they are unknown, and the digests of the kernels that the GPUs run."""
        try:
            output = processes.run_module(
                "tools.gpu_check.machine", environment=self._environment, folder=self._root, limit_s=_GPUS_LIMIT_S
            )
            return processes.json_lines(output)[-1]
        except (ProcessFailed, ValueError, IndexError) as error:
            return {"gpus": [{"unknown": document.text_of(error)}], "kernels": {}}

    def _run(self, name: str, arguments: Sequence[str]) -> int:
        """Runs a Python module; its output goes to the console and to <name>.log."""
        log_path = self._out_dir / f"{name}.log"
        with log_path.open("w", encoding="utf-8") as log:

            def say(line: str) -> None:
                print(line, flush=True)
                log.write(line + "\n")

            command = [sys.executable, "-m", *arguments]
            return processes.stream(command, say, folder=self._root, environment=self._environment)


def _typed_command() -> str:
    """The command to run this again, without folders of this machine: it is published."""
    words = ["python3", pathlib.Path(sys.argv[0]).name]
    for word in sys.argv[1:]:
        words.append("DIR" if words[-1] == "--out" else word)
    return shlex.join("--out=DIR" if word.startswith("--out=") else word for word in words)


def choose_num_shards(gpus: Sequence[Mapping[str, Any]], num_cpus: int) -> int:
    """How many processes run the tests at once: limited by the CPUs and by the memory of the first GPU."""
    memory_bytes = gpus[0].get("memory_bytes", 0) if gpus else 0
    return max(1, min(_MAX_SHARDS, num_cpus // 2, memory_bytes // _BYTES_OF_SHARD))


def summarise_outcomes(paths: Sequence[pathlib.Path]) -> dict[str, Any]:
    """Counts of outcomes in these files, the failures with their text, and the reasons of skips.

    A test that was started and has no outcome took its process down: it counts as "crashed".
    """
    last: dict[str, dict[str, str]] = {}
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    for outcome in processes.json_lines("".join(texts)):
        earlier = last.get(outcome["test"])
        if earlier is None or earlier["outcome"] != "failed":
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


def kernels_named(digests: Mapping[str, str], paths: Sequence[pathlib.Path]) -> dict[str, str]:
    """The digests of the kernels that a selection of tests checks: tests of values name them, and all of these passed.

    Args:
      digests: by id of a kernel.
      paths: files with the outcomes of the tests.
    """
    last = {}
    for outcome in processes.json_lines("".join(path.read_text(encoding="utf-8") for path in paths if path.exists())):
        last[outcome["test"]] = outcome["outcome"]
    outcomes: dict[str, set[str]] = {}
    for test, outcome in last.items():
        if "_values_test.py::" in test:
            for word in re.findall(r"\w+", test):
                outcomes.setdefault(word, set()).add(outcome)
    return {kernel: digest for kernel, digest in digests.items() if outcomes.get(kernel) == {"passed"}}


def _tools(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in compute_sanitizer.TOOLS]:
        raise argparse.ArgumentTypeError(
            f"{','.join(unknown)!r} must be of {','.join(compute_sanitizer.TOOLS)}; omit --tools for all of them"
        )
    return list(dict.fromkeys(names))


def _parse_sanitize(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The runner's own arguments of sanitize, and those of launch_every_kernel.py."""
    parser = argparse.ArgumentParser(prog="gpu_check.pyz sanitize --out DIR --", add_help=False, allow_abbrev=False)
    parser.add_argument("--tools", type=_tools, default=list(compute_sanitizer.TOOLS))
    parser.add_argument("--options", type=shlex.split, default=[])
    return parser.parse_known_args(argv)


def _parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    end = list(argv).index("--") if "--" in argv else len(argv)
    extra = list(argv[end + 1 :])
    parser = argparse.ArgumentParser(
        prog="gpu_check.pyz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the results")
    parser.add_argument("--commit", default="unknown", help="that the wheels were built from")
    parsed = parser.parse_args(argv[:end])
    if extra and parsed.command == "all":
        parser.error("arguments after -- need one command, not all: each program has its own")
    return parsed, extra


def main(argv: Sequence[str], archive: pathlib.Path) -> int:
    arguments, extra = _parse_arguments(argv)
    out_dir = arguments.out.resolve()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"gpu_check: --out={arguments.out} must be a folder, there or to be made: {error.strerror}; pass another",
            file=sys.stderr,
        )
        return 2
    commands = COMMANDS_OF_ALL if arguments.command == "all" else (arguments.command,)
    root = pathlib.Path(tempfile.mkdtemp(prefix="gpu_check_"))
    results: dict[str, dict[str, float]] = {}
    try:
        check_machine()
        runner = Runner(archive, root, out_dir, arguments.commit)
        print(f"wheel {runner.wheel.name}, sha256 {runner.wheel_sha256}", flush=True)
        for idx, command in enumerate(commands, start=1):
            print(f"[{idx}/{len(commands)}] {command}: results and log in {out_dir}", flush=True)
            start = time.monotonic()
            exit_code = runner.run(command, extra)
            seconds = round(time.monotonic() - start, 1)
            results[command] = {"exit_code": exit_code, "seconds": seconds}
            print(f"[{idx}/{len(commands)}] {command}: exit code {exit_code} after {seconds} s")
    except RunnerError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(root, ignore_errors=True)
    document.write(out_dir / "summary.json", json.dumps({**runner.record(), "results": results}, indent=1) + "\n")
    return max(int(result["exit_code"] != 0) for result in results.values())
