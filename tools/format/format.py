"""Formats Python, C++ and Starlark of the source tree: `./bazelw run //tools:format`.

With `-- --check` it writes nothing, prints what would change, and exits with 1 if anything would.
"""

from __future__ import annotations

import os
import pathlib
import sys

import style
from absl import app, flags

_CHECK = flags.DEFINE_bool("check", False, "Only print what would change.")


def main(argv: list[str]) -> None:
    del argv
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    failed = []
    for name, tool in style.FORMATTERS.items():
        options = tool.check if _CHECK.value else tool.fix
        assert options is not None
        try:
            result = style.run(tool, options, root)
        except style.ToolMissing as error:
            print(f"format: {name} is left out: {error}", file=sys.stderr)
            continue
        if result.returncode:
            failed.append(name)
            print(result.stdout, end="")
    if failed and _CHECK.value:
        sys.exit(f"format: {', '.join(failed)} must be formatted; run `./bazelw run //tools:format`")
    if failed:
        sys.exit(f"format: {', '.join(failed)} cannot be formatted; fix the errors above, then run again")


if __name__ == "__main__":
    app.run(main)
