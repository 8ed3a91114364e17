"""Checks that a commit can be released: the same wheels from two clones, and a second clone that compiles nothing.

    ./bazelw run //tools/release:check [-- --folder=DIR]

It clones the commit twice, fetches what the build needs into an output base for each clone, and cuts the network. Then
it builds the wheels in both clones without any cache, and in the second clone once more with a cache server that the
first has filled. The exit code is 1 if the digests differ or the last build executes an action. After an interruption
the same command continues.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

import bazelw
import cache_server
from absl import app, flags, logging

_TARGET = flags.DEFINE_string("target", "//:release_wheels", "What is built; its files that end in .whl are compared.")
_FOLDER = flags.DEFINE_string("folder", None, "Where the clones and their outputs go; by default in bazelw's cache.")
_COLD = flags.DEFINE_bool(
    "cold",
    True,
    "Compile everything in both clones. With --nocold they take what other clones of this machine have compiled, so a "
    "compiler that gives other bytes each time is not noticed.",
)
_KEEP = flags.DEFINE_bool("keep", False, "Keep the folder after a check that passed.")
_NETWORK_IS_CUT = flags.DEFINE_bool("network_is_cut", False, "Set by the program for its own second half.")

# Names of different length, so that a path in the outputs changes their digests.
_FIRST, _SECOND = "one", "second_clone"
_NOT_EXECUTED = {"total", "internal", "remote cache hit", "disk cache hit"}
_LAUNCHERS = ("PYTHON", "BUILD_", "RUNFILES_")
# From linux/sockios.h and linux/if.h.
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


class CheckError(Exception):
    """The release is not one, or cannot be checked; the message has rule, value and remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """What one build gave.

    Attributes:
      digests: sha256 of each wheel, by its file name.
      executed: actions that ran, by what ran them; actions from a cache or of Bazel itself are not counted.
      num_cached: actions whose result came from a cache.
    """

    digests: dict[str, str]
    executed: dict[str, int]
    num_cached: int


_interrupts: list[int] = []


def stop_if_interrupted() -> None:
    if _interrupts:
        raise KeyboardInterrupt


def run(args: list[str | os.PathLike], **kwargs: Any) -> subprocess.CompletedProcess:
    """Runs a command with its output on the terminal; an error ends the check.

    Ctrl-C reaches the command as well, and Bazel needs a moment to stop its compilers, so it is waited for.
    """
    stop_if_interrupted()
    result = subprocess.run(args, check=False, text=True, **kwargs)
    stop_if_interrupted()
    if result.returncode:
        words = " ".join(map(str, args))
        raise CheckError(f"each step must succeed, but `{words}` ended with {result.returncode}; its output is above")
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clone:
    """A clone with an output base of its own; its Bazel reads no cache unless an option names one."""

    folder: pathlib.Path
    output_base: pathlib.Path

    def bazel(self, command: str, *options: str) -> None:
        run(**self._call(command, *options))

    def shutdown(self) -> None:
        """Ends the clone's Bazel server, which keeps the network that it was started in; also after Ctrl-C."""
        subprocess.run(**self._call("shutdown"), check=False)

    def _call(self, command: str, *options: str) -> dict[str, Any]:
        startup = [f"--output_base={self.output_base}", "--max_idle_secs=60"]
        return {
            "args": [self.folder / "bazelw", *startup, command, *options],
            "cwd": self.folder,
            # Without what Bazel's launcher sets for this program's own Python.
            "env": {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)},
        }

    def clone(self, repository: pathlib.Path, commit: str) -> None:
        if not (self.folder / ".git").exists():
            run(["git", "clone", "--quiet", "--no-checkout", repository, self.folder])
        run(["git", "checkout", "--quiet", "--detach", commit], cwd=self.folder)

    def build(self, target: str, events: pathlib.Path, *options: str) -> Build:
        """Builds the target, or reads what a build that ended before the check was interrupted gave."""
        record = events.with_suffix(".json")
        if record.exists():
            logging.info("%s: built before, see %s", self.folder.name, record)
            return Build(**json.loads(record.read_text(encoding="utf-8")))
        self.bazel("build", "--disk_cache=", f"--build_event_json_file={events}", *options, target)
        build = read_events(events, self.folder)
        record.write_text(json.dumps(dataclasses.asdict(build)), encoding="utf-8")
        return build


def read_events(events: pathlib.Path, workspace: pathlib.Path) -> Build:
    """Reads Bazel's build event file.

    Raises:
      CheckError: the build has no wheel, or Bazel did not count its actions.
    """
    digests: dict[str, str] = {}
    runners: dict[str, int] = {}
    for line in events.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        for file in event.get("namedSetOfFiles", {}).get("files", []):
            if file["name"].endswith(".whl"):
                wheel = workspace.joinpath(*file["pathPrefix"], file["name"])
                digests[wheel.name] = hashlib.sha256(wheel.read_bytes()).hexdigest()
        for runner in event.get("buildMetrics", {}).get("actionSummary", {}).get("runnerCount", []):
            runners[runner["name"]] = runner["count"]
    if not digests or not runners:
        raise CheckError(
            f"a build must report a wheel and how its actions ran, but {events} has {len(digests)} wheels and "
            f"{len(runners)} kinds of runners; pass a --target that is a wheel"
        )
    return Build(
        digests=dict(sorted(digests.items())),
        executed={name: count for name, count in runners.items() if name not in _NOT_EXECUTED},
        num_cached=sum(count for name, count in runners.items() if name.endswith("cache hit")),
    )


