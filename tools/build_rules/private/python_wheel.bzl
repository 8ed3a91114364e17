"""python_wheel: Python sources, extension modules, kernels and tables as one reproducible wheel."""

load("@stoneware_python//:version.bzl", "PYTHON_VERSION")
load(":nanobind_module.bzl", "extension_for_abi")
load(":platform.bzl", "processor_of", "to_platform_of_tag")
load(":providers.bzl", "KernelInfo", "OpenKernelsInfo", "PythonExtensionInfo", "TileMatmulInfo")

_HOST_TAG = "cp" + PYTHON_VERSION.replace(".", "")

# abi: (Python and ABI tags, file name suffix of extension modules)
_ABIS = {
    "abi3": ("cp312-abi3", ".abi3.so"),
    "host": (
        "{0}-{0}".format(_HOST_TAG),
        ".cpython-{}-x86_64-linux-gnu.so".format(PYTHON_VERSION.replace(".", "")),
    ),
}

def _pairs(ctx, attribute):
    """"key=value" for each value of each key of the attribute."""
    values = getattr(ctx.attr, attribute)
    for key in values:
        if not values[key]:
            fail("{}: each of {} must have a value, but \"{}\" has none; give it one or leave it out".format(
                ctx.label,
                attribute,
                key,
            ))
    return ["{}={}".format(key, value) for key in values for value in values[key]]

def _python_wheel_impl(ctx):
    python_and_abi, suffix = _ABIS[ctx.attr.abi]
    if ctx.attr.abi == "host" and processor_of(ctx.attr.platform) != "x86_64":
        fail("{}: a wheel for another processor must have abi = \"abi3\", since the headers of the host's Python are for x86-64, but has abi = \"host\" and platform = \"{}\"; set abi = \"abi3\"".format(
            ctx.label,
            ctx.attr.platform,
        ))
    tag = "{}-{}".format(python_and_abi, ctx.attr.platform)
    contents = {}

    def put(path, file):
        if path in contents and contents[path] != file:
            fail("{}: two files go to {} in the wheel: {} and {}".format(
                ctx.label,
                path,
                contents[path].short_path,
                file.short_path,
            ))
        contents[path] = file

    root = "{}/".format(ctx.attr.strip_prefix) if ctx.attr.strip_prefix else ""
    for file in ctx.files.srcs:
        path = file.short_path
        if file.owner.repo_name:
            path = path.removeprefix("../{}/".format(file.owner.repo_name))
        if not path.startswith(root):
            fail("{}: {} does not lie below strip_prefix = \"{}\"".format(ctx.label, path, root))
        put(path.removeprefix(root), file)
    for target, folder in ctx.attr.extensions.items():
        info = target[PythonExtensionInfo]
        put("{}/{}{}".format(folder, info.module_name, suffix), info.module)
        put("{}/{}.pyi".format(folder, info.module_name), info.stub)
    for target in ctx.attr.kernels:
        for kernel in target[KernelInfo].kernels.to_list():
            if not kernel.json:
                fail("{}: kernels must be compiled ahead of time, with a launch description, but {} of {} has none; embedded kernels come with their extension".format(
                    ctx.label,
                    kernel.id,
                    target.label,
                ))
            for file in (kernel.cubin, kernel.json):
                put("{}/{}".format(ctx.attr.kernels_folder, file.basename), file)
    for target in ctx.attr.open_kernels:
        for open in target[OpenKernelsInfo].files.to_list():
            put("{}/{}".format(ctx.attr.open_kernels_folder, open.file.basename), open.file)
    for target in ctx.attr.tile_matmuls:
        for built in target[TileMatmulInfo].files.to_list():
            put("{}/{}".format(ctx.attr.tile_matmuls_folder, built.file.basename), built.file)
    for target, path in ctx.attr.data.items():
        put(path, target.files.to_list()[0])
    licenses = {"LICENSE": ctx.file.license}
    for target, path in ctx.attr.notices.items():
        licenses[path] = target.files.to_list()[0]
    info = "{}-{}.dist-info".format(ctx.attr.distribution, ctx.attr.version)
    for path, file in licenses.items():
        put("{}/licenses/{}".format(info, path), file)
    for target, name in ctx.attr.sboms.items():
        put("{}/sboms/{}".format(info, name), target.files.to_list()[0])

    listing = ctx.actions.declare_file(ctx.label.name + ".contents.json")
    ctx.actions.write(listing, json.encode({path: file.path for path, file in contents.items()}))
    wheel = ctx.actions.declare_file("{}-{}-{}.whl".format(ctx.attr.distribution, ctx.attr.version, tag))
    site = ctx.actions.declare_directory(ctx.label.name + "_site")
    args = ctx.actions.args()
    args.add("--contents", listing)
    args.add("--distribution", ctx.attr.distribution)
    args.add("--version", ctx.attr.version)
    args.add("--summary", ctx.attr.summary)
    args.add("--tag", tag)
    args.add("--requires_python", ">=3.12" if ctx.attr.abi == "abi3" else "=={}.*".format(PYTHON_VERSION))
    args.add_all(ctx.attr.requires, before_each = "--requires")
    args.add_all(_pairs(ctx, "extras"), before_each = "--extra")
    args.add_all(_pairs(ctx, "entry_points"), before_each = "--entry_point")
    args.add("--license_expression", ctx.attr.license_expression)
    args.add_all(licenses.keys(), before_each = "--license_file")
    args.add("--readme", ctx.file.readme)

    # Two actions: a test that imports the unpacked files waits for no archive.
    for flag, output, verb in [("--wheel", wheel, "Packing"), ("--site", site, "Laying out")]:
        ctx.actions.run(
            executable = ctx.executable._write_wheel,
            arguments = [args, flag, output.path],
            inputs = [listing, ctx.file.readme] + contents.values(),
            outputs = [output],
            mnemonic = "PythonWheel",
            progress_message = "{} {}".format(verb, output.basename),
        )
    return [
        DefaultInfo(files = depset([wheel])),
        OutputGroupInfo(site = depset([site])),
    ]

