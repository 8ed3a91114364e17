"""Several GPUs: ranks that tune share the work, and ranks that decide differently find out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from stoneware.tuning.store import Store

M_VALUES = (1, 16, 64, 128, 512)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")

PROGRAM = """
import json, logging, os, sys
import torch
rank = int(os.environ["LOCAL_RANK"])
if rank and sys.argv[1] == "differ":
    os.environ["STONEWARE_TUNING"] = "error_on_miss"
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
import stoneware as sw
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("stoneware").addHandler(handler)
digest = sw.distributed.assert_same_tuning()
a = torch.randn(16, 4096, device="cuda").to(torch.float8_e4m3fn)
b = torch.randn(4096, 4096, device="cuda").to(torch.float8_e4m3fn).t()
one = torch.ones((), device="cuda")
with sw.tuning("off"):  # whether or not this device was measured
    out = sw.scaled_mm(a, b, one, one)
torch.cuda.synchronize()
finite = bool(out.isfinite().all())
with open(os.path.join(sys.argv[2], f"rank{rank}.json"), "w") as file:
    json.dump({"digest": digest, "said": said, "finite": finite}, file)
torch.distributed.destroy_process_group()
"""


def torchrun(*arguments: str, folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments],
        env={**os.environ, "STONEWARE_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_tune_under_torchrun_measures_each_problem_once_on_either_gpu(tmp_path):
    store = tmp_path / "samples.sqlite3"
    torchrun(
        "-m",
        "stoneware",
        "tune",
        "--ops=scaled_mm",
        "--weights=llama3_8b_o",
        "--scales=row",
        f"--m-values={','.join(map(str, M_VALUES))}",
        "--rounds=5",
        f"--store={store}",
        folder=str(tmp_path),
    )
    taken = Store(store).samples()
    times = Counter((sample.key, sample.config) for _, sample in taken)
    assert {key.m for key, _ in times} == set(M_VALUES)
    assert set(times.values()) == {1}
    assert len({run.id for run, _ in taken}) == 2, "one rank did all the work"


@pytest.mark.parametrize("how", ["agree", "differ"])
def test_ranks_over_nccl_agree_or_fall_back_to_the_wheel_and_say_so(tmp_path, how):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun(str(program), how, str(tmp_path), folder=str(tmp_path / "cache"))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert all(rank["finite"] for rank in ranks)
    for rank in ranks:
        assert len(rank["said"]) == (how == "differ"), rank["said"]
        assert all("only the tables of the wheel" in text and "ranks 1:" in text for text in rank["said"])
