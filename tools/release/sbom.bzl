"""spdx_sbom: the bill of materials of a wheel, for its .dist-info/sboms (PEP 770)."""

def _spdx_sbom_impl(ctx):
    components = ctx.actions.declare_file(ctx.label.name + ".components.json")
    ctx.actions.write(components, ctx.attr.components)
    out = ctx.actions.declare_file(ctx.label.name + ".spdx.json")
    args = ctx.actions.args()
    args.add("--components", components)
    args.add("--distribution", ctx.attr.distribution)
    args.add("--version", ctx.attr.version)
    args.add("--license_expression", ctx.attr.license_expression)
    args.add("--manifest", ctx.file.manifest)
    args.add("--manifest_path", ctx.attr.manifest_path)
    args.add("--out", out)
    ctx.actions.run(
        executable = ctx.executable._write_sbom,
        arguments = [args],
        inputs = [components, ctx.file.manifest],
        outputs = [out],
        mnemonic = "SpdxSbom",
        progress_message = "Writing %{output}",
    )
    return [DefaultInfo(files = depset([out]))]

_spdx_sbom = rule(
    implementation = _spdx_sbom_impl,
    attrs = {
        "components": attr.string(mandatory = True),
        "distribution": attr.string(mandatory = True),
        "license_expression": attr.string(mandatory = True),
        "manifest": attr.label(mandatory = True, allow_single_file = [".json"]),
        "manifest_path": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_write_sbom": attr.label(default = "//tools/release:write_sbom", executable = True, cfg = "exec"),
    },
)

def spdx_sbom(name, *, components, **kwargs):
    """Writes NAME.spdx.json, SPDX 2.3: the same bytes from the same arguments and manifest.

    Args:
      name: the target.
      components: as in components.bzl.
      **kwargs: distribution, version and license_expression of the wheel; the kernel manifest, and manifest_path,
        its path in the wheel.
    """
    _spdx_sbom(name = name, components = json.encode(components), **kwargs)
