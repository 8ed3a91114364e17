"""cubin_library: CUDA kernels, from configs to one library with their cubins inside."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load(":backward.bzl", "narrower")
load(":cuda_archs.bzl", "check_arch")
load(":cuda_cubin.bzl", "cuda_cubin")
load(":cuda_library.bzl", "cuda_library")
load(":open_kernels.bzl", "open_kernels")
load(":platform.bzl", "to_outer_platform")
load(":providers.bzl", "CudaArchsInfo", "KernelInfo", "OpenKernelsInfo")

# A config is a struct as kernel_config() makes it. Its family has texts for str.format: `device`, the
# source of a cubin; `host`, how the source of the host object begins; and `host_entry`, what it has for
# each kernel. Two more if its kernels are also built open: `open`, how their source begins, and
# `open_kernel`, what it has for each. They name what _names() returns.

_EMBED_ONE = """\
    .section .rodata.{id}_image, "a", @progbits
    .balign 16
    .globl {id}_image_begin
    .hidden {id}_image_begin
{id}_image_begin:
    .incbin "{path}"
    .globl {id}_image_end
    .hidden {id}_image_end
{id}_image_end:
    .byte 0
"""

_REGISTRY = """\
#include <cstddef>

#include "{header}"

{declarations}

namespace {namespace} {{

extern const {type}* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

// An array of no elements is not C++.
const {type}* const kKernelEntries[] = {{
{elements}    nullptr,
}};
const std::size_t kNumKernelEntries = {count};

}}  // namespace {namespace}
"""

def _generated_file_impl(ctx):
    ctx.actions.write(ctx.outputs.out, ctx.attr.content)

_generated_file = rule(
    implementation = _generated_file_impl,
    attrs = {"content": attr.string(), "out": attr.output(mandatory = True)},
)

def _host_source_impl(ctx):
    entries = [
        entry
        for kernel, entry in ctx.attr.entries.items()
        if kernel[KernelInfo].kernels
    ]
    ctx.actions.write(ctx.outputs.out, "\n".join([ctx.attr.head] + entries))

_host_source = rule(
    implementation = _host_source_impl,
    doc = "The source of a family's host object: its beginning, and the entry of each kernel that is built.",
    attrs = {
        "entries": attr.label_keyed_string_dict(
            cfg = to_outer_platform,
            providers = [KernelInfo],
            doc = "kernel: its entry",
        ),
        "head": attr.string(mandatory = True),
        "out": attr.output(mandatory = True),
    },
)

def _registry(ctx, kernels):
    file = ctx.actions.declare_file(ctx.label.name + "_registry.cc")
    ctx.actions.write(file, _REGISTRY.format(
        count = len(kernels),
        declarations = "\n".join([
            "extern \"C\" const {} {}_entry;".format(ctx.attr.entry_type, kernel.id)
            for kernel in kernels
        ]),
        elements = "".join(["    &{}_entry,\n".format(kernel.id) for kernel in kernels]),
        header = ctx.attr.entry_header,
        namespace = ctx.attr.namespace,
        type = ctx.attr.entry_type,
    ))
    return file

def _embedded_kernels_impl(ctx):
    archs = ctx.attr._cuda_archs[CudaArchsInfo].archs
    for target in ctx.attr.kernels:
        for kernel in target[KernelInfo].kernels.to_list():
            check_arch(target.label, kernel.arch)  # no value of //:cuda_archs chooses another one
    kernels = [
        kernel
        for target in ctx.attr.kernels
        for kernel in target[KernelInfo].kernels.to_list()
        if kernel.arch in archs
    ]
    removed = [
        kernel
        for target in ctx.attr.kernels
        for kernel in target[KernelInfo].removed.to_list()
        if kernel.arch in archs
    ]
    assembler = ctx.actions.declare_file(ctx.label.name + "_images.S")
    ctx.actions.write(assembler, "".join([
        _EMBED_ONE.format(id = kernel.id, path = kernel.image.path)
        for kernel in kernels
    ]) + "    .section .note.GNU-stack, \"\", @progbits\n")

    toolchain = find_cc_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    hosts = [host for host, arch in ctx.attr.hosts.items() if arch in archs]
    deps = [dep[CcInfo] for dep in ctx.attr.deps + hosts]
    compilation_context, outputs = cc_common.compile(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        name = ctx.label.name,
        srcs = [assembler, _registry(ctx, kernels)],
        compilation_contexts = [dep.compilation_context for dep in deps],
        additional_inputs = [kernel.image for kernel in kernels],
        user_compile_flags = ["-fvisibility=hidden"],
    )
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = outputs,
        linking_contexts = [dep.linking_context for dep in deps],
        name = ctx.label.name,
        # Host objects need its cubins, and it the hosts' entries: GNU ld would not read it a second time.
        alwayslink = True,
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset([kernel.cubin for kernel in kernels])),
        CcInfo(compilation_context = compilation_context, linking_context = linking_context),
        KernelInfo(kernels = depset(kernels), removed = depset(removed)),
        OpenKernelsInfo(files = depset([
            file
            for target in ctx.attr.open_kernels
            for file in target[OpenKernelsInfo].files.to_list()
            if file.arch in archs
        ])),
    ]

_embedded_kernels = rule(
    implementation = _embedded_kernels_impl,
    doc = "Cubins as data in an object file, compressed, with the registry that lists their entries.",
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "entry_header": attr.string(mandatory = True),
        "entry_type": attr.string(mandatory = True),
        "hosts": attr.label_keyed_string_dict(
            providers = [CcInfo],
            doc = "the host object of each family, and its architecture",
        ),
        "kernels": attr.label_list(cfg = to_outer_platform, providers = [KernelInfo]),
        "namespace": attr.string(mandatory = True),
        "open_kernels": attr.label_list(cfg = to_outer_platform, providers = [OpenKernelsInfo]),
        "_cuda_archs": attr.label(default = Label("//:cuda_archs"), providers = [CudaArchsInfo]),
    },
    fragments = ["cpp"],
    toolchains = use_cc_toolchain(),
)

def _include(label):
    """The path by which sources include a header of this repository."""
    label = native.package_relative_label(label)
    return label.package + "/" + label.name if label.package else label.name

def _names(config, entry_type = None):
    """What a family's templates may name of one config."""
    headers = {
        name: _include(getattr(config.family, name))
        for name in ("device_header", "host_header")
        if hasattr(config.family, name)
    }
    return headers | {
        "config_header": _include(config.id + "_config.h"),
        "image_begin": config.id + "_image_begin",
        "image_end": config.id + "_image_end",
        "entry": config.id + "_entry",
        "entry_type": entry_type,
        "id": config.id,
    }

