"""gpu_check's sanitize without a GPU: what its output says, and what counts as a failure."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import textwrap

import pytest

from tools.gpu_check import compute_sanitizer, runner

SPLIT = "matmul_sm90_bf16_splitk"

MEMCHECK = f"""\
========= COMPUTE-SANITIZER
[1/2] {SPLIT}
========= Invalid __global__ read of size 4 bytes
=========     at {SPLIT}+0x1b0
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     Host Frame: matmul_of_the_host
=========
========= Invalid __global__ read of size 4 bytes
=========     at {SPLIT}+0x1b0
=========     by thread (4,0,0) in block (0,0,0)
=========
========= LEAK SUMMARY: 0 bytes leaked in 0 allocations
========= ERROR SUMMARY: 2 errors
"""

RACECHECK = f"""\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {SPLIT}+0x400
=========     and Read access at {SPLIT}+0x480 [4 hazards]
=========
========= Warning: Race reported between Read access at 0x170 in another
=========     and Write access at 0x148 in another [124 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""

UNINSTRUMENTED = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
"""


def test_errors_are_counted_and_told_by_kernel():
    report = compute_sanitizer.read_report(MEMCHECK.splitlines(), 0)
    assert (report.errors, report.warnings) == (2, 0)
    assert report.findings == {("Invalid __global__ read of size 4 bytes", SPLIT): 2}


def test_races_are_counted_apart_from_warnings():
    report = compute_sanitizer.read_report(RACECHECK.splitlines(), 0)
    assert (report.errors, report.warnings) == (1, 1)
    assert report.findings == {
        (f"Error: Race reported between Write access at {SPLIT}+0x400 and Read access at {SPLIT}+0x480", SPLIT): 1,
        ("Warning: Race reported between Read access at 0x170 in another and Write access at 0x148 in another", ""): 1,
    }


@pytest.mark.parametrize(
    ("line", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("a last line without its end========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("ERROR SUMMARY: 0 errors", None),
        ("========= ERROR SUMMARY: 9 errors were not printed. Use --print-limit", None),
    ],
)
def test_a_summary_is_the_tools_own_line(line, errors):
    assert compute_sanitizer.read_report([line], 0).errors == errors


def test_a_last_finding_that_was_cut_off_is_kept():
    lines = MEMCHECK.splitlines()[:5]
    assert sum(compute_sanitizer.read_report(lines, 1).findings.values()) == 1


def test_no_compute_sanitizer_is_an_error_that_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr(compute_sanitizer, "find", lambda: None)
    with pytest.raises(runner.RunnerError, match=r"must be on PATH, or in .*CUDA_HOME.*; install"):
        runner_in(tmp_path).sanitize([])


def test_compute_sanitizer_is_found_on_the_path_and_then_in_the_toolkit(tmp_path):
    for folder in ("first", "toolkit/bin"):
        program = tmp_path / folder / compute_sanitizer.PROGRAM
        program.parent.mkdir(parents=True)
        program.write_text("")
        program.chmod(0o755)
    home = {"CUDA_HOME": str(tmp_path / "toolkit")}
    first = str(tmp_path / "first")
    assert compute_sanitizer.find({"PATH": first, **home}).startswith(first)
    assert compute_sanitizer.find({"PATH": str(tmp_path), **home}).startswith(str(tmp_path / "too"))


def runner_in(folder: pathlib.Path) -> runner.Runner:
    made = runner.Runner.__new__(runner.Runner)
    made._out_dir = made._root = folder
    made._commit = "c0ffee"
    made._environment = {**os.environ, "PYTHONPATH": str(folder)}
    made.wheel = pathlib.Path("stoneware-1-cp312-abi3-linux.whl")
    made.wheel_sha256 = "a" * 64
    (folder / "tools" / "gpu_check").mkdir(parents=True, exist_ok=True)
    describe_machine(folder, """print('{"gpus": [{"gpu": "H200 0"}, {"gpu": "H200 1"}], "kernels": {"a": "5ha"}}')""")
    return made


def describe_machine(folder: pathlib.Path, code: str) -> None:
    (folder / "tools" / "gpu_check" / "machine.py").write_text(code)


GOOD = {"kernels": 2, "launches": 5, "failures": [], "not_launched": []}
SOUND = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors"


def sanitize(
    folder: pathlib.Path,
    monkeypatch,
    extra: list[str],
    *,
    of_broken: str = MEMCHECK,
    of_ours: str = SOUND,
    launched: dict | None = GOOD,
    exit_code: int = 0,
) -> tuple[int, dict, list[list[str]]]:
    """The runner's sanitize with a compute-sanitizer that says what it is told to.

    Returns:
      Exit code, sanitize.json, and the arguments of each start.
    """
    folder.mkdir(exist_ok=True)
    program = folder / compute_sanitizer.PROGRAM
    program.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(f"""\
        import json, os, pathlib, sys
        if "--version" in sys.argv:
            print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.4.0")
            sys.exit()
        assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        with open({str(folder / "starts")!r}, "a") as file:
            file.write(json.dumps(sys.argv[1:]) + "\\n")
        if "tools.gpu_check.broken_kernel" in sys.argv:
            print({of_broken!r})
            sys.exit()
        print({of_ours!r})
        for argument in sys.argv:
            if argument.startswith("--json_out=") and {launched!r} is not None:
                pathlib.Path(argument.partition("=")[2]).write_text(json.dumps({launched!r}))
        sys.exit({exit_code})
        """)
    )
    program.chmod(0o755)
    monkeypatch.setattr(compute_sanitizer, "find", lambda: str(program))
    code = runner_in(folder).sanitize(extra)
    document = json.loads((folder / "sanitize.json").read_text())
    starts = [json.loads(line) for line in (folder / "starts").read_text().splitlines()]
    return code, document, starts


def test_each_tool_runs_over_the_broken_kernel_and_over_ours(tmp_path, monkeypatch):
    code, document, starts = sanitize(tmp_path, monkeypatch, [])
    assert code == 0
    assert document["compute_sanitizer"] == "Version 2025.4.0"
    assert set(document["tools"]) == {"memcheck", "racecheck", "initcheck"}
    for tool, result in document["tools"].items():
        assert (result["errors"], result["kernels"], result["launches"]) == (0, 2, 5)
        assert result["failures"] == [] and result["errors_of_broken_kernel"] == 2
        modules = [start[start.index("-m") + 1] for start in starts if start[:2] == ["--tool", tool]]
        assert modules == ["tools.gpu_check.broken_kernel", "tools.gpu_check.launch_every_kernel"]
    log = (tmp_path / "sanitize.log").read_text()
    assert "[racecheck] ========= ERROR SUMMARY: 0 errors\n" in log


def test_the_results_name_what_they_were_got_with(tmp_path, monkeypatch):
    start = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    _, document, _ = sanitize(tmp_path, monkeypatch, [])
    assert list(document)[:7] == ["date", "command", "commit", "wheel", "wheel_sha256", "gpus", "kernels"]
    assert (document["commit"], document["kernels"]) == ("c0ffee", {"a": "5ha"})
    date = datetime.datetime.fromisoformat(document["date"])
    assert start <= date <= datetime.datetime.now(datetime.UTC)
    assert document["command"].startswith("python3 ")
    assert document["wheel"].endswith(".whl") and document["wheel_sha256"] == "a" * 64
    assert document["gpus"] == [{"gpu": "H200 0"}, {"gpu": "H200 1"}]


@pytest.mark.parametrize(
    ("code", "reason"), [("raise OSError('no driver')", "no driver"), ("import os; os._exit(0)", "IndexError")]
)
def test_a_machine_that_cannot_say_what_it_is_keeps_its_results(tmp_path, code, reason):
    made = runner_in(tmp_path)
    describe_machine(tmp_path, code)
    made._write_json("check.json", {**made._machine(), "exit_code": 0})
    document = json.loads((tmp_path / "check.json").read_text())
    assert (document["exit_code"], document["kernels"]) == (0, {})
    assert reason in document["gpus"][0]["unknown"]


def test_arguments_go_where_they_belong(tmp_path, monkeypatch):
    extra = ["--tools=racecheck", "--options=--suppressions x.xml", "--kernels=splitk"]
    _, document, (control, ours) = sanitize(tmp_path, monkeypatch, extra)
    assert list(document["tools"]) == ["racecheck"]
    before, after = ours[: ours.index("-m")], ours[ours.index("-m") :]
    assert before[-3:] == ["--suppressions", "x.xml", sys.executable]
    assert after[-1] == "--kernels=splitk"
    # What an option leaves out of our kernels does not discredit the tool.
    assert "--suppressions" not in control and "--kernels=splitk" not in control


def test_a_tool_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        sanitize(tmp_path, monkeypatch, ["--tools=memcheck,leakcheck"])
    assert "'leakcheck' must be of memcheck,racecheck,initcheck; omit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"of_ours": MEMCHECK}, "memcheck found 2 errors"),
        ({"of_ours": UNINSTRUMENTED}, "memcheck wrote no summary"),
        ({"of_broken": SOUND}, "must report errors of broken_kernel.py, and reports 0"),
        ({"of_broken": UNINSTRUMENTED}, "broken_kernel.py, and reports None"),
        ({"launched": None}, "launch_every_kernel.py wrote no report"),
        ({"launched": {**GOOD, "kernels": 0}}, "no kernel was launched"),
        ({"launched": {**GOOD, "not_launched": [SPLIT]}}, f"{SPLIT} was not launched"),
        (
            {
                "launched": {
                    **GOOD,
                    "failures": [{"kernel": SPLIT, "problem": "m=1", "message": "it wrote outside of out"}],
                }
            },
            f"{SPLIT}: m=1: it wrote outside of out",
        ),
        ({"exit_code": 7}, "exit code 7"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split()[-1],
)
def test_what_does_not_show_that_the_kernels_are_sound_fails(told, reason, tmp_path, monkeypatch):
    code, document, _ = sanitize(tmp_path, monkeypatch, ["--tools=memcheck"], **told)
    assert code == 1
    [failure] = document["tools"]["memcheck"]["failures"]
    assert reason in failure


def test_all_does_not_need_compute_sanitizer():
    assert "sanitize" in runner.COMMANDS and "sanitize" not in runner.COMMANDS_OF_ALL


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
