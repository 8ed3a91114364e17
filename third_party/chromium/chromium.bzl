"""A headless Chromium for tests, out of Debian's packages."""

load("//third_party/python:python.bzl", "host_python_of")

def _headless_chromium_impl(ctx):
    ctx.report_progress("fetching headless Chromium from Debian (about 106 MB)")
    result = ctx.execute(
        [host_python_of(ctx), "-B", ctx.path(ctx.attr._fetch_chromium), "tree"],
        environment = {"PYTHONPATH": str(ctx.path(ctx.attr._debian).dirname)},
        timeout = 1800,
    )
    if result.return_code:
        fail("\n" + result.stderr)
    ctx.file("tree/fonts.conf", ctx.read(ctx.attr._fonts_conf), executable = False)
    ctx.file("headless_shell.sh", ctx.read(ctx.attr._headless_shell))
    ctx.file("BUILD.bazel", ctx.read(ctx.attr._build_file), executable = False)

headless_chromium = repository_rule(
    implementation = _headless_chromium_impl,
    doc = """Debian's chromium-headless-shell as the program `:headless_shell`.

Fetched with apt-get, as any repository only when a target that needs it is built. Shared libraries
and fonts come with it; glibc is the host's.
""",
    attrs = {
        "_build_file": attr.label(default = Label("//third_party/chromium:chromium.BUILD")),
        "_debian": attr.label(default = Label("//tools/bootstrap:debian.py")),
        "_fetch_chromium": attr.label(default = Label("//third_party/chromium:fetch_chromium.py")),
        "_fonts_conf": attr.label(default = Label("//third_party/chromium:fonts.conf")),
        "_headless_shell": attr.label(default = Label("//third_party/chromium:headless_shell.sh")),
    },
    environ = ["PATH"],
)
