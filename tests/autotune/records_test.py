"""Config, Sample, Run and device records: validated, and the same after a trip through JSON."""

from __future__ import annotations

import json
import random

import pytest
import small_package as small

from stoneware.errors import TableError
from stoneware.kernels.config import Config, KernelConfig
from stoneware.runtime.device import DeviceFingerprint, normalized_name
from stoneware.tuning import samples as sample_format


def test_config_goes_through_json_unchanged():
    config = Config(backend="sm90", kernel="x", max_swizzle=4, raster="along_n")
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert Config.from_json({"backend": "vendor", "kernel": "y"}).max_swizzle == 1


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"max_swizzle": 3}, ValueError, ["max_swizzle=3", "(1, 2, 4, 8)"]),
        ({"max_swizzle": True}, TypeError, ["max_swizzle=True", "bool"]),
        ({"raster": "diagonal"}, ValueError, ["raster='diagonal'", "along_m"]),
        ({"kernel": ""}, ValueError, ["kernel=''", "empty"]),
        ({"kernel": 7}, TypeError, ["kernel=7", "str"]),
    ],
)
def test_config_refuses_bad_fields(changes, error, parts):
    with pytest.raises(error) as caught:
        Config(**{"backend": "sm90", "kernel": "x", **changes})
    for part in parts:
        assert part in str(caught.value)


def test_config_from_json_names_unknown_and_missing_fields():
    with pytest.raises(ValueError, match=r"unknown fields \['tile'\], missing fields \['kernel'\]"):
        Config.from_json({"backend": "vendor", "tile": 1})


def test_samples_go_through_their_lines_unchanged(tmp_path):
    sample = small.sample(small.sm90(small.BIG, max_swizzle=2), 12.345, spread_us=0.1)
    failed = small.sample(small.VENDOR, 0, status="failed", count=0, detail="out of memory")
    sample_format.write_samples(tmp_path / "x.jsonl", [sample, failed])
    assert {read for _, read in sample_format.read_samples(tmp_path / "x.jsonl")} == {sample, failed}


def test_values_of_other_types_are_other_configs_and_other_samples():
    configs = [KernelConfig(kwargs=(("flag", value),)) for value in (1, True, 1.0, 0.0, -0.0, None)]
    assert len(set(configs)) == len(configs)
    assert KernelConfig(kwargs=(("flag", True),)) == configs[1]


def test_sample_files_have_the_same_bytes_in_whatever_order_samples_come(tmp_path):
    samples = [
        small.sample(config, 10.0, m=m)
        for m in (1, 16, 512)
        for config in (small.VENDOR, small.sm90(small.BIG), small.triton())
    ]
    sample_format.write_samples(tmp_path / "x.jsonl", samples)
    expected = (tmp_path / "x.jsonl").read_bytes()
    random.shuffle(samples)
    sample_format.write_samples(tmp_path / "x.jsonl", samples)
    assert (tmp_path / "x.jsonl").read_bytes() == expected
    read = [sample for _, sample in sample_format.read_samples(tmp_path / "x.jsonl")]
    assert sorted(read, key=lambda sample: sample.identity) == read
    assert set(read) == set(samples)


def _good_lines() -> tuple[dict, dict]:
    """The lines of a candidate and of a problem."""
    candidate, problem = sample_format.samples_text([small.sample(small.VENDOR, 1.0)]).splitlines()
    return json.loads(candidate), json.loads(problem)


def _good_line() -> dict:
    return _good_lines()[1]


def _with(position: int, value: object) -> str:
    """The line with another value in the candidate's list: its id, median, ..."""
    line = _good_line()
    line["samples"][0][position] = value
    return json.dumps(line)


def _candidate_with(**changes) -> str:
    return json.dumps({**_good_lines()[0], **changes})


def _with_key(**changes) -> str:
    line = _good_line()
    return json.dumps({**line, "key": {**line["key"], **changes}})


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[]", "must be a JSON object"),
        ("[" * 200_000, "recursion"),
        ('"NaN"', "must be a JSON object"),
        (json.dumps({**_good_line(), "colour": "red"}), "unknown fields ['colour']"),
        (json.dumps({key: value for key, value in _good_line().items() if key != "key"}), "missing fields ['key']"),
        (json.dumps({**_good_line(), "samples": []}), "samples=[]"),
        (json.dumps({**_good_line(), "samples": [[]]}), "must be lists of a candidate's id"),
        (json.dumps({**_good_line(), "run": 7}), "run=7"),
        (json.dumps({**_good_line(), "key": 7}), "key=7"),
        (_with_key(colour="red"), "unknown fields ['colour']"),
        (_with_key(m=0), "m=0"),
        (_with_key(m="16"), "m='16'"),
        (_with(1, float("nan")), "median_us=nan"),
        (_with(1, -1), "median_us=-1"),
        (_with(0, None), "candidate=None"),
        (_with(0, "x"), "candidate='x' of 1 samples must be the id of a line"),
        (_candidate_with(kernel_sha256="abc"), "kernel_sha256='abc'"),
        (_candidate_with(config=None), "config=None"),
        (_candidate_with(candidate=7), "candidate=7"),
        (_candidate_with(colour="red"), "unknown fields ['colour']"),
        (_candidate_with(kernel_sha256="0" * 64), "must name one candidate, and names two"),
    ],
)
def test_bad_line_is_reported_with_file_and_line(tmp_path, line, part):
    path = tmp_path / "scaled_mm.jsonl"
    path.write_text("".join(f"{text}\n" for text in (*map(json.dumps, _good_lines()), line)))
    with pytest.raises(TableError) as caught:
        sample_format.read_samples(path)
    assert f"{path}:3: " in str(caught.value)
    assert part in str(caught.value)
    assert "version control" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"schema": 1, "runs": []}', '{"schema": 2, "runs": []}', '{"schema": 3}', "[" * 200_000]
)
def test_bad_runs_file_is_reported_with_its_name(tmp_path, text):
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(TableError, match="runs.json: not runs"):
        sample_format.read_runs(tmp_path / "runs.json")


def test_device_names_fold_case_vendor_and_separators():
    for name in ("NVIDIA H200", "nvidia_h200", "H200", "h200"):
        assert normalized_name(name) == normalized_name("NVIDIA H200")
    assert normalized_name("H100") != normalized_name("NVIDIA H200")


def test_devices_are_told_apart_by_numbers_and_not_by_name():
    renamed = DeviceFingerprint.from_json({**small.H200.to_json(), "name": "GRID H200"})
    assert renamed.same_hardware(small.H200)
    slice_of_it = DeviceFingerprint.from_json({**small.H200.to_json(), "num_sms": 60})
    assert not slice_of_it.same_hardware(small.H200)
    assert not small.H100.same_hardware(small.H200)
    assert small.H200.distance(small.H100) < small.H200.distance(slice_of_it)
    assert small.H200.distance(small.L40) == float("inf")


def test_fingerprint_takes_the_drivers_attributes():
    attributes = {**small.H200.to_json(), "compute_capability": (9, 0), "memory_bus_bits": 6144}
    assert DeviceFingerprint.from_json(attributes) == small.H200
    with pytest.raises(ValueError, match="num_sms"):
        DeviceFingerprint.from_json({"name": "x"})