def verdict(builds: dict[str, Build], *, cached: str) -> list[str]:
    """What is wrong with the builds; empty if nothing is.

    Args:
      builds: by name.
      cached: the name of the build that must execute nothing.
    """
    wrong = []
    if len({json.dumps(build.digests) for build in builds.values()}) != 1:
        wrong.append(
            "every build of a commit must give the same wheels, but the digests above differ; unpack two of them and "
            "compare"
        )
    if builds[cached].executed:
        ran = ", ".join(f"{count} by {name}" for name, count in builds[cached].executed.items())
        wrong.append(
            f"a clone with a filled cache must execute no action, but it executed {ran}; compare the inputs of both "
            "clones with --execution_log_json_file"
        )
    return wrong


def commit_of(repository: pathlib.Path) -> str:
    changes = run(["git", "status", "--porcelain"], cwd=repository, stdout=subprocess.PIPE).stdout
    if changes:
        raise CheckError(f"only a commit is released, but the clone has changes:\n{changes}commit or stash them")
    return run(["git", "rev-parse", "HEAD"], cwd=repository, stdout=subprocess.PIPE).stdout.strip()


def without_network() -> list[str]:
    """The words in front of a command that give it a network namespace of its own; empty if not permitted."""
    words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
        return words
    return []


def start_loopback() -> None:
    """Sets up the loopback device, by which Bazel's client and the cache server are reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    interfaces = [name for _, name in socket.if_nameindex()]
    if interfaces != ["lo"]:
        raise CheckError(f"the network must be cut, but there is {interfaces}; run the check without --network_is_cut")
    logging.info("the network is cut: loopback is the only interface")


def build_all(clones: list[Clone], folder: pathlib.Path, cache: pathlib.Path, options: list[str]) -> dict[str, Build]:
    """The builds, by name; the last one is that with the cache server."""
    first, second = clones
    builds = {}
    with cache_server.serve(cache) as address:
        # On a busy machine an upload took longer than Bazel's 60 s, and its action was missing in the cache.
        server = [f"--remote_cache={address}", "--remote_timeout=900s", *options]
        logging.info("building in %s, to fill the cache server", first.folder)
        filling = ["--noremote_accept_cached"] if _COLD.value else []
        builds["first clone"] = first.build(_TARGET.value, folder / "first.events", *server, *filling)
        first.shutdown()
        if _COLD.value:
            logging.info("building in %s, without a cache", second.folder)
            builds["second clone"] = second.build(_TARGET.value, folder / "second.events", *options)
            second.bazel("clean")
        logging.info("building in %s, from the cache server", second.folder)
        builds["second clone, cached"] = second.build(
            _TARGET.value, folder / "cached.events", *server, "--noremote_upload_local_results"
        )
    return builds


def fetch(clones: list[Clone], repository: pathlib.Path, commit: str) -> None:
    for clone in clones:
        logging.info("fetching for %s", clone.folder)
        clone.clone(repository, commit)
        clone.bazel("build", "--disk_cache=", "--nobuild", _TARGET.value)
        clone.shutdown()


def check(repository: pathlib.Path) -> None:
    commit = commit_of(repository)
    kind = "cold" if _COLD.value else "not_cold"
    name = f"{commit[:12]}_{kind}{re.sub(r'[^a-z0-9]+', '_', _TARGET.value)}"
    folder = pathlib.Path(_FOLDER.value or bazelw.cache_folder() / "release").absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    clones = [Clone(folder=folder / name, output_base=folder / f"outputs_{name}") for name in (_FIRST, _SECOND)]
    options: list[str] = []
    if _NETWORK_IS_CUT.value:
        start_loopback()
    else:
        fetch(clones, repository, commit)
        if words := without_network():
            os.execvp(words[0], [*words, sys.executable, *sys.argv, "--network_is_cut"])
        logging.warning("network namespaces are not permitted here: Bazel's own switches cut the network")
        options = ["--nofetch", "--repository_disable_download"]
    cache = folder / "cache" if _COLD.value else bazelw.cache_folder() / "disk_cache"
    try:
        builds = build_all(clones, folder, cache, options)
    finally:
        for clone in clones:
            clone.shutdown()
    for name, build in builds.items():
        print(f"{name}: {sum(build.executed.values())} actions executed, {build.num_cached} from a cache")
        for wheel, sha256 in build.digests.items():
            print(f"  {sha256}  {wheel}")
    wrong = verdict(builds, cached="second clone, cached")
    if wrong:
        raise CheckError("\n".join([*wrong, f"the clones are in {folder}; remove it to check again"]))
    print(f"release check passed ({kind}): {commit}")
    if not _KEEP.value:
        run(["chmod", "-R", "u+w", folder])  # Bazel's outputs are read-only.
        shutil.rmtree(folder)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    signal.signal(signal.SIGINT, lambda number, frame: _interrupts.append(number))
    try:
        check(pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")).absolute())
    except CheckError as error:
        print(f"release check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("release check: interrupted; the same command continues where it stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    app.run(main)