def _cubin(config, backend, backward, tags):
    """The targets of one kernel: its config's header, its device source, its cubin."""
    _generated_file(
        name = config.id + "_config_header",
        content = config.header,
        out = config.id + "_config.h",
        tags = tags,
    )
    _generated_file(
        name = config.id + "_device_source",
        content = config.family.device.format(**_names(config)),
        out = config.id + ".cu",
        tags = tags,
    )
    cuda_cubin(
        name = config.id + "_cubin",
        src = config.id + ".cu",
        hdrs = config.family.device_hdrs + [config.id + "_config.h"],
        arch = config.arch,
        backend = backend,
        backward = narrower(getattr(config, "backward", "inherit"), backward),
        config = config.config_json,
        defines = config.defines,
        kernel_id = config.id,
        op = config.op,
        serves = getattr(config, "serves", ["forward"]),
        tags = tags,
    )

def _open(name, file_name, configs, tags):
    """The open kernels of one file."""
    family = configs[0].family
    for config in configs:
        if config.defines:
            fail("cubin_library: an open kernel must have no defines, since it is compiled with others, but {} has {}; omit them, or the family's `open`"
                .format(config.id, config.defines))
    open_kernels(
        name = name,
        arch = configs[0].arch,
        file_name = file_name,
        hdrs = family.device_hdrs + [config.id + "_config.h" for config in configs],
        head = family.open.format(**_names(configs[0])),
        kernels = {
            ":" + config.id + "_cubin": family.open_kernel.format(**_names(config))
            for config in configs
        },
        tags = tags,
    )

def _open_group(config):
    """The name of the file that an open kernel is in: kernels of a family, an op, dtypes and tile rows share it.

    A config of another family may have neither dtypes nor a tile.
    """
    fields = json.decode(config.config_json)
    shared = [fields[name] for name in ["a", "out"] if name in fields]
    if "tile" in fields:
        shared.append(str(int(fields["tile"][0])))
    return "_".join([config.family.name, config.op] + shared + [config.arch])

def _host(name, configs, deps, copts, entry_type, tags):
    """The host object of one family's kernels for one architecture."""
    family = configs[0].family
    _host_source(
        name = name + "_source",
        entries = {
            ":" + config.id + "_cubin": family.host_entry.format(**_names(config, entry_type))
            for config in configs
        },
        head = family.host,
        out = name + ".cc",
        tags = tags,
    )
    cuda_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = family.host_hdrs + [config.id + "_config.h" for config in configs],
        copts = copts,
        tags = tags,
        deps = deps,
    )

