"""buildifier, which formats and lints Starlark, out of its npm package."""

_VERSION = "8.2.1"
_SHA256 = "b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee"

# EX_UNAVAILABLE of sysexits.h; //tools/format knows it.
_MISSING = """#!/bin/sh
echo "buildifier comes from npm, which is not on PATH; install Node.js, then run again" >&2
exit 69
"""

def _buildifier_impl(ctx):
    ctx.file("BUILD.bazel", ctx.read(ctx.attr._build_file), executable = False)
    npm = ctx.which("npm")
    if not npm:
        ctx.file("buildifier", _MISSING)
        return
    package = "@bazel/buildifier@" + _VERSION
    ctx.report_progress("fetching {} (about 24 MB)".format(package))
    result = ctx.execute([npm, "pack", package, "--silent"], timeout = 1800)
    if result.return_code:
        fail("{}: `npm pack` failed; npm's registry must carry it.\n{}".format(package, result.stderr.strip()))
    archive = ctx.path(result.stdout.strip().split("\n")[-1])
    found = ctx.execute(["sha256sum", archive]).stdout.split(" ")[0]
    if found != _SHA256:
        fail("{}: the archive that npm found is not the locked one.\n  expected {}\n  found    {}\nPoint npm at a registry that carries it, or change _SHA256 in //third_party/buildifier:buildifier.bzl deliberately.".format(package, _SHA256, found))
    ctx.extract(archive, "unpacked", "package")
    ctx.symlink("unpacked/buildifier-linux_amd64", "buildifier")
    ctx.delete(archive)

buildifier = repository_rule(
    implementation = _buildifier_impl,
    doc = """The program `:buildifier`, for x86-64 Linux.

npm is asked by name, so the machine's registry, proxy and certificates apply; the hash decides.
Fetched as any repository, only when a target that needs it is built. Without npm the program says so
and ends with 69.
""",
    attrs = {"_build_file": attr.label(default = Label("//third_party/buildifier:buildifier.BUILD"))},
    environ = ["PATH"],
)
