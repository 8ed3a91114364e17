"""explain: ops and decorated kernels, and the mistakes that it names."""

from __future__ import annotations

import sys

import pytest
import small_samples as small
import torch
from conftest import as_json, forget, stoneware
from small_samples import GROUPED, GROUPED_VENDOR, KERNEL_OP, grouped_sample, kernel_sample, run

from stoneware.cli import exit_codes
from stoneware.tuning.store import Store


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--scales", "row"], "--scales must be left out"),
        (
            ["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--scales", "foo"],
            "scales='foo' must be one of tensor, row, block, block_1d, or two as tensor/row",
        ),
        (["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--scales", "row/foo"], "scales='row/foo' must"),
        (
            [KERNEL_OP, "M=1", "-m", 1, "--out-dtype", "bf16"],
            "-m --out-dtype must be left out: a decorated kernel takes KEY=VALUE",
        ),
        ([KERNEL_OP, "M=1", "--bias"], "--bias must be left out"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2], "--num-groups must be left out"),
        (["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--batch", 2], "--batch must be left out"),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--layout", "nn"],
            "--layout must be left out: grouped_mm has no choice of a layout, only matmul has",
        ),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", "xy"], "layout='xy' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", "n"], "layout='n' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", ""], "layout='' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--batch", 0], "batch=0 must be at least 1"),
        (
            ["matmul", "-m", 0, "-n", 16, "-k", 16, "--batch", 4],
            "m=0 must be at least 1; an empty matmul runs no kernel, so leave it out",
        ),
        (["grouped_mm", "-m", 1, "-n", 16, "-k", 16], "--num-groups must be given for grouped_mm"),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--bias"],
            "--bias must be left out: grouped_mm has no bias, only scaled_mm and matmul have",
        ),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--scales", "tensor"],
            "scales='tensor' must be one of row, block",
        ),
    ],
)
def test_explain_refuses_flags_that_do_not_apply(package, capsys, arguments, message):
    code, _, err = stoneware(capsys, "explain", *arguments)
    assert code == exit_codes.USAGE and message in err


def test_explain_prints_the_layer_and_the_source(package, capsys):
    arguments = ("explain", "scaled_mm", "-m", "16", "-n", "4096", "-k", "4096")
    code, document = as_json(capsys, *arguments, "--device", "H200")
    assert code == exit_codes.OK
    assert {
        "op",
        "problem",
        "device",
        "config",
        "step",
        "grade",
        "reason",
        "chosen",
        "runners_up",
        "refusals",
        "table_digest",
        "run",
    } <= set(document)
    code, out, _ = stoneware(capsys, *arguments, "--device", "H200")
    assert "step" in out and "config" in out


@pytest.fixture
def grouped_table(package, tmp_path, capsys):
    """Installs a table of groups, in which the vendor library is chosen: it needs no module."""
    folder = small.write_folder(
        tmp_path / "grouped",
        [
            grouped_sample(GROUPED_VENDOR, 9.0),
            grouped_sample(GROUPED, 12.0),
            grouped_sample(GROUPED_VENDOR, 20.0, m=64),
            grouped_sample(GROUPED, 24.0, m=64),
            grouped_sample(GROUPED_VENDOR, 99.0, num_groups=32),
        ],
    )
    table = package / "tables" / "grouped_mm.table"
    assert stoneware(capsys, "bake", "--op", "grouped_mm", "--out", table, folder)[0] == exit_codes.OK
    forget()
    return folder


@pytest.mark.parametrize(
    "m, num_groups, step, median_us",
    [(128, 8, "exact", 9.0), (121, 8, "exact", 9.0), (129, 8, "nearest m", 20.0), (512, 32, "exact", 99.0)],
)
def test_explain_finds_a_grouped_measurement_by_groups_and_mean_rows(
    grouped_table, capsys, m, num_groups, step, median_us
):
    code, document = as_json(
        capsys,
        "explain",
        "grouped_mm",
        "-m",
        m,
        "-n",
        4096,
        "-k",
        14336,
        "--num-groups",
        num_groups,
        "--dtype",
        "bf16",
        "--device",
        "H200",
    )
    assert (code, document["step"], document["grade"]) == (exit_codes.OK, step, step)
    assert document["chosen"]["median_us"] == median_us
    assert document["problem"]["num_groups"] == num_groups


