"""Runs pytest on the files named by its arguments; the main program of every pytest_test."""

import os
import sys

import pytest


def main() -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # The machine may have plugins of its own.
    options = ["-p", "no:cacheprovider", "-rs", "-ra", "--strict-markers", "--import-mode=prepend"]
    if "TEST_TMPDIR" in os.environ:
        options.append(f"--basetemp={os.environ['TEST_TMPDIR']}/pytest")
    if "XML_OUTPUT_FILE" in os.environ:
        options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter
        options += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    return pytest.main([*options, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
