"""The host's Python for tools and tests, and CPython headers for both ABIs of the modules."""

# Debian's CPython headers, for hosts that lack them, and for wheels for another processor: suite, version, and by
# Debian's architecture the sha256 that tools/bootstrap/debian.py computes of the folder, and prints if another is there.
_DEBIAN_HEADERS = {
    "3.11": struct(
        sha256 = {"amd64": "cb600a64cc44d5459fb168e1c3e06deffcb82b6a7bb04f7face81507c2e2eeb2"},
        suite = "bookworm",
        version = "3.11.2",
    ),
    "3.13": struct(
        sha256 = {
            "amd64": "fb2f3f89dfbe147c59c826b826eef88ab15a2b92828fa34de69b639e3c2b7da4",
            "arm64": "3caa10a3443c82d9240b4bf0c8f2fb43ef63d32583cb9a52b69b72124efdf054",
        },
        suite = "trixie",
        version = "3.13.5",
    ),
}

# The abi3 wheel serves this version and later ones.
_ABI3_MINIMUM = [3, 12]

# Where the abi3 headers come from when the host's Python is older than _ABI3_MINIMUM.
_ABI3_DEBIAN = "3.13"

_HEADERS_BUILD = """\
load("@rules_cc//cc:cc_library.bzl", "cc_library")

cc_library(
    name = "headers",
    hdrs = glob(["headers/**/*.h"]),
    defines = {defines},
    includes = {includes},
    visibility = ["//visibility:public"],
)
"""

def host_python_impl(ctx):
    """Implements host_python; public for its tests.

    Args:
      ctx: the repository's context.
    """

    # Every build asks for this repository first, before anything is downloaded.
    if ctx.os.name != "linux" or ctx.os.arch not in ("amd64", "x86_64"):
        fail(("Stoneware is built on x86-64 Linux, for which its compilers are locked, but this machine is {} {}; " +
              "build there, or by the `docker run` line of docs/wheels.md, and copy the wheel or gpu_check.pyz to " +
              "where it runs").format(ctx.os.name, ctx.os.arch))
    python = ctx.which("python3")
    if not python:
        fail("python3 is not on PATH; install Python 3.11 with pip, then run again")
    ctx.path(ctx.attr._probe)  # find_python.py runs it.
    result = ctx.execute([
        python,
        "-B",
        ctx.path(ctx.attr._find_python),
        ctx.os.environ.get("STONEWARE_PREFERRED_PYTHON", ""),
    ])
    if result.return_code:
        fail("python3 on PATH finds no Python for the build: " + result.stderr)
    interpreter, version, headers, newer_headers = result.stdout.removesuffix("\n").split("\n")
    ctx.file("interpreter", "\n".join([interpreter, version, headers, ""]), executable = False)
    ctx.file("newer_headers", newer_headers, executable = False)
    ctx.template("python3", ctx.path(ctx.attr._python3), {"{version}": version}, executable = True)
    ctx.template("BUILD.bazel", ctx.path(ctx.attr._build_file), {"{name}": ctx.name}, executable = False)
    ctx.file("version.bzl", "PYTHON_VERSION = \"{}\"\n".format(version))

host_python = repository_rule(
    implementation = host_python_impl,
    doc = """A Python of PATH, as a Python toolchain, and its version.

It is the first one with a supported version and pip: `python3` of each folder, then `python3.11` and so
on. STONEWARE_PREFERRED_PYTHON (`--repo_env`) may name a version that comes before the others.
""",
    attrs = {
        "_build_file": attr.label(default = Label("//third_party/python:python.BUILD")),
        "_find_python": attr.label(default = Label("//third_party/python:find_python.py")),
        "_probe": attr.label(default = Label("//third_party/python:probe.py")),
        "_python3": attr.label(default = Label("//third_party/python:python3.sh")),
    },
    environ = [
        "PATH",
        "STONEWARE_PREFERRED_PYTHON",
    ],
)

def host_python_of(ctx):
    """The Python that host_python found, for programs of repository rules.

    A rule that calls this is not run again if Python's version or path changes.

    Args:
      ctx: the repository's context.
    Returns:
      its path.
    """
    return ctx.path(Label("@stoneware_python//:BUILD.bazel")).dirname.get_child("python3")

