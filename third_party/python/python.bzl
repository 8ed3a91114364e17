"""The host's Python for tools and tests, and CPython headers for both ABIs of the modules."""

# Debian suites with CPython headers, for hosts that lack them.
_DEBIAN_SUITES = {
    "3.11": "bookworm",
    "3.13": "trixie",
}

# The abi3 wheel serves this version and later ones.
_ABI3_MINIMUM = (3, 12)

# Where the abi3 headers come from when the host's Python is older than _ABI3_MINIMUM.
_ABI3_DEBIAN = "3.13"

_HEADERS_BUILD = """\
cc_library(
    name = "headers",
    hdrs = glob(["headers/**/*.h"]),
    defines = {defines},
    includes = {includes},
    visibility = ["//visibility:public"],
)
"""

_PROBE = {"_probe": attr.label(default = Label("//third_party/python:probe.py"))}

def _host(ctx):
    """The interpreter that `python3` names: path, "3.11" and the folder of its headers."""
    python = ctx.which("python3")
    if not python:
        fail("python3 is not on PATH; install Python 3.11 with pip, then run again")
    result = ctx.execute([python, "-B", ctx.path(ctx.attr._probe)])
    if result.return_code:
        fail("python3 does not run: " + result.stderr)
    return result.stdout.strip().split("\n")

def _host_python_impl(ctx):
    interpreter, version, _ = _host(ctx)
    ctx.file("interpreter", interpreter + "\n", executable = False)
    ctx.template("python3", ctx.path(ctx.attr._python3), {"{version}": version}, executable = True)
    ctx.file("BUILD.bazel", ctx.read(ctx.attr._build_file), executable = False)
    ctx.file("version.bzl", "PYTHON_VERSION = \"{}\"\n".format(version))

host_python = repository_rule(
    implementation = _host_python_impl,
    doc = "The interpreter that `python3` names, as a Python toolchain, and its version.",
    attrs = {
        "_build_file": attr.label(default = Label("//third_party/python:python.BUILD")),
        "_python3": attr.label(default = Label("//third_party/python:python3.sh")),
    } | _PROBE,
    environ = ["PATH"],
)

def _python_headers_impl(ctx):
    interpreter, version, include = _host(ctx)
    if ctx.attr.abi == "abi3" and _parse(version) < _ABI3_MINIMUM:
        version, include = _ABI3_DEBIAN, ""
    includes = _headers(ctx, interpreter, version, include)
    ctx.file("BUILD.bazel", _HEADERS_BUILD.format(
        defines = repr(["Py_LIMITED_API=0x030C0000"] if ctx.attr.abi == "abi3" else []),
        includes = repr(includes),
    ))

python_headers = repository_rule(
    implementation = _python_headers_impl,
    doc = """CPython's headers as `:headers`, for one ABI.

"host" fits the interpreter that `python3` names; "abi3" defines Py_LIMITED_API for CPython 3.12 and
later. They are the host's where it has them, else Debian's, fetched with apt-get.
""",
    attrs = {
        "abi": attr.string(mandatory = True, values = ["host", "abi3"]),
        "_debian": attr.label(default = Label("//tools/bootstrap:debian.py")),
    } | _PROBE,
    environ = ["PATH"],
)

def _parse(version):
    return tuple([int(part) for part in version.split(".")])

def _headers(ctx, python, version, host_include):
    """Puts the headers of `version` under the folder `headers`; returns the include folders."""
    folder = "headers"
    if host_include and ctx.path(host_include + "/Python.h").exists:
        ctx.symlink(host_include, folder + "/include")
        return [folder + "/include"]
    if version not in _DEBIAN_SUITES:
        fail(("Python {} has no headers here (no Python.h in {}) and Debian carries none of that " +
              "version; install its development package, or use Python {}").format(
            version,
            host_include,
            " or ".join(_DEBIAN_SUITES.keys()),
        ))
    ctx.report_progress("fetching the headers of Python {} from Debian".format(version))
    result = ctx.execute([
        python,
        "-B",
        ctx.path(ctx.attr._debian),
        _DEBIAN_SUITES[version],
        "libpython{}-dev".format(version),
        folder,
    ], timeout = 600)
    if result.return_code:
        fail("Python {} has no headers here: {}; install its development package".format(version, result.stderr))

    # The package links its own static library from a folder of lib; only the headers are wanted.
    ctx.delete(folder + "/unpacked/usr/lib")
    include = folder + "/unpacked/usr/include"
    return [include + "/python" + version, include]
