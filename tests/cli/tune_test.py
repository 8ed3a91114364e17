"""`stoneware tune` without a GPU: a stand-in measures; flags, summary, ranks, interrupts."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections import Counter

import pytest
import torch
from small_samples import H200, UNKNOWN_GPU, VENDOR, bad_sample, key, ours, run, sample

from stoneware.cli import exit_codes, main, tune_command
from stoneware.runtime.device import Device
from stoneware.sessions import session
from stoneware.tuning import store_table
from stoneware.tuning.store import Store

SMALL = ours()


@pytest.fixture
def measuring(monkeypatch):
    """Replaces session.tune by a stand-in; returns its arguments and what it stores."""
    state = {
        "samples": [sample(SMALL, 10.0), sample(VENDOR, 16.0)],
        "error": None,
        "failures": [],
        "report": lambda reporter: None,
    }

    def tune(problems, store, ordinal, settings, reporter, *, ranks):
        state.update(problems=problems, store=store, ordinal=ordinal, settings=settings)
        store.add(run(), state["samples"])
        state["report"](reporter)
        if state["error"] is not None:
            raise state["error"]
        return session.Summary(
            run="run-1",
            num_problems=len(problems),
            num_known=1,
            num_measured=1,
            statuses=Counter(item.status for item in state["samples"]),
            failures=state["failures"],
            seconds=1.5,
        )

    monkeypatch.setattr(session, "tune", tune)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(tune_command, "cuda_device", lambda ordinal: Device(ordinal=ordinal, fingerprint=H200))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return state


def tune(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.run(["tune", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_documented_keys(measuring, own_store, capsys):
    code, out, _ = tune(capsys, "--json", "--weights", "llama3_8b_o", "--m-values", "1,16")
    document = json.loads(out)
    assert code == exit_codes.OK
    assert set(document) == {
        "command",
        "exit_code",
        "run",
        "rank",
        "world_size",
        "store",
        "num_problems",
        "num_known",
        "num_measured",
        "statuses",
        "failures",
        "seconds",
    }
    assert document["statuses"] == {"ok": 2, "wrong": 0, "failed": 0, "hung": 0}
    assert document["store"] == str(own_store / "samples.sqlite3")


def test_flags_select_the_problems_and_the_settings(measuring, tmp_path, capsys):
    store = tmp_path / "s.sqlite3"
    code, *_ = tune(
        capsys,
        "--ops",
        "scaled_mm",
        "--shapes",
        "16x4096x14336,1x64x64",
        "--scales",
        "row",
        "--out-dtypes",
        "fp16",
        "--rounds",
        "7",
        "--seconds-per-problem",
        "0.5",
        "--fastest",
        "12",
        "--remeasure",
        "--commit",
        "1a2b3c",
        "--device",
        "1",
        "--store",
        store,
    )
    assert code == exit_codes.OK
    assert [(p.m, p.n, p.k, p.scales, p.out_dtype) for p in measuring["problems"]] == [
        (16, 4096, 14336, "row", "fp16"),
        (1, 64, 64, "row", "fp16"),
    ]
    settings = measuring["settings"]
    assert (settings.rounds, settings.seconds_per_problem, settings.fastest) == (7, 0.5, 12)
    assert (settings.remeasure, settings.commit) == (True, "1a2b3c")
    assert measuring["ordinal"] == 1 and measuring["store"].path == store


def test_at_least_one_candidate_is_measured(measuring, capsys):
    code, _, err = tune(capsys, "--fastest", "0")
    assert code == exit_codes.USAGE and "fastest=0 must be at least 1; pass a number from 1 up" in err
    assert "problems" not in measuring


def test_shapes_are_read_from_a_file(measuring, tmp_path, capsys):
    file = tmp_path / "shapes.txt"
    file.write_text("# of a model\n16x4096x14336\n\n 1x64x64  # small\r\n16x4096x14336\n")
    code, _, err = tune(capsys, "--ops", "scaled_mm", "--scales", "row", "--shapes", f"@{file}")
    assert code == exit_codes.OK, err
    assert [(p.m, p.n, p.k) for p in measuring["problems"]] == [(16, 4096, 14336), (1, 64, 64)]
    assert measuring["settings"].command == "stoneware tune --ops scaled_mm --scales row --shapes @FILE"


@pytest.mark.parametrize(
    "text, message",
    [
        ("1x64x64\n16x4096 # two\n", "shapes.txt:2: shapes='16x4096' must be of the form that scaled_mm or"),
        ("1x64x64,1x16x16\n", "shapes.txt:1: shapes='1x64x64,1x16x16' must be of the form"),
        ("1x64x64\n\n1x64x0\n", "shapes.txt:3: k=0 must be"),
        ("1x64x\xff", "shapes.txt:1: shapes="),
        ("# none\n", "shapes.txt must have a shape in a line, and has none; write for example 16x4096x14336"),
        (None, "shapes.txt: No such file or directory"),
    ],
)
def test_mistake_in_a_file_of_shapes_is_named_with_its_line(measuring, tmp_path, capsys, text, message):
    file = tmp_path / "shapes.txt"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    code, _, err = tune(capsys, "--shapes", f"@{file}")
    assert code == exit_codes.USAGE and message in err
    assert "problems" not in measuring, "it measured first"


def test_mistake_in_another_flag_is_not_laid_on_a_line_of_the_file(measuring, tmp_path, capsys):
    file = tmp_path / "shapes.txt"
    file.write_text("1x64x64\n")
    code, _, err = tune(capsys, "--shapes", f"@{file}", "--dtypes", "fp8")
    assert code == exit_codes.USAGE and err.startswith("stoneware tune: dtypes=fp8 must be among")


def test_flags_select_grouped_problems(measuring, capsys):
    code, *_ = tune(
        capsys,
        "--ops",
        "grouped_mm",
        "--weights",
        "gpt_oss_20b_down",
        "--m-values",
        "16",
        "--shapes",
        "8x2x64x32",
        "--dtypes",
        "bf16",
    )
    assert code == exit_codes.OK
    assert [(p.key.op, p.num_groups, p.m, p.key.m, p.n, p.k, p.a_dtype) for p in measuring["problems"]] == [
        ("grouped_mm", 32, 512, 16, 2880, 2880, "bf16"),
        ("grouped_mm", 8, 16, 2, 64, 32, "bf16"),
    ]


def test_the_record_of_the_command_has_no_folder_of_the_machine(measuring, tmp_path, capsys):
    tune(capsys, "--m-values", "1", "--weights", "llama3_8b_o", "--store", tmp_path / "s.sqlite3", "--json")
    assert measuring["settings"].command == ("stoneware tune --m-values 1 --weights llama3_8b_o --store STORE")


def test_plain_tune_is_recorded_as_it_is(measuring, capsys):
    tune(capsys)
    assert measuring["settings"].command == "stoneware tune"


@pytest.mark.parametrize("status", ["wrong", "failed", "hung"])
def test_a_bad_candidate_ends_with_1(measuring, capsys, status):
    measuring["samples"] = [sample(VENDOR, 16.0), bad_sample(SMALL, status)]
    code, out, _ = tune(capsys)
    assert code == exit_codes.FINDINGS and f"1 {status}" in out


def test_a_problem_that_was_not_measured_ends_with_1(measuring, capsys):
    measuring["failures"] = [("scaled_mm m=1", "the memory is full")]
    code, out, _ = tune(capsys, "--json")
    assert code == exit_codes.FINDINGS
    assert json.loads(out)["failures"] == [{"problem": "scaled_mm m=1", "reason": "the memory is full"}]


def test_an_interrupt_ends_with_130_and_keeps_what_was_measured(measuring, own_store, capsys):
    measuring["error"] = KeyboardInterrupt()
    code, out, err = tune(capsys, "--json")
    assert code == exit_codes.INTERRUPTED
    assert json.loads(out)["error"]["message"] == "interrupted"
    assert err.endswith("stoneware tune: interrupted\n")
    assert len(Store(own_store / "samples.sqlite3").samples()) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--weights", "gpt5"], "weights=gpt5 must be among"),
        (["--shapes", "16x4096"], "shapes='16x4096' must be of the form that scaled_mm or"),
        (["--device", "2"], "--device=2 must be the number of a GPU that torch finds, 0 to 1"),
        (["--rounds", "0"], "rounds=0 must be at least 1; pass"),
        (["--ops", "conv"], "ops=conv must be among"),
        (["--ops", "matmul", "--scales", "row"], "--scales=row is for scaled_mm and grouped_mm, which --ops=matmul"),
        (["--ops", "scaled_mm", "--layouts", "nt"], "add matmul, or leave --layouts out"),
        (["--ops", "matmul,scaled_mm", "--dtypes", "bf16"], "--dtypes=bf16 is for grouped_mm"),
        (["--ops", "grouped_mm", "--shapes", "16x4096x64"], "the form that grouped_mm takes: GxMxNxK"),
        (["--dtypes", "fp8"], "dtypes=fp8 must be among e4m3, bf16"),
    ],
)
def test_mistakes_are_named(measuring, capsys, arguments, message):
    code, _, err = tune(capsys, *arguments)
    assert code == exit_codes.USAGE and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--store", ""], "--store= must be the path of a file"),
        (["--store", "FOLDER"], "must be the path of a file"),
        (["--device", "-1"], "Invalid value for '--device': -1 is not in the range x>=0"),
    ],
)
def test_a_bad_flag_is_named_before_a_gpu_is_asked_for(monkeypatch, capsys, tmp_path, arguments, message):
    """Exit code 2, not the 3 of a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flag, value = arguments
    code, _, err = tune(capsys, flag, value.replace("FOLDER", str(tmp_path)))
    assert code == exit_codes.USAGE and message in err


