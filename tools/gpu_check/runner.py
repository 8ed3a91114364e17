"""Checks and measures a built Stoneware wheel on this machine: python3 gpu_check.pyz COMMAND --out
DIR

The file carries everything but Python (3.11 or later), torch and the NVIDIA driver: the wheels, the
GPU tests, pytest and the measuring programs. Nothing is installed, built or fetched; all of it is
unpacked into a temporary folder that is removed at the end.

commands
  check    the tests of tests/gpu, under pytest            -> check.json, check.log
  bench    every family of matmuls beside torch's          -> bench.json, bench.md, bench.log
  sample   stoneware tune: every candidate at every shape   -> samples.sqlite3, sample.log
  autotune sw.autotune beside triton.autotune              -> autotune.json, .md, .log
  invariance  the bits of sw.batch_invariant, and what it costs -> batch_invariance.json, .log
  all      all of these; one that fails does not keep the next from running
  sanitize every kernel under compute-sanitizer            -> sanitize.json, sanitize.log
  held_out the look-up's choices at problems that no one tuned for -> held_out.json, .txt, .log
  layers   the layers of stoneware.nn beside torch's and torchao's -> layers.json, .md, .log

sanitize runs memcheck, racecheck and initcheck at once, each over launch_every_kernel.py. It is not
in all, since it needs NVIDIA's compute-sanitizer, of the CUDA toolkit, on the machine. What the
tools do not see is said in compute_sanitizer.py. held_out is not in all either, since it takes hours:
-- --seed S [--minutes M]; the same command goes on where it stopped. layers is not in all, since it
needs transformers: -- [--parts linear,inference]; the same command goes on with the parts that it lacks.

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
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.gpu_check import compute_sanitizer

COMMANDS_OF_ALL = ("check", "bench", "sample", "autotune", "invariance")
COMMANDS = (*COMMANDS_OF_ALL, "sanitize", "held_out", "layers")
MIN_PYTHON = (3, 11)

_MAX_STARTS = 20
"""How often check is started, each time going on after what ended the process."""
_LOST_CONTEXT_EXIT_CODE = 3  # of tests/gpu/conftest.py
_NO_TESTS_EXIT_CODE = 5  # of pytest
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
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), str(root), os.environ.get("PYTHONPATH", "")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def check(self, extra: Sequence[str]) -> int:
        gpus = self._gpus()  # before a test can break one
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
        self._write_json("check.json", {"gpus": gpus, "exit_code": exit_code, **summary})
        print(f"check: {summary['counts']}")
        for failure in summary["failures"]:
            print(f"check: FAILED {failure['test']}")
        if not summary["counts"].get("passed"):
            print("check: no test passed, so nothing is shown; this counts as a failure")
            return exit_code or 1
        return exit_code or int(bool(summary["failures"]))

    def bench(self, extra: Sequence[str]) -> int:
        return self._measured("bench", extra)

    def invariance(self, extra: Sequence[str]) -> int:
        return self._measured("batch_invariance", extra)

    def held_out(self, extra: Sequence[str]) -> int:
        return self._measured("held_out", extra)

    def layers(self, extra: Sequence[str]) -> int:
        return self._measured("layers", extra)

    def sample(self, extra: Sequence[str]) -> int:
        return self._run("sample", ["-m", "stoneware", "tune", f"--store={self._out_dir / 'samples.sqlite3'}", *extra])

    def autotune(self, extra: Sequence[str]) -> int:
        return self._run(
            "autotune",
            ["-m", "tools.gpu_check.autotune_bench", f"--out={self._out_dir}", f"--command={_typed_command()}", *extra],
        )

    def _measured(self, name: str, extra: Sequence[str]) -> int:
        """Runs a measuring program whose report names the wheel and the command."""
        return self._run(
            name,
            [
                "-m",
                f"tools.gpu_check.{name}",
                f"--out={self._out_dir}",
                f"--wheel_sha256={self.wheel_sha256}",
                f"--command={_typed_command()}",
                *extra,
            ],
        )

    def sanitize(self, extra: Sequence[str]) -> int:
        chosen, for_program = _parse_sanitize(extra)
        program = compute_sanitizer.find()
        if program is None:
            raise RunnerError(
                "compute-sanitizer must be on PATH, or in the folder bin of a CUDA toolkit "
                "(CUDA_HOME, /usr/local/cuda), and is in none; install the CUDA toolkit, or add "
                "its folder to PATH"
            )
        gpus = self._gpus()
        start = time.monotonic()
        lock = threading.Lock()
        with (self._out_dir / "sanitize.log").open("w", encoding="utf-8") as log:

            def say(line: str) -> None:
                with lock:
                    print(line, flush=True)
                    log.write(line + "\n")

            # Most of the time a tool is busy on one CPU core; the tools know nothing of each other.
            with concurrent.futures.ThreadPoolExecutor(len(chosen.tools)) as pool:
                results = list(
                    pool.map(
                        lambda tool: self._sanitize_with(
                            program, tool, chosen.options, for_program, lambda line: say(f"[{tool}] {line}")
                        ),
                        chosen.tools,
                    )
                )
        by_tool = dict(zip(chosen.tools, results))
        self._write_json(
            "sanitize.json",
            {
                "gpus": gpus,
                "compute_sanitizer": compute_sanitizer.version(program),
                "seconds": round(time.monotonic() - start, 1),
                "tools": by_tool,
            },
        )
        for tool, result in by_tool.items():
            print(
                f"sanitize: {tool}: {result['errors']} errors, {result['warnings']} warnings in "
                f"{result['launches']} launches of {result['kernels']} kernels, "
                f"{result['seconds']} s"
            )
            for reason in result["failures"]:
                print(f"sanitize: {tool}: FAILED {reason}")
        return int(any(result["failures"] for result in results))

    def _sanitize_with(
        self, program: str, tool: str, options: Sequence[str], extra: Sequence[str], say: Callable[[str], None]
    ) -> dict[str, Any]:
        """Runs a tool on the broken kernel, then on all of ours."""
        launched_path = self._root / f"launched_{tool}.json"
        # Each tensor is an allocation of the driver's: of torch's, which are cut from large ones,
        # memcheck knows no bounds, and initcheck takes what was freed for written.
        environment = {**self._environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        start = time.monotonic()

        def run(module: str, options: Sequence[str], arguments: Sequence[str]) -> compute_sanitizer.Report:
            return compute_sanitizer.run(
                program,
                tool,
                options,
                [sys.executable, "-m", f"tools.gpu_check.{module}", *arguments],
                folder=self._root,
                environment=environment,
                say=say,
            )

        control = run("broken_kernel", [], [])
        report = run("launch_every_kernel", options, [f"--json_out={launched_path}", *extra])
        launched = json.loads(launched_path.read_text()) if launched_path.exists() else None
        return {
            "errors": report.errors,
            "warnings": report.warnings,
            "exit_code": report.exit_code,
            "seconds": round(time.monotonic() - start, 1),
            "kernels": launched["kernels"] if launched else 0,
            "launches": launched["launches"] if launched else 0,
            "errors_of_broken_kernel": control.errors,
            "failures": sanitize_failures(tool, control, report, launched),
            "findings": [
                {"what": what, "kernel": kernel, "times": times}
                for (what, kernel), times in sorted(report.findings.items())
            ],
        }

    def _write_json(self, name: str, results: Mapping[str, Any]) -> None:
        """Writes results, and before them what they were got with."""
        document = {**self.record(), **results}
        (self._out_dir / name).write_text(json.dumps(document, indent=1) + "\n")

    def record(self) -> dict[str, Any]:
        """When, how and of which wheel."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": _typed_command(),
            "wheel": self.wheel.name,
            "wheel_sha256": self.wheel_sha256,
        }

    def _gpus(self) -> list[dict[str, Any]]:
        """GPUs, driver and versions, as bench.json has its machine; or why they are unknown."""
        code = (
            "import json, torch\n"
            "from tools.gpu_check import machine\n"
            "print(json.dumps([machine.describe(i) for i in range(torch.cuda.device_count())]))"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=self._root,
                env=self._environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=_GPUS_LIMIT_S,
            )
            return json.loads(done.stdout.splitlines()[-1])
        except subprocess.CalledProcessError as error:
            return [{"unknown": error.stderr.strip()[-500:]}]
        except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
            return [{"unknown": f"{type(error).__name__}: {error}"}]

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
    """The command to run this again, without folders of this machine: it is published."""
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


