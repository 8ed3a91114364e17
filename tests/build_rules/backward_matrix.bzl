"""backward_matrix_test: which matmuls a kernel serves, and which are open, by flag, library and kernel.

Nothing is compiled.
"""

load("//tests/build_rules:own_family.bzl", "own_kernel")
load("//tools/build_rules:defs.bzl", "cubin_library", "triton_aot")
load("//tools/build_rules/private:providers.bzl", "KernelInfo", "OpenKernelsInfo")

_SETTINGS = ["inherit", "on", "off"]

# What a kernel can compute: name in its id -> `serves`.
_SERVES = {
    "both": ["forward", "dgrad"],
    "forward": ["forward"],
    "gradients": ["dgrad", "wgrad"],
}

# A kernel of triton_aot is in no library.
_TRITON = "triton"

# flag, library -> whether backward is on for a kernel that says "inherit", "on", "off".
_MATRIX = {
    ("on", "inherit"): [True, True, False],
    ("on", "on"): [True, True, False],
    ("on", "off"): [False, True, False],
    ("off", "inherit"): [False, True, False],
    ("off", "on"): [True, True, False],
    ("off", "off"): [False, True, False],
    ("on", _TRITON): [True, True, False],
    ("off", _TRITON): [False, True, False],
}

_FLAG = "//:enable_backward"

def _id(library, kernel, serves):
    return "_".join(["matrix", library, kernel, serves])

def _both_flags_impl(_settings, _attr):
    return {"on": {_FLAG: True}, "off": {_FLAG: False}}

_both_flags = transition(implementation = _both_flags_impl, inputs = [], outputs = [_FLAG])

def _found(libraries):
    """Id -> (whether it is built, matmul -> whether it is served)."""
    found = {}
    for library in libraries:
        info = library[KernelInfo]
        for is_built, kernels in [(True, info.kernels), (False, info.removed)]:
            for kernel in kernels.to_list():
                found[kernel.id] = (is_built, json.decode(kernel.serves))
    return found

def _open_kernels(libraries):
    """The ids of the open kernels."""
    return [
        id
        for library in libraries
        if OpenKernelsInfo in library
        for file in library[OpenKernelsInfo].files.to_list()
        for id in file.kernels
    ]

def _backward_matrix_test_impl(ctx):
    problems = []
    for flag, libraries in ctx.split_attr.libraries.items():
        found = _found(libraries)
        expected = {}
        for library in _SETTINGS + [_TRITON]:
            for kernel, is_on in zip(_SETTINGS, _MATRIX[(flag, library)]):
                for name, matmuls in _SERVES.items():
                    serves = {matmul: matmul == "forward" or is_on for matmul in matmuls}
                    expected[_id(library, kernel, name)] = (any(serves.values()), serves)
        if len(found) != len(expected):
            problems.append("{} kernels with the flag {}, not {}".format(len(found), flag, len(expected)))
        built = [id for id, (is_built, _) in found.items() if is_built and _TRITON not in id]
        if sorted(_open_kernels(libraries)) != sorted(built):
            problems.append("flag {}: the open kernels are not those that are built".format(flag))
        problems += [
            "flag {}: {} is {}, not {}".format(flag, id, found.get(id), what)
            for id, what in expected.items()
            if found.get(id) != what
        ]
    if len(ctx.split_attr.libraries) != 2:
        problems.append("flags: {}".format(ctx.split_attr.libraries.keys()))
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

_backward_matrix_test = rule(
    implementation = _backward_matrix_test_impl,
    attrs = {
        "libraries": attr.label_list(cfg = _both_flags, mandatory = True, providers = [KernelInfo]),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
    analysis_test = True,
)

def backward_matrix_test(name, deps):
    """Passes when the narrowest setting of flag, library and kernel wins, for each kind of kernel.

    Args:
      name: the test.
      deps: what own_kernel()'s C++ needs.
    """
    for library in _SETTINGS:
        cubin_library(
            name = "{}_{}".format(name, library),
            backend = "own",
            backward = library,
            configs = [
                own_kernel(_id(library, kernel, serves), "1.0F", backward = kernel, serves = matmuls)
                for kernel in _SETTINGS
                for serves, matmuls in _SERVES.items()
            ],
            entry_header = "tests/build_rules/own_family/entry.h",
            entry_type = "own::Entry",
            namespace = "own",
            tags = ["manual"],
            deps = deps,
        )
    for kernel in _SETTINGS:
        for serves, matmuls in _SERVES.items():
            triton_aot(
                name = "{}_{}_{}_{}".format(name, _TRITON, kernel, serves),
                src = "module_test.py",  # never compiled
                archs = ["sm_90"],
                backward = kernel,
                function = "none",
                kernel_id = _id(_TRITON, kernel, serves),
                num_stages = 1,
                num_warps = 1,
                op = "store",
                serves = matmuls,
                signature = "i32",
                tags = ["manual"],
            )
    _backward_matrix_test(
        name = name,
        size = "small",
        libraries = [":{}_{}".format(name, library) for library in _SETTINGS] + [
            ":{}_{}_{}_{}".format(name, _TRITON, kernel, serves)
            for kernel in _SETTINGS
            for serves in _SERVES
        ],
    )
