"""Everything the build fetches: two calls in WORKSPACE or an extension in MODULE.bazel, here and in consumers."""

load("//third_party/buildifier:buildifier.bzl", "buildifier")
load("//third_party/chromium:chromium.bzl", "headless_chromium")
load("//third_party/pypi:pypi.bzl", "pypi_packages", "wheel_tree")
load("//third_party/python:python.bzl", "host_python", "python_headers")

# Parts of zig for targets other than x86-64 Linux with glibc: two thirds of its files.
_ZIG_OTHER_TARGETS = [
    "lib/libc/darwin",
    "lib/libc/include/any-macos-any",
    "lib/libc/include/any-windows-any",
    "lib/libc/include/generic-musl",
    "lib/libc/mingw",
    "lib/libc/musl",
    "lib/libc/wasi",
    "lib/tsan",
]

def stoneware_repositories():
    """Declares @stoneware_cuda, _cutlass, _zig, _nanobind, _chromium, _buildifier, _python and the _pypi_* packages."""
    wheel_tree(
        name = "stoneware_cuda",
        packages = [
            "nvidia-cuda-nvcc",
            "nvidia-nvvm",
            "nvidia-cuda-crt",
            "nvidia-cuda-cccl",
            "nvidia-cuda-runtime",
        ],
        prefix = "nvidia/cu13",
        executables = ["bin", "nvvm/bin"],
        patches = [Label("//third_party/cuda:libcxx_on_x86.patch")],
        build_file = Label("//third_party/cuda:cuda.BUILD"),
    )
    wheel_tree(
        name = "stoneware_cutlass",
        license_of = "nvidia-cutlass",
        packages = ["nvidia-cutlass"],
        prefix = "cutlass_library/source",
        build_file = Label("//third_party/cutlass:cutlass.BUILD"),
    )
    wheel_tree(
        name = "stoneware_zig",
        packages = ["ziglang"],
        prefix = "ziglang",
        executables = ["zig"],
        delete = _ZIG_OTHER_TARGETS,
        build_file = Label("//third_party/zig:zig.BUILD"),
    )
    wheel_tree(
        name = "stoneware_nanobind",
        license_of = "nanobind",
        packages = ["nanobind"],
        prefix = "nanobind",
        build_file = Label("//third_party/nanobind:nanobind.BUILD"),
    )
    headless_chromium(name = "stoneware_chromium")
    buildifier(name = "stoneware_buildifier")
    host_python(name = "stoneware_python")
    for abi in ("host", "abi3"):
        python_headers(
            name = "stoneware_python_headers_" + abi,
            abi = abi,
        )
    python_headers(
        name = "stoneware_python_headers_abi3_aarch64",
        abi = "abi3",
        architecture = "arm64",
    )
    pypi_packages([
        "abi3audit",
        "abi3info",
        "accelerate",
        "ast-serialize",
        "attrs",
        "auditwheel",
        "beartype",
        "boolean-py",
        "cattrs",
        "certifi",
        "charset-normalizer",
        "clang-format",
        "click",
        "contourpy",
        "cuda-bindings",
        "cuda-pathfinder",
        "cycler",
        "filelock",
        "fonttools",
        "fsspec",
        "grimp",
        "h11",
        "httpcore2",
        "httpx2",
        "huggingface-hub",
        "hypothesis",
        "idna",
        "import-linter",
        "jinja2",
        "kaitaistruct",
        "kiwisolver",
        "librt",
        "license-expression",
        "markupsafe",
        "matplotlib",
        "mpmath",
        "mypy",
        "mypy-extensions",
        "networkx",
        "numpy",
        "nvidia-nvjitlink",
        "pathspec",
        "pefile",
        "pillow",
        "platformdirs",
        "psutil",
        "pyelftools",
        "pyparsing",
        "python-dateutil",
        "pyyaml",
        "regex",
        "requests",
        "requests-cache",
        "ruff",
        "safetensors",
        "sortedcontainers",
        "spdx-tools",
        "sympy",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "triton",
        "truststore",
        "typing-extensions",
        "tzdata",
        "uritools",
        "url-normalize",
        "urllib3",
        "waitress",
        "wheel",
    ])

    # In one folder, as pip installs them: their bindings look in one folder for both libraries.
    wheel_tree(
        name = "stoneware_pypi_nvrtc_and_nvjitlink",
        packages = [
            "nvidia-cuda-nvrtc",
            "nvidia-nvjitlink",
        ],
        build_file = Label("//third_party/pypi:package.BUILD"),
    )

    # These travel inside gpu_check.pyz.
    pypi_packages(
        [
            "absl-py",
            "annotated-doc",
            "iniconfig",
            "markdown-it-py",
            "mdurl",
            "nvidia-ml-py",
            "packaging",
            "pluggy",
            "pygments",
            "pytest",
            "rich",
            "shellingham",
            "typer",
        ],
        keep_wheels = True,
    )