def test_without_a_home_the_remedy_is_named(measuring, monkeypatch, capsys):
    monkeypatch.delenv("STONEWARE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    code, _, err = tune(capsys)
    assert code == exit_codes.ENVIRONMENT and "set STONEWARE_CACHE_DIR, or pass --store=FILE" in err


def _report(reporter):
    reporter.start(2, 1, 1.0, "NVIDIA H200")
    reporter.note("a kernel\x1b[31m hung")
    reporter.end("scaled_mm", 1.0, "best of 3")
    reporter.finish("all done")


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            0,
            "1 problems to measure on NVIDIA H200, 1 more are known\na kernel\\x1b[31m hung\n"
            "[1/1] scaled_mm: best of 3; 0 s gone, about 0 s left\nall done\n",
        ),
        (3, "rank 3: a kernel\\x1b[31m hung\n"),
    ],
)
def test_rank_0_says_how_far_it_is_and_the_others_only_what_went_wrong(measuring, monkeypatch, capsys, rank, message):
    monkeypatch.setattr(session.Ranks, "from_environment", lambda: session.Ranks(rank=rank, world_size=4))
    measuring["report"] = _report
    stream = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["stoneware", "tune"])
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger("stoneware"), "handlers", [])
    with pytest.raises(SystemExit):
        main.main()
    assert stream.getvalue() == message
    assert bool(capsys.readouterr().out) == (rank == 0)


