"""What the rules tell each other."""

KernelInfo = provider(
    doc = "Compiled GPU kernels, on their way into a module, a manifest or a wheel.",
    fields = {
        "kernels": "depset of struct(id, op, backend, arch, config, cubin, json): config is JSON; " +
                   "json is the launch description of an ahead-of-time kernel, or None",
    },
)

PythonExtensionInfo = provider(
    doc = "One extension module, linked for both Python ABIs.",
    fields = {
        "abi3": "File: the module for the stable ABI of CPython 3.12 and later",
        "host": "File: the module for the host's Python",
        "module_name": "string: the last part of its import name",
        "stub": "File: its stub for type checkers",
    },
)

CudaArchsInfo = provider(
    doc = "The architectures to compile for.",
    fields = {"archs": "list of strings such as sm_90a"},
)
