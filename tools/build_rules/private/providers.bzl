"""What the rules tell each other."""

KernelInfo = provider(
    doc = "Compiled GPU kernels, on their way into a module, a manifest or a wheel.",
    fields = {
        "kernels": "depset of struct(id, op, backend, arch, config, serves, cubin, image, json): config and " +
                   "serves, whether each matmul is served, are JSON; image is the fat binary that has the " +
                   "cubin of an embedded kernel, json the launch description of an ahead-of-time kernel, or None",
        "removed": "depset of the same without cubin, image and json: kernels that backward = off removes",
    },
)

OpenKernelsInfo = provider(
    doc = "LTO-IR of kernels that call a device function which is linked later.",
    fields = {
        "files": "depset of struct(file, arch, kernels): kernels are the ids of those in the file",
    },
)

TileMatmulInfo = provider(
    doc = "LTO-IR of a tile matmul's directions, which are linked into users' kernels.",
    fields = {
        "files": "depset of struct(direction, file): direction is \"forward\", \"dA\" or \"dB\"",
    },
)

BackwardInfo = provider(
    doc = "Whether a build has kernels for gradients.",
    fields = {"is_on": "bool"},
)

PythonExtensionInfo = provider(
    doc = "One extension module, linked for the host's Python or the stable ABI.",
    fields = {
        "module": "File: the module",
        "module_name": "string: the last part of its import name",
        "stub": "File: its stub for type checkers",
    },
)

CudaArchsInfo = provider(
    doc = "The architectures to compile for.",
    fields = {"archs": "list of strings such as sm_90a"},
)