def stoneware_toolchains(cc = True):
    """Registers zig for C and C++, CUDA and the host's Python; call it after stoneware_repositories().

    Args:
      cc: False leaves C and C++ to the toolchain that the workspace has.
    """
    if cc:
        native.register_toolchains(
            str(Label("//third_party/zig:cc_toolchain")),
            str(Label("//third_party/zig:cc_toolchain_aarch64")),
        )
    native.register_toolchains(
        str(Label("//tools/build_rules/private:cuda_toolchain_aarch64")),
        str(Label("//tools/build_rules/private:cuda_toolchain")),
        "@stoneware_python//:toolchain",
    )

_TOOLCHAINS_BUILD = """\
[
    toolchain(
        name = name,
        exec_compatible_with = exec_constraints,
        target_compatible_with = target_constraints,
        toolchain = target,
        toolchain_type = type,
    )
    for name, type, target, exec_constraints, target_constraints in {toolchains}
]
"""

def _linux(processor):
    return [str(Label("@platforms//cpu:" + processor)), str(Label("@platforms//os:linux"))]

def _registered_toolchains_impl(ctx):
    cuda = str(Label("//tools/build_rules:cuda_toolchain_type"))
    cc = "@bazel_tools//tools/cpp:toolchain_type"

    # `:all` registers them by name: the one for a single processor must come before the one for any.
    toolchains = [
        ("cuda_1", cuda, str(Label("//tools/build_rules/private:cuda_aarch64")), [], _linux("aarch64")),
        ("cuda_2", cuda, str(Label("//tools/build_rules/private:cuda")), [], []),
        ("python", "@bazel_tools//tools/python:toolchain_type", str(Label("@stoneware_python//:pair")), [], []),
    ]
    if ctx.attr.cc:
        toolchains += [
            ("cc", cc, str(Label("//third_party/zig:cc")), _linux("x86_64"), _linux("x86_64")),
            ("cc_aarch64", cc, str(Label("//third_party/zig:cc_aarch64")), _linux("x86_64"), _linux("aarch64")),
        ]
    ctx.file("BUILD.bazel", _TOOLCHAINS_BUILD.format(toolchains = repr(toolchains)))

_registered_toolchains = repository_rule(
    implementation = _registered_toolchains_impl,
    doc = "What stoneware_toolchains() registers, as targets: a module registers `:all` of it.",
    attrs = {"cc": attr.bool(mandatory = True, doc = "whether zig is among them")},
)

def _stoneware_impl(ctx):
    stoneware_repositories()
    _registered_toolchains(
        name = "stoneware_toolchains",
        cc = all([tag.cc for module in ctx.modules if module.is_root for tag in module.tags.toolchains]),
    )
    return ctx.extension_metadata(reproducible = True)

stoneware = module_extension(
    implementation = _stoneware_impl,
    doc = """The repositories of stoneware_repositories(), and the toolchains of stoneware_toolchains().

Example, of a module that has a C++ toolchain of its own:
    repositories = use_extension("@stoneware//third_party:repositories.bzl", "stoneware")
    repositories.toolchains(cc = False)
""",
    tag_classes = {
        "toolchains": tag_class(
            attrs = {
                "cc": attr.bool(
                    default = True,
                    doc = "False leaves C and C++ to the toolchain that the root module has.",
                ),
            },
            doc = "What is registered; of the root module alone.",
        ),
    },
)
