"""Finds or sets up Bazel, then becomes it. Standard library only: this runs before anything else.

Order: $BAZEL, `bazelisk`, a `bazel` of the right major version on PATH, else Bazel from Debian's
packages under the user's cache folder. Caches (Bazel's output, the disk cache, Bazel itself) live in
$XDG_CACHE_HOME/stoneware, by default ~/.cache/stoneware.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import debian_bazel

WORKSPACE = pathlib.Path(__file__).resolve().parents[2]
VERSION = (WORKSPACE / ".bazelversion").read_text().strip()
MAJOR = VERSION.split(".")[0]
# On systems that this build does not run on: Debian 12 with Python 3.11 and pip.
DOCKER = (
    'docker run --rm --platform linux/amd64 -v "$PWD:/stoneware" -w /stoneware python:3.11-bookworm '
    'sh -c "./bazelw build //:wheel && cp bazel-bin/*.whl ."'
)
# Bazel drops the oldest entries of the disk cache beyond this size.
DISK_CACHE_MAX_SIZE = "10G"


def say(text: str) -> None:
    print(f"bazelw: {text}", file=sys.stderr, flush=True)


def cache_folder() -> pathlib.Path:
    """The folder for everything bazelw keeps; never under /tmp, which Bazel's sandbox hides."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = pathlib.Path(base).absolute().resolve() / "stoneware"
    if folder.is_relative_to("/tmp"):
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        moved = pathlib.Path(f"/var/tmp/stoneware-{os.getuid()}-{digest}")
        say(f"{folder} lies under /tmp, which Bazel's sandbox hides; using {moved} in its place")
        folder = moved
    if re.search(r"""[\s'"\\#]""", str(folder)):
        sys.exit(
            f"bazelw: the cache folder must have no white space, quote, backslash or # in its name, "
            f"which Bazel does not read right, but is {str(folder)!r}; set XDG_CACHE_HOME to another."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        sys.exit(
            f"bazelw: the cache folder {folder} must be one that can be written ({error.strerror}); "
            "set XDG_CACHE_HOME to such a folder."
        )
    if folder.stat().st_uid != os.getuid():
        sys.exit(f"bazelw: {folder} belongs to another user; set XDG_CACHE_HOME to a folder of yours.")
    return folder


def check_machine() -> None:
    """Exits on a machine for which the build has no compilers, before anything is downloaded."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64") or not is_glibc():
        libc = "" if system != "Linux" or is_glibc() else " without glibc"
        sys.exit(
            f"bazelw: Stoneware is built on x86-64 Linux with glibc, for which its compilers are locked, but this "
            f"machine is {system} {machine}{libc}; build there, or here by `{DOCKER}`, and copy the wheel to where "
            "it runs."
        )


def is_glibc() -> bool:
    """Whether this Linux has glibc, not musl (Alpine), for which pip's wheels are others."""
    return platform.libc_ver()[0] == "glibc"


def version_of(bazel: str) -> str:
    """What `bazel --version` says ("7.7.1"), or an empty string if it does not run.

    It runs in this folder: a bazelisk that is called `bazel` reads .bazelversion, and may download that Bazel first.
    """
    try:
        result = subprocess.run(
            [bazel, "--version"], capture_output=True, text=True, errors="replace", check=False, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"bazel (\d+\.\d+\S*)", result.stdout)
    return match.group(1) if match else ""


def warn_of_another_version(bazel: str, remedy: str) -> None:
    """Says so if the Bazel that somebody chose has another major version. One that does not run says more itself."""
    version = version_of(bazel)
    if version and version.split(".")[0] != MAJOR:
        say(f"{bazel} is version {version}, but Stoneware is tested with {VERSION} alone; if it fails, {remedy}")


def find_bazel(cache: pathlib.Path) -> tuple[list[str], list[str]]:
    """The command with its startup options, and the rc lines that this Bazel needs."""
    chosen = os.environ.get("BAZEL")
    if chosen:
        if shutil.which(chosen) is None:
            sys.exit(f"bazelw: $BAZEL must name a program, but is {chosen!r}; correct or unset it.")
        warn_of_another_version(chosen, "point $BAZEL at one")
        return [chosen], []
    bazelisk = shutil.which("bazelisk")
    if bazelisk:
        warn_of_another_version(bazelisk, f"unset USE_BAZEL_VERSION, or put {VERSION} into .bazelversion")
        return [bazelisk], []
    bazel = shutil.which("bazel")
    if bazel:
        found = version_of(bazel)
        if found.split(".")[0] == MAJOR:
            return [bazel], []
        say(f"{bazel} is version {found or 'unknown'}, not {MAJOR}.x; it is left alone")
    try:
        prefix = debian_bazel.install(cache / f"bazel-{VERSION}", VERSION, say)
    except debian_bazel.CannotInstall as error:
        sys.exit(
            f"bazelw: no Bazel {MAJOR} here and none could be set up ({error}); install bazelisk (npm has it: "
            f"@bazel/bazelisk), or Bazel {VERSION}, so that it is on PATH, or point $BAZEL at it."
        )
    return debian_bazel.command(prefix), debian_bazel.rc_lines(prefix)


def main(argv: list[str]) -> None:
    check_machine()
    cache = cache_folder()
    command, rc_lines = find_bazel(cache)
    rc = cache / "bazelw.bazelrc"
    text = (
        "\n".join(
            [
                "# Written by bazelw.",
                f"common --disk_cache={cache / 'disk_cache'}",
                f"common --experimental_disk_cache_gc_max_size={DISK_CACHE_MAX_SIZE}",
                *rc_lines,
            ]
        )
        + "\n"
    )
    environment = {"USER": f"uid{os.getuid()}", **os.environ}
    try:
        if not rc.exists() or rc.read_bytes() != os.fsencode(text):
            fresh = rc.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(os.fsencode(text))
            os.replace(fresh, rc)
        os.execvpe(
            command[0], [*command, f"--output_user_root={cache / 'bazel'}", f"--bazelrc={rc}", *argv], environment
        )
    except OSError as error:
        sys.exit(f"bazelw: cannot start {command[0]} ({error}); correct $BAZEL or the cache {cache}.")


if __name__ == "__main__":
    main(sys.argv[1:])
