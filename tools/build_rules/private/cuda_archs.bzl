"""The build setting that chooses GPU architectures."""

load(":providers.bzl", "CudaArchsInfo")

# What ships: CUTLASS and PTX kernels for Hopper (sm_90a), Triton kernels for the rest of the list.
DEFAULT_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]

def check_arch(label, arch):
    """Fails for an architecture that this build cannot compile for.

    Args:
      label: of the target that names it.
      arch: such as "sm_90a".
    """
    if arch not in DEFAULT_ARCHS:
        fail("{}: \"{}\" is not an architecture of this build; choose from {}".format(
            label,
            arch,
            ", ".join(DEFAULT_ARCHS),
        ))

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
