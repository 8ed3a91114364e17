"""Runs programs under NVIDIA's compute-sanitizer, and reads what its tools found.

    memcheck   accesses outside of what was allocated, or misaligned; every allocation is padded, so
               that one that goes too far does not land in the next
    racecheck  accesses of shared memory that no barrier orders
    initcheck  reads of global memory that nothing has written

What they do not see. initcheck follows cp.async.bulk, by which TMA moves tiles, from version 2025.4
on (docs.nvidia.com/compute-sanitizer/ReleaseNotes): before, a tile that was never written goes
unnoticed. racecheck attributes what a tensor map moves (cp.async.bulk.tensor) to no thread, and so
finds no race with it; a plain cp.async.bulk it attributes to the thread that issued it, and reports
a race although an mbarrier orders it (AI/RACECHECK_TMA_HAZARD.md of flash-attention 2.8.3).
memcheck mistook the size of wgmma's operands in 2023 (NVIDIA/compute-sanitizer-samples, issue 19).
What they miss, the values and the guards that the launched program compares must show.

Standard library only, as runner.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu_check import processes

PROGRAM = "compute-sanitizer"

TOOLS: dict[str, tuple[str, ...]] = {
    # Calls of the driver that fail are the program's to report, and some are made to find out: the
    # count of a kernel's parameters ends with the first that is refused. After a fault the context
    # lives on, so that one kernel does not hide the others.
    "memcheck": ("--report-api-errors", "no", "--destroy-on-device-error", "kernel", "--padding", "4096"),
    "racecheck": (),
    "initcheck": (),
}
"""Tool -> its options."""

_OPTIONS = (
    "--target-processes", "all",  # the Python on PATH may be a script that starts another
    "--launch-timeout", "300",  # seconds to the first call of the driver: torch is imported first
    "--print-limit", "1000",
)  # fmt: skip

_PREFIX = "========="
_HEADLINE = re.compile(rf"{_PREFIX} (?! )(.+)")
_NO_FINDINGS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY")
_ERRORS = re.compile(rf"{_PREFIX} ERROR SUMMARY: (\d+) errors?$")
_HAZARDS = re.compile(rf"{_PREFIX} RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")
_KERNEL = re.compile(r"\b(?:scaled_mm|matmul|grouped_mm)\w*")
_ADDRESS = re.compile(r"\+?0x[0-9a-f]+")
_RACE = "Race reported"  # its addresses are places in the code, the same from run to run
_OTHER_ACCESS = re.compile(rf"{_PREFIX}     (and .+?)(?: \[\d+ hazards?\])?$")


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """The program on PATH, otherwise in a CUDA toolkit: CUDA_HOME's, or where NVIDIA installs it."""
    toolkits = (environment.get("CUDA_HOME", ""), "/usr/local/cuda")
    folders = [str(pathlib.Path(toolkit, "bin")) for toolkit in toolkits if toolkit]
    return shutil.which(PROGRAM, path=os.pathsep.join([environment.get("PATH", ""), *folders]))


def version(program: str) -> str:
    """Its version, such as "Version 2025.3.0.0 (build 36266894)"."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Version")), " ".join(lines))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a tool said of a program.

    Attributes:
      errors: as its summary counts them; None without a summary, when nothing was checked.
      warnings: of racecheck: hazards that may be meant.
      findings: (what it is, kernel or "") -> how often it was printed; without addresses, but of a
        race with both accesses and where they are in the kernel.
      exit_code: the program's, or that of a sanitizer that could not run it.
    """

    errors: int | None
    warnings: int
    findings: Mapping[tuple[str, str], int]
    exit_code: int


