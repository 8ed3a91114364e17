"""What the wheels contain of other projects, and what compiles it; the SBOM and NOTICE list it."""

load("//third_party/pypi:lock.bzl", "WHEELS")

_LLVM = "Apache-2.0 WITH LLVM-exception"
_NVIDIA = "LicenseRef-NVIDIA-Proprietary"

def _locked(name, license, *, is_inside, comment):
    version, files = WHEELS[name]
    return {
        "comment": comment,
        "files": files,
        "is_inside": is_inside,
        "license": license,
        "name": name,
        "version": version,
    }

def _part(name, version, license, *, part_of, comment):
    return {
        "comment": comment,
        "is_inside": True,
        "license": license,
        "name": name,
        "part_of": part_of,
        "version": version,
    }

COMPONENTS = [
    _locked("nvidia-cutlass", "BSD-3-Clause", is_inside = True, comment = "Headers, compiled into kernels and modules."),
    _locked("nanobind", "BSD-3-Clause", is_inside = True, comment = "Compiled into every module."),
    _part(
        "robin-map",
        "1.4.0",  # TSL_RH_VERSION_* in tsl/robin_growth_policy.h; tests/wheel/sbom_test.py compares
        "MIT",
        part_of = "nanobind",
        comment = "Headers, compiled into every module.",
    ),
    _locked(
        "ziglang",
        "MIT",
        is_inside = True,
        comment = "The C++ compiler; its compiler_rt is linked into every module.",
    ),
] + [
    _part(
        name,
        "18.1",  # _LIBCPP_VERSION in libcxx/include/__config; tests/wheel/sbom_test.py compares
        _LLVM,
        part_of = "ziglang",
        comment = "Linked into every module.",
    )
    for name in ("libcxx", "libcxxabi", "libunwind")
] + [
    _locked(name, _NVIDIA, is_inside = True, comment = "Headers, compiled into kernels and modules.")
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt")
] + [
    _locked("nvidia-cuda-nvcc", _NVIDIA, is_inside = False, comment = "Compiles the kernels for Hopper."),
    _locked("nvidia-nvvm", _NVIDIA, is_inside = False, comment = "Compiles the kernels for Hopper."),
    _locked("triton", "MIT", is_inside = False, comment = "Compiles the Triton kernels."),
]
