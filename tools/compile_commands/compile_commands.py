"""Writes compile_commands.json at the repository's root: `./bazelw run //tools:compile_commands`.

Covers the C++ that Bazel's own rules compile below cc/: the modules and the libraries they are made
of. Kernels and host code with CUDA types are nvcc's, which clangd does not follow. Generated headers
are found once they are built: `./bazelw build //:wheel`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_QUERY = 'mnemonic("CppCompile", //cc/...)'


def bazel(root: pathlib.Path, *arguments: str) -> str:
    # Without what Bazel's launcher sets for this program's own Python.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [root / "bazelw", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"compile_commands: `./bazelw {' '.join(arguments)}` failed:\n{result.stderr}")
    return result.stdout


def commands(actions: list[dict[str, Any]], root: pathlib.Path, output_base: str) -> list[dict[str, Any]]:
    """An entry for each source of the repository, that of the first action that compiles it.

    Args:
      actions: `actions` of `bazel aquery --output=jsonproto`.
      root: of the repository.
      output_base: Bazel's folder, which has every repository that was fetched below external/.
    """
    entries: dict[str, dict[str, Any]] = {}
    for action in actions:
        arguments = list(action["arguments"])
        at = arguments.index("-c") + 1
        source = root / arguments[at]
        if arguments[at].startswith(("bazel-out/", "external/")):
            continue  # generated, or another repository's
        arguments[at] = str(source)
        arguments = [f"{output_base}/{one}" if one.startswith("external/") else one for one in arguments]
        entries.setdefault(str(source), {"directory": str(root), "file": str(source), "arguments": arguments})
    return [entries[file] for file in sorted(entries)]


def main() -> None:
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")).absolute()
    actions = json.loads(bazel(root, "aquery", "--output=jsonproto", _QUERY))["actions"]
    output_base = bazel(root, "info", "output_base").strip()
    entries = commands(actions, root, output_base)
    file = root / "compile_commands.json"
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}: {len(entries)} sources")


if __name__ == "__main__":
    main()
