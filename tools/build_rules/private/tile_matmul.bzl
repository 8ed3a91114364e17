"""tile_matmul: the LTO-IR of a tile matmul, so that NVRTC need not compile it at the user's."""

load(":backward.bzl", "BACKWARD_ATTRS", "served")
load(":cuda_archs.bzl", "NVCC_ARCHS", "check_arch")
load(":cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load(":nvcc.bzl", "NVCC_ATTRS", "compile_lto_ir")
load(":providers.bzl", "TileMatmulInfo")

# What a matmul serves -> its direction in sw.tile.
_DIRECTIONS = {
    "forward": "forward",
    "dgrad": "dA",
    "wgrad": "dB",
}

def _tile_matmul_impl(ctx):
    attr = ctx.attr
    check_arch(ctx.label, attr.arch, NVCC_ARCHS)
    fields = {
        "m": attr.m,
        "n": attr.n,
        "k": attr.k,
        "a": attr.a,
        "b": attr.b,
        "layouts": attr.layouts,
        "threads": attr.threads,
        "arch": attr.arch,
    }
    prefix = "_".join([attr.a, attr.b] + attr.layouts + [
        "{}x{}x{}".format(attr.m, attr.n, attr.k),
        str(attr.threads),
        attr.arch,
    ])
    files = []
    for matmul, is_served in served(ctx).items():
        if not is_served:
            continue
        direction = _DIRECTIONS[matmul]
        name = "{}_{}".format(prefix, direction)
        source = ctx.actions.declare_file("{}/{}.cu".format(ctx.label.name, name))
        args = ctx.actions.args()
        args.add("--fields", json.encode(fields))
        args.add("--direction", direction)
        args.add("--name", name + ".fatbin")
        args.add("--out", source)
        ctx.actions.run(
            executable = ctx.executable._tile_matmul,
            arguments = [args],
            outputs = [source],
            mnemonic = "TileMatmulSource",
            progress_message = "Writing %{output}",
        )
        file = ctx.actions.declare_file("{}/{}.fatbin".format(ctx.label.name, name))
        compile_lto_ir(
            ctx,
            src = source,
            out = file,
            arch = attr.arch,
            hdrs = ctx.files._headers,
            mnemonic = "TileMatmul",
        )
        files.append(struct(direction = direction, file = file))
    return [
        DefaultInfo(files = depset([built.file for built in files])),
        TileMatmulInfo(files = depset(files)),
    ]

tile_matmul = rule(
    implementation = _tile_matmul_impl,
    doc = """Compiles each direction of a tile matmul (sw.tile.matmul) to LTO-IR, a file of its own.

It is compiled even if //:cuda_archs leaves out `arch`. fp8 has no gradients: it needs
`serves = ["forward"]` or `backward = "off"`, and `layouts = ["row", "col"]`.

Example:
    tile_matmul(
        name = "bf16_64x64x64",
        a = "bf16",
        b = "bf16",
        m = 64,
        n = 64,
        k = 64,
        backward = "off",
    )
""",
    attrs = BACKWARD_ATTRS | {
        "a": attr.string(mandatory = True, doc = "dtype of a"),
        "arch": attr.string(default = "sm_90a", doc = "the architecture"),
        "b": attr.string(mandatory = True, doc = "dtype of b"),
        "k": attr.int(mandatory = True, doc = "columns of a, rows of b"),
        "layouts": attr.string_list(default = ["row", "row"], doc = "of a and b"),
        "m": attr.int(mandatory = True, doc = "rows of a"),
        "n": attr.int(mandatory = True, doc = "columns of b"),
        "serves": attr.string_list(default = _DIRECTIONS.keys(), doc = "of " + ", ".join(_DIRECTIONS)),
        "threads": attr.int(default = 128, doc = "threads of the block that computes it"),
        "_headers": attr.label(default = Label("//cc/tile:headers")),
        "_tile_matmul": attr.label(
            default = Label("//tools/tile_matmul"),
            executable = True,
            cfg = "exec",
        ),
    } | NVCC_ATTRS,
    toolchains = [CUDA_TOOLCHAIN],
)
