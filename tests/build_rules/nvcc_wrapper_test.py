"""The wrapper around nvcc refuses spills, arrays in local memory and serialised wgmma, and leaves nothing behind.

A shell script stands in for nvcc. STONEWARE_TEST_NVCC_WRAPPER names the wrapper.
"""

from __future__ import annotations

import os
import subprocess

import pytest

_NO_SPILLS = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
_QUIET_REPORT = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas info    : Function properties for add
    {_NO_SPILLS}
ptxas info    : Used 168 registers, used 1 barriers
"""


@pytest.fixture
def compile_with(tmp_path):
    """Runs the wrapper on an nvcc that prints `report` and exits with `status`."""
    # Not resolved: its own runfiles are found through those of this test.
    wrapper = os.path.abspath(os.environ["STONEWARE_TEST_NVCC_WRAPPER"])
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(report: str, status: int = 0, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "report").write_text(report)
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            f"cat {tmp_path}/report\n"
            f'printf "%s\\n" "$TMPDIR" "$@" > {tmp_path}/arguments\n'
            'touch "$TMPDIR/left_by_nvcc"\n'
            f"exit {status}\n"
        )
        nvcc.chmod(0o755)
        return subprocess.run(
            [wrapper, str(nvcc), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/bin:/usr/bin", "TMPDIR": str(scratch)},
        )

    yield run
    assert list(scratch.iterdir()) == [], "the scratch folder must be gone"


def test_a_clean_report_passes_in_silence(compile_with):
    result = compile_with(_QUIET_REPORT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "spill",
    [
        "8 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads",
        "8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads",
        "940 bytes stack frame, 940 bytes spill stores, 1200 bytes spill loads",
        "100 bytes stack frame, 100 bytes spill stores, 100 bytes spill loads",
    ],
)
def test_spilled_registers_fail_with_rule_value_and_remedy(compile_with, spill):
    result = compile_with(_QUIET_REPORT.replace(_NO_SPILLS, spill))
    assert result.returncode == 1
    assert "must not spill registers" in result.stderr
    assert spill in result.stderr
    assert "choose a smaller tile" in result.stderr


def test_arrays_in_local_memory_fail_with_rule_value_and_remedy(compile_with):
    stack = "512 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    result = compile_with(_QUIET_REPORT.replace(_NO_SPILLS, stack))
    assert result.returncode == 1
    assert "must not have arrays in local memory" in result.stderr
    assert stack in result.stderr
    assert "unroll the loops" in result.stderr


@pytest.mark.parametrize(
    "reason",
    [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma in the function 'add'",
        "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions reading accumulator registers of  a wgmma in the function 'add'",
    ],
)
def test_serialised_wgmma_fails_with_rule_value_and_remedy(compile_with, reason):
    warning = f"ptxas info    : {reason}"
    result = compile_with(_QUIET_REPORT + warning + "\n")
    assert result.returncode == 1
    assert "must not serialise wgmma" in result.stderr
    assert warning in result.stderr
    assert "-DNDEBUG" in result.stderr


def test_a_failing_nvcc_fails_with_its_own_words(compile_with):
    result = compile_with("add.cu(3): error: identifier is undefined\n", 2)
    assert result.returncode != 0
    assert "add.cu(3): error: identifier is undefined" in result.stderr


def test_other_warnings_are_shown(compile_with):
    result = compile_with(_QUIET_REPORT + "add.cu(3): warning #177-D: declared but never used\n")
    assert result.returncode == 0
    assert result.stderr == "add.cu(3): warning #177-D: declared but never used\n"


def test_arguments_arrive_unchanged_behind_a_folder_of_this_call_alone(compile_with, tmp_path):
    folders = set()
    for _ in range(2):
        assert compile_with("", 0, "-c", "two words", "$HOME", "*").returncode == 0
        folder, keep, keep_dir, kept, *arguments = (tmp_path / "arguments").read_text().splitlines()
        assert (keep, keep_dir, kept) == ("--keep", "--keep-dir", folder)
        assert arguments == ["-c", "two words", "$HOME", "*"]
        folders.add(folder)
    assert len(folders) == 2
