"""What holds for every command, and for info: paths, escape sequences, defects of ours."""

from __future__ import annotations

import json

import pytest
import small_samples as small
from conftest import as_json, stoneware
from small_samples import ours, sample

from stoneware.cli import exit_codes


@pytest.mark.parametrize("command", ["verify", "diff", "report"])
def test_a_path_that_is_no_source_is_told_how_a_table_is_named(tmp_path, package, capsys, command):
    table = tmp_path / "scaled_mm"
    table.write_bytes((package / "tables" / "scaled_mm.table").read_bytes())
    paths = [table, table] if command == "diff" else [table]
    _, out, err = stoneware(capsys, command, *paths, *["--json"] * (command == "report"))
    assert f"{table}: no samples" in out + err and "a file *.table" in out + err


def test_info_has_the_documented_keys(package, capsys):
    code, document = as_json(capsys, "info")
    assert code == exit_codes.OK
    assert {"stoneware", "python", "torch", "driver", "devices", "modules", "kernel_set", "kernels", "tables"} <= set(
        document
    )


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
