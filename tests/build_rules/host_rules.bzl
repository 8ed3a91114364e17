"""Repository rules on hosts that this one is not, with a stand-in for their context."""

load("//third_party/pypi:pypi.bzl", "wheel_tree_impl")
load("//third_party/python:python.bzl", "host_python_impl", "python_headers_impl")

# Host -> what of it differs from Debian 12 on x86-64.
_HOSTS = {
    "aarch64": {"arch": "aarch64"},
    "debian_12": {},
    "debian_12_with_python3_dev": {"has_multiarch": True},
    "debian_12_without_headers": {"has_headers": False},
    "fedora_python_3_13": {"debian_error": "apt-get is not on PATH", "version": "3.13"},
    "fedora_python_3_13_without_headers": {
        "debian_error": "apt-get is not on PATH",
        "has_headers": False,
        "version": "3.13",
    },
    "macos": {"arch": "aarch64", "os": "mac os x"},
    "ubuntu_python_3_11": {"debian_error": "no Debian keyring"},
    "ubuntu_python_3_11_and_3_12": {"debian_error": "no Debian keyring", "newer_headers": "/usr/include/python3.12"},
    "ubuntu_python_3_12": {"debian_error": "no Debian keyring", "has_multiarch": True, "version": "3.12"},
    "ubuntu_python_3_12_without_headers": {
        "debian_error": "no Debian keyring",
        "has_headers": False,
        "version": "3.12",
    },
}

def _nothing(*_args, **_kwargs):
    return None

_DEBIAN_12 = {
    "arch": "amd64",
    "debian_error": "",
    "has_headers": True,
    "has_multiarch": False,
    "newer_headers": "",
    "os": "linux",
    "version": "3.11",
}

def _path_on(host, path):
    """A stand-in for a path; one folder above it is enough."""
    folder, _, basename = path.rpartition("/")
    return struct(
        basename = basename,
        dirname = struct(get_child = lambda name: struct(
            exists = host["has_multiarch"],
            text = folder + "/" + name,
        )),
        exists = host["has_headers"],
        text = path,
    )

def _context(host, abi, calls):
    """A repository context on one of _HOSTS; what it links, runs and writes goes to the list `calls`."""
    host = _DEBIAN_12 | _HOSTS[host]

    def execute(command, **_kwargs):
        calls.append(["execute"] + [word for word in command if type(word) == "string"])
        return struct(return_code = 1 if host["debian_error"] else 0, stderr = host["debian_error"], stdout = "")

    return struct(
        attr = struct(
            abi = abi.removesuffix("_aarch64"),
            architecture = "arm64" if abi.endswith("_aarch64") else "amd64",
            _debian = "debian.py",
            _host = "interpreter",
        ),
        delete = _nothing,
        execute = execute,
        file = lambda path, content: calls.append(["file", path, content]),
        os = struct(arch = host["arch"], name = host["os"]),
        path = lambda path: _path_on(host, path),
        read = lambda file: host["newer_headers"] if str(file).endswith(":newer_headers") else (
            "/usr/bin/python\n{0}\n/usr/include/python{0}\n".format(host["version"])
        ),
        report_progress = _nothing,
        symlink = lambda target, link: calls.append(["symlink", getattr(target, "text", target), link]),
    )

def _on_host_impl(ctx):
    rule = host_python_impl if ctx.attr.abi == "" else python_headers_impl
    rule(_context(ctx.attr.host, ctx.attr.abi, []))
    return []

on_host = rule(
    implementation = _on_host_impl,
    doc = "Calls a repository rule where a test can see it fail: python_headers of `abi`, or host_python without one.",
    attrs = {"abi": attr.string(), "host": attr.string(mandatory = True, values = _HOSTS.keys())},
)

def _linked(version, multiarch = False):
    links = [["symlink", "/usr/include/python" + version, "headers/include"]]
    if multiarch:
        folder = "x86_64-linux-gnu/python" + version
        links.append(["symlink", "/usr/include/" + folder, "headers/" + folder])
    return links

def _unpacked(suite, version, architecture = "amd64"):
    return ["execute", "/usr/bin/python", "-B", suite, "libpython{}-dev".format(version), architecture]

def _host_headers_test_impl(_ctx):
    problems = []
    for host, abi, expected in [
        ("debian_12", "host", _linked("3.11")),
        ("debian_12", "abi3", [_unpacked("trixie", "3.13")]),
        ("debian_12", "abi3_aarch64", [_unpacked("trixie", "3.13", "arm64")]),
        ("debian_12_with_python3_dev", "host", _linked("3.11", multiarch = True)),
        ("debian_12_without_headers", "host", [_unpacked("bookworm", "3.11")]),
        ("fedora_python_3_13", "host", _linked("3.13")),
        ("fedora_python_3_13", "abi3", _linked("3.13")),
        ("ubuntu_python_3_11", "host", _linked("3.11")),
        ("ubuntu_python_3_11_and_3_12", "abi3", [_unpacked("trixie", "3.13")] + _linked("3.12")),
        ("ubuntu_python_3_12", "host", _linked("3.12", multiarch = True)),
        ("ubuntu_python_3_12", "abi3", _linked("3.12", multiarch = True)),
    ]:
        calls = []
        python_headers_impl(_context(host, abi, calls))
        build = calls[-1][2]

        # Versions and hashes of packages are in python.bzl alone.
        if [call[:5] + call[8:] for call in calls[:-1]] != expected:
            problems.append("{} {}: {}".format(host, abi, calls))
        if ("\"headers\"]" in build) != (len(expected) == 2 and expected[0][0] == "symlink"):
            problems.append("{} {}: {}".format(host, abi, build))
        if ("Py_LIMITED_API=0x030C0000" in build) != abi.startswith("abi3"):
            problems.append("{} {}: {}".format(host, abi, build))
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

host_headers_test = rule(
    implementation = _host_headers_test_impl,
    doc = "Headers are the host's where they fit, else Debian's, else those of a newer Python on PATH; of aarch64 Debian's.",
    analysis_test = True,
)

def _reads_of_wheel_tree(package):
    """What wheel_tree reads to fetch a package: files of the build, whose change fetches it anew."""
    reads = []
    wheel_tree_impl(struct(
        attr = struct(
            build_file = "package.BUILD",
            delete = [],
            executables = [],
            keep_wheels = False,
            license_of = "",
            packages = [package],
            patches = [],
            prefix = "",
            _fetch_wheel = "fetch_wheel.py",
        ),
        delete = _nothing,
        execute = lambda *_args, **_kwargs: struct(return_code = 0, stderr = ""),
        file = _nothing,
        name = package,
        path = lambda path: struct(dirname = struct(get_child = lambda name: name)),
        read = lambda label: reads.append(str(label)),
        report_progress = _nothing,
    ))
    return reads

def _refetched_for_another_python_test_impl(_ctx):
    version = str(Label("@stoneware_python//:version.bzl"))
    expected = {"absl-py": False, "auditwheel": False, "nvidia-cuda-nvcc": False, "torch": True, "triton": True}
    wrong = [package for package in expected if (version in _reads_of_wheel_tree(package)) != expected[package]]
    return [AnalysisTestResultInfo(success = not wrong, message = "wrong of " + ", ".join(wrong))]

refetched_for_another_python_test = rule(
    implementation = _refetched_for_another_python_test_impl,
    doc = "Where python3 becomes another version, wheels for one version are fetched again, and no others.",
    analysis_test = True,
)
