"""The run that all measuring programs share: its deadline, what a later run goes on with, and what it reports."""

from __future__ import annotations

import itertools
import json
import sys
import types

import pytest

from tools.gpu_check import experiment, machine
from tools.gpu_check.experiment import Deadline, Experiment, figures, interleaved

CASES = [{"layer": name, "m": m} for name in ("up", "down") for m in (1, 16)]


class Toy(Experiment):
    """Its clock is `seconds_gone`; preparing a case takes 2 s and timing it the seconds that it may."""

    name = "toy"
    ordinal = None
    seconds_gone = 0.0

    def __init__(self, folder, cases=CASES, **changed):
        self.measured, self.given_s, self._cases = [], [], cases
        self.bad, self.raises, self.parts = (), None, None
        values = {"out": folder, "commit": "c0", "wheel_sha256": "w", "command": "toy", "seconds": 100.0, "size": 1}
        super().__init__(types.SimpleNamespace(**{**values, **changed}), now=lambda: self.seconds_gone)

    @property
    def seconds(self):
        return self.values.seconds

    def settings(self):
        return {"size": self.values.size}

    def measure(self):
        for name, settings in (self.parts or {}).items():
            self.part(name, self._fill, 50.0, settings)
        if self.parts is None:
            self._fill(self.rows())

    def _fill(self, part):
        part.measure(self._cases, self._prepare, self._time, judge=lambda row: row["wrong"], most_s=10.0)

    def _prepare(self, case):
        self.measured.append((case["layer"], case["m"]))
        if self.raises and self.measured[-1] == self.raises[0]:
            raise self.raises[1]
        self.seconds_gone += 2.0
        wrong = ["ours is off"] if self.measured[-1] in self.bad else []
        return {"wrong": wrong}, {} if wrong else {"ours": lambda: 0, "peer": lambda: 0}

    def _time(self, calls, seconds, row):
        self.given_s.append(seconds)
        self.seconds_gone += seconds
        return {name: figures([1.0, 2.0, 3.0], "us") for name in calls}

    def page(self):
        return f"{len(self.report.get('rows', ()))} rows\n"


def rows_of(folder):
    return json.loads((folder / "toy.json").read_text())["rows"]


def names_of(rows):
    return [(row["layer"], row["m"]) for row in rows]


# The deadline


def test_time_is_shared_by_the_cases_less_what_preparing_them_takes(tmp_path):
    toy = Toy(tmp_path, seconds=40.0)
    assert toy.run() == 0
    assert toy.given_s == [pytest.approx(38 / 4 - 2)] + [pytest.approx(8.0 + 0.5 / 3, abs=1)] * 3
    assert toy.seconds_gone <= 40.0


def test_a_case_is_timed_for_the_most_seconds_and_at_least_for_a_moment():
    deadline = Deadline(100.0, lambda: 0.0)
    assert deadline.share(1, 3.0) == 3.0
    deadline.prepared(200.0)
    assert deadline.share(1, 3.0) == experiment.LEAST_S


def test_a_run_whose_time_is_over_fails_and_the_same_command_goes_on(tmp_path, capsys):
    first = Toy(tmp_path, seconds=4.0)
    assert first.run() == 1
    assert len(first.measured) < len(CASES)
    left = len(CASES) - len(first.measured)
    said = f"toy: FAILED toy: time was over before {left} cases; the same command goes on with them"
    assert said in capsys.readouterr().out
    second = Toy(tmp_path)
    assert second.run() == 0
    assert first.measured + second.measured == names_of(CASES)
    assert names_of(rows_of(tmp_path)) == names_of(CASES)
    assert "s left" in capsys.readouterr().out


def test_a_sample_of_cases_ends_with_its_time_and_lacks_nothing(tmp_path):
    toy = Toy(tmp_path)
    part = toy.rows(seconds=13.0)
    part.measure(CASES, toy._prepare, toy._time, judge=lambda row: (), most_s=5.0, is_sample=True)
    assert (len(toy.measured), toy.given_s) == (2, [5.0, 5.0])
    assert toy.problems() == []


# What a later run goes on with


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_a_run_that_is_ended_keeps_what_it_measured(tmp_path, error):
    toy = Toy(tmp_path)
    toy.raises = ("down", 1), error
    with pytest.raises(type(error)):
        toy.run()
    assert names_of(rows_of(tmp_path)) == [("up", 1), ("up", 16)]
    again = Toy(tmp_path)
    assert again.run() == 0
    assert again.measured == [("down", 1), ("down", 16)]


def test_rows_are_in_the_order_of_the_cases_whenever_they_were_measured(tmp_path):
    assert Toy(tmp_path, CASES[2:]).run() == 0
    assert Toy(tmp_path).run() == 0
    assert names_of(rows_of(tmp_path)) == names_of(CASES)


def test_what_was_wrong_or_failed_is_measured_again(tmp_path, capsys):
    toy = Toy(tmp_path)
    toy.bad, toy.raises = [("up", 16)], (("down", 1), RuntimeError("no memory"))
    assert toy.run() == 1
    rows = rows_of(tmp_path)
    assert ["step" in row for row in rows] == [True, False, False, True]
    wrong = [["layer up, m 16: ours is off"], ["layer down, m 1: RuntimeError: no memory"]]
    assert [row.get("problems") for row in rows] == [None, *wrong, None]
    printed = capsys.readouterr().out
    assert "toy: FAILED toy: layer up, m 16: ours is off" in printed
    assert "toy: FAILED toy: layer down, m 1: RuntimeError: no memory" in printed
    again = Toy(tmp_path)
    assert again.run() == 0
    assert again.measured == [("up", 16), ("down", 1)]
    assert json.loads((tmp_path / "toy.json").read_text())["problems"] == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"commit": "c1"}, "toy: toy.json has another commit 'c0'; all is measured anew"),
        ({"wheel_sha256": "v"}, "another wheel_sha256 'w'"),
        ({"size": 2}, "another settings;"),
    ],
)
def test_results_of_something_else_are_measured_anew_with_the_reason(tmp_path, capsys, changed, reason):
    assert Toy(tmp_path).run() == 0
    other = Toy(tmp_path, **changed)
    assert reason in capsys.readouterr().out
    assert other.run() == 0
    assert len(other.measured) == len(CASES)


