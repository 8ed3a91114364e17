"""Resolves requirements.txt into lock.bzl: every wheel of the closure with version and sha256.

Run as `./bazelw run //third_party/pypi:refresh` after editing requirements.txt. pip does the
resolving, against the machine's own index; only wheels that fit the running Python on Linux are
taken, and of what the wheels are built with those of the other Pythons that build them. Nothing is
installed.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

# nvidia-cutlass names packages that only its Python front end uses; here it is headers.
HEADERS_ONLY = ("nvidia-cutlass",)
# //:wheel is built with these Pythons too. Tests are not: torch has no locked wheel for them.
OTHER_PYTHONS = ("3.12", "3.13")
# What //:wheel is built with and has a wheel for each Python.
FOR_EACH_PYTHON = ("triton",)


def resolve(requirements: list[str], *options: str) -> list[dict]:
    """pip's own installation report for `requirements`: one record a distribution."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--report",
            "-",
            *options,
            *requirements,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)["install"]


def lock_entry(record: dict) -> tuple[str, str, str, str]:
    """(name, version, file name, sha256) of one record."""
    download = record["download_info"]
    name = re.sub(r"[-_.]+", "-", record["metadata"]["name"]).lower()
    file = urllib.parse.unquote(download["url"].split("#")[0].rsplit("/", 1)[-1])
    sha256 = download["archive_info"]["hashes"]["sha256"]
    return name, record["metadata"]["version"], file, sha256


def render(entries: list[tuple[str, str, str, str]]) -> str:
    packages: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, version, file, sha256 in sorted(entries):
        packages.setdefault((name, version), []).append((file, sha256))
    lines = [
        '"""Wheels by version and sha256; written by `./bazelw run //third_party/pypi:refresh`."""',
        "",
        "# name: (version, {file name: sha256})",
        "WHEELS = {",
    ]
    for (name, version), files in packages.items():
        lines.append(f'    "{name}": ("{version}", {{')
        lines += [f'        "{file}": "{sha256}",' for file, sha256 in files]
        lines.append("    }),")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    folder = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."), "third_party/pypi")
    requirements = [
        line for line in (folder / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    alone = [line for line in requirements if line.split("==")[0] in HEADERS_ONLY]
    closed = [line for line in requirements if line not in alone]
    print(f"resolving {len(requirements)} requirements with pip …", file=sys.stderr)
    records = resolve(closed) + resolve(alone, "--no-deps")
    for_each = [line for line in requirements if line.split("==")[0] in FOR_EACH_PYTHON]
    for python in OTHER_PYTHONS:
        # pip wants a folder with the version; it writes nothing there.
        records += resolve(for_each, "--no-deps", f"--python-version={python}", "--target=unused")
    (folder / "lock.bzl").write_text(render([lock_entry(record) for record in records]))
    print(f"wrote {folder / 'lock.bzl'}: {len(records)} wheels", file=sys.stderr)


if __name__ == "__main__":
    main()
