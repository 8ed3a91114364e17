"""Repositories out of wheels that pip fetches by name, version and sha256 (lock.bzl)."""

load("//third_party/python:python.bzl", "host_python_of")
load(":lock.bzl", "WHEELS")

def _is_for_one_python(file):
    """Whether a wheel serves one version of Python alone, by its name."""
    python, abi = file.removesuffix(".whl").split("-")[-3:-1]
    return python == abi

def _compile_python(ctx, python):
    """Compiles the modules once, as pip does: actions cannot write here, and would compile them at each import.

    The bytes depend neither on the folder nor on the order, so a cache serves other clones that have the same patch
    release of Python. Python compares the hash of a source, so that an edited one counts. A file that this Python
    cannot parse, such as a template, gets no bytecode. Another version of Python ignores the bytecode.
    """
    compiled = ctx.execute(
        [python, "-B", "-m", "compileall", "-q", "-s", "tree", "-p", "/", "--invalidation-mode", "checked-hash", "tree"],
        environment = {"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "", "PYTHONPYCACHEPREFIX": ""},
        timeout = 3600,
    )
    if compiled.return_code not in (0, 1):  # 1: some files cannot be parsed
        fail("{}: Python's compileall failed: {}".format(ctx.name, compiled.stderr))

def wheel_tree_impl(ctx):
    """Implements wheel_tree; public for its tests.

    Args:
      ctx: the repository's context.
    """
    python = host_python_of(ctx)
    for name in ctx.attr.packages:
        if name not in WHEELS:
            fail("{} is not in //third_party/pypi:lock.bzl; add it to requirements.txt and run `./bazelw run //third_party/pypi:refresh`".format(name))
        version, files = WHEELS[name]
        if [file for file in files if _is_for_one_python(file)]:
            # Read so that another version of Python fetches its wheel.
            ctx.read(Label("@stoneware_python//:version.bzl"))
        ctx.report_progress("fetching {} {}".format(name, version))
        result = ctx.execute(
            [python, "-B", ctx.path(ctx.attr._fetch_wheel), name, version, "unpacked"] +
            ["{}={}".format(file, sha256) for file, sha256 in files.items()] +
            (["KEEP=wheels"] if ctx.attr.keep_wheels else []),
            timeout = 3600,
        )
        if result.return_code:
            fail("\n" + result.stderr)

    # Texts of licences lie beside the packages, in a folder whose name has the version.
    if ctx.attr.license_of:
        name = ctx.attr.license_of
        info = "unpacked/{}-{}.dist-info/licenses".format(name.replace("-", "_"), WHEELS[name][0])
        moved = ctx.execute(["mv", info, "licenses"])
        if moved.return_code:
            fail("{}: license_of = \"{}\" has no licences: {}".format(ctx.name, name, moved.stderr))

    # One folder, handed to actions as one directory: thousands of single inputs would each become a
    # configured target and slow every sandbox down.
    moved = ctx.execute(["mv", "unpacked/" + ctx.attr.prefix if ctx.attr.prefix else "unpacked", "tree"])
    if moved.return_code:
        fail("{}: prefix = \"{}\" is not in the wheels: {}".format(ctx.name, ctx.attr.prefix, moved.stderr))
    ctx.delete("unpacked")
    for path in ctx.attr.delete:
        if not ctx.path("tree/" + path).exists:
            fail("{}: delete names {}, which the wheels do not have".format(ctx.name, path))
        ctx.delete("tree/" + path)
    for path in ctx.attr.executables:
        changed = ctx.execute(["chmod", "-R", "+x", "tree/" + path])
        if changed.return_code:
            fail("{}: executables names {}: {}".format(ctx.name, path, changed.stderr))
    for patch in ctx.attr.patches:
        ctx.patch(patch, strip = 1)
    if not ctx.attr.prefix:  # packages; toolchains import nothing of theirs
        _compile_python(ctx, python)
    ctx.file("BUILD.bazel", ctx.read(ctx.attr.build_file))

wheel_tree = repository_rule(
    implementation = wheel_tree_impl,
    doc = """Unpacks locked wheels, one over the other, into the folder `tree`.

Fails with name, version, expected and found hash when the index serves another file.

Example:
    wheel_tree(
        name = "stoneware_nanobind",
        packages = ["nanobind"],
        prefix = "nanobind",
        build_file = Label("//third_party/nanobind:nanobind.BUILD"),
    )
""",
    attrs = {
        "build_file": attr.label(mandatory = True, doc = "the repository's BUILD file"),
        "delete": attr.string_list(doc = "paths below `tree` that no action needs"),
        "executables": attr.string_list(doc = "paths below `tree` that need their run bit set"),
        "keep_wheels": attr.bool(doc = "also keep the wheels themselves, in the folder `wheels`"),
        "license_of": attr.string(doc = "the package whose licences go to the folder `licenses`"),
        "packages": attr.string_list(mandatory = True, doc = "names in lock.bzl"),
        "patches": attr.label_list(doc = "patch files, applied with -p1 at the repository's root"),
        "prefix": attr.string(doc = "the folder inside the wheels that becomes `tree`"),
        "_fetch_wheel": attr.label(default = Label("//third_party/pypi:fetch_wheel.py")),
        "_lock": attr.label(default = Label("//third_party/pypi:lock.bzl")),
    },
)

def pypi_packages(names, keep_wheels = False):
    """One repository `stoneware_pypi_<name>` per package, with a py_library `:site`.

    Args:
      names: names in lock.bzl; the tests' and tools' Python dependencies.
      keep_wheels: also offer the wheel file, as `:wheel`.
    """
    for name in names:
        wheel_tree(
            name = "stoneware_pypi_" + name.replace("-", "_"),
            packages = [name],
            keep_wheels = keep_wheels,
            build_file = Label("//third_party/pypi:package.BUILD"),
        )
