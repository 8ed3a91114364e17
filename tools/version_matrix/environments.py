"""Virtual environments with the built wheel, one version of torch, and what the tests need."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from absl import logging

from tools.version_matrix.combinations import Combination

TOOLS = ("pytest", "hypothesis", "numpy", "psutil", "pyyaml", "safetensors", "cuda-bindings==13.*")
LINKERS = ("nvidia-cuda-nvrtc==13.*", "nvidia-nvjitlink==13.*")
"""What links a Python function into a kernel; a CUDA build of torch brings it, and it needs no GPU."""

NO_DEPENDENCIES = ("accelerate",)
"""These require torch, whose CUDA libraries pip would install again."""

_IS_OF_CUDA = re.compile(r"(nvidia|cuda)-")
_REQUIREMENTS = """
import importlib.metadata, json, sys
names = importlib.metadata.requires(sys.argv[1]) or []
print(json.dumps([name for name in names if "extra ==" not in name]))
"""


class Gap(Exception):
    """A combination that this machine cannot test; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment of one Python and one torch.

    Attributes:
      folder: of the environment.
      shared: holds CUDA's libraries, which a CUDA build of torch loads and CPU tests do not call. They are those of
        the first build for CUDA 13 that is installed, and serve all of them; builds for CUDA 12 share others.
    """

    folder: Path
    shared: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin/python"

    def make(self, interpreter: str, combination: Combination, wheels: Path) -> None:
        """Installs torch and the wheel.

        Raises:
          Gap: there is no wheel for this Python, or pip offers no such torch.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", "--without-pip", str(self.folder)], check=True)
        # First, since it tells in a second whether there is a wheel for this Python.
        self.install("-f", str(wheels), "--no-index", "--no-deps", "stoneware")
        self.install("--no-deps", f"torch=={combination.torch}.*")
        requirements = self._requirements("torch")
        of_cuda = [name for name in requirements if _IS_OF_CUDA.match(name)]
        others = [name for name in requirements if name not in of_cuda and not name.startswith("triton")]
        others += [name for name in self._requirements("stoneware") if not name.startswith("torch")]
        if of_cuda:
            self._link_cuda(of_cuda)
        self.install(*others, *TOOLS, *(() if of_cuda else LINKERS))
        self.install("--no-deps", *NO_DEPENDENCIES)

    def install(self, *arguments: str) -> None:
        """Runs `pip install`.

        Raises:
          Gap: pip refuses; the message is its reason.
        """
        _pip([f"--python={self.python}", "install", "--no-cache-dir", *arguments])

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """The installed version of each package, and that of Python."""
        program = (
            "import importlib.metadata, json, platform, sys\n"
            "print(json.dumps({'python': platform.python_version()} | "
            "{name: importlib.metadata.version(name) for name in sys.argv[1:]}))"
        )
        return dict(json.loads(self._run(program, *names)))

    def _requirements(self, package: str) -> list[str]:
        return list(json.loads(self._run(_REQUIREMENTS, package)))

    def _run(self, program: str, *arguments: str) -> str:
        return subprocess.run(
            [str(self.python), "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def _link_cuda(self, requirements: list[str]) -> None:
        """Links CUDA's libraries next to torch, where it looks for them."""
        is_of_12 = any("-cu12" in name for name in requirements)
        shared = self.shared.with_name(f"{self.shared.name}_12") if is_of_12 else self.shared
        if not shared.exists():
            partial = shared.with_name(f"{shared.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _pip(["install", "--no-cache-dir", f"--target={partial}", *requirements])
            partial.rename(shared)
        (packages,) = self.folder.glob("lib/python3*/site-packages")
        (packages / "nvidia").symlink_to(shared / "nvidia")


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    logging.debug("%s", " ".join(command))
    # Bazel runs a program with a PYTHONPATH, which must not be that of another Python.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Gap(reason_of(result.stdout + result.stderr))


def reason_of(output: str) -> str:
    """Why pip failed, in words without addresses.

    Args:
      output: what pip wrote to stdout and stderr.
    """
    capped = re.findall(r"The user requested \(constraint\) (\S+)", output)
    if capped:
        return f"the machine's pip is constrained to {' and '.join(sorted(set(capped)))}"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        if missing.group(1) == "stoneware":
            return "there is no wheel of stoneware for this Python"
        return f"pip finds no {missing.group(1)} for this Python"
    lines = [line for line in output.strip().splitlines() if line.startswith("ERROR:")] or ["no reason"]
    return "pip fails: " + re.sub(r"(\w+://|/)\S+", "...", lines[-1].removeprefix("ERROR:").strip())
