"""Stoneware's public build rules; everything under private/ may change without notice.

    cuda_archs       the build setting //:cuda_archs
    kernel_set       the build setting //:kernel_set
    enable_backward  the build setting //:enable_backward
    cuda_toolchain   a CUDA toolkit, for a toolchain() of //tools/build_rules:cuda_toolchain_type
    cuda_cubin       one CUDA kernel for one architecture
    cuda_library     host code with CUDA types, as a C++ library
    kernel_family    the C++ that kernels share, in files
    kernel_config    one kernel of a family
    cubin_library    CUDA kernels, from configs to a library with their cubins inside
    nanobind_module  a Python extension module for the host's Python and the stable ABI
    tile_matmul      a matmul on shared memory, as LTO-IR that users' kernels are linked with
    triton_aot       a Triton kernel, compiled ahead of time for several architectures
    kernel_group     several kernel targets under one name
    kernel_manifest  what was compiled, by id and digest
    tuning_table     the bake, from committed measurements to a table
    python_wheel     all of it as one reproducible wheel

No rule needs a flag that only this repository's .bazelrc sets, a system compiler, a CUDA
installation or a GPU. In WORKSPACE call stoneware_repositories() and stoneware_toolchains() of
//third_party:repositories.bzl; MODULE.bazel of this repository does the same for modules.
"""

load("//tools/build_rules/private:backward.bzl", _enable_backward = "enable_backward")
load("//tools/build_rules/private:cubin_library.bzl", _cubin_library = "cubin_library")
load("//tools/build_rules/private:cuda_archs.bzl", _DEFAULT_ARCHS = "DEFAULT_ARCHS", _cuda_archs = "cuda_archs")
load("//tools/build_rules/private:cuda_cubin.bzl", _cuda_cubin = "cuda_cubin")
load("//tools/build_rules/private:cuda_library.bzl", _cuda_library = "cuda_library")
load("//tools/build_rules/private:cuda_toolchain.bzl", _CUDA_TOOLCHAIN = "CUDA_TOOLCHAIN", _cuda_toolchain = "cuda_toolchain")
load("//tools/build_rules/private:kernel_family.bzl", _kernel_config = "kernel_config", _kernel_family = "kernel_family")
load("//tools/build_rules/private:kernel_group.bzl", _kernel_group = "kernel_group")
load("//tools/build_rules/private:kernel_manifest.bzl", _kernel_manifest = "kernel_manifest")
load("//tools/build_rules/private:kernel_set.bzl", _kernel_set = "kernel_set")
load("//tools/build_rules/private:nanobind_module.bzl", _nanobind_module = "nanobind_module")
load("//tools/build_rules/private:python_wheel.bzl", _python_wheel = "python_wheel")
load("//tools/build_rules/private:tile_matmul.bzl", _tile_matmul = "tile_matmul")
load("//tools/build_rules/private:triton_aot.bzl", _triton_aot = "triton_aot")
load("//tools/build_rules/private:tuning_table.bzl", _tuning_table = "tuning_table")

# For rules that use the CUDA toolchain: its type.
CUDA_TOOLCHAIN = _CUDA_TOOLCHAIN
DEFAULT_ARCHS = _DEFAULT_ARCHS
cuda_archs = _cuda_archs
cuda_cubin = _cuda_cubin
cuda_library = _cuda_library
cuda_toolchain = _cuda_toolchain
cubin_library = _cubin_library
enable_backward = _enable_backward
kernel_config = _kernel_config
kernel_family = _kernel_family
kernel_group = _kernel_group
kernel_manifest = _kernel_manifest
kernel_set = _kernel_set
nanobind_module = _nanobind_module
python_wheel = _python_wheel
tile_matmul = _tile_matmul
triton_aot = _triton_aot
tuning_table = _tuning_table