def test_results_of_another_kernel_are_measured_anew(tmp_path, monkeypatch, capsys):
    digests = {"kernel": "1" * 64}
    monkeypatch.setattr(machine, "packaged_digests", lambda gpus: dict(digests))
    assert Toy(tmp_path).run() == 0
    assert json.loads((tmp_path / "toy.json").read_text())["kernels"] == digests
    digests["kernel"] = "2" * 64
    other = Toy(tmp_path)
    assert "toy.json has another kernels" in capsys.readouterr().out
    assert other.run() == 0 and len(other.measured) == len(CASES)


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": ['])
def test_a_file_that_is_no_report_is_replaced(tmp_path, capsys, text):
    (tmp_path / "toy.json").write_text(text)
    assert Toy(tmp_path).run() == 0
    assert "measured anew" in capsys.readouterr().out
    assert len(rows_of(tmp_path)) == len(CASES)


# Parts


def test_a_part_that_fails_leaves_the_others_and_is_measured_again(tmp_path):
    toy = Toy(tmp_path)
    toy.parts, toy.bad = {"linear": {}, "lora": {"rank": 4}}, [("up", 1)]
    toy._fill = lambda part: 1 / 0 if part.name == "linear" else Toy._fill(toy, part)
    assert toy.run() == 1
    parts = json.loads((tmp_path / "toy.json").read_text())["parts"]
    assert parts["linear"]["wrong"] == ["ZeroDivisionError: division by zero"]
    assert parts["lora"]["rows"][0]["problems"] == ["layer up, m 1: ours is off"]
    again = Toy(tmp_path)
    again.parts = {"linear": {}, "lora": {"rank": 4}}
    assert again.run() == 0
    assert again.measured == [*names_of(CASES), ("up", 1)]


def test_a_complete_part_is_known_and_other_settings_measure_it_anew(tmp_path, capsys):
    for rank, count in ((4, 4), (4, 0), (8, 4)):
        toy = Toy(tmp_path)
        toy.parts = {"lora": {"rank": rank}}
        assert toy.run() == 0
        assert len(toy.measured) == count
    printed = capsys.readouterr().out
    assert "lora: toy.json has it already" in printed
    assert "lora: was measured with {'rank': 4}, not {'rank': 8}, and is measured anew" in printed


def test_a_part_is_not_begun_when_the_time_is_over(tmp_path):
    toy = Toy(tmp_path, seconds=8.0)
    toy.parts = {"linear": {}, "lora": {}}
    assert toy.run() == 1
    assert toy.problems()[-1] == "lora: time was over before it began; the same command goes on with it"


def test_only_the_parts_that_were_asked_for_count(tmp_path):
    toy = Toy(tmp_path)
    toy.parts, toy.bad = {"linear": {}}, [("up", 1)]
    assert toy.run() == 1
    toy = Toy(tmp_path)
    toy.parts = {"lora": {}}
    assert toy.run() == 0
    assert set(json.loads((tmp_path / "toy.json").read_text())["parts"]) == {"linear", "lora"}


def test_a_folder_of_a_part_is_of_its_head_and_settings(tmp_path):
    def folder(commit, settings):
        found = []
        toy = Toy(tmp_path, commit=commit)
        toy.part("train", lambda part: found.append(part.folder()), 1.0, settings)
        return found[0]

    folders = {folder(commit, {"steps": steps}) for commit, steps in (("a", 1), ("a", 2), ("b", 1))}
    assert len(folders) == 3 and {path.name[:10] for path in folders} == {"toy_train_"}


# Interleaving and figures


def test_each_round_has_every_call_once_in_an_order_of_its_own():
    order = []
    calls = {name: lambda name=name: order.append(name) or [1.0] for name in "abcd"}
    samples = interleaved(calls, 20)
    rounds = [tuple(order[start : start + 4]) for start in range(0, 80, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 5
    assert samples == {name: [1.0] * 20 for name in "abcd"}


def test_rounds_end_with_the_time_but_not_before_the_third():
    clock = itertools.count()
    assert len(interleaved({"a": lambda: [1.0]}, 50, seconds=5.0, now=lambda: next(clock))["a"]) == 8
    assert len(interleaved({"a": lambda: [1.0]}, 50, seconds=-1.0)["a"]) == 3


def test_figures_are_the_median_and_the_interquartile_range():
    assert figures([4.0, 1.0, 2.0, 3.0, 9.0], "ms") == {"median_ms": 3.0, "spread_ms": 2.0, "count": 5}


# What is written


def test_the_report_names_machine_command_commit_and_kernels(tmp_path):
    assert Toy(tmp_path).run() == 0
    report = json.loads((tmp_path / "toy.json").read_text())
    assert report["command"] == "toy" and report["commit"] == "c0" and report["kernels"] == {}
    assert report["machine"]["torch"] and report["machine_after"]["gpu"] == "none"
    assert (tmp_path / "toy.md").read_text() == "4 rows\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
