"""Writes the kernel manifest from a listing of cubins; the program of the rule kernel_manifest.

The manifest's "digest" is the sha256 of the file with an empty digest; stoneware/kernels/manifest.py
checks it by the same formula.
The "sha256" covers the bytes that ship, of a cubin or of the fat binary that an embedded one is compressed in, and
"code_sha256" only the code that the GPU executes.
"open" has the files of open kernels, each with the ids of the kernels in it.
"left_out" has the ids of kernels that exist but are not in this set, "removed" those that are not built because
backward is off for them, "backward" the value of the flag. Empty lists are omitted.
"""

import hashlib
import json
import pathlib
import sys

import cubin_code
from absl import app, flags

_KERNELS = flags.DEFINE_string(
    "kernels",
    None,
    "JSON: backward, left_out, removed; open, each with file and kernels; and kernels, each with id, op, backend, "
    "arch, config, serves, cubin; description, the path of the launch .json of a kernel that has one; and image, the "
    "path of the fat binary of a kernel that is embedded.",
    required=True,
)
_OUT = flags.DEFINE_string("out", None, "The manifest to write.", required=True)


def _open_file(listed: dict) -> dict:
    """The manifest's record of a file of open kernels."""
    path = pathlib.Path(listed["file"])
    content = path.read_bytes()
    return {
        "kernels": sorted(listed["kernels"]),
        "name": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
    }


def _symbol_error(id: str, path: str, symbols: list[str]) -> str:
    return (
        f"{path}: kernel_id={id!r} must be the symbol of a kernel in the cubin, which has {', '.join(symbols)}; "
        f'declare the kernel extern "C" __global__ under this name, or correct kernel_id'
    )


def main(argv: list[str]) -> int:
    del argv
    listing = json.loads(pathlib.Path(_KERNELS.value).read_text(encoding="utf-8"))
    kernels = listing["kernels"]
    for kernel in kernels:
        path = kernel.pop("cubin")
        cubin = pathlib.Path(path).read_bytes()
        ships = pathlib.Path(kernel.pop("image", path)).read_bytes()
        kernel["sha256"] = hashlib.sha256(ships).hexdigest()
        kernel["code_sha256"] = cubin_code.code_sha256(cubin)
        kernel["size_bytes"] = len(ships)
        description = kernel.pop("description", None)
        if description is None:  # a launch description has the symbol; otherwise it is the id
            symbols = cubin_code.kernels(cubin)
            if kernel["id"] not in symbols:
                print(_symbol_error(kernel["id"], path, symbols), file=sys.stderr)
                return 1
        else:
            kernel["description_sha256"] = hashlib.sha256(pathlib.Path(description).read_bytes()).hexdigest()
    manifest = {
        "schema": 1,
        "digest": "",
        "backward": listing["backward"],
        "kernels": sorted(kernels, key=lambda kernel: kernel["id"]),
    }
    if listing["open"]:
        manifest["open"] = sorted(map(_open_file, listing["open"]), key=lambda open_file: open_file["name"])
    if listing["left_out"]:
        manifest["left_out"] = sorted(listing["left_out"])
    if listing["removed"]:
        manifest["removed"] = sorted(listing["removed"], key=lambda kernel: kernel["id"])
    text = json.dumps(manifest, sort_keys=True, indent=1) + "\n"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    text = text.replace('"digest": ""', f'"digest": "{digest}"', 1)
    pathlib.Path(_OUT.value).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    app.run(main)
