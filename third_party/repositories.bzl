"""Everything the build fetches: one call in WORKSPACE, here and where Stoneware is vendored."""

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
    pypi_packages([
        "accelerate",
        "ast-serialize",
        "auditwheel",
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
        "kiwisolver",
        "librt",
        "markupsafe",
        "matplotlib",
        "mpmath",
        "mypy",
        "mypy-extensions",
        "networkx",
        "numpy",
        "nvidia-nvjitlink",
        "pathspec",
        "pillow",
        "psutil",
        "pyelftools",
        "pyparsing",
        "python-dateutil",
        "pyyaml",
        "regex",
        "ruff",
        "safetensors",
        "sortedcontainers",
        "sympy",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "triton",
        "truststore",
        "typing-extensions",
        "tzdata",
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
        native.register_toolchains(str(Label("//third_party/zig:cc_toolchain")))
    native.register_toolchains(
        str(Label("//tools/build_rules/private:cuda_toolchain")),
        "@stoneware_python//:toolchain",
    )
