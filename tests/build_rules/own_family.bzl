"""Kernels as another repository has them: cubin_library knows nothing of their C++."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//tools/build_rules:defs.bzl", "kernel_config", "kernel_family")

_FAMILY = kernel_family(
    "store",
    namespace = "own",
    device = "own_family/store.cuh",
    kernel = "own::StoreKernel",
    host = "own_family/store_host.h",
    make_entry = "own::MakeEntry",
    open_kernel = "own::OpenStoreKernel",
)

def own_kernel(id, value, arch = "sm_90a", **others):
    """A config for cubin_library.

    Args:
      id: of the kernel.
      value: what it stores.
      arch: the architecture.
      **others: further arguments of kernel_config().

    Returns:
      The config.
    """
    return kernel_config(
        _FAMILY,
        id = id,
        op = "store",
        arch = arch,
        constants = {"kValue": value},
        **others
    )

OWN_KERNELS = [
    own_kernel(id, value)
    for id, value in [
        ("store_1", "1.5F"),
        ("store_2", "2.5F"),
    ]
]

def _float_constant_impl(_ctx):
    own_kernel("store_3", 1.5)
    return []

float_constant = rule(
    implementation = _float_constant_impl,
    doc = "What kernel_config checks, where a test can see it fail.",
)

def _links_in_any_order_test_impl(ctx):
    inputs = ctx.attr.kernels[CcInfo].linking_context.linker_inputs.to_list()
    own = [one for one in inputs if one.owner == ctx.attr.kernels.label]
    is_whole = [library.alwayslink for one in own for library in one.libraries]
    return [AnalysisTestResultInfo(
        success = bool(is_whole) and all(is_whole),
        message = "{} must be linked as a whole: GNU ld reads an archive once, and its cubins are ".format(
            ctx.attr.kernels.label,
        ) + "needed by host objects that it needs itself",
    )]

links_in_any_order_test = rule(
    implementation = _links_in_any_order_test_impl,
    doc = "A library of cubin_library links by a linker that reads each archive once.",
    attrs = {"kernels": attr.label(mandatory = True, providers = [CcInfo])},
    analysis_test = True,
)
