"""A package that ships a table of its own kernel: found when installed with Stoneware, exact without any tuning."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

SITE = pathlib.Path(os.environ["ACME_SITE"]).absolute()

UPDATE = (
    "after a change of the kernel or its configs: on an H200 take the samples anew with tests/downstream/acme/tune.py"
)

LOOK_UP = """
import json
from acme.axpb import axpb
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune.identity import identity_of
from stoneware.tuning import lookup, sources

h200 = DeviceFingerprint(name="H200 SXM", compute_capability=(9, 0), num_sms=132,
                         l2_bytes=62914560, memory_clock_khz=3201000)
digest = identity_of(axpb.fn).sha256

def answer(count, digest=digest):
    key = KernelKey(op="acme.axpb:axpb", names=("count",), values=(count,),
                    dtypes=(("x", "float32"), ("out", "float32")))
    found = lookup.find(key, h200, sources.sources(key.op), digest)
    listed = [str(choice.config) for choice in found.entry.choices]
    return [found.source, found.step, found.grade, listed]

print(json.dumps({
    "op": axpb.op,
    "exact": answer(1 << 20), "near": answer(1 << 19), "edited": answer(1 << 20, "0" * 64),
}))
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, sys.path)]),
        "STONEWARE_CACHE_DIR": str(tmp_path / "empty"),
    }


def run(environment: dict[str, str], *arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_packages_table_answers_for_the_kernel_as_it_is(environment):
    found = json.loads(run(environment, "-c", LOOK_UP))
    assert found["op"] == "acme.axpb:axpb"
    assert found["exact"][:3] == ["package acme", "exact", "exact"], UPDATE
    assert found["near"][:3] == ["package acme", "nearest shape", "nearest shape"]
    assert len(found["exact"][3]) == 10, UPDATE


def test_an_edited_kernel_gets_the_entry_with_the_grade_of_a_stale_one(environment):
    found = json.loads(run(environment, "-c", LOOK_UP))
    assert found["edited"][:3] == ["package acme", "exact", "stale kernel"]


def test_without_the_entry_point_there_is_no_answer(environment, tmp_path):
    """The entry point is how the table is found: the same files without it answer nothing."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "acme").symlink_to(SITE / "acme")
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(str(SITE), str(bare))
    program = "from stoneware.tuning import sources; print(sources.sources('acme.axpb:axpb'))"
    assert run(environment, "-c", program).strip() == "()"


def test_the_command_line_explains_it_without_importing_the_package(environment):
    out = run(environment, "-m", "stoneware", "explain", "acme.axpb:axpb", "count=1048576", "--json")
    answer = json.loads(out)["answers"][0]
    assert (answer["source"], answer["step"]) == ("package acme", "exact")
    assert answer["device"]["name"] == "NVIDIA H200"
