"""What importing costs and does: no torch, no native module, no CUDA, no file, no thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    "module",
    [
        "stoneware",
        "stoneware.errors",
        "stoneware.tuning.bake",
        "stoneware.tuning.lookup",
        "stoneware.tuning.samples",
        "stoneware.tuning.table",
        "stoneware.specs.scaled_mm_problem",
        "stoneware.specs.scaled_mm",
        "stoneware.specs.grouped_mm",
        "stoneware.specs.matmul_problem",
        "stoneware.specs.matmul",
        "stoneware.runtime.device",
        "stoneware.kernels.manifest",
        "stoneware.tuning.choose",
        "stoneware.tuning.entries",
        "stoneware.tuning.sources",
        "stoneware.tuning.policy",
        "stoneware.tuning.table_file",
        "stoneware.distributed",
        "stoneware.tile",
    ],
)
def test_import_needs_neither_torch_nor_a_native_module(module):
    loaded = run(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not {"torch", "numpy", "triton", "sqlite3"} & set(loaded)
    assert not [name for name in loaded if name.startswith("stoneware") and "._" in name]


def test_import_of_the_package_loads_nothing_of_it():
    loaded = run("import sys, stoneware; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("stoneware")] == ["stoneware"]


def test_api_starts_no_thread_and_no_cuda():
    program = (
        "import threading, torch, stoneware as sw; sw.scaled_mm, sw.matmul, sw.explain, sw.info; "
        "sw.tuning, sw.distributed, sw.autotune; "
        "print(threading.active_count(), torch.cuda.is_initialized())"
    )
    assert run(program).split() == ["1", "False"]


@pytest.mark.parametrize("use", ["sw.scaled_mm", "sw.matmul", "sw.explain('matmul', m=8, n=8, k=8)"])
def test_use_without_torch_says_what_to_install(use):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import stoneware as sw\n"
        f"try: {use}\n"
        "except ImportError as error: print(error)"
    )
    assert 'pip install "torch>=2.11"' in run(program)


@pytest.mark.parametrize(
    "broken",
    [
        "class Torch:\n  def __getattr__(self, name): raise OSError('libc10.so is missing')\n"
        "sys.modules['torch'] = Torch()",
        "import stoneware.runtime.native as native; import types\n"
        "module = types.ModuleType('stoneware.runtime._driver')\n"
        "def driver_version(): raise SystemError('half built')\n"
        "module.driver_version = driver_version\n"
        "sys.modules[module.__name__] = module",
        "import importlib; whole = importlib.import_module\n"
        "def import_module(name, package=None):\n"
        "  if '._' in name: raise AttributeError('half built')\n"
        "  return whole(name, package)\n"
        "importlib.import_module = import_module",
    ],
)
def test_info_says_what_is_broken_and_never_raises(broken):
    said = run(f"import sys\n{broken}\nimport stoneware as sw; print(sw.info())")
    assert "libc10.so is missing" in said or "half built" in said


CONTEXT = (
    "import types; context = types.ModuleType('stoneware.tuning.context')\n"
    "context.tuning = lambda *arguments, **options: (arguments, options)\n"
    "import sys; sys.modules[context.__name__] = context\n"
)


@pytest.mark.parametrize(
    "imports",
    [
        "import stoneware as sw; tuning = sw.tuning",
        "import stoneware as sw, stoneware.tuning.choose; tuning = sw.tuning",
        "import stoneware as sw; sw.tuning; import stoneware.tuning.choose; tuning = sw.tuning",
        "from stoneware import tuning",
        "from stoneware.tuning import choose; from stoneware import tuning",
        "import stoneware.tuning as tuning",
    ],
)
def test_tuning_is_the_context_manager_and_the_package(imports):
    program = (
        f"{CONTEXT}{imports}\n"
        "import stoneware.tuning.choose, stoneware\n"
        "assert callable(tuning) and tuning is stoneware.tuning\n"
        "assert tuning is sys.modules['stoneware.tuning']\n"
        "assert isinstance(tuning, types.ModuleType) and tuning.choose.choose\n"
        "print(tuning('off', overlay='folder'))"
    )
    assert run(program).strip() == "(('off',), {'overlay': 'folder'})"


def test_import_of_tuning_loads_no_context():
    loaded = run("import sys, stoneware as sw; sw.tuning; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("stoneware")] == ["stoneware", "stoneware.tuning"]


def test_tuning_can_be_called_where_its_policy_was_imported_before():
    program = (
        "import stoneware.tuning.policy, stoneware as sw; from stoneware import *\n"
        "assert tuning is sw.tuning\n"
        "with sw.tuning('on_miss'): print(stoneware.tuning.policy.current_mode())\n"
    )
    assert run(program).strip() == "on_miss"


def test_unknown_name_lists_the_known_ones():
    import stoneware

    with pytest.raises(AttributeError, match="no attribute 'gemm'; it has .*scaled_mm"):
        stoneware.gemm
    assert {"scaled_mm", "matmul", "explain", "info", "tuning", "autotune", "distributed"} <= set(dir(stoneware))
