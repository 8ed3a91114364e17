"""Prints the Python that the build uses, a line each: interpreter, version ("3.11"), headers, newer headers.

`find_python.py PREFERRED` looks through PATH: for a Python of version PREFERRED, otherwise for the first
one that is supported. The fourth line is a folder with headers of Python 3.12 or later, or empty.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SUPPORTED = ("3.11", "3.12", "3.13")
# Wheels of the stable ABI are compiled with headers of one of these.
WITH_STABLE_ABI = ("3.12", "3.13")
_PROBE = pathlib.Path(__file__).resolve().with_name("probe.py")
_TIMEOUT_S = 60


def run(*command: str) -> str | None:
    """What a command prints, or None if it fails; a shim of pyenv fails for versions that are not selected."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def probed_pythons(path: str) -> dict[str, tuple[str, str]]:
    """Interpreter to (version, folder of headers), in the order of PATH, `python3` of all folders first."""
    pythons: dict[str, tuple[str, str]] = {}
    for name in ("python3", *("python" + version for version in SUPPORTED)):
        for folder in path.split(os.pathsep):
            program = os.path.join(folder, name)
            if folder and os.access(program, os.X_OK):
                answer = run(program, "-B", str(_PROBE))
                if answer:
                    interpreter, version, headers = answer.splitlines()
                    pythons.setdefault(interpreter, (version, headers))
    return pythons


def main(argv: list[str]) -> None:
    preferred = argv[1]
    pythons = probed_pythons(os.environ.get("PATH", ""))
    supported = {python: version for python, (version, _) in pythons.items() if version in SUPPORTED}
    by_preference = sorted(supported, key=lambda python: supported[python] != preferred)
    chosen = next((python for python in by_preference if run(python, "-c", "import pip") is not None), None)
    if chosen is None:
        seen = [
            f"{python} ({version}{', without pip' if python in supported else ''})"
            for python, (version, _) in pythons.items()
        ]
        sys.exit(
            f"the build needs Python {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]} with pip, but PATH has "
            f"{', '.join(seen) or 'none'}; install Python {preferred or SUPPORTED[0]} with pip, so that it is on PATH"
        )
    newer = next(
        (
            headers
            for version, headers in pythons.values()
            if version in WITH_STABLE_ABI and os.path.exists(os.path.join(headers, "Python.h"))
        ),
        "",
    )
    print(chosen, *pythons[chosen], newer, sep="\n")


if __name__ == "__main__":
    main(sys.argv)