def read_report(lines: Iterable[str], exit_code: int) -> Report:
    """Reads the output of a tool and the program; a finding ends with an empty line."""
    errors: int | None = None
    warnings = 0
    findings: Counter[tuple[str, str]] = Counter()
    what, kernel = "", ""
    for line in [*(line.rstrip() for line in lines), _PREFIX]:
        # The program's last line may lack its end, and the summary follows on it.
        if counted := _ERRORS.search(line):
            errors = int(counted[1])
        elif counted := _HAZARDS.search(line):
            errors, warnings = int(counted[1]), int(counted[2])
        headline = _HEADLINE.match(line)
        if what and (headline or line == _PREFIX):
            findings[what, kernel] += 1
            what, kernel = "", ""
        if headline and not headline[1].startswith(_NO_FINDINGS):
            what = headline[1] if _RACE in headline[1] else _ADDRESS.sub("", headline[1])
        elif _RACE in what and (other := _OTHER_ACCESS.match(line)):
            what = f"{what} {other[1]}"
        if what and not kernel and line.startswith(_PREFIX) and (name := _KERNEL.search(line)):
            kernel = name[0]
    return Report(errors=errors, warnings=warnings, findings=findings, exit_code=exit_code)


def run_on_all(
    program: str,
    tool: str,
    options: Sequence[str],
    arguments: Sequence[str],
    folder: pathlib.Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs a tool on the broken kernel, and then on all of ours.

    Args:
      options: of the tool, for ours.
      arguments: of launch_every_kernel.py.
      folder: of the unpacked archive.
      say: gets each line, without its end, as it comes.

    Returns:
      As sanitize.json has it.
    """
    launched_path = folder / f"launched_{tool}.json"
    # Each tensor is an allocation of the driver's: of torch's, which are cut from large ones,
    # memcheck knows no bounds, and initcheck takes what was freed for written.
    environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()

    def run(module: str, options: Sequence[str], arguments: Sequence[str]) -> Report:
        lines: list[str] = []

        def keep(line: str) -> None:
            lines.append(line)
            say(line)

        command = [program, "--tool", tool, *_OPTIONS, *TOOLS[tool], *options]
        command += [sys.executable, "-m", f"tools.gpu_check.{module}", *arguments]
        return read_report(lines, processes.stream(command, keep, folder=folder, environment=environment))

    control = run("broken_kernel", [], [])
    report = run("launch_every_kernel", options, [f"--json_out={launched_path}", *arguments])
    launched = json.loads(launched_path.read_text()) if launched_path.exists() else None
    return {
        "errors": report.errors,
        "warnings": report.warnings,
        "exit_code": report.exit_code,
        "seconds": round(time.monotonic() - begin, 1),
        "kernels": launched["kernels"] if launched else 0,
        "launches": launched["launches"] if launched else 0,
        "errors_of_broken_kernel": control.errors,
        "failures": failures(tool, control, report, launched),
        "findings": [
            {"what": what, "kernel": kernel, "times": times}
            for (what, kernel), times in sorted(report.findings.items())
        ],
    }


def failures(tool: str, control: Report, report: Report, launched: Mapping[str, Any] | None) -> list[str]:
    """Why a tool's run does not show that the kernels are sound; empty if it does.

    Args:
      control: of the kernel that is broken.
      report: of ours.
      launched: what launch_every_kernel.py wrote; None if it wrote nothing.
    """
    wrong = []
    if not control.errors:
        wrong.append(
            f"{tool} must report errors of broken_kernel.py, and reports {control.errors}: it does "
            "not work with this GPU and driver; take the compute-sanitizer of the driver's CUDA"
        )
    if report.errors is None:
        wrong.append(f"{tool} wrote no summary, so nothing is shown; see sanitize.log")
    elif report.errors:
        wrong.append(f"{tool} found {report.errors} errors; see findings, and sanitize.log")
    if launched is None:
        wrong.append("launch_every_kernel.py wrote no report; see the end of sanitize.log")
    else:
        wrong += [] if launched["kernels"] else ["no kernel was launched, so nothing is shown"]
        wrong += [f"{kernel} was not launched" for kernel in launched["not_launched"]]
        wrong += [f"{item['kernel']}: {item['problem']}: {item['message']}" for item in launched["failures"]]
    if report.exit_code and not wrong:
        wrong.append(f"exit code {report.exit_code}; see the end of sanitize.log")
    return wrong
