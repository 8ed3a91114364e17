"""verify: each kind of damage that it finds, with its place, and what it calls good."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest
import small_samples as small
from conftest import BIG, SMALL, as_json, forget, stoneware
from small_samples import GROUPED, kernel_sample, run, sample

from stoneware.cli import exit_codes, verification
from stoneware.kernels import manifest
from stoneware.tuning.bake import bake
from stoneware.tuning.merge import file_name
from stoneware.tuning.store import Store


@pytest.fixture
def native_module(package, monkeypatch):
    """A native module that has the kernels of the manifest; returns it."""
    module = types.SimpleNamespace(
        kernels=lambda: [{"id": config.kernel} for config in (SMALL, BIG, GROUPED)], image=small.cubin
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
    native_module.image = lambda kernel_id: b"other bytes"
    table = package / "tables" / "matmul.table"
    table.write_bytes(table.read_bytes().replace(b"matmul", b"matmuL", 1))
    forget()
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FINDINGS
    messages = {(item["part"], item["problem"]) for item in document["problems"]}
    for part, place in (
        ("kernels", f"{small.TRITON_ID}.cubin: expected sha256="),
        ("kernels", f"{small.TRITON_ID}.json: cannot be read"),
        ("kernels", f"small_native_module: {SMALL.kernel}: expected"),
        ("tables", f"{table}: expected content with the digest"),
        ("user's store", str(store.path)),
    ):
        assert any(part == part_name and place in problem for part_name, problem in messages), (part, place, messages)
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
    assert code == exit_codes.FINDINGS and document["parts"]["user's store"] == 1
    assert "STONEWARE_CACHE_DIR" in document["problems"][0]["problem"]
    assert "cannot be read" in as_json(capsys, "info")[1]["store"]


@pytest.mark.parametrize("name", ["scaled_mm.jsonl", "runs.json", "table.table"])
def test_a_pipe_in_the_place_of_a_file_is_found_and_not_waited_for(h200, capsys, name):
    (h200 / name).unlink(missing_ok=True)
    os.mkfifo(h200 / name)
    place = h200 / name if name == "table.table" else h200
    code, document = as_json(capsys, "verify", place)
    assert code == exit_codes.FINDINGS
    assert any("must be a regular file, and is a pipe" in item["problem"] for item in document["problems"])


def test_a_table_of_the_users_own_is_baked_anew_and_not_reinstalled(tmp_path, package, capsys):
    table = tmp_path / "scaled_mm.table"
    table.write_bytes((package / "tables" / "scaled_mm.table").read_bytes()[:-9])
    for command in (["verify", table], ["diff", table, table], ["report", table]):
        _, out, err = stoneware(capsys, *command, *["--json"] * (command[0] == "report"))
        assert "stoneware bake" in out + err and "reinstall" not in out + err


def test_an_unknown_mode_of_tuning_is_reported(native_module, capsys, monkeypatch):
    monkeypatch.setenv("STONEWARE_TUNING", "nonsense")
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FINDINGS and document["parts"]["mode of tuning"] == 1
    assert "STONEWARE_TUNING='nonsense'" in as_json(capsys, "info")[1]["mode"]
    code, _, err = stoneware(capsys, "explain", "scaled_mm", "-m", 1, "-n", 1, "-k", 1)
    assert code == exit_codes.USAGE and "STONEWARE_TUNING='nonsense'" in err


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
    code, _, err = stoneware(capsys, "bake", "--op", op, "--out", tmp_path / "t.table", folder)
    assert code == exit_codes.USAGE and f"{file}:2: not a sample" in err
    assert stoneware(capsys, "report", "--json", folder)[0] == exit_codes.USAGE
    [item, *_] = as_json(capsys, "verify", folder)[1]["problems"]
    assert f"{file}:2: not a sample" in item["problem"]


def test_missing_runs_are_one_line_with_a_count(h200, tmp_path, capsys):
    (h200 / "runs.json").unlink()
    _, _, err = stoneware(capsys, "merge", h200, "--out", tmp_path / "all")
    [line] = [line for line in err.splitlines() if "scaled_mm.jsonl" in line]
    assert f"{h200}/scaled_mm.jsonl: not complete: {h200}/runs.json lacks the runs of 4 of 4 samples" in line


def test_verify_finds_a_native_module_and_a_manifest_that_are_missing(package, capsys, monkeypatch):
    monkeypatch.setattr(verification, "NATIVE_MODULES", ("stoneware.no_such_module",))
    (package / "kernel_manifest.json").unlink()
    forget()
    code, document = as_json(capsys, "verify")
    assert code == exit_codes.FINDINGS
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
    assert code == exit_codes.FINDINGS
    messages = [item["problem"] for item in document["problems"]]
    assert any(problem.startswith(f"package acme: {table}: expected a table") for problem in messages)
    assert any("no_such_package" in problem for problem in messages) and len(messages) == 2


def test_verify_finds_a_table_entry_of_an_unknown_kernel(native_module, package, h200, capsys):
    gone = small.write_folder(package / "gone", [sample(SMALL, 10.0)])
    data = bake("scaled_mm", gone.iterdir(), manifest.packaged())
    (package / "tables" / "scaled_mm.table").write_bytes(data)
    kept = [SMALL.kernel]
    text = json.loads(small.manifest_text())
    document = {"schema": 1, "kernels": [k for k in text["kernels"] if k["id"] not in kept]}
    (package / "kernel_manifest.json").write_text(manifest.text_of(document))
    forget()
    _, output = as_json(capsys, "verify")
    assert any("is not a kernel of the manifest" in item["problem"] for item in output["problems"])


def test_verify_of_paths_looks_at_these_alone(h200, package, tmp_path, capsys):
    good = [h200, package / "tables" / "scaled_mm.table"]
    code, document = as_json(capsys, "verify", *good)
    assert code == exit_codes.OK and set(document["parts"]) == set(map(str, good))
    with (h200 / "scaled_mm.jsonl").open("a") as file:
        file.write("{garbage\n")
    cut = tmp_path / "cut.table"
    cut.write_bytes(good[1].read_bytes()[:-9])
    code, out, _ = stoneware(capsys, "verify", h200, cut)
    assert code == exit_codes.FINDINGS
    assert f"{h200}/scaled_mm.jsonl:6" in out and f"{cut}: expected content" in out


def test_the_installed_wheel_is_sound(capsys):
    try:
        manifest.packaged()
    except Exception:
        pytest.skip("needs the wheel, not the sources")
    code, document = as_json(capsys, "verify")
    assert (code, document["problems"]) == (exit_codes.OK, [])


@pytest.mark.parametrize("command", [["verify"], ["bake", "--op", "scaled_mm", "--out", "x.table"]])
def test_a_path_with_nothing_there_is_named(capsys, command):
    code, _, err = stoneware(capsys, *command, "nowhere/nvidia_h200")
    assert code == exit_codes.USAGE and "nowhere/nvidia_h200: no such file or folder; check the path" in err