def python_headers_impl(ctx):
    """Implements python_headers; public for its tests.

    Args:
      ctx: the repository's context.
    """

    # Not probed again, so that nothing is fetched again when a virtual environment is activated.
    python, version, include = ctx.read(ctx.attr._host).strip().split("\n")
    is_abi3 = ctx.attr.abi == "abi3"
    needed = version
    if ctx.attr.architecture != "amd64" or is_abi3 and [int(part) for part in version.split(".")] < _ABI3_MINIMUM:
        needed = _ABI3_DEBIAN
    if ctx.attr.architecture != "amd64":
        includes, reason = _fetch_from_debian(ctx, python, needed)
        if reason:
            fail("a wheel for {0} needs Debian's headers of Python {1} for {0}, but they cannot be used: {2}\nbuild on Debian 12 or later, or by the `docker run` line of docs/wheels.md".format(
                ctx.attr.architecture,
                needed,
                reason,
            ))
    elif needed == version and ctx.path(include + "/Python.h").exists:
        includes = _link(ctx, include)
    else:
        includes, reason = _fetch_from_debian(ctx, python, needed)
        if reason and needed != version:
            # Read only if needed, and no attribute: another PATH shall not fetch Debian's again.
            include = ctx.read(Label("@stoneware_python//:newer_headers"))
            includes = _link(ctx, include) if include else []
        if not includes:
            _fail(ctx.attr.abi, version, needed, reason)
    ctx.file("BUILD.bazel", _HEADERS_BUILD.format(
        defines = repr(["Py_LIMITED_API=0x030C0000"] if is_abi3 else []),
        includes = repr(includes),
    ))

python_headers = repository_rule(
    implementation = python_headers_impl,
    doc = """CPython's headers as `:headers`, for one ABI.

"host" fits the interpreter of host_python; "abi3" defines Py_LIMITED_API for CPython 3.12 and later.
They are the host's if it has them, otherwise Debian's, fetched with apt-get. If Debian's cannot be
fetched, "abi3" uses those of any Python 3.12 or 3.13 on PATH. For another architecture they are Debian's.
""",
    attrs = {
        "abi": attr.string(mandatory = True, values = ["host", "abi3"]),
        "architecture": attr.string(default = "amd64", values = ["amd64", "arm64"], doc = "Debian's name of it"),
        "_debian": attr.label(default = Label("//tools/bootstrap:debian.py")),
        "_host": attr.label(default = Label("@stoneware_python//:interpreter")),
    },
)

def _link(ctx, include):
    """Links a folder of headers; returns the include folders."""
    ctx.symlink(include, "headers/include")
    folder = ctx.path(include)

    # Debian and Ubuntu keep pyconfig.h of each processor apart, and python3-dev's only includes it.
    multiarch = "x86_64-linux-gnu/" + folder.basename
    pyconfig = folder.dirname.get_child(multiarch)
    if not pyconfig.exists:
        return ["headers/include"]
    ctx.symlink(pyconfig, "headers/" + multiarch)
    return ["headers/include", "headers"]

def _fetch_from_debian(ctx, python, needed):
    """Unpacks Debian's headers of Python `needed`; returns the include folders, and why there are none."""
    if needed not in _DEBIAN_HEADERS:
        return [], "no suite is known for it"
    headers = _DEBIAN_HEADERS[needed]
    ctx.report_progress("fetching the headers of Python {} from Debian".format(needed))
    result = ctx.execute([
        python,
        "-B",
        ctx.path(ctx.attr._debian),
        headers.suite,
        "libpython{}-dev".format(needed),
        headers.version,
        headers.sha256[ctx.attr.architecture],
        "headers",
        ctx.attr.architecture,
    ], timeout = 600)
    if result.return_code:
        ctx.delete("headers")
        return [], result.stderr.strip()

    # The package links its own static library from a folder of lib; only the headers are wanted.
    ctx.delete("headers/unpacked/usr/lib")
    include = "headers/unpacked/usr/include"
    return [include + "/python" + needed, include], ""

def _fail(abi, version, needed, reason):
    rule = "modules for python3 need its headers (Python.h)"
    remedy = "install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
    if abi == "abi3":
        rule = "the wheel for Python 3.12 and later needs headers (Python.h) of such a version"
        if needed != version:
            remedy = "install Python 3.12 or 3.13 with its headers, so that it is on PATH"
        remedy += ", or build what needs no such headers, as //:wheel_host and //:quickstart"
    fail("{}, but python3 is {}, this machine lacks them, and Debian's of {} cannot be used: {}\n{}".format(
        rule,
        version,
        needed,
        reason,
        remedy,
    ))
