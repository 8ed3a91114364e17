"""Writes the kernel manifest from a listing of cubins; the program of the rule kernel_manifest."""

import hashlib
import json
import pathlib

from absl import app, flags

_KERNELS = flags.DEFINE_string("kernels", None, "JSON listing: id, op, backend, arch, config, cubin.", required=True)
_OUT = flags.DEFINE_string("out", None, "The manifest to write.", required=True)


def main(argv: list[str]) -> None:
    del argv
    kernels = json.loads(pathlib.Path(_KERNELS.value).read_text(encoding="utf-8"))
    for kernel in kernels:
        cubin = pathlib.Path(kernel.pop("cubin")).read_bytes()
        kernel["sha256"] = hashlib.sha256(cubin).hexdigest()
        kernel["size_bytes"] = len(cubin)
    manifest = {"schema": 1, "kernels": sorted(kernels, key=lambda kernel: kernel["id"])}
    text = json.dumps(manifest, sort_keys=True, indent=1) + "\n"
    pathlib.Path(_OUT.value).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