def test_a_model_is_measured_and_the_gain_is_told(measuring, package, own_store, tmp_path, capsys):
    config = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    measured = sample(SMALL, 10.0, m=16, n=4096, k=4096), sample(VENDOR, 16.0, m=16, n=4096, k=4096)
    measuring["samples"] = list(measured)
    code, out, _ = tune(capsys, "--json", "--model", tmp_path, "--max-batch-tokens", "16", "--dtype", "fp8")
    assert code == exit_codes.OK
    assert {(problem.op, problem.scales) for problem in measuring["problems"]} == {("scaled_mm", "row")}
    assert {problem.m for problem in measuring["problems"]} == {1, 2, 4, 8, 16}
    assert "--model MODEL" in measuring["settings"].command and str(tmp_path) not in measuring["settings"].command
    gain = json.loads(out)["gain"]
    assert gain["num_problems"] == 1 and gain["over_torch"] == 1.6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tensor-parallel", "2"], "--tensor-parallel=2 is for --model, which is missing; pass --model too"),
        (["--model", "x", "--ops", "matmul"], "--ops must be left out: --model says what is measured"),
        (["--model", "nowhere"], "model='nowhere' must be a Hugging Face config.json"),
    ],
)
def test_flags_of_a_model_are_refused_elsewhere(measuring, own_store, capsys, arguments, text):
    code, _, err = tune(capsys, *arguments)
    assert code == exit_codes.USAGE and text in " ".join(err.split())


