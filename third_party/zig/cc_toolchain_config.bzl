"""zig as a cc_toolchain: clang 18, libc++ linked statically, glibc 2.28 or later at run time."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "ACTION_NAMES")
load(
    "@bazel_tools//tools/cpp:cc_toolchain_config_lib.bzl",
    "env_entry",
    "env_set",
    "feature",
    "flag_group",
    "flag_set",
    "tool_path",
)

GLIBC = "2.28"

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

def _runtime_cache_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable._build,
        arguments = [out.path],
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
        "_build": attr.label(
            default = Label("//third_party/zig:build_runtime_cache"),
            allow_single_file = True,
            executable = True,
            cfg = "exec",
        ),
        "_zig": attr.label(default = Label("@stoneware_zig//:tree"), allow_single_file = True),
    },
)

def _config_impl(ctx):
    flags = lambda actions, words: flag_set(actions = actions, flag_groups = [flag_group(flags = words)])
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
            ],
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
        target_cpu = "k8",
        target_system_name = "x86_64-linux-gnu",
        target_libc = "glibc_" + GLIBC,
        abi_version = "clang",
        abi_libc_version = GLIBC,
        features = features,
        tool_paths = [
            tool_path(name = "gcc", path = "clang++"),
            tool_path(name = "cpp", path = "clang++"),
            tool_path(name = "ld", path = "clang++"),
            tool_path(name = "ar", path = "ar"),
            tool_path(name = "strip", path = "objcopy"),
            tool_path(name = "objcopy", path = "objcopy"),
            tool_path(name = "nm", path = "objcopy"),
            tool_path(name = "objdump", path = "objcopy"),
        ],
    )

zig_cc_toolchain_config = rule(
    implementation = _config_impl,
    attrs = {
        "runtime_cache": attr.label(mandatory = True, allow_single_file = True, cfg = "exec"),
    },
    provides = [CcToolchainConfigInfo],
)
