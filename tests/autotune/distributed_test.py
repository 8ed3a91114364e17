"""sw.distributed: two processes over gloo that decide alike, or find out that they do not."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import pytest
import small_package as small
import torch

import stoneware as sw
from stoneware.tuning.store import Store

PROGRAM = """
import json, logging, sys
import small_package as small
from pathlib import Path
from stoneware.runtime import package_files
from stoneware.tuning import policy
rank, rendezvous, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
package_files.ROOT = root
import torch
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
import stoneware as sw
from stoneware.errors import TuningMismatchError
from stoneware.ops.scaled_mm.api import OPERATION, Problem
from stoneware.runtime.device import Device
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("stoneware").addHandler(handler)
device = Device(fingerprint=small.H200)
def decide():
    decision = OPERATION.decide(Problem.dense(m=16, n=4096, k=4096), device)
    return [decision.source, str(decision.config)]
before, epoch, digest, error = decide(), policy.EPOCH[0], "", ""
try:
    digest = sw.distributed.assert_same_tuning()
except TuningMismatchError as mismatch:
    error = str(mismatch)
print(json.dumps({
    "before": before, "after": decide(), "digest": digest, "error": error, "said": said,
    "is_anew": policy.EPOCH[0] != epoch,
}))
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def ranks(package, tmp_path):
    """Runs the two ranks, each with its own environment and package; returns what each saw."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(roots=(package, package), environments=({}, {})):
        rendezvous = tmp_path / f"rendezvous-{len(list(tmp_path.iterdir()))}"
        running = [
            subprocess.Popen(
                [sys.executable, str(tmp_path / "program.py"), str(rank), str(rendezvous), str(root)],
                env={**small.environment(root), **environment},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, (root, environment) in enumerate(zip(roots, environments))
        ]
        seen = []
        for process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            seen.append(json.loads(out.splitlines()[-1]))
        return seen

    return run


def warm_store(folder):
    Store(folder / "samples.sqlite3").add(small.run("run-2"), [small.sample(small.sm90(small.BIG), 1.0, run="run-2")])


def test_ranks_that_decide_alike_get_one_digest_and_keep_their_store(ranks, package):
    warm_store(package / "user")
    first, second = ranks()
    assert first == second
    assert (len(first["digest"]), first["said"], first["is_anew"]) == (64, [], False)
    assert first["before"] == first["after"]
    assert first["after"][0] == "user's store"


def test_ranks_with_different_stores_fall_back_on_the_wheel_and_each_says_so(ranks, package, tmp_path):
    warm_store(package / "user")
    cold = {"STONEWARE_CACHE_DIR": str(tmp_path / "cold")}
    first, second = ranks(environments=({}, cold))
    assert first["before"][0] == "user's store"
    assert second["before"][0] == "wheel"
    assert first["after"] == second["after"] == second["before"]
    assert first["digest"] == second["digest"]
    for seen in (first, second):
        assert seen["is_anew"]
        [message] = seen["said"]
        assert "the ranks are tuned differently (user's store)" in message
        assert "ranks 0: digest" in message
        assert "ranks 1: digest" in message
        assert "user's store none" in message


def test_ranks_with_different_modes_fall_back_too(ranks):
    first, second = ranks(environments=({"STONEWARE_TUNING": "on_miss"}, {}))
    for seen in (first, second):
        assert "tuned differently (mode)" in seen["said"][0]
        assert "mode on_miss" in seen["said"][0]
    assert first["digest"] == second["digest"]


def test_ranks_with_different_wheels_are_an_error_that_names_them(ranks, package, tmp_path):
    other = tmp_path / "other"
    (other / "tables").mkdir(parents=True)
    (other / "kernel_manifest.json").write_bytes((package / "kernel_manifest.json").read_bytes())
    for path in (package / "tables").iterdir():
        (other / "tables" / path.name).write_bytes(path.read_bytes())
    files = small.write_device(tmp_path / "x", [small.sample(small.VENDOR, 1.0)])
    (other / "tables" / "scaled_mm.table").write_bytes(small.bake("scaled_mm", files, small.manifest()))
    for seen in ranks(roots=(package, other)):
        for part in (
            "must have the same stoneware wheel",
            "table of scaled_mm",
            "ranks 0:",
            "ranks 1:",
            "install one wheel",
        ):
            assert part in seen["error"]
        assert seen["said"] == []


def test_without_a_process_group_it_is_an_error(package):
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        sw.distributed.assert_same_tuning()


def test_without_torch_the_error_says_how_to_install_it(monkeypatch):
    from stoneware import distributed

    def no_torch(name, *arguments):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *arguments)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(ImportError, match='pip install "torch'):
        distributed.assert_same_tuning()
