"""bake, merge and diff: what they write, print, and end with."""

from __future__ import annotations

import dataclasses

import pytest
import small_samples as small
from conftest import BIG, SMALL, as_json, stoneware
from small_samples import KERNEL_OP, UNKNOWN_GPU, kernel_sample, ours, run, sample

from stoneware.cli import exit_codes
from stoneware.kernels import manifest
from stoneware.tuning import samples as sample_format
from stoneware.tuning.bake import bake
from stoneware.tuning.merge import file_name
from stoneware.tuning.store import Store


def test_bake_writes_what_the_function_returns(h200, package, tmp_path, capsys):
    out = tmp_path / "table.table"
    code, document = as_json(capsys, "bake", "--op", "scaled_mm", "--out", out, h200)
    assert code == exit_codes.OK
    assert out.read_bytes() == bake("scaled_mm", h200.iterdir(), manifest.packaged())
    assert set(document) == {"command", "exit_code", "op", "out", "digest", "num_bytes", "num_files", "devices"}
    assert document["num_files"] == 3
    [device] = document["devices"]
    assert device["name"] == "NVIDIA H200"


def test_bake_takes_files_too(h200, package, tmp_path, capsys):
    out = tmp_path / "table.table"
    code, message, _ = stoneware(capsys, "bake", "--op", "scaled_mm", "--out", out, *h200.iterdir())
    assert code == exit_codes.OK and message.startswith(f"{out}: ")
    assert out.read_bytes() == bake("scaled_mm", h200.iterdir(), manifest.packaged())


def test_bake_of_a_kernel_that_the_manifest_lacks_fails_with_its_place(package, tmp_path, capsys):
    folder = small.write_folder(tmp_path / "h200", [sample(ours("1x1x1"), 10.0)])
    out = tmp_path / "table.table"
    code, _, err = stoneware(capsys, "bake", "--op", "scaled_mm", "--out", out, folder)
    assert code == exit_codes.USAGE
    assert f"{folder}/scaled_mm.jsonl:2: kernel" in err
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
    assert code == exit_codes.FINDINGS
    assert "4 samples" in out and f"{h200}/scaled_mm.jsonl:6" in err


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
    assert code == exit_codes.FINDINGS
    assert set(document) == {"command", "exit_code", "num_common", "fraction", "changed", "only_a", "only_b", "skipped"}
    assert (document["num_common"], document["fraction"]) == (2, 0.5)
    [changed] = document["changed"]
    assert (changed["median_us_a"], changed["median_us_b"]) == (10.0, 12.0)
    assert [item["key"]["m"] for item in document["only_b"]] == [128]
    code, out, _ = stoneware(capsys, "diff", h200, other)
    assert "scaled_mm m=16 n=4096 k=4096" in out and "1.200" in out and "50.0%" in out
    assert "\x1b" not in out


def test_diff_says_kernels_in_words_and_fits_a_terminal(package, h200, tmp_path, capsys):
    other = small.write_folder(
        tmp_path / "other", [sample(SMALL, 15.0), sample(BIG, 12.0), kernel_sample(16, 1.0), sample(ours("1x1x1"), 9.0)]
    )
    code, out, _ = stoneware(capsys, "diff", h200, other)
    assert code == exit_codes.FINDINGS and max(map(len, out.splitlines())) <= 80
    assert "A     10.00 us  sm90: tile 64x16x256, warp-specialized, swap AB\n" in out
    assert "B      9.00 us  sm90: scaled_mm_sm90_e4m3_e4m3_bf16_1x1x1" in out  # not of this build
    assert "B      1.00 us  BLOCK=128 num_warps=4" in out


def test_diff_of_what_cannot_be_read_is_never_0(h200, capsys):
    with (h200 / "scaled_mm.jsonl").open("a") as file:
        file.write("{garbage\n")
    code, document = as_json(capsys, "diff", h200, h200)
    assert (code, document["num_common"], document["changed"]) == (exit_codes.FINDINGS, 2, [])
    [skipped] = document["skipped"]
    assert f"{h200}/scaled_mm.jsonl:6" in skipped
    code, _, err = stoneware(capsys, "diff", h200, h200)
    assert code == exit_codes.FINDINGS and skipped in err


@pytest.mark.parametrize("path, message", [("", "is empty"), ("none", "no such file or folder")])
def test_diff_of_no_path_is_a_mistake(h200, capsys, path, message):
    code, _, err = stoneware(capsys, "diff", h200, path)
    assert code == exit_codes.USAGE and message in err


@pytest.mark.parametrize("arguments", [["verify", ""], ["merge", "", "--out", "all"], ["report", "", "--json"]])
def test_an_empty_path_is_not_the_current_folder(h200, monkeypatch, capsys, arguments):
    monkeypatch.chdir(h200)
    code, out, err = stoneware(capsys, *arguments)
    assert code == exit_codes.USAGE and "is empty" in out + err


def test_diff_takes_tables(package, capsys):
    path = package / "tables" / "scaled_mm.table"
    assert stoneware(capsys, "diff", path, path)[0] == exit_codes.OK


def test_diff_takes_samples_of_an_op_that_is_not_known_here(package, h200, capsys):
    text = (h200 / "scaled_mm.jsonl").read_text()
    (h200 / "newer.jsonl").write_text(text.replace('"op":"scaled_mm"', '"op":"newer"'))
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
    """Nor where candidates tie, which the heuristic settles, in both orders of their names."""
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


def test_bake_of_a_misspelt_kernel_lists_those_that_were_measured(tmp_path, capsys):
    folder = small.write_folder(tmp_path / "h200", [kernel_sample(16, 1.0)])
    out, wrong = tmp_path / "table.table", KERNEL_OP.replace("softmax", "sofmax")
    code, _, err = stoneware(capsys, "bake", "--op", wrong, "--out", out, folder)
    assert code == exit_codes.USAGE and KERNEL_OP in err and not out.exists()


def test_samples_written_by_merge_are_found_by_bake_and_verify(tmp_path, package, capsys):
    assert file_name("scaled_mm") == "scaled_mm.jsonl"
    folder = small.write_folder(tmp_path / "x1", [sample(SMALL, 1.0)], device=UNKNOWN_GPU)
    as_json(capsys, "merge", folder, "--out", tmp_path / "all")
    [written] = (tmp_path / "all").iterdir()
    assert sample_format.read_folder(written)[0].fingerprint == UNKNOWN_GPU
    assert as_json(capsys, "verify", written)[0] == exit_codes.OK
    assert as_json(capsys, "bake", "--op", "scaled_mm", "--out", tmp_path / "t.table", written)[0] == exit_codes.OK
