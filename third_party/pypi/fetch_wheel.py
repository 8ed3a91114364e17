"""Downloads one wheel with the machine's own pip, checks its sha256 and unpacks it.

Called by the repository rule of pypi.bzl: `fetch_wheel.py NAME VERSION FOLDER FILE=SHA256 ...` unpacks
below FOLDER; with KEEP=FOLDER2 among the last arguments the wheel itself stays in FOLDER2. pip is asked
by name, so the machine's index, mirror, proxy and certificates apply; the hash decides.
"""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

EXECUTABLE_BITS = 0o111


def check_interpreter(name: str, version: str, locked: dict[str, str]) -> None:
    """Exits unless a locked file is for this Python: pip would fetch another one, whose hash differs."""
    running = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = [file.removesuffix(".whl").split("-")[-3:-1] for file in locked]
    if any(python == running or not abi.startswith(python) for python, abi in tags):
        return  # pure Python, the stable ABI, or this version
    wanted = ", ".join(sorted({f"3.{python[3:]}" for python, _ in tags}))
    sys.exit(
        f"{name} {version}: the locked wheel is for Python {wanted}, but the build uses Python "
        f"{sys.version.split()[0]} ({sys.executable}); install Python {wanted} with pip, so that it is on PATH"
    )


def download(name: str, version: str, folder: pathlib.Path) -> pathlib.Path:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(folder),
            f"{name}=={version}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(
            f"{name} {version}: `pip download {name}=={version}` failed; pip's index must carry the "
            f"locked wheel, for x86-64 Linux.\n{result.stderr.strip()}"
        )
    return next(folder.glob("*.whl"))


def check(name: str, version: str, wheel: pathlib.Path, locked: dict[str, str]) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found not in locked.values():
        expected = "\n".join(f"  expected {sha256}  {file}" for file, sha256 in locked.items())
        sys.exit(
            f"{name} {version}: the wheel that pip found is not the locked one.\n{expected}\n"
            f"  found    {found}  {wheel.name}\n"
            "Point pip at an index that carries the locked file, or take the new one deliberately: "
            "`./bazelw run //third_party/pypi:refresh`."
        )


def unpack(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = pathlib.Path(archive.extract(entry, folder))
            if (entry.external_attr >> 16) & EXECUTABLE_BITS and path.is_file():
                path.chmod(0o755)


def main(argv: list[str]) -> None:
    name, version, folder = argv[1:4]
    locked = dict(pair.split("=", 1) for pair in argv[4:])
    keep = locked.pop("KEEP", None)
    check_interpreter(name, version, locked)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(name, version, pathlib.Path(scratch))
        check(name, version, wheel, locked)
        unpack(wheel, pathlib.Path(folder))
        if keep:
            pathlib.Path(keep).mkdir(exist_ok=True)
            shutil.copy(wheel, keep)


if __name__ == "__main__":
    main(sys.argv)
