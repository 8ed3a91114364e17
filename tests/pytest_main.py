"""Runs pytest on the files named by its arguments; the main program of every pytest_test."""

import importlib.util
import os
import random
import sys

import pytest


def _calm_hypothesis() -> None:
    """The time of an example depends on the machine's other work, not on the code."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    import hypothesis

    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("bazel", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("bazel")


class SameDraws:
    """A pytest plugin: a test draws the same numbers in each run, so that a rounding error which one draw in some
    thousands has cannot fail a build that changed nothing."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        random.seed(0)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(0)


def main() -> int:
    _calm_hypothesis()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # The machine may have plugins of its own.
    options = ["-p", "no:cacheprovider", "-rs", "-ra", "--strict-markers", "--import-mode=prepend"]
    if "TEST_TMPDIR" in os.environ:
        options.append(f"--basetemp={os.environ['TEST_TMPDIR']}/pytest")
    if "XML_OUTPUT_FILE" in os.environ:
        options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter
        options += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    return pytest.main([*options, *sys.argv[1:]], plugins=[SameDraws()])


if __name__ == "__main__":
    sys.exit(main())