python_wheel_rule = rule(
    implementation = _python_wheel_impl,
    attrs = {
        "abi": attr.string(mandatory = True, values = _ABIS.keys(), doc = "host or abi3"),
        "data": attr.label_keyed_string_dict(allow_files = True, doc = "file: path in the wheel"),
        "distribution": attr.string(mandatory = True, doc = "the name that pip installs it by"),
        "entry_points": attr.string_list_dict(
            doc = "group, such as console_scripts: \"name = module:function\", in any order",
        ),
        "extensions": attr.label_keyed_string_dict(
            cfg = to_platform_of_tag,
            providers = [PythonExtensionInfo],
            doc = "modules of this ABI: folder in the wheel",
        ),
        "extras": attr.string_list_dict(doc = "extra: the requirements that it adds"),
        "kernels": attr.label_list(
            providers = [KernelInfo],
            doc = "ahead-of-time kernels; embedded ones come with their extension",
        ),
        "kernels_folder": attr.string(default = "kernels", doc = "folder of `kernels` in the wheel"),
        "license": attr.label(mandatory = True, allow_single_file = True, doc = "the text of the license"),
        "license_expression": attr.string(
            default = "Apache-2.0",
            doc = "SPDX, of all that the wheel holds",
        ),
        "notices": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "texts of others' licences: path in .dist-info/licenses",
        ),
        "open_kernels": attr.label_list(
            providers = [OpenKernelsInfo],
            doc = "cubin_library: its open kernels become files",
        ),
        "open_kernels_folder": attr.string(default = "open_kernels", doc = "folder of `open_kernels` in the wheel"),
        "platform": attr.string(
            # The glibc that the C++ toolchain of stoneware_toolchains() targets (//third_party/zig).
            default = "manylinux_2_28_x86_64",
            doc = "Platform tag. With a manylinux tag the modules are checked: one that needs a newer " +
                  "symbol or another library fails the build. linux_x86_64 promises nothing. With one that ends " +
                  "with aarch64 the modules are compiled for that processor; `abi` must then be abi3.",
        ),
        "readme": attr.label(mandatory = True, allow_single_file = True, doc = "the long description, in Markdown"),
        "requires": attr.string_list(doc = "requirements, as pip spells them"),
        "sboms": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "software bills of materials: file name in .dist-info/sboms (PEP 770)",
        ),
        "srcs": attr.label_list(allow_files = True, doc = "Python sources and files next to them"),
        "strip_prefix": attr.string(doc = "the folder of this repository above the packages"),
        "summary": attr.string(mandatory = True, doc = "one line that describes it"),
        "tile_matmuls": attr.label_list(
            providers = [TileMatmulInfo],
            doc = "tile_matmul: the LTO-IR becomes files",
        ),
        "tile_matmuls_folder": attr.string(default = "tile_matmuls", doc = "folder of `tile_matmuls` in the wheel"),
        "version": attr.string(mandatory = True, doc = "the version, by PEP 440"),
        "_write_wheel": attr.label(
            default = Label("//tools/build_rules/private:write_wheel"),
            executable = True,
            cfg = "exec",
        ),
    },
)

def python_wheel(name, *, abi, extensions = {}, **kwargs):
    """Packs a wheel, the same bytes from any folder; the output group `site` is it, unpacked, without RECORD.

    Example:
        python_wheel(
            name = "wheel",
            distribution = "mypackage",
            version = "1.0",
            summary = "My kernels",
            abi = "abi3",
            srcs = ["//py/mypackage:srcs"],
            strip_prefix = "py",
            extensions = {"//py/mypackage:_native": "mypackage"},
            kernels = ["//py/mypackage:triton"],
            kernels_folder = "mypackage/kernels",
            data = {":kernel_manifest": "mypackage/kernel_manifest.json"},
            requires = ["torch>=2.11"],
            extras = {"report": ["plotly>=6"]},
            entry_points = {"console_scripts": ["mypackage = mypackage.cli:main"]},
            license = "LICENSE",
            readme = "README.md",
        )

    `pip install mypackage` then brings torch and the command `mypackage`; `pip install mypackage[report]`
    brings plotly too.

    Args:
      name: the target.
      abi: "host", for the host's Python, or "abi3", for CPython 3.12 and later.
      extensions: nanobind_module: folder in the wheel; of each the module for `abi` is taken.
      **kwargs: further attributes of the table.
    """
    python_wheel_rule(
        name = name,
        abi = abi,
        extensions = {extension_for_abi(label, abi): folder for label, folder in extensions.items()},
        **kwargs
    )
