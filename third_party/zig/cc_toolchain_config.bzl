"""zig as a cc_toolchain: clang 18, libc++ linked statically, glibc 2.28 or later at run time."""

load("@rules_cc//cc:action_names.bzl", "ACTION_NAMES")
load(
    "@rules_cc//cc:cc_toolchain_config_lib.bzl",
    "action_config",
    "env_entry",
    "env_set",
    "feature",
    "flag_group",
    "flag_set",
    "tool",
)
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/toolchains:cc_toolchain_config_info.bzl", "CcToolchainConfigInfo")

GLIBC = "2.28"

# Processor of zig's triples: Bazel's name of it in output folders.
_CPUS = {
    "aarch64": "aarch64",
    "x86_64": "k8",
}

def zig_target(processor):
    """The triple that zig compiles for.

    Args:
      processor: "x86_64" or "aarch64".
    Returns:
      the value of -target.
    """
    return "{}-linux-gnu.{}".format(processor, GLIBC)

_COMPILE = [
    ACTION_NAMES.assemble,
    ACTION_NAMES.preprocess_assemble,
    ACTION_NAMES.c_compile,
    ACTION_NAMES.cpp_compile,
    ACTION_NAMES.cpp_header_parsing,
]
_LINK_EXECUTABLE = [ACTION_NAMES.cpp_link_executable]
_LINK_SHARED = [
    ACTION_NAMES.cpp_link_dynamic_library,
    ACTION_NAMES.cpp_link_nodeps_dynamic_library,
]

# Bazel's own features of each kind of action, as its action configs for tools by path have them.
_COMPILE_FEATURES = [
    "legacy_compile_flags",
    "user_compile_flags",
    "sysroot",
    "unfiltered_compile_flags",
    "compiler_input_flags",
    "compiler_output_flags",
]
_LINK_FEATURES = [
    "strip_debug_symbols",
    "linkstamps",
    "output_execpath_flags",
    "runtime_library_search_directories",
    "library_search_directories",
    "libraries_to_link",
    "user_link_flags",
    "legacy_link_flags",
    "linker_param_file",
    "fission_support",
    "sysroot",
]
_SHARED_FEATURES = ["build_interface_libraries", "dynamic_library_linker_tool", "shared_flag"]

_ZIG = {"_zig": attr.label(default = Label("@stoneware_zig//:tree"), allow_single_file = True)}

def _tools_impl(ctx):
    program = ctx.outputs.program
    zig = ctx.file._zig.path + "/zig"
    cache = program.path + ".cache"  # It goes with the sandbox.
    ctx.actions.run(
        executable = zig,
        arguments = ["cc", "-target", zig_target("x86_64"), "-DZIG=\"{}\"".format(zig)] +
                    ["-std=c11", "-O2", "-g0", "-s", ctx.file.src.path, "-o", program.path],
        inputs = [ctx.file._zig, ctx.file.src],
        outputs = [program],
        env = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        mnemonic = "ZigTool",
        progress_message = "Compiling %{output}",
    )
    for alias in ctx.outputs.aliases:
        ctx.actions.symlink(output = alias, target_file = program, is_executable = True)

zig_tools = rule(
    implementation = _tools_impl,
    doc = "The tools of the C++ toolchain: one program under several names.",
    attrs = {
        "aliases": attr.output_list(doc = "further names of the program"),
        "program": attr.output(mandatory = True),
        "src": attr.label(mandatory = True, allow_single_file = [".c"]),
    } | _ZIG,
)

def _runtime_cache_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable._build,
        arguments = [ctx.file._zig.path + "/zig", out.path, zig_target(ctx.attr.processor)],
        inputs = [ctx.file._zig],
        outputs = [out],
        env = {"PATH": "/bin:/usr/bin"},
        mnemonic = "ZigRuntime",
        progress_message = "Building libc++ and start files for %{label}",
    )
    return [DefaultInfo(files = depset([out]))]

