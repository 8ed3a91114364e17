"""What the GPU tests share: they are skipped, with the reason, where there is no CUDA GPU.

`--outcomes FILE` is for tools/gpu_check: every outcome is written there as it is known, and tests
that FILE names already are not run. A kernel that faults destroys the CUDA context, after which all
tests of the process would fail; the session then ends with exit code 3, and is started again to go
on after it. So one session on a GPU finds every fault.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from stoneware.runtime.device import Device, cuda_device

LOST_CONTEXT_EXIT_CODE = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="JSON-lines file of outcomes; its tests are not run again")
    parser.addoption("--shard", default="0/1", metavar="I/N", help="run every Nth test, from the Ith on")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(_Outcomes(pathlib.Path(path)))


@pytest.hookimpl(tryfirst=True)  # before tests that were run are left out, so that a share stays the same
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    idx, num_shards = map(int, config.getoption("--shard").split("/"))
    items[:] = items[idx::num_shards]
    if torch.cuda.is_available():
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    reason = f"no CUDA GPU: torch {torch.__version__}, built for {built_for}, sees none"
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> Device:
    """The first GPU."""
    torch.cuda.init()
    return cuda_device(0)


@pytest.fixture(autouse=True)
def _fresh_random_numbers(request: pytest.FixtureRequest) -> None:
    """New operands in each run; the seed is printed with a failure."""
    seed = torch.seed() % (1 << 62)
    torch.manual_seed(seed)
    request.node.add_report_section("setup", "seed", f"torch.manual_seed({seed})")


class _Outcomes:
    """Writes the file of --outcomes: a line when a test starts, and one for each outcome."""

    def __init__(self, path: pathlib.Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self._done = {json.loads(line)["test"] for line in lines}
        self._file = path.open("a", encoding="utf-8")

    def _write(self, test: str, outcome: str, message: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "message": message}) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            # A skip's is (path, line, reason); the path is one of this machine.
            shown = report.longrepr[2] if report.skipped else report.longrepr
            message = "" if report.passed else str(shown)[-6000:]
            self._write(report.nodeid, report.outcome, message)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self._write(nodeid, "failed", f"the CUDA context is lost: {error}")
            pytest.exit(f"{nodeid} destroyed the CUDA context", returncode=LOST_CONTEXT_EXIT_CODE)
