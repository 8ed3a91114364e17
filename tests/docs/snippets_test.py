"""Every Python block and every `stoneware` command of every page runs on the installed wheel.

The blocks of a page run in their order, Python in one namespace and commands in one folder. A comment
in the line above a block skips it: `<!-- needs a GPU -->` on machines without a GPU, and
`<!-- not run: reason -->` everywhere.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from markdown_pages import ROOT, Block, blocks, pages

from stoneware.cli import exit_codes
from stoneware.tuning import samples
from stoneware.tuning.merge import merge
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.store import Store

_BLOCKS = [block for page in pages() for block in blocks(page) if block.language == "python" or block.commands]


class Page:
    """What the blocks of one page share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, object] = {"__name__": "page"}
        self.done: set[int] = set()

    def run(self, block: Block) -> None:
        """Runs a block after the earlier ones of its page, each once."""
        for one in _BLOCKS:
            if one.page != block.page or one.line > block.line or one.line in self.done or why_not(one):
                continue
            self.done.add(one.line)
            if one.language == "python":
                self._run_python(one)
            else:
                self._run_commands(one)

    def _run_python(self, block: Block) -> None:
        file = self.folder / f"line_{block.line}.py"  # a file, since Triton reads the source of a kernel
        file.write_text("\n" * block.line + block.text)
        exec(compile(file.read_text(), file, "exec"), self.namespace)

    def _run_commands(self, block: Block) -> None:
        for command in block.commands:
            done = subprocess.run(
                [sys.executable, "-m", *shlex.split(command, comments=True)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
            )
            found = [exit_codes.FINDINGS] if command.startswith("stoneware diff") else []
            assert done.returncode in (exit_codes.OK, *found), f"{block}: {command}\n{done.stdout}{done.stderr}"


def why_not(block: Block) -> str:
    """Why a block does not run here; empty if it does."""
    if block.needs_gpu and not torch.cuda.is_available():
        return "needs a GPU"
    return block.not_run


def _samples(folder: Path, op: str, most: int) -> list[tuple[Run, Sample]]:
    """Samples of an op in a folder of a device, each with its run."""
    runs = samples.read_runs(folder / "runs.json")
    return [(runs[sample.run], sample) for _, sample in samples.read_samples(folder / f"{op}.jsonl")[:most]]


def _add(store: Path, measured: list[tuple[Run, Sample]]) -> None:
    for run, sample in measured:
        Store(store).add(run, [sample])


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> dict[str, Page]:
    """A Page for each page: its folder has two stores, their samples like in a clone, and a package's
    samples, which are also in the user's store."""
    root = tmp_path_factory.mktemp("pages")
    h200 = _samples(ROOT / "py" / "stoneware" / "tuning_data" / "nvidia_h200", "scaled_mm", most=30)
    acme = ROOT / "tests" / "downstream" / "tuning_data"
    _add(root / "cache" / "samples.sqlite3", _samples(acme / "nvidia_h200", "acme.axpb.axpb", most=30))
    found = {}
    for page in sorted({block.page for block in _BLOCKS}):
        folder = root / page.replace("/", "_")
        _add(folder / "node1.sqlite3", h200[:20])
        _add(folder / "node2.sqlite3", h200[10:])
        merge([folder / "node1.sqlite3", folder / "node2.sqlite3"], folder / "py" / "stoneware" / "tuning_data")
        shutil.copytree(acme, folder / "tuning_data")
        found[page] = Page(folder)
    return found


@pytest.fixture(autouse=True)
def own_store(opened, monkeypatch) -> None:
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(next(iter(opened.values())).folder.parent / "cache"))


@pytest.mark.parametrize("block", _BLOCKS, ids=str)
def test_a_block_runs(block, opened):
    if block.language == "python":
        compile(block.text, str(block), "exec")  # also what is not run here
    if why_not(block):
        pytest.skip(why_not(block))
    opened[block.page].run(block)


def test_there_are_blocks_of_both_kinds():
    assert any(block.language == "python" for block in _BLOCKS)
    assert any(block.commands for block in _BLOCKS)
