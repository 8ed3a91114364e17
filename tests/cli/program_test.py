"""`python -m stoneware` as a process: what it prints where, its exit codes, and what it imports."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from small_samples import KERNEL_OP, kernel_sample, run, write_folder

from stoneware import __version__
from stoneware.cli import exit_codes, main
from stoneware.cli.main import COMMANDS
from stoneware.kernels.config import KernelConfig
from stoneware.tuning.store import Store


def environment(**changes: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STONEWARE_", "COLUMNS", "FORCE_", "TERM"))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", **changes}


def stoneware(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoneware", *arguments], capture_output=True, text=True, env=environment(**changes)
    )


def test_version():
    done = stoneware("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stoneware {__version__}\n", "")


def test_the_programs_help_lists_commands_and_exit_codes():
    done = stoneware("--help", COLUMNS="120")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"{code}  {meaning}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_commands_help_has_an_example_and_the_json_keys(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main.run([command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "Examples:" in help_text and f"\n   stoneware {command}" in help_text
    assert "Exit codes:" in help_text and "With --json:" in help_text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_nothing_is_cut(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    codes = lines[lines.index(next(line for line in lines if "Exit codes:" in line)) + 1 :]
    # A code's line that is too long goes on at the left margin.
    assert all(line.startswith("  ") for line in codes[: next(i for i, line in enumerate(codes) if not line.strip())])


NO_WIDTH = "99999999999999999999"


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_each_help_ignores_a_width_that_no_terminal_has(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", NO_WIDTH)
    assert main.run([*command, "--help"]) == exit_codes.OK
    assert "Exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["COLUMNS", "TERMINAL_WIDTH"])
@pytest.mark.parametrize("columns", [NO_WIDTH, "100000", "-1", "wide", "²"])
def test_a_width_of_the_environment_that_is_not_one_is_ignored(name, columns):
    done = stoneware("explain", "--help", **{name: columns})
    assert (done.returncode, done.stderr) == (exit_codes.OK, "") and len(done.stdout) < 50_000


def test_help_of_a_pipe_has_no_colours():
    assert "\x1b" not in stoneware("explain", "--help").stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "stoneware: a command must be given"),
        (["bake_it"], "stoneware: No such command 'bake_it'"),
        (["explain"], "stoneware explain: Missing argument 'OP'"),
        (["explain", "scaled_mm", "-m", "x", "-n", "1", "-k", "1"], "stoneware explain: Invalid value"),
        (["explain", "scaled_mm", "-m", "16"], "stoneware explain: -n -k must be given for an op"),
        (["explain", "conv", "-m", "1", "-n", "1", "-k", "1"], "stoneware explain: op='conv' must be"),
        (["tune", "--m-values", "1,,2"], "stoneware tune: --m-values='1,,2' must be values separated by"),
        (
            ["tune", "--m-values", "1,-2"],
            "stoneware tune: --m-values='1,-2' must be integers >= 1 "
            "separated by commas, and '-2' is not one; pass for example 1,16,64",
        ),
        (["report"], "stoneware report: --out must name the page to write"),
        (["report", "--out", "x.html", "nowhere"], "stoneware report: nowhere: no such file or folder; check the path"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(arguments, message, capsys):
    assert main.run(arguments) == exit_codes.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message), err
    assert err.count("\n") == 1


def test_a_mistake_with_json_is_a_document_too():
    done = stoneware("explain", "scaled_mm", "-m", "16", "--json")
    assert done.returncode == exit_codes.USAGE
    document = json.loads(done.stdout)
    assert document["command"] == "explain" and document["exit_code"] == 2
    assert document["error"]["kind"] == "ValueError"
    assert done.stderr == f"stoneware explain: {document['error']['message']}\n"


def test_a_typing_mistake_with_json_is_a_document_too(capsys):
    assert main.run(["explain", "--json", "--deep"]) == exit_codes.USAGE
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["kind"] == "UsageError" and "--deep" in document["error"]["message"]


def test_traceback_is_shown_if_asked_for(capsys):
    assert main.run(["--traceback", "explain", "scaled_mm"]) == exit_codes.USAGE
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_tune_without_a_gpu_says_so_with_code_3():
    done = stoneware("tune", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == exit_codes.ENVIRONMENT
    assert json.loads(done.stdout)["error"]["kind"] == "UnsupportedError"
    assert "tune needs a GPU that torch can use" in done.stderr
    assert "Traceback" not in done.stderr


def test_tune_checks_its_flags_before_it_asks_for_a_gpu():
    done = stoneware("tune", "--shapes", "16x4096", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == exit_codes.USAGE
    assert "16x4096" in done.stderr and "GPU" not in done.stderr


def test_tune_without_torch_says_what_to_install_with_code_3(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No torch', name='torch')\n")
    changed = environment()["PYTHONPATH"]
    done = stoneware("tune", PYTHONPATH=f"{tmp_path}{os.pathsep}{changed}")
    assert done.returncode == exit_codes.ENVIRONMENT
    assert 'pip install "torch' in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "stoneware", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == exit_codes.PIPE_CLOSED
    assert errors == ""


def test_an_interrupt_is_one_line_and_code_130(tmp_path):
    # A FIFO that nobody writes to: the command waits in open() until it is interrupted.
    fifo = tmp_path / "waits.json"
    os.mkfifo(fifo)
    program = (
        "import sys, threading, os, signal\n"
        "from stoneware.cli import exit_codes, main\n"
        "from stoneware import installation\n"
        "def wait():\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        f"    open({str(fifo)!r}).read()\n"
        "installation.info = wait\n"
        "sys.exit(main.run(['info', '--json']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == exit_codes.INTERRUPTED
    assert errors == "stoneware info: interrupted\n"
    assert json.loads(output)["error"]["kind"] == "KeyboardInterrupt"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["explain", "x", "-m", "1"]])
def test_starting_imports_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from stoneware.cli import main\n"
        f"main.run({arguments!r})\n"
        "heavy = {'torch', 'triton', 'sqlite3', 'numpy', 'pynvml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["info", "--json"], ["info"], ["explain", "conv", "--json"], ["--version"]])
@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
def test_a_stdout_that_takes_nothing_is_one_line_and_a_documented_code(arguments, to):
    command = " ".join([sys.executable, "-m", "stoneware", *arguments, to])
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=environment())
    is_mistake = "conv" in arguments and to == ">/dev/full"
    assert done.returncode == (exit_codes.USAGE if is_mistake else exit_codes.ENVIRONMENT)
    lines = [line for line in done.stderr.splitlines() if line.startswith("stoneware")]
    assert len(lines) == 1 and ("stdout" in lines[0] or is_mistake)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


ESCAPES = "\x1b[31m\x9b5m\u202e\a"


def test_no_escape_sequence_in_a_name_reaches_the_terminal(tmp_path):
    folder = tmp_path / f"own{ESCAPES}"
    item = dataclasses.replace(kernel_sample(64, 10.0), config=KernelConfig(kwargs=(("MODE", f"fast{ESCAPES}"),)))
    Store(folder / "samples.sqlite3").add(run(), [item])
    samples = write_folder(tmp_path / f"h200{ESCAPES}", [item])
    with (samples / "runs.json").open("a") as file:
        file.write("torn")
    for arguments in (
        ["info"],
        ["explain", KERNEL_OP, "COLS=1024", "M=64"],
        ["verify", f"none{ESCAPES}"],
        ["explain", KERNEL_OP, "COLS=1024", "M=64", "--device", "none"],
        ["report", "--json", f"none{ESCAPES}"],
        ["merge", str(samples), "--out", f"{folder}/out"],
        ["bake", "--op", KERNEL_OP, "--out", f"{folder}/x.table", str(samples / "device.json")],
        ["diff", str(samples), f"{folder}/samples.sqlite3"],
        ["report", "--out", f"{folder}/x.html", str(samples)],
        ["--traceback", "verify", f"none{ESCAPES}"],
        ["tune", "--model", f"none{ESCAPES}"],
        ["tune", "--shapes", f"1x1{ESCAPES}"],
    ):
        done = stoneware(*arguments, STONEWARE_CACHE_DIR=str(folder))
        printed_text = re.sub(r"\n *", "", done.stdout + done.stderr)  # a long path is wrapped anywhere
        assert printed_text.isprintable(), (arguments, printed_text)
        assert "\\x1b[31m\\x9b5m\\u202e\\x07" in printed_text or "--device" in arguments, printed_text


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["info"], exit_codes.ENVIRONMENT),
        (["--version"], exit_codes.ENVIRONMENT),
        (["explain", "conv"], exit_codes.USAGE),
        (["explain", "conv", "--json"], exit_codes.USAGE),
    ],
)
def test_a_full_disk_behind_stdout_and_stderr_is_a_documented_code(arguments, code):
    command = " ".join([sys.executable, "-m", "stoneware", *arguments, ">/dev/full 2>&1"])
    assert subprocess.run(["sh", "-c", command], env=environment()).returncode == code


def test_a_closed_stderr_puts_nothing_on_stdout():
    command = f"{sys.executable} -m stoneware explain conv --json 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, env=environment())
    assert done.returncode == exit_codes.USAGE
    assert json.loads(done.stdout)["exit_code"] == exit_codes.USAGE