def check_ids(configs):
    """Fails if two configs have the same id, which identifies a config within its family.

    Args:
      configs: as of cubin_library.
    """
    places = {}
    num_of_family = {}
    for config in configs:
        family = config.family.name
        place = num_of_family.get(family, 0) + 1
        num_of_family[family] = place
        if config.id in places:
            fail("cubin_library: each config must have an id of its own, but configs {} and {} of {} are both {}; remove one of them"
                .format(places[config.id], place, family, config.id))
        places[config.id] = place

def check_subset(library, ids, all_ids):
    """Fails if a subset names a kernel that `configs` lacks.

    Args:
      library: the subset's name.
      ids: the ids in the subset.
      all_ids: those of `configs`.
    """
    for id in ids:
        if id not in all_ids:
            fail("cubin_library: a subset must name ids of `configs`, but {} names {}; remove it, or add its config (the name of a family is not an id)"
                .format(library, repr(id)))

def _library(name, configs, entry_header, entry_type, namespace, deps, copts, tags, visibility):
    """The library of these kernels, the host object of each family, and the files of open kernels."""
    families = {}
    open_groups = {}
    for config in configs:
        key = "{}_{}_{}_host".format(name, config.family.name, config.arch)
        families.setdefault(key, []).append(config)
        if hasattr(config.family, "open"):
            open_groups.setdefault(_open_group(config), []).append(config)
    for key, of_family in families.items():
        _host(key, of_family, deps, copts, entry_type, tags)
    for key, of_group in open_groups.items():
        _open("{}_{}_open".format(name, key), key, of_group, tags)
    _embedded_kernels(
        name = name,
        entry_header = entry_header,
        entry_type = entry_type,
        hosts = {":" + key: of_family[0].arch for key, of_family in families.items()},
        kernels = [":" + config.id + "_cubin" for config in configs],
        namespace = namespace,
        open_kernels = [":{}_{}_open".format(name, key) for key in open_groups],
        tags = tags,
        visibility = visibility,
        deps = deps,
    )

def cubin_library(
        name,
        backend,
        configs,
        entry_header,
        entry_type,
        namespace,
        deps,
        copts = [],
        backward = "inherit",
        subsets = {},
        tags = [],
        visibility = None):
    """A cubin for each config, a host object for each family, and the library `name` of them all.

    Editing one config recompiles that kernel's cubin, and its family's host object and open kernels. An architecture
    that //:cuda_archs leaves out is neither compiled nor listed. A kernel that serves gradients alone is
    neither compiled nor in a host object where backward is off for it.

    A config is a kernel_config() of a kernel_family(), whose C++ is in files.

    The library defines, in `namespace`, `const entry_type* const kKernelEntries[]` and
    `const std::size_t kNumKernelEntries`.

    Example:
        cubin_library(
            name = "kernels_sm90",
            backend = "sm90",
            configs = KERNELS_SM90,
            entry_header = "cc/gemm/kernel_entry.h",
            entry_type = "stoneware::gemm::KernelEntry",
            namespace = "stoneware::gemm",
            deps = [":kernel_entry", "//cc/host_adapter"],
        )

    Args:
      name: the library; it offers CcInfo to modules and KernelInfo to manifests.
      backend: the backend that launches them.
      configs: the kernels, of kernel_config().
      entry_header: the header of entry_type, by the path by which sources include it.
      entry_type: the C++ type of a kernel's entry, with its namespace.
      namespace: of the list of entries.
      deps: libraries of the host side; one of them offers entry_header.
      copts: further flags for the host side.
      backward: whether its kernels serve gradients: "on", "off" or "inherit", what //:enable_backward
        says.
      subsets: further libraries, by name, each of some kernels alone, by their ids. They share the
        cubins of `name`. Host objects and open kernels are compiled for each library.
      tags: of every target, "manual" for kernels that `bazel build //...` shall not compile.
      visibility: of the libraries.
    """
    check_ids(configs)
    for config in configs:
        _cubin(config, backend, backward, tags)
    all_ids = [config.id for config in configs]
    for library, ids in ({name: all_ids} | subsets).items():
        check_subset(library, ids, all_ids)
        _library(
            name = library,
            configs = [config for config in configs if config.id in ids],
            copts = copts,
            deps = deps,
            entry_header = entry_header,
            entry_type = entry_type,
            namespace = namespace,
            tags = tags,
            visibility = visibility,
        )
