"""The matrix of versions covers what is promised, states the reason of each gap, and its page shows its result."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from absl import app

from tools.version_matrix import combinations, environments, page, version_matrix

DOCUMENT = json.loads(pathlib.Path(version_matrix.JSON).read_text())


def test_each_version_is_in_a_combination():
    planned = combinations.combinations()
    assert len({combination.name for combination in planned}) == len(planned)
    for field, versions in {
        "python": combinations.PYTHONS,
        "torch": (*combinations.TORCHES, combinations.REFUSED_TORCH),
        "transformers": combinations.TRANSFORMERS,
        "triton": combinations.TRITONS,
    }.items():
        assert {getattr(combination, field) for combination in planned} == {*versions}


def test_the_page_shows_the_committed_result():
    text = pathlib.Path(page.PAGE).read_text()
    assert page.rendered(text, DOCUMENT) == text


def test_the_committed_result_is_green_or_has_a_reason():
    planned = [combination.name for combination in combinations.combinations()]
    assert [result["name"] for result in DOCUMENT["results"]] == planned
    for result in DOCUMENT["results"]:
        assert result["status"] in ("passed", "refused") or (result["status"] == "gap" and result["reason"]), result


@pytest.mark.parametrize(
    "output, reason",
    [
        (
            "The conflict is caused by:\n    The user requested torch==2.15.*\n"
            "    The user requested (constraint) torch<=2.14.1\nERROR: ResolutionImpossible: for help visit a://b",
            "the machine's pip is constrained to torch<=2.14.1",
        ),
        ("ERROR: No matching distribution found for torch==2.15.*", "pip finds no torch==2.15.* for this Python"),
        ("ERROR: No matching distribution found for stoneware", "there is no wheel of stoneware for this Python"),
        ("ERROR: Could not fetch URL some://host/torch/ of /tmp/x", "pip fails: Could not fetch URL ... of ..."),
    ],
)
def test_a_gap_has_pips_reason_without_addresses(output, reason):
    assert environments.reason_of(output) == reason


def test_a_result_counts_only_for_the_wheels_and_tests_that_it_was_taken_with(tmp_path):
    (tmp_path / "results").mkdir()
    combination, wheels = combinations.Combination(), {"a.whl": "00"}
    passed = {"name": combination.name, **dataclasses.asdict(combination), "status": "passed"}
    version_matrix.result_file(tmp_path, combination).write_text(json.dumps(passed | {"wheels": wheels}))
    assert version_matrix.result_of(tmp_path, combination, wheels)["status"] == "passed"
    for other in ((combination, {"a.whl": "01"}), (dataclasses.replace(combination, tests=("tests/ops",)), wheels)):
        assert version_matrix.result_of(tmp_path, *other)["status"] == "not run"


def test_environments_of_a_stopped_run_are_not_used_again(tmp_path):
    environment = version_matrix.environment_of(tmp_path, combinations.Combination())
    environment.folder.mkdir()
    (tmp_path / "results").mkdir()
    version_matrix.remove_environments(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_an_interpreter_that_does_not_run_is_refused():
    with pytest.raises(app.UsageError, match="--python=/no/python must be a Python that runs"):
        version_matrix.interpreters(["/no/python"])