def sanitize_failures(
    tool: str, control: compute_sanitizer.Report, report: compute_sanitizer.Report, launched: Mapping[str, Any] | None
) -> list[str]:
    """Why a tool's run does not show that the kernels are sound; empty if it does.

    Args:
      control: of the kernel that is broken.
      report: of ours.
      launched: what launch_every_kernel.py wrote; None if it wrote nothing.
    """
    failures = []
    if not control.errors:
        failures.append(
            f"{tool} must report errors of broken_kernel.py, and reports {control.errors}: it does "
            "not work with this GPU and driver; take the compute-sanitizer of the driver's CUDA"
        )
    if report.errors is None:
        failures.append(f"{tool} wrote no summary, so nothing is shown; see sanitize.log")
    elif report.errors:
        failures.append(f"{tool} found {report.errors} errors; see findings, and sanitize.log")
    if launched is None:
        failures.append("launch_every_kernel.py wrote no report; see the end of sanitize.log")
    else:
        if not launched["kernels"]:
            failures.append("no kernel was launched, so nothing is shown")
        failures += [f"{kernel} was not launched" for kernel in launched["not_launched"]]
        failures += [
            f"{failure['kernel']}: {failure['problem']}: {failure['message']}" for failure in launched["failures"]
        ]
    if report.exit_code and not failures:
        failures.append(f"exit code {report.exit_code}; see the end of sanitize.log")
    return failures


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
    extra_arguments: list[str] = []
    arguments = list(argv)
    if "--" in arguments:
        split = arguments.index("--")
        arguments, extra_arguments = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="gpu_check.pyz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
            f"gpu_check: --out={arguments.out} must be a folder, there or to be made: {error.strerror}; pass another",
            file=sys.stderr,
        )
        return 2
    commands = COMMANDS_OF_ALL if arguments.command == "all" else (arguments.command,)
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
    summary = {**runner.record(), "results": results}
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return max(int(result["exit_code"] != 0) for result in results.values())