zig_runtime_cache = rule(
    implementation = _runtime_cache_impl,
    doc = "The run-time libraries that zig builds itself, built once, as a cache for every link.",
    attrs = {
        "processor": attr.string(mandatory = True, values = _CPUS.keys()),
        "_build": attr.label(
            default = Label("//third_party/zig:build_runtime_cache"),
            allow_single_file = True,
            executable = True,
            cfg = "exec",
        ),
    } | _ZIG,
)

def _config_impl(ctx):
    processor = ctx.attr.processor

    flags = lambda actions, words: flag_set(actions = actions, flag_groups = [flag_group(flags = words)])

    # clang++ compiles for x86-64 unless an argument names another target.
    target = []
    if processor != "x86_64":
        target = [flags(_COMPILE + _LINK_SHARED + _LINK_EXECUTABLE, ["-target", zig_target(processor)])]
    features = [
        feature(name = "supports_pic", enabled = True),
        feature(name = "supports_dynamic_linker", enabled = True),
        # zig names its own headers by their real path, which Bazel refuses in dependency files.
        # Without such files every declared header counts as used.
        feature(name = "no_dotd_file", enabled = True),
        feature(
            name = "stoneware_flags",
            enabled = True,
            flag_sets = [
                # Same bytes from any folder: no debug information, no time stamps, no real paths.
                flags(_COMPILE, [
                    "-g0",
                    "-fPIC",
                    "-fno-strict-aliasing",
                    "-ffile-compilation-dir=.",
                    "-Wno-builtin-macro-redefined",
                    "-D__DATE__=\"redacted\"",
                    "-D__TIME__=\"redacted\"",
                    "-D__TIMESTAMP__=\"redacted\"",
                ]),
                # zig turns the undefined-behaviour sanitizer on where no optimisation is asked for.
                flags(_COMPILE, ["-fno-sanitize=all"]),
                flags(_LINK_SHARED, ["-fPIC", "-s", "-shared"]),
                flags(_LINK_EXECUTABLE, ["-fPIC", "-s", "-pie"]),
            ] + target,
            env_sets = [env_set(
                actions = _LINK_SHARED + _LINK_EXECUTABLE,
                env_entries = [env_entry(
                    key = "STONEWARE_ZIG_CACHE",
                    value = ctx.file.runtime_cache.path,
                )],
            )],
        ),
    ]
    return cc_common.create_cc_toolchain_config_info(
        ctx = ctx,
        toolchain_identifier = "stoneware_zig",
        compiler = "clang",
        target_cpu = _CPUS[processor],
        target_system_name = processor + "-linux-gnu",
        target_libc = "glibc_" + GLIBC,
        abi_version = "clang",
        abi_libc_version = GLIBC,
        features = features,
        action_configs = [
            action_config(name, enabled = True, tools = [tool(tool = file)], implies = implies, flag_sets = flag_sets)
            for file, names, implies, flag_sets in [
                (ctx.file._clang, _COMPILE, _COMPILE_FEATURES, []),
                (ctx.file._clang, _LINK_EXECUTABLE, _LINK_FEATURES + ["force_pic_flags"], []),
                (ctx.file._clang, _LINK_SHARED, _SHARED_FEATURES + _LINK_FEATURES, []),
                (ctx.file._ar, [ACTION_NAMES.cpp_link_static_library], ["archiver_flags", "linker_param_file"], []),
                (ctx.file._objcopy, [ACTION_NAMES.strip], [], [flag_set(flag_groups = [
                    flag_group(flags = ["-S", "-p", "-o", "%{output_file}", "%{input_file}"]),
                ])]),
            ]
            for name in names
        ],
    )

zig_cc_toolchain_config = rule(
    implementation = _config_impl,
    attrs = {
        "processor": attr.string(mandatory = True, values = _CPUS.keys(), doc = "what is compiled for"),
        "runtime_cache": attr.label(mandatory = True, allow_single_file = True, cfg = "exec"),
    } | {
        name: attr.label(default = Label(default), allow_single_file = True, cfg = "exec")
        for name, default in {
            "_ar": "//third_party/zig:ar",
            "_clang": "//third_party/zig:clang++",
            "_objcopy": "//third_party/zig:objcopy",
        }.items()
    },
    provides = [CcToolchainConfigInfo],
)
