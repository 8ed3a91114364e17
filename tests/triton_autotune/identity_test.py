"""A kernel's digest follows what it computes, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from stoneware.triton_autotune.identity import identity_of, op_name

SOURCE = '''
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)


@triton.jit
def inner(x):
    return x * FACTOR


@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    """Doubles."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, inner(tl.load(x_ptr + offsets, mask=mask)), mask=mask)
'''


def load(folder, source, name="kernels"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(folder, source, name="kernels"):
    return identity_of(load(folder, source, name).kernel).sha256


@pytest.fixture
def original(tmp_path):
    return digest(tmp_path / "original", SOURCE)


@pytest.mark.parametrize(
    "change",
    [
        lambda source: "# a line\n\n\n" + source,
        lambda source: source.replace("@triton.jit\ndef kernel", "\n\n@triton.jit\ndef kernel"),
        lambda source: source + "\nUNUSED = 7\n\n@triton.jit\ndef other(x):\n    return x\n",
        lambda source: source.replace("@triton.jit\ndef kernel", "@triton.heuristics({})\n@triton.jit\ndef kernel"),
    ],
    ids=["further down", "gap", "neighbours", "decorator"],
)
def test_moving_a_kernel_keeps_its_digest(tmp_path, original, change):
    assert digest(tmp_path / "elsewhere", change(SOURCE), "other_name") == original


@pytest.mark.parametrize(
    "old, new",
    [
        ("offsets < n", "offsets <= n"),
        ("x * FACTOR", "x + FACTOR"),
        ("constexpr(3)", "constexpr(4)"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 64"),
        ("@triton.jit\ndef inner", "@triton.jit(noinline=True)\ndef inner"),
    ],
)
def test_editing_what_it_computes_changes_its_digest(tmp_path, original, old, new):
    assert old in SOURCE
    assert digest(tmp_path / "edited", SOURCE.replace(old, new)) != original


def test_a_default_by_name_counts_with_its_value(tmp_path):
    text = "BLOCK: tl.constexpr"
    first, second = (
        digest(tmp_path / str(value), f"SIZE = {value}\n" + SOURCE.replace(text, f"{text} = SIZE"))
        for value in (32, 64)
    )
    assert first != second


def test_a_kernel_of_another_module_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for factor in (2, 3):
        (tmp_path / "parts.py").write_text(f"import triton\n\n\n@triton.jit\ndef scaled(x):\n    return x * {factor}\n")
        sys.modules.pop("parts", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        source = SOURCE.replace("inner(tl.load", "parts.scaled(tl.load")
        digests.append(digest(tmp_path / str(factor), "import parts\n" + source))
    sys.modules.pop("parts", None)
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "setting",
    [
        "import types\nOPTIONS = types.SimpleNamespace(factor=tl.constexpr({}))",
        "class OPTIONS:\n    factor = tl.constexpr({})",
        "def plain():\n    return {}\n\n\nclass OPTIONS:\n    factor = triton.constexpr_function(plain)",
    ],
    ids=["object", "class", "function"],
)
def test_what_a_kernel_reads_through_an_attribute_counts(tmp_path, setting):
    """A kernel that is kept on disk would otherwise be launched with the old value."""
    source = SOURCE.replace("x * FACTOR", "x * OPTIONS.factor")
    digests = [
        digest(tmp_path / str(value), source.replace("FACTOR = tl.constexpr(3)", setting.format(value)))
        for value in (2, 3, 2)
    ]
    assert digests[0] == digests[2] != digests[1]


def test_a_value_of_a_closure_counts(tmp_path):
    head, body = SOURCE.split("@triton.jit\ndef inner")[0], SOURCE.split("return x * FACTOR")[1]
    body = textwrap.indent(body.replace("inner(tl.load", "(factor * tl.load"), "    ")
    source = f"{head}def make(factor):\n{body}    return kernel\n\n\n"
    source += "kernel = make(tl.constexpr({}))\n"
    digests = [digest(tmp_path / str(value), source.format(value)) for value in (2, 3, 2)]
    assert digests[0] == digests[2] != digests[1]


def test_a_kernel_that_calls_itself_has_a_digest(tmp_path):
    source = SOURCE.replace("return x * FACTOR", "return inner(x) * FACTOR")
    assert digest(tmp_path / "a", source) == digest(tmp_path / "b", source)


def test_global_values_that_are_compiled_in_are_known(tmp_path):
    module = load(tmp_path, SOURCE)
    global_values = identity_of(module.kernel).global_values
    assert [(name, value.value) for name, value, _ in global_values] == [("FACTOR", 3)]
    assert all(scope is vars(module) for _, _, scope in global_values)


def test_the_interpreter_gives_a_digest_too(tmp_path):
    (tmp_path / "kernels.py").write_text(SOURCE)
    code = (
        "from stoneware.triton_autotune.identity import identity_of; import kernels; "
        "print(identity_of(kernels.kernel).sha256)"
    )
    digests = {run(code, tmp_path, TRITON_INTERPRET=flag) for flag in ("0", "1")}
    assert len(digests) == 1, digests


def run(code, folder, *arguments, **environment):
    import os

    command = [sys.executable, *(arguments or ("-c", code))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join([*map(os.path.abspath, sys.path), str(folder)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_name_is_module_and_function(tmp_path):
    assert op_name(load(tmp_path, SOURCE, "kernels").kernel) == "kernels:kernel"


def test_a_kernel_of_the_main_program_is_named_as_an_import_would_name_it(tmp_path):
    program = SOURCE + textwrap.dedent("""
        from stoneware.triton_autotune.identity import op_name
        print(op_name(kernel))
    """)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(program)
    assert run("", tmp_path, str(package / "train.py")) == "train:kernel"
    assert run("", tmp_path, "-m", "package.train") == "package.train:kernel"
    assert run("import package.train", tmp_path) == "package.train:kernel"


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match="must be a function under @triton.jit.*int"):
        op_name(3)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
