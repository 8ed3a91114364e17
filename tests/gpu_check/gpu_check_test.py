"""tools/gpu_check without a GPU: the archive is deterministic and picks its wheel."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import zipfile

import pytest

from stoneware.measuring import operands
from stoneware.specs.matmul_problem import Problem
from tools.gpu_check import bundle, runner

HERE = pathlib.Path(__file__).parent
SOURCES = [
    f"tools/gpu_check/{name}={HERE.parents[1] / 'tools/gpu_check' / name}"
    for name in ("compute_sanitizer.py", "document.py", "processes.py", "runner.py")
]


@pytest.fixture
def wheel(tmp_path) -> str:
    path = tmp_path / "stoneware-1-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("stoneware/__init__.py", "")
    return str(path)


def test_equal_inputs_give_equal_bytes_in_any_order(tmp_path, wheel):
    extra = [f"tests/gpu/a_test.py={__file__}", *SOURCES]
    for name, sources in (("one.pyz", extra), ("another_name.pyz", extra[::-1])):
        bundle.write(tmp_path / name, bundle.collect([wheel], [], sources))
    assert (tmp_path / "one.pyz").read_bytes() == (tmp_path / "another_name.pyz").read_bytes()


def test_the_archive_runs_alone(tmp_path, wheel):
    archive = tmp_path / "gpu_check.pyz"
    bundle.write(archive, bundle.collect([wheel], [], SOURCES))
    done = subprocess.run([sys.executable, "-I", str(archive), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check,bench,sample,autotune,invariance,sanitize,held_out,layers,sweep,deep_gemm,all" in done.stdout


def test_out_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code = runner.main(["check", "--out", str(tmp_path / "file" / "out")], tmp_path / "none.pyz")
    assert code == 2
    assert f"gpu_check: --out={tmp_path}/file/out must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], SOURCES), "--wheel must be given"),
        ((["w.whl"], ["numpy-1-cp311-cp311-linux_x86_64.whl"], SOURCES), "numpy-1-cp311"),
        (([__file__], [], []), "tools/gpu_check/runner.py"),
        (([__file__], [], ["/etc/x=y"]), "NAME=PATH"),
        (([__file__, __file__], [], SOURCES), "only once; remove the other"),
    ],
)
def test_inputs_that_make_no_archive_are_refused(arguments, message):
    with pytest.raises(bundle.BundleError, match=message):
        bundle.collect(*arguments)


@pytest.mark.parametrize(
    ("tags", "python", "fits"),
    [
        ("cp311-cp311", (3, 11), True),
        ("cp311-cp311", (3, 12), False),
        ("cp312-abi3", (3, 11), False),
        ("cp312-abi3", (3, 12), True),
        ("cp312-abi3", (3, 14), True),
        ("py3-none", (3, 13), True),
    ],
)
def test_wheel_tags(tags, python, fits):
    assert runner.wheel_fits(f"stoneware-0.1.0-{tags}-manylinux_2_28_x86_64.whl", python) is fits


def test_no_wheel_that_fits_is_an_error_that_lists_them(tmp_path):
    (tmp_path / "stoneware-1-cp312-abi3-linux_x86_64.whl").touch()
    with pytest.raises(runner.RunnerError, match=r"3\.11 must be .*cp312-abi3"):
        runner.choose_wheel(tmp_path, (3, 11))


def test_sample_tunes_into_the_folder_of_the_results(tmp_path, monkeypatch):
    ran = []
    sampler = runner.Runner.__new__(runner.Runner)
    sampler._out_dir, sampler._commit = tmp_path, "c0ffee"
    monkeypatch.setattr(sampler, "_run", lambda name, arguments: ran.append(arguments) or 0)
    assert sampler.sample(["--ops", "matmul"]) == 0
    assert ran == [[
        "stoneware", "tune", f"--store={tmp_path}/samples.sqlite3", "--commit=c0ffee", "--ops", "matmul",
    ]]  # fmt: skip


def test_a_test_that_took_its_process_down_counts_as_crashed(tmp_path):
    outcomes = [
        ("a", "started"), ("a", "passed"), ("b", "started"),
        ("c", "started"), ("c", "failed"), ("d", "started"), ("d", "skipped"),
    ]  # fmt: skip
    paths = [tmp_path / "check_0.jsonl", tmp_path / "check_1.jsonl", tmp_path / "check_2.jsonl"]  # the last is missing
    lines = [json.dumps({"test": test, "outcome": outcome, "message": outcome}) + "\n" for test, outcome in outcomes]
    for path, share in zip(paths, (lines[:3], lines[3:])):
        path.write_text("".join(share))
    summary = runner.summarise_outcomes(paths)
    assert summary["counts"] == {"passed": 1, "crashed": 1, "failed": 1, "skipped": 1}
    assert [failure["test"] for failure in summary["failures"]] == ["b", "c"]


def test_a_selection_of_tests_checks_the_kernels_whose_values_passed(tmp_path):
    values, other = "tests/gpu/matmul_values_test.py::test", "tests/gpu/concurrency_test.py::test"
    outcomes = [
        (f"{values}[16-a_64x16]", "passed"), (f"{values}[17-a_64x16]", "passed"), (f"{values}[a_64x16_swap]", "passed"),
        (f"{values}[9-a_64x16_swap]", "failed"), (f"{values}[b]", "started"), (f"{values}[c-2]", "skipped"),
        (f"{other}[d]", "passed"),
    ]  # fmt: skip
    path = tmp_path / "check_0.jsonl"
    path.write_text("".join(json.dumps({"test": t, "outcome": o, "message": ""}) + "\n" for t, o in outcomes))
    digests = dict.fromkeys(["a_64x16", "a_64x16_swap", "b", "c", "d", "a"], "1")
    assert runner.kernels_named(digests, [path, tmp_path / "missing.jsonl"]) == {"a_64x16": "1"}


@pytest.mark.parametrize(
    ("gpus", "num_cpus", "expected"),
    [
        ([{"memory_bytes": 80 << 30}], 16, 6),
        ([{"memory_bytes": 80 << 30}], 4, 2),
        ([{"memory_bytes": 24 << 30}], 16, 2),
        ([{"memory_bytes": 8 << 30}], 1, 1),
        ([{"unknown": "no driver"}], 16, 1),
        ([], 16, 1),
    ],
)
def test_processes_of_a_check_fit_the_machine(gpus, num_cpus, expected):
    assert runner.choose_num_shards(gpus, num_cpus) == expected


def test_comparison_sees_one_wrong_element_that_the_norm_hides():
    import torch

    expected = torch.randn(256, 8192)
    problem = Problem.dense(m=256, n=8192, k=64)
    out = expected.to(torch.bfloat16)
    assert operands.compare(out, expected, problem).is_right
    out[5, 7] += 3
    comparison = operands.compare(out, expected, problem)
    assert comparison.error < comparison.limit and not comparison.is_right
    out[5, 7] = float("nan")
    assert not operands.compare(out, expected, problem).is_right


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
