"""Tests the built wheels with each combination of Python, torch, transformers and Triton that pip provides.

    ./bazelw run //tools/version_matrix -- --python /path/to/python3.12 --python /path/to/python3.13

writes docs/measured/versions.json, and the table of docs/versions.md. Interpreters python3.10 to python3.14 on PATH are
found without the flag. A combination that this machine cannot test is a gap, with its reason. Tests run on the CPU.

Environments and results are kept in --cache_dir: 1.5 GB for the environment in use, and 3.2 GB of CUDA's libraries.
A run that was stopped continues where it stopped: a combination that passed with these wheels is not run again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from absl import app, flags, logging

from tools.version_matrix import page
from tools.version_matrix.combinations import PYTHONS, Combination, combinations
from tools.version_matrix.environments import Environment, Gap

_PYTHON = flags.DEFINE_multi_string("python", [], "An interpreter; may be repeated.")
_WHEEL = flags.DEFINE_multi_string("wheel", None, "The wheels to test.", required=True)
_ONLY = flags.DEFINE_string("only", "", "Run only combinations whose name this regular expression finds.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Environments and results; by default in the cache of bazelw.")
_TIMEOUT_S = flags.DEFINE_integer("timeout_s", 1800, "Seconds that the tests of a combination may take.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Root of the repository; by default the one that `bazel run` was called in.")

JSON = "docs/measured/versions.json"
MAX_NAMES = 20
"""Most failed tests that a result names."""


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; pass interpreters by --python")
    root = Path(_OUT.value or os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoneware/versions"
    cache = Path(_CACHE_DIR.value).absolute() if _CACHE_DIR.value else cache
    (cache / "results").mkdir(parents=True, exist_ok=True)
    remove_environments(cache)
    wheels = copied(_WHEEL.value, cache / "wheels")
    pythons = interpreters(_PYTHON.value)
    planned = combinations()
    todo = [
        combination
        for combination in planned
        if re.search(_ONLY.value, combination.name)
        and result_of(cache, combination, wheels)["status"] not in ("passed", "refused")
    ]
    started_s = time.monotonic()
    for position, combination in enumerate(todo):
        left = (
            ""
            if not position
            else f", about {(time.monotonic() - started_s) / position * (len(todo) - position) / 60:.0f} min left"
        )
        logging.info("%d of %d: %s%s", position + 1, len(todo), combination.name, left)
        result = run(combination, pythons, cache, root)
        logging.info("%s: %s", combination.name, page.verdict(result))
        result_file(cache, combination).write_text(json.dumps(result | {"wheels": wheels}))
        following = todo[position + 1 : position + 2]
        if not following or environment_of(cache, following[0]) != environment_of(cache, combination):
            shutil.rmtree(environment_of(cache, combination).folder, ignore_errors=True)
    results = [result_of(cache, combination, wheels) for combination in planned]
    document = {"date": datetime.date.today().isoformat(), "wheels": wheels, "results": results}
    (root / JSON).write_text(json.dumps(document, indent=1) + "\n")
    page.write(root, document)
    return int(any(result["status"] in ("failed", "not run") for result in results))


def remove_environments(cache: Path) -> None:
    """Removes the environments of a run that was stopped: they may hold other wheels."""
    for folder in cache.glob("python*-torch*/"):
        shutil.rmtree(folder)


def copied(wheels: list[str], folder: Path) -> dict[str, str]:
    """Copies the wheels, since a build replaces them; returns name -> sha256."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for wheel in wheels:
        shutil.copyfile(wheel, folder / Path(wheel).name)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def interpreters(paths: list[str]) -> dict[str, str]:
    """Version -> interpreter, for those named, then for those on PATH.

    Raises:
      UsageError: a named one does not run.
    """
    found: dict[str, str] = {}
    for path in paths + [f"python{version}" for version in PYTHONS]:
        program = "import sys; print('{}.{}'.format(*sys.version_info), sys.executable)"
        try:
            result = subprocess.run([path, "-c", program], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if path in paths:
                raise app.UsageError(f"--python={path} must be a Python that runs: {error}") from error
            continue
        version, executable = result.stdout.strip().split(" ", 1)
        found.setdefault(version, executable)
    return found


def result_file(cache: Path, combination: Combination) -> Path:
    """The result of a combination."""
    return cache / "results" / f"{combination.name}.json"


def result_of(cache: Path, combination: Combination, wheels: dict[str, str]) -> dict[str, Any]:
    """The last result of a combination with the same wheels and tests; its status is "not run" if there is none."""
    path = result_file(cache, combination)
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if result.pop("wheels", None) == wheels and tuple(result["tests"]) == combination.tests:
        return result
    not_run = {"status": "not run", "reason": "the run was stopped before"}
    return {"name": combination.name, **dataclasses.asdict(combination), **not_run}


def environment_of(cache: Path, combination: Combination) -> Environment:
    """The environment of a combination's Python and torch."""
    return Environment(cache / f"python{combination.python}-torch{combination.torch}", cache / "cuda")


def run(combination: Combination, pythons: dict[str, str], cache: Path, root: Path) -> dict[str, Any]:
    """Installs what a combination needs, and tests it."""
    result = {"name": combination.name, **dataclasses.asdict(combination)}
    environment = environment_of(cache, combination)
    started_s = time.monotonic()
    try:
        if combination.python not in pythons:
            raise Gap(f"there is no python{combination.python} on this machine")
        if not environment.folder.exists():
            environment.make(pythons[combination.python], combination, cache / "wheels")
        if combination.tests:
            environment.install(f"transformers=={combination.transformers}.*", f"triton=={combination.triton}.*")
        names = ("torch", "transformers", "triton") if combination.tests else ("torch",)
        result["versions"] = environment.versions(names)
    except Gap as gap:
        shutil.rmtree(environment.folder, ignore_errors=True)
        return result | {"status": "gap", "reason": str(gap)}
    test = tested if combination.tests else refused
    result |= test(combination, environment, cache, root)
    return result | {"seconds": round(time.monotonic() - started_s)}


def refused(combination: Combination, environment: Environment, cache: Path, root: Path) -> dict[str, Any]:
    """Whether the import of an unsupported torch is one ImportError; `reason` is its message."""
    program = "import stoneware as sw\ntry: sw.matmul\nexcept ImportError as error: print(error)"
    done = subprocess.run(
        [str(environment.python), "-c", program],
        env=variables(cache),
        cwd=cache,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    is_clear = len(lines) == 1 and lines[0].startswith("stoneware needs torch>=")
    return {"status": "refused" if is_clear else "failed", "reason": lines[-1] if lines else "it is not refused"}


def tested(combination: Combination, environment: Environment, cache: Path, root: Path) -> dict[str, Any]:
    """The counts of passed, failed and skipped tests, and the names of failed ones."""
    report = cache / f"{environment.folder.name}.xml"
    report.unlink(missing_ok=True)
    command = [str(environment.python), "tests/pytest_main.py", "-q", "--tb=short", *combination.tests]
    with (cache / "results" / f"{combination.name}.log").open("w") as log:
        try:
            subprocess.run(
                command,
                cwd=root,
                env=variables(cache) | {"XML_OUTPUT_FILE": str(report)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S.value,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"the tests took more than {_TIMEOUT_S.value} s"}
    if not report.exists():
        return {"status": "failed", "reason": f"the tests ended without a report; see {log.name}"}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "status": "failed" if failed or not cases else "passed",
        "num_passed": len(cases) - len(failed) - num_skipped,
        "num_skipped": num_skipped,
        "num_failed": len(failed),
        "failed_tests": [f"{case.get('classname')}.{case.get('name')}" for case in failed[:MAX_NAMES]],
    }


def variables(cache: Path) -> dict[str, str]:
    """The environment of the tests: this process's without Bazel's paths; one thread, offline, a store of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STONEWARE_", "RUNFILES", "PYTHON", "BUILD_", "TEST"))
    }
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STONEWARE_CACHE_DIR": str(cache / "store"),
        "TRANSFORMERS_VERBOSITY": "error",
    }


if __name__ == "__main__":
    sys.exit(app.run(main))
