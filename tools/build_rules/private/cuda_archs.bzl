"""The build setting that chooses GPU architectures."""

load(":providers.bzl", "CudaArchsInfo")

# What ships: CUTLASS and PTX kernels for Hopper (sm_90a), Triton kernels for the rest of the list.
DEFAULT_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]

def _cuda_archs_impl(ctx):
    for arch in ctx.build_setting_value:
        if arch not in DEFAULT_ARCHS:
            fail("{}: \"{}\" is not an architecture of this build; choose from {}".format(
                ctx.label,
                arch,
                ", ".join(DEFAULT_ARCHS),
            ))
    return [CudaArchsInfo(archs = ctx.build_setting_value)]

cuda_archs = rule(
    implementation = _cuda_archs_impl,
    doc = """A build setting: which architectures kernels are compiled for.

Example: `bazel build //:wheel --//:cuda_archs=sm_90,sm_90a`.
""",
    build_setting = config.string_list(flag = True),
)
