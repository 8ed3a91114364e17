"""Importing Stoneware imports no integration, and importing an integration imports no host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import pytest

from stoneware.errors import UnsupportedError

HOSTS = ("kernels", "sglang", "torchao", "transformers", "vllm")


def run(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_stoneware_imports_no_integration():
    run("import sys, stoneware, stoneware.nn; assert 'stoneware.integrations' not in sys.modules")


def test_importing_the_package_imports_nothing_else():
    run("import sys, stoneware.integrations; assert 'torch' not in sys.modules and 'stoneware.nn' not in sys.modules")


@pytest.mark.parametrize(
    "name", ["finegrained_fp8", "hosts", "sglang", "torchao", "transformers", "vllm", "vllm_experts"]
)
def test_importing_an_integration_imports_no_host(name):
    run(f"import sys, stoneware.integrations.{name}; assert not {{*{HOSTS}}} & {{*sys.modules}}")


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "vllm.general_plugins"])
def test_the_wheel_has_an_entry_point_for_each_engine(group, caplog):
    [entry_point] = [one for one in importlib.metadata.entry_points(group=group) if one.name == "stoneware"]
    plugin = entry_point.load()
    host = group.partition(".")[0]
    if importlib.util.find_spec(host) is None:
        plugin()  # the engine must start
        assert re.search(f"runs its own kernels: .*tried with {host} .*, but {host} is not installed", caplog.text)
        with pytest.raises(UnsupportedError, match=f"tried with {host}"):
            importlib.import_module(entry_point.module).register()