@pytest.mark.parametrize("path, text", [("/dev/zero", "must be a regular file"), ("deep.json", "nested too deeply")])
def test_a_model_that_cannot_be_read_is_a_users_mistake(measuring, own_store, tmp_path, capsys, path, text):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    code, _, err = tune(capsys, "--model", tmp_path / path)  # an absolute path stays
    assert (code, err.count("\n")) == (exit_codes.USAGE, 1) and text in err


OLD = "cd" * 32
"""Digest of an earlier version of a kernel."""


def store_baked(folder, samples, of_run=None) -> None:
    store = Store(folder / "samples.sqlite3")
    store.add(of_run or run(), samples)
    store_table.bake(store.path)


def stale_problems(measuring, capsys, *arguments) -> list[tuple[str, int]]:
    code, _, err = tune(capsys, "--stale", *arguments)
    assert code == exit_codes.OK, err
    return [(problem.key.scales, problem.m) for problem in measuring["problems"]]


def test_stale_measures_what_the_tables_have_of_earlier_kernels_alone(measuring, package, own_store, capsys):
    assert stale_problems(measuring, capsys) == []
    older = [
        sample(SMALL, 10.0, m=16, kernel_sha256=OLD),  # the wheel has it with the kernel of today
        sample(SMALL, 11.0, m=64, kernel_sha256=OLD),
        sample(VENDOR, 12.0, m=64),
        sample(SMALL, 12.0, m=128, kernel_sha256=OLD),
        sample(VENDOR, 5.0, m=128),  # is chosen, and has no code of ours
        sample(SMALL, 9.0, key=key(256, scales="tensor"), kernel_sha256=OLD),
    ]
    store_baked(own_store, older)
    assert stale_problems(measuring, capsys) == [("row", 64), ("tensor", 256)]
    assert stale_problems(measuring, capsys, "--ops", "scaled_mm", "--scales", "tensor") == [("tensor", 256)]
    assert stale_problems(measuring, capsys, "--ops", "matmul") == []
    store_baked(own_store, [sample(SMALL, 11.0, m=64)])
    assert stale_problems(measuring, capsys) == [("tensor", 256)]


def test_samples_that_other_ranks_store_meanwhile_do_not_change_the_list(measuring, package, own_store, capsys):
    store_baked(own_store, [sample(SMALL, 11.0, m=64, kernel_sha256=OLD)])
    Store(own_store / "samples.sqlite3").add(run(), [sample(SMALL, 11.0, m=64), sample(VENDOR, 12.0, m=64)])
    assert stale_problems(measuring, capsys) == [("row", 64)]


def test_stale_leaves_other_gpus_out(measuring, package, own_store, capsys):
    other = run("run-2", device=UNKNOWN_GPU)
    old = sample(SMALL, 11.0, m=64, kernel_sha256=OLD, run=other.id)
    store_baked(own_store, [old], other)
    assert stale_problems(measuring, capsys) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "1x16x16"], "--shapes must be left out: --stale takes the shapes of the tables"),
        (["--weights", "llama3_8b_o", "--m-values", "1"], "--weights --m-values must be left out: --stale takes"),
        (["--model", "x"], "--stale must be left out: --model says what is measured"),
        (["--scales", "rows"], "scales=rows must be among"),
        (["--ops", "matmul", "--scales", "row"], "--scales=row is for scaled_mm and grouped_mm, which --ops=matmul"),
        (["--device", "2"], "--device=2 must be the number of a GPU that torch finds, 0 to 1"),
    ],
)
def test_stale_takes_no_shapes_and_the_flags_of_its_ops(measuring, package, own_store, capsys, arguments, text):
    code, _, err = tune(capsys, "--stale", *arguments)
    assert code == exit_codes.USAGE and text in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--scales", "rows"], "scales=rows must be among"),
        (["--ops", "scaled", "--scales", "row"], "ops=scaled must be among"),
    ],
)
def test_a_wrong_name_is_refused_before_a_gpu_is_needed(measuring, own_store, monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = tune(capsys, "--stale", *arguments)
    assert code == exit_codes.USAGE and text in " ".join(err.split())


def test_stale_needs_a_gpu(measuring, package, own_store, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = tune(capsys, "--stale")
    assert code == exit_codes.ENVIRONMENT and "tune needs a GPU that torch can use" in " ".join(err.split())
