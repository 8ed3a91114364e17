"""pytest_test: test files under pytest, as a `bazel test` target."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(
        name,
        srcs,
        support = [],
        deps = [],
        data = [],
        env = {},
        tags = [],
        all_kernels = False,
        size = "small",
        **kwargs):
    """Runs pytest on `srcs` against the unpacked wheel; a run without any test fails.

    Args:
      name: the target.
      srcs: files with tests.
      support: Python files that the tests import, conftest.py among them.
      deps: further libraries; the wheel and pytest are there already.
      data: further files; the current folder is the root of this repository's runfiles.
      env: environment, with $(rootpath ...) expansion; torch has one thread, since Bazel runs a test on each core.
      tags: as everywhere; "gpu" marks tests that skip themselves without a GPU.
      all_kernels: whether the tests need the kernels that //:kernel_set may leave out.
      size: as everywhere.
      **kwargs: as for py_test.
    """
    main = Label("//tests:pytest_main.py")
    py_test(
        name = name,
        size = size,
        srcs = srcs + support + [main],
        main = main,
        args = ["$(rootpath {})".format(src) for src in srcs],
        data = data,
        env = {"OMP_NUM_THREADS": "1"} | env,
        tags = tags,
        deps = deps + [
            Label("//:installed_all" if all_kernels else "//:installed"),
            Label("//third_party/pypi:pytest"),
        ],
        **kwargs
    )
