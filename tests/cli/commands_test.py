"""bake, merge, diff, verify, explain and info: what they do, print, and end with."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types

import pytest
import small_samples as small
from conftest import forget
from small_samples import (
    GROUPED,
    GROUPED_VENDOR,
    KERNEL_OP,
    UNKNOWN_GPU,
    VENDOR,
    grouped_sample,
    kernel_sample,
    ours,
    run,
    sample,
)

from stoneware.cli import exit_codes, main, verification
from stoneware.kernels import manifest
from stoneware.tuning import samples as sample_format
from stoneware.tuning.bake import bake
from stoneware.tuning.merge import file_name
from stoneware.tuning.store import Store

SMALL, BIG = ours("64x16x256"), ours("64x64x256")


def stoneware(capsys, *arguments) -> tuple[int, str, str]:
    code = main.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys, *arguments) -> tuple[int, dict]:
    code, out, _ = stoneware(capsys, *arguments, "--json")
    document = json.loads(out)
    assert (document["command"], document["exit_code"]) == (arguments[0], code)
    return code, document


@pytest.fixture
def h200(tmp_path):
    return small.write_folder(
        tmp_path / "h200", [sample(SMALL, 10.0), sample(BIG, 14.0), sample(VENDOR, 16.0), sample(SMALL, 20.0, m=64)]
    )


def test_bake_writes_what_the_function_returns(h200, package, tmp_path, capsys):
    out = tmp_path / "table.table"
    code, document = as_json(capsys, "bake", "--op", "scaled_mm", "--out", out, h200)
    assert code == exit_codes.OK
    assert out.read_bytes() == bake("scaled_mm", h200.iterdir(), manifest.packaged())
    assert set(document) == {"command", "exit_code", "op", "out", "digest", "num_bytes", "num_files", "devices"}
    assert document["num_files"] == 3
    [device] = document["devices"]
    assert device["name"] == "NVIDIA H200"


def test_bake_takes_files_and_a_manifest_too(h200, tmp_path, capsys):
    given = tmp_path / "kernel_manifest.json"
    given.write_text(small.manifest_text())
    out = tmp_path / "table.table"
    code, said, _ = stoneware(capsys, "bake", "--op", "scaled_mm", "--manifest", given, "--out", out, *h200.iterdir())
    assert code == exit_codes.OK and said.startswith(f"{out}: ")
    assert out.read_bytes() == bake("scaled_mm", h200.iterdir(), manifest.read_manifest(given))


def test_bake_of_a_kernel_that_the_manifest_lacks_fails_with_its_place(package, tmp_path, capsys):
    folder = small.write_folder(tmp_path / "h200", [sample(ours("1x1x1"), 10.0)])
    out = tmp_path / "table.table"
    code, _, err = stoneware(capsys, "bake", "--op", "scaled_mm", "--out", out, folder)
    assert code == exit_codes.USAGE
    assert f"{folder}/scaled_mm.jsonl:1: kernel" in err
    assert not out.exists()


def test_bake_touches_no_file_but_its_own(package, h200, tmp_path, capsys):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "u.table.draft").symlink_to(tmp_path / "precious")
    out = tmp_path / "u.table"
    arguments = ("bake", "--op", "scaled_mm", "--out", out, h200)
    assert stoneware(capsys, *arguments)[0] == exit_codes.OK
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "u.table.draft").is_symlink() and out.is_file() and not out.is_symlink()


def test_bake_into_a_missing_folder_names_it(package, h200, tmp_path, capsys):
    out = tmp_path / "missing" / "table.table"
    code, _, err = stoneware(capsys, "bake", "--op", "scaled_mm", "--out", out, h200)
    assert code == exit_codes.USAGE and f"{out}: No such file or directory" in err


def test_merge_unites_folders_and_stores(h200, tmp_path, capsys):
    store = Store(tmp_path / "node.sqlite3")
    store.add(run("run-2"), [sample(BIG, 13.0, run="run-2")])
    code, document = as_json(capsys, "merge", h200, store.path, "--out", tmp_path / "all")
    assert code == exit_codes.OK
    assert document["num_samples"] == 5 and document["problems"] == []
    [folder] = document["folders"]
    assert folder == str(tmp_path / "all" / "nvidia_h200")
    code, document = as_json(capsys, "merge", h200, store.path, "--out", tmp_path / "new", "--keep", "newest")
    assert document["num_samples"] == 4


def test_merge_says_what_it_left_out_and_ends_with_1(h200, tmp_path, capsys):
    with (h200 / "scaled_mm.jsonl").open("a") as file:
        file.write("{garbage\n")
    code, out, err = stoneware(capsys, "merge", h200, "--out", tmp_path / "all")
    assert code == exit_codes.FOUND
    assert "4 samples" in out and f"{h200}/scaled_mm.jsonl:3" in err


def test_merge_of_nothing_is_a_mistake(tmp_path, capsys):
    code, _, err = stoneware(capsys, "merge", tmp_path / "none", "--out", tmp_path / "all")
    assert code == exit_codes.USAGE and "none: no such file or folder" in err


def test_diff_of_the_same_is_0_and_of_others_1(h200, tmp_path, capsys):
    assert as_json(capsys, "diff", h200, h200)[0] == exit_codes.OK
    other = small.write_folder(
        tmp_path / "other",
        [sample(SMALL, 15.0), sample(BIG, 12.0), sample(SMALL, 20.0, m=64), sample(SMALL, 30.0, m=128)],
    )
    code, document = as_json(capsys, "diff", h200, other)
    assert code == exit_codes.FOUND
    assert set(document) == {"command", "exit_code", "num_common", "fraction", "changed", "only_a", "only_b", "skipped"}
    assert (document["num_common"], document["fraction"]) == (2, 0.5)
    [changed] = document["changed"]
    assert (changed["median_us_a"], changed["median_us_b"]) == (10.0, 12.0)
    assert [item["key"]["m"] for item in document["only_b"]] == [128]
    code, out, _ = stoneware(capsys, "diff", h200, other)
    assert "scaled_mm m=16 n=4096 k=4096" in out and "1.200" in out and "50.0%" in out
    assert "\x1b" not in out


def test_diff_of_what_cannot_be_read_is_never_0(h200, capsys):
    with (h200 / "scaled_mm.jsonl").open("a") as file:
        file.write("{garbage\n")
    code, document = as_json(capsys, "diff", h200, h200)
    assert (code, document["num_common"], document["changed"]) == (exit_codes.FOUND, 2, [])
    [skipped] = document["skipped"]
    assert f"{h200}/scaled_mm.jsonl:3" in skipped
    code, _, err = stoneware(capsys, "diff", h200, h200)
    assert code == exit_codes.FOUND and skipped in err


@pytest.mark.parametrize("path, said", [("", "is empty"), ("none", "no such file or folder")])
def test_diff_of_no_path_is_a_mistake(h200, capsys, path, said):
    code, _, err = stoneware(capsys, "diff", h200, path)
    assert code == exit_codes.USAGE and said in err


@pytest.mark.parametrize("arguments", [["verify", ""], ["merge", "", "--out", "all"], ["report", "", "--json"]])
def test_an_empty_path_is_not_the_current_folder(h200, monkeypatch, capsys, arguments):
    monkeypatch.chdir(h200)
    code, out, err = stoneware(capsys, *arguments)
    assert code == exit_codes.USAGE and "is empty" in out + err


def test_diff_takes_tables(package, capsys):
    path = package / "tables" / "scaled_mm.table"
    assert stoneware(capsys, "diff", path, path)[0] == exit_codes.OK


def test_diff_takes_samples_of_an_op_that_is_not_known_here(package, h200, capsys):
    known = (h200 / "scaled_mm.jsonl").read_text()
    (h200 / "newer.jsonl").write_text(known.replace('"op":"scaled_mm"', '"op":"newer"'))
    code, document = as_json(capsys, "diff", h200, h200)
    assert (code, document["num_common"]) == (exit_codes.OK, 4)


def test_diff_of_an_edited_kernel_takes_its_newest_source(tmp_path, capsys):
    """Its old source had a faster config."""
    before, now = (
        dataclasses.replace(kernel_sample(64, us, num_warps=warps), kernel_sha256=source, run=name)
        for us, warps, source, name in ((5.0, 8, "a" * 64, "run-1"), (8.0, 4, "b" * 64, "run-2"))
    )
    runs = [run(), run("run-2", date="2026-11-22")]
    both = small.write_folder(tmp_path / "both", [before, now], runs=runs)
    last = small.write_folder(tmp_path / "last", [now], runs=runs)
    assert as_json(capsys, "diff", both, last)[0] == exit_codes.OK


def test_a_table_differs_nowhere_from_the_samples_it_was_baked_of(package, tmp_path, capsys):
    """Nor where candidates tie, which the rule of thumb settles, in both orders of their names."""
    samples = small.write_folder(
        tmp_path / "samples",
        [
            sample(config, 10.0 + 0.1 * (config == faster), m=m)
            for m, faster in ((16, SMALL), (64, BIG))
            for config in (SMALL, BIG)
        ],
    )
    table = tmp_path / "baked.table"
    assert stoneware(capsys, "bake", "--op", "scaled_mm", "--out", table, samples)[0] == exit_codes.OK
    _, document = as_json(capsys, "diff", table, samples)
    assert document["num_common"] == 2
    assert document["changed"] == document["only_a"] == document["only_b"] == []


@pytest.fixture
def native_module(package, monkeypatch):
    """A native module that has the cubins of the manifest; returns it."""
    module = types.SimpleNamespace(
        kernels=lambda: [{"id": config.kernel} for config in (SMALL, BIG, GROUPED)], cubin=small.cubin
    )
    monkeypatch.setitem(sys.modules, "small_native_module", module)
    monkeypatch.setattr(verification, "NATIVE_MODULES", ("small_native_module",))
    return module


def test_verify_of_a_good_installation_is_0(native_module, own_store, capsys):
    Store(own_store / "samples.sqlite3").add(run(), [sample(SMALL, 10.0)])
    code, document = as_json(capsys, "verify")
    assert document["problems"] == [] and code == exit_codes.OK
    assert set(document) == {"command", "exit_code", "parts", "problems"}
    assert set(document["parts"]) == {
        "manifest",
        "native modules",
        "kernels",
        "tables",
        "packages' tables",
        "user's store",
        "mode of tuning",
    }


def test_verify_finds_each_kind_of_damage_with_its_place(native_module, package, own_store, capsys):
    store = Store(own_store / "samples.sqlite3")
    store.add(run(), [sample(SMALL, 10.0)])
    data = store.path.read_bytes()
    store.path.write_bytes(b"\0" * 100 + data[100:])
    (package / "cubins" / f"{small.TRITON_ID}.cubin").write_bytes(b"other bytes")
    (package / "cubins" / f"{small.TRITON_ID}.json").unlink()
    native_module.cubin = lambda kernel_id: b"other bytes"
    table = package / "tables" / "matmul.table"
    table.write_bytes(table.read_bytes().replace(b"matmul", b"matmuL", 1))
    forget()
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FOUND
    said = {(item["part"], item["problem"]) for item in document["problems"]}
    for part, place in (
        ("kernels", f"{small.TRITON_ID}.cubin: expected sha256="),
        ("kernels", f"{small.TRITON_ID}.json: cannot be read"),
        ("kernels", f"small_native_module: {SMALL.kernel}: expected"),
        ("tables", f"{table}: expected content with the digest"),
        ("user's store", str(store.path)),
    ):
        assert any(part == one and place in problem for one, problem in said), (part, place, said)
    assert document["parts"]["manifest"] == 0


def _loop(folder):
    folder.mkdir()
    (folder / "samples.sqlite3").symlink_to("samples.sqlite3")


def _file(folder):
    folder.write_text("")


def _pipe(folder):
    folder.mkdir()
    os.mkfifo(folder / "samples.sqlite3")


@pytest.mark.parametrize("spoil", [_loop, _file, _pipe])
def test_a_store_that_cannot_be_read_at_all_is_no_good_store(native_module, own_store, capsys, spoil):
    spoil(own_store)
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FOUND and document["parts"]["user's store"] == 1
    assert "STONEWARE_CACHE_DIR" in document["problems"][0]["problem"]
    assert "cannot be read" in as_json(capsys, "info")[1]["store"]


@pytest.mark.parametrize("name", ["scaled_mm.jsonl", "runs.json", "table.table"])
def test_a_pipe_in_the_place_of_a_file_is_found_and_not_waited_for(h200, capsys, name):
    (h200 / name).unlink(missing_ok=True)
    os.mkfifo(h200 / name)
    place = h200 / name if name == "table.table" else h200
    code, document = as_json(capsys, "verify", place)
    assert code == exit_codes.FOUND
    assert any("must be a regular file, and is a pipe" in item["problem"] for item in document["problems"])


def test_a_table_of_the_users_own_is_baked_anew_and_not_reinstalled(tmp_path, package, capsys):
    table = tmp_path / "scaled_mm.table"
    table.write_bytes((package / "tables" / "scaled_mm.table").read_bytes()[:-9])
    for command in (["verify", table], ["diff", table, table], ["report", table]):
        _, out, err = stoneware(capsys, *command, *["--json"] * (command[0] == "report"))
        assert "stoneware bake" in out + err and "reinstall" not in out + err


def test_a_mode_of_tuning_that_is_none_is_said(native_module, capsys, monkeypatch):
    monkeypatch.setenv("STONEWARE_TUNING", "nonsense")
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FOUND and document["parts"]["mode of tuning"] == 1
    assert "STONEWARE_TUNING='nonsense'" in as_json(capsys, "info")[1]["mode"]
    code, _, err = stoneware(capsys, "explain", "scaled_mm", "-m", 1, "-n", 1, "-k", 1)
    assert code == exit_codes.USAGE and "STONEWARE_TUNING='nonsense'" in err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--scales", "row"], "--scales must be left out"),
        (
            ["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--scales", "foo"],
            "scales='foo' must be one of tensor, row, block, or two as tensor/row",
        ),
        (["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--scales", "row/foo"], "scales='row/foo' must"),
        ([KERNEL_OP, "M=1", "-m", 1, "--out-dtype", "bf16"], "-m --out-dtype must be left out"),
        ([KERNEL_OP, "M=1", "--bias"], "--bias must be left out"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2], "--num-groups must be left out"),
        (["scaled_mm", "-m", 1, "-n", 16, "-k", 16, "--batch", 2], "--batch must be left out"),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--layout", "nn"],
            "--layout must be left out: for matmul",
        ),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", "xy"], "layout='xy' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", "n"], "layout='n' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--layout", ""], "layout='' must be one of nt"),
        (["matmul", "-m", 1, "-n", 16, "-k", 16, "--batch", 0], "batch=0 must be at least 1"),
        (["matmul", "-m", 0, "-n", 16, "-k", 16, "--batch", 4], "m=0 must be at least 1"),
        (["grouped_mm", "-m", 1, "-n", 16, "-k", 16], "--num-groups must be given for grouped_mm"),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--bias"],
            "--bias must be left out: for scaled_mm and matmul; grouped_mm has no bias",
        ),
        (
            ["grouped_mm", "-m", 1, "-n", 16, "-k", 16, "--num-groups", 2, "--scales", "row"],
            "--scales must be left out",
        ),
    ],
)
def test_explain_refuses_flags_that_do_not_apply(package, capsys, arguments, said):
    code, _, err = stoneware(capsys, "explain", *arguments)
    assert code == exit_codes.USAGE and said in err


def test_bake_of_a_misspelt_kernel_lists_those_that_were_measured(tmp_path, capsys):
    folder = small.write_folder(tmp_path / "h200", [kernel_sample(16, 1.0)])
    out, wrong = tmp_path / "table.table", KERNEL_OP.replace("softmax", "sofmax")
    code, _, err = stoneware(capsys, "bake", "--op", wrong, "--kernels", wrong, "--out", out, folder)
    assert code == exit_codes.USAGE and KERNEL_OP in err and not out.exists()


@pytest.mark.parametrize(
    "make, field", [(lambda: sample(SMALL, 10.0), '"m":16'), (lambda: kernel_sample(16, 1.0), "[1024,16]")]
)
def test_a_size_beyond_all_bounds_is_a_bad_sample_with_its_place(package, tmp_path, capsys, make, field):
    folder = small.write_folder(tmp_path / "h200", [make()])
    [file] = folder.glob("*.jsonl")
    op = make().op
    file = file.rename(folder / file_name(op))
    text = file.read_text()
    assert field in text
    file.write_text(text.replace(field, field.replace("16", "1" + "0" * 400)))
    code, _, err = stoneware(capsys, "bake", "--op", op, "--kernels", op, "--out", tmp_path / "t.table", folder)
    assert code == exit_codes.USAGE and f"{file}:1: not a sample" in err
    assert stoneware(capsys, "report", "--json", folder)[0] == exit_codes.USAGE
    [item, *_] = as_json(capsys, "verify", folder)[1]["problems"]
    assert f"{file}:1: not a sample" in item["problem"]


def test_missing_runs_are_one_line_with_a_count(h200, tmp_path, capsys):
    (h200 / "runs.json").unlink()
    _, _, err = stoneware(capsys, "merge", h200, "--out", tmp_path / "all")
    [line] = [line for line in err.splitlines() if "scaled_mm.jsonl" in line]
    assert f"{h200}/scaled_mm.jsonl: skipped 4 of 4 samples: {h200}/runs.json lacks" in line


def test_verify_finds_a_native_module_and_a_manifest_that_are_missing(package, capsys, monkeypatch):
    monkeypatch.setattr(verification, "NATIVE_MODULES", ("stoneware.no_such_module",))
    (package / "kernel_manifest.json").unlink()
    forget()
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FOUND
    assert document["parts"]["manifest"] == document["parts"]["native modules"] == 1


def test_verify_finds_damage_in_the_table_of_another_package(native_module, tmp_path, capsys, monkeypatch):
    site = tmp_path / "site"
    (site / "acme" / "tables").mkdir(parents=True)
    (site / "acme" / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    table = site / "acme" / "tables" / "scaled_mm.table"
    table.write_text("{}")
    (site / "acme-1.0.dist-info").mkdir()
    (site / "acme-1.0.dist-info" / "METADATA").write_text("Name: acme\nVersion: 1.0\n")
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        "[stoneware.tuning_tables]\nacme = acme.tables\nnone = no_such_package.tables\n"
    )
    monkeypatch.syspath_prepend(str(site))
    forget()
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FOUND
    said = [item["problem"] for item in document["problems"]]
    assert any(problem.startswith(f"package acme: {table}: expected a table") for problem in said)
    assert any("no_such_package" in problem for problem in said) and len(said) == 2


def test_verify_finds_a_table_entry_of_an_unknown_kernel(native_module, package, h200, capsys):
    gone = small.write_folder(package / "gone", [sample(SMALL, 10.0)])
    data = bake("scaled_mm", gone.iterdir(), manifest.packaged())
    (package / "tables" / "scaled_mm.table").write_bytes(data)
    kept = [SMALL.kernel]
    text = json.loads(small.manifest_text())
    document = {"schema": 1, "kernels": [k for k in text["kernels"] if k["id"] not in kept]}
    (package / "kernel_manifest.json").write_text(json.dumps({**document, "digest": manifest.content_digest(document)}))
    forget()
    _, found = as_json(capsys, "verify")
    assert any("is no kernel of the manifest" in item["problem"] for item in found["problems"])


def test_verify_of_paths_looks_at_these_alone(h200, package, tmp_path, capsys):
    good = [h200, package / "kernel_manifest.json", package / "tables" / "scaled_mm.table"]
    code, document = as_json(capsys, "verify", *good)
    assert code == exit_codes.OK and set(document["parts"]) == set(map(str, good))
    with (h200 / "scaled_mm.jsonl").open("a") as file:
        file.write("{garbage\n")
    bad = tmp_path / "kernel_manifest.json"
    bad.write_text(small.manifest_text().replace("sm_90a", "sm_80"))
    cut = tmp_path / "cut.json"
    cut.write_text(small.manifest_text()[:-9])
    code, out, _ = stoneware(capsys, "verify", h200, bad, cut)
    assert code == exit_codes.FOUND
    assert f"{h200}/scaled_mm.jsonl:3" in out and f"{bad}: expected content" in out
    assert f"{cut}: not a kernel manifest" in out and "a table is named *.table" in out


@pytest.mark.parametrize("command", ["verify", "diff", "report"])
def test_a_path_that_is_no_source_is_told_how_a_table_is_named(tmp_path, package, capsys, command):
    table = tmp_path / "scaled_mm"
    table.write_bytes((package / "tables" / "scaled_mm.table").read_bytes())
    paths = [table, table] if command == "diff" else [table]
    _, out, err = stoneware(capsys, command, *paths, *["--json"] * (command == "report"))
    assert f"{table}: no samples" in out + err and "a file *.table" in out + err


def test_explain_prints_the_layer_and_the_source(package, capsys):
    arguments = ("explain", "scaled_mm", "-m", "16", "-n", "4096", "-k", "4096")
    code, document = as_json(capsys, *arguments, "--device", "H200")
    assert code == exit_codes.OK
    assert {
        "op",
        "problem",
        "device",
        "config",
        "layer",
        "grade",
        "reason",
        "chosen",
        "runners_up",
        "refusals",
        "table_digest",
        "run",
    } <= set(document)
    code, out, _ = stoneware(capsys, *arguments, "--device", "H200")
    assert "layer" in out and "config" in out


@pytest.fixture
def grouped_table(package, tmp_path, capsys):
    """Installs a table of groups, in which the vendor library is chosen: it needs no module."""
    folder = small.write_folder(
        tmp_path / "grouped",
        [
            grouped_sample(GROUPED_VENDOR, 9.0),
            grouped_sample(GROUPED, 12.0),
            grouped_sample(GROUPED_VENDOR, 20.0, m=64),
            grouped_sample(GROUPED, 20.1, m=64),
            grouped_sample(GROUPED_VENDOR, 99.0, num_groups=32),
        ],
    )
    table = package / "tables" / "grouped_mm.table"
    assert stoneware(capsys, "bake", "--op", "grouped_mm", "--out", table, folder)[0] == exit_codes.OK
    forget()
    return folder


@pytest.mark.parametrize(
    "m, num_groups, layer, median_us",
    [(128, 8, "exact", 9.0), (121, 8, "exact", 9.0), (129, 8, "nearest m", 20.0), (512, 32, "exact", 99.0)],
)
def test_explain_finds_a_grouped_measurement_by_groups_and_mean_rows(
    grouped_table, capsys, m, num_groups, layer, median_us
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
    assert (code, document["layer"], document["grade"]) == (exit_codes.OK, layer, layer)
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
    assert "12.00 us" in out and "tile 128x32x64" in out


def test_explain_of_an_unknown_device_names_the_known(package, capsys):
    code, _, err = stoneware(capsys, "explain", "scaled_mm", "-m", "16", "-n", "4096", "-k", "4096", "--device", "Z1")
    assert code == exit_codes.USAGE and "device='Z1'" in err and "H200" in err


@pytest.fixture
def kernel_store(own_store, package):
    Store(own_store / "samples.sqlite3").add(
        run(), [kernel_sample(64, 10.0, 4), kernel_sample(64, 12.0, 8), kernel_sample(128, 20.0, 8)]
    )


def test_explain_of_a_decorated_kernel_imports_nothing_of_the_users(kernel_store, capsys):
    code, document = as_json(capsys, "explain", KERNEL_OP, "COLS=1024", "M=64")
    assert code == exit_codes.OK
    [answer] = document["answers"]
    assert set(answer) == {"key", "device", "source", "layer", "grade", "rule", "answered_by", "chosen", "runners_up"}
    assert (answer["layer"], answer["source"]) == ("exact", "user's store")
    assert answer["chosen"]["config"]["num_warps"] == 4
    assert [item["median_us"] for item in answer["runners_up"]] == [12.0]
    assert "mypackage" not in sys.modules


def test_explain_of_a_decorated_kernel_takes_the_nearest_m(kernel_store, capsys):
    code, out, _ = stoneware(capsys, "explain", KERNEL_OP, "M=512", "COLS=1024")
    assert code == exit_codes.OK
    assert "nearest m, from the user's store" in out and "num_warps=8" in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["M=64"], "must give each key argument of mypackage.kernels:softmax once: COLS, M"),
        (["M"], "'M' must be KEY=VALUE"),
        (["COLS=1024", "M=64", "--device", "L40"], "--device='L40' must be a device that was measured"),
        (["COLS=wide", "M=64"], "must be of a kind that was measured"),
    ],
)
def test_explain_of_a_decorated_kernel_names_mistakes(kernel_store, capsys, arguments, said):
    code, _, err = stoneware(capsys, "explain", KERNEL_OP, *arguments)
    assert code == exit_codes.USAGE and said in err


def test_explain_of_an_unknown_kernel_says_how_to_measure_it(package, capsys):
    code, _, err = stoneware(capsys, "explain", "mypackage:none", "M=1")
    assert code == exit_codes.USAGE and 'under stoneware.tuning("on_miss")' in err


def test_info_has_the_documented_keys(package, capsys):
    code, document = as_json(capsys, "info")
    assert code == exit_codes.OK
    assert {"stoneware", "python", "torch", "driver", "devices", "modules", "kernel_set", "kernels", "tables"} <= set(
        document
    )


def test_the_installed_wheel_is_sound(capsys):
    try:
        manifest.packaged()
    except Exception:
        pytest.skip("needs the wheel, not the sources")
    code, document = as_json(capsys, "verify")
    assert (code, document["problems"]) == (exit_codes.OK, [])


def test_report_of_the_installation_reads_its_tables(package, tmp_path, capsys):
    code, document = as_json(capsys, "report")
    assert code == exit_codes.OK
    [device] = document["devices"]
    assert device["sources"] == ["wheel"] and set(device["digests"]) == {"scaled_mm"}
    [family] = device["families"]
    assert [problem["speedup"] for problem in family["problems"]] == [1.6]


ESCAPE = "\x1b]0;title\x07\x1b[2J"


def test_no_escape_sequence_of_a_file_reaches_the_terminal(package, tmp_path, capsys):
    bad = ours(f"1x1x1{ESCAPE}")
    folders = [
        small.write_folder(
            tmp_path / f"{name}{ESCAPE}", [sample(bad, 10.0, kernel_sha256=small.SHA256, m=m, detail=ESCAPE)]
        )
        for name, m in (("a", 1), ("b", 2))
    ]
    with (folders[0] / "scaled_mm.jsonl").open("a") as file:
        file.write(f'{{"{ESCAPE}":1}}\n')
    for command in (
        ["verify", *folders],
        ["diff", *folders],
        ["merge", *folders, "--out", tmp_path / ESCAPE],
        [ESCAPE],
        ["verify", f"none{ESCAPE}"],
    ):
        _, out, err = stoneware(capsys, *command)
        assert out + err and (out + err).replace("\n", "").isprintable(), (command, out + err)


def test_a_defect_of_ours_is_shown_with_its_traceback_and_code_70(capsys, monkeypatch):
    from stoneware import installation

    def fail():
        raise AssertionError("a defect")

    monkeypatch.setattr(installation, "info", fail)
    code, out, err = stoneware(capsys, "info", "--json")
    assert code == exit_codes.INTERNAL and "Traceback (most recent call last)" in err
    assert json.loads(out)["error"] == {"kind": "AssertionError", "message": "a defect"}


def test_samples_written_by_merge_are_found_by_bake_and_verify(tmp_path, package, capsys):
    assert file_name("scaled_mm") == "scaled_mm.jsonl"
    folder = small.write_folder(tmp_path / "x1", [sample(SMALL, 1.0)], device=UNKNOWN_GPU)
    as_json(capsys, "merge", folder, "--out", tmp_path / "all")
    [written] = (tmp_path / "all").iterdir()
    assert sample_format.read_device(written / "device.json").fingerprint == UNKNOWN_GPU
    assert as_json(capsys, "verify", written)[0] == exit_codes.OK
    assert as_json(capsys, "bake", "--op", "scaled_mm", "--out", tmp_path / "t.table", written)[0] == exit_codes.OK