def test_explain_prints_the_groups_and_the_runners_up(grouped_table, capsys):
    _, out, _ = stoneware(
        capsys,
        "explain",
        "grouped_mm",
        "-m",
        128,
        "-n",
        4096,
        "-k",
        14336,
        "--num-groups",
        8,
        "--dtype",
        "bf16",
        "--device",
        "H200",
    )
    assert "grouped_mm m=128 n=4096 k=14336 groups=8 bf16*bf16->bf16" in out
    assert "12.00 us" in out and "tile 64x64x128" in out


def test_explain_of_an_unknown_device_names_the_known(package, capsys):
    code, _, err = stoneware(capsys, "explain", "scaled_mm", "-m", "16", "-n", "4096", "-k", "4096", "--device", "Z1")
    assert code == exit_codes.USAGE and "device='Z1'" in err and "H200" in err


@pytest.mark.parametrize("name", ["A100", "sm_80"])
def test_explain_takes_a_gpu_that_was_not_measured(package, capsys, name):
    arguments = ("explain", "matmul", "-m", "16", "-n", "4096", "-k", "4096", "--device", name)
    code, document = as_json(capsys, *arguments)
    assert code == exit_codes.OK
    assert document["device"]["name"] == "NVIDIA A100-SXM4-80GB" and document["grade"] in ("heuristic", "default")


def test_explain_without_a_gpu_suggests_a_device(package, capsys):
    code, out, _ = stoneware(capsys, "explain", "matmul", "-m", "16", "-n", "4096", "-k", "4096")
    assert code == exit_codes.OK
    assert torch.cuda.is_available() or "command line --device) with a name such as H200" in " ".join(out.split())


@pytest.fixture
def kernel_store(own_store, package):
    Store(own_store / "samples.sqlite3").add(
        run(), [kernel_sample(64, 10.0, 4), kernel_sample(64, 12.0, 8), kernel_sample(128, 20.0, 8)]
    )


def test_explain_of_a_decorated_kernel_imports_nothing_of_the_users(kernel_store, capsys):
    code, document = as_json(capsys, "explain", KERNEL_OP, "COLS=1024", "M=64")
    assert code == exit_codes.OK
    [answer] = document["answers"]
    assert answer["problem"] == {
        "op": KERNEL_OP,
        "names": ["COLS", "M"],
        "values": [1024, 64],
        "dtypes": [["x", "fp32"]],
    }
    assert answer["reason"].startswith("10.00 us on NVIDIA H200, run run-1; ")
    assert answer["run"]["driver"] == "580.95"
    assert (answer["step"], answer["source"]) == ("exact", "user's store")
    assert answer["chosen"]["config"]["num_warps"] == 4
    assert [item["median_us"] for item in answer["runners_up"]] == [12.0]
    assert "mypackage" not in sys.modules


def test_explain_of_a_decorated_kernel_takes_the_nearest_m(kernel_store, capsys):
    code, out, _ = stoneware(capsys, "explain", KERNEL_OP, "M=512", "COLS=1024")
    assert code == exit_codes.OK
    assert "nearest m, from the user's store" in out and "num_warps=8" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["M=64"], "must give each key argument of mypackage.kernels:softmax once: COLS, M"),
        (["M"], "'M' must be KEY=VALUE"),
        (["COLS=1024", "M=64", "--device", "L40"], "device='L40' is not in the set of measurements, which has"),
        (["COLS=1024", "M=64", "--device", "sm_80"], "device='sm_80' must be that of a measured device; pass one of"),
        (["COLS=wide", "M=64"], "must be of a kind that was measured"),
        ([f"COLS={'[' * 100_000}", "M=64"], "must be of a kind that was measured"),
    ],
)
def test_explain_of_a_decorated_kernel_names_mistakes(kernel_store, capsys, arguments, message):
    code, _, err = stoneware(capsys, "explain", KERNEL_OP, *arguments)
    assert code == exit_codes.USAGE and message in err


def test_explain_of_a_decorated_kernel_takes_a_compute_capability(kernel_store, capsys):
    code, document = as_json(capsys, "explain", KERNEL_OP, "COLS=1024", "M=64", "--device", "sm_90")
    assert code == exit_codes.OK
    assert [answer["device"]["name"] for answer in document["answers"]] == ["NVIDIA H200"]


def test_explain_of_an_unknown_kernel_says_how_to_measure_it(package, capsys):
    code, _, err = stoneware(capsys, "explain", "mypackage:none", "M=1")
    assert code == exit_codes.USAGE and 'under stoneware.tuning("on_miss")' in err
