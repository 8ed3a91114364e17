"""The build setting that chooses GPU architectures."""

load(":providers.bzl", "CudaArchsInfo")

# What ships: CUTLASS and PTX kernels for Hopper (sm_90a), Triton kernels for the rest of the list.
DEFAULT_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]

# What the locked nvcc can compile for, with the instructions of one architecture ("a") and of a family ("f").
NVCC_ARCHS = ["sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_90a"] + [
    "sm_{}{}".format(number, suffix)
    for number in [100, 103, 110, 120, 121]
    for suffix in ["", "a", "f"]
]

def check_arch(label, arch, archs = DEFAULT_ARCHS):
    """Fails for an architecture that is not in a list.

    Args:
      label: of the target that names it.
      arch: such as "sm_90a".
      archs: the list: by default those that //:cuda_archs can choose.
    """
    if arch not in archs:
        fail("{}: \"{}\" is not an architecture of this build; choose from {}".format(label, arch, ", ".join(archs)))

def _cuda_archs_impl(ctx):
    for arch in ctx.build_setting_value:
        check_arch(ctx.label, arch)
    return [CudaArchsInfo(archs = ctx.build_setting_value)]

cuda_archs = rule(
    implementation = _cuda_archs_impl,
    doc = """A build setting: which architectures kernels are compiled for.

Example: `bazel build //:wheel --//:cuda_archs=sm_90,sm_90a`.
""",
    build_setting = config.string_list(flag = True),
)
