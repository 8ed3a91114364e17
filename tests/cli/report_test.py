"""`stoneware report`: its numbers are those of the samples, its figures are plotly's, and its page
holds both."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import sys
from pathlib import Path

import plotly.graph_objects
import pytest
from small_samples import (
    GROUPED,
    GROUPED_VENDOR,
    H200,
    KERNEL_OP,
    UNKNOWN_GPU,
    VENDOR,
    bad_sample,
    grouped_sample,
    kernel_sample,
    ours,
    run,
    sample,
    write_folder,
)

from stoneware.cli import exit_codes, main
from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.registry import OPS
from stoneware.report import figures, measures, page, regret, sources

SMALL, BIG = ours("64x16x256"), ours("64x64x256")
COMMITTED = Path("py/stoneware/tuning_data/nvidia_h200")


def report(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.run(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def embedded(text: str) -> dict:
    """The page's data."""
    [data] = re.findall(f'<script type="application/json" id="{page.DATA_ID}">(.*?)</script>', text)
    return json.loads(data)


def place(names: dict, sizes: list[int]) -> tuple:
    """What tells a problem from others: the names and groups of its key or family, and its sizes."""
    return (
        *sorted((name, value) for name, value in names.items() if isinstance(value, str)),
        names.get("num_groups", 0),
        *sizes,
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(
        tmp_path / "h200",
        [
            sample(SMALL, 10.0),
            sample(BIG, 14.0),
            sample(VENDOR, 16.0),
            sample(SMALL, 30.0, m=64),
            sample(BIG, 20.0, m=64),
            sample(VENDOR, 22.0, m=64),
            bad_sample(BIG, "hung", m=128),
            sample(VENDOR, 40.0, m=128),
        ],
    )


def test_json_has_the_documented_keys_and_needs_no_plotly(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, out, err = report(capsys, "--json", folder)
    assert (code, err) == (exit_codes.OK, "")
    document = json.loads(out)
    assert set(document) == {"command", "exit_code", "out", "devices"} and document["out"] is None
    [device] = document["devices"]
    assert set(device) == {"device", "aliases", "sources", "digests", "statuses", "runs", "families"}
    assert device["statuses"] == {"ok": 7, "wrong": 0, "failed": 0, "hung": 1}
    [family] = device["families"]
    assert set(family) == {
        "family",
        "title",
        "num_problems",
        "speedup_geomean",
        "speedup_least",
        "problems",
        "roofs",
        "roofline",
        "regret",
    }
    assert [problem["speedup"] for problem in family["problems"]] == [1.6, 1.1, 1.0]
    assert family["speedup_least"] == 1.0
    assert [item["ratio"] for item in family["regret"]["m"]["regrets"]] == [1.4, 1.1, 1.0]


def test_page_holds_the_same_numbers_as_json(folder, capsys, tmp_path):
    out = tmp_path / "report.html"
    code, said, _ = report(capsys, "--out", out, folder)
    assert (code, said) == (exit_codes.OK, f"{out}: 3 problems on NVIDIA H200\n")
    _, text, _ = report(capsys, "--json", folder)
    assert embedded(out.read_text())["devices"] == json.loads(text)["devices"]


def test_groups_are_named_in_titles_rows_and_shapes(tmp_path, capsys):
    folder = write_folder(
        tmp_path / "h200",
        [
            item
            for num_groups in (8, 32)
            for item in (
                grouped_sample(GROUPED, 10.0, num_groups=num_groups),
                grouped_sample(GROUPED_VENDOR, 15.0, num_groups=num_groups),
            )
        ],
    )
    out = tmp_path / "report.html"
    assert report(capsys, "--out", out, folder)[0] == exit_codes.OK
    [device] = embedded(out.read_text())["devices"]
    assert [family["title"] for family in device["families"]] == [
        f"grouped_mm bf16 × bf16 → bf16, layout nt, {groups} groups" for groups in (8, 32)
    ]
    [problem] = device["families"][0]["problems"]
    assert (problem["shape"], problem["speedup"]) == ("m=16 n=4096 k=14336 groups=8", 1.5)
    drawn = embedded(out.read_text())["figures"].values()
    rows = {
        row for figure in drawn for trace in figure["data"] for row in trace.get("y", ()) if trace["type"] == "heatmap"
    }
    # With 32 groups it is no layer of a model that is known.
    assert rows == {"mixtral_8x7b_down  4096 × 14336", "4096 × 14336"}
    for figure in drawn:
        plotly.graph_objects.Figure(figure)


def test_page_names_what_hung_and_escapes_it(folder, capsys, tmp_path):
    out = tmp_path / "report.html"
    report(capsys, "--out", out, folder)
    text = out.read_text()
    assert "it was hung &lt;here&gt;" in text and "it was hung <here>" not in text


def test_text_that_would_end_the_data_does_not(tmp_path, capsys):
    folder = write_folder(tmp_path / "h200", [sample(SMALL, 10.0)], aliases=("</script><b>x",))
    out = tmp_path / "report.html"
    report(capsys, "--out", out, folder)
    assert embedded(out.read_text())["devices"][0]["aliases"] == ["</script><b>x"]
    assert html.escape("</script><b>x") in out.read_text()


def test_every_figure_is_one_that_plotly_accepts(folder, capsys, tmp_path):
    out = tmp_path / "report.html"
    report(capsys, "--out", out, folder)
    drawn = embedded(out.read_text())["figures"]
    assert len(drawn) == 4
    for figure in drawn.values():
        plotly.graph_objects.Figure(figure)  # raises ValueError for an unknown property


def test_committed_samples_are_drawn_as_they_are(capsys, tmp_path):
    """The speed of every cell, computed here from the files alone, is what the page holds."""
    if not COMMITTED.exists():
        pytest.skip("runs in the root of the repository")
    out = tmp_path / "report.html"
    assert report(capsys, "--out", out, COMMITTED)[0] == exit_codes.OK
    document = embedded(out.read_text())
    vendor_us, times_us = {}, {}
    for file in (COMMITTED / f"{op}.jsonl" for op in OPS):
        for line in file.read_text().splitlines() if file.exists() else ():
            raw = json.loads(line)
            if raw["status"] != "ok":
                continue
            at = place(raw["key"], Key(**raw["key"]).sizes)
            times_us.setdefault(at, {})[Config.from_json(raw["config"])] = raw["median_us"]
            if raw["config"]["backend"] == "vendor":
                vendor_us[at] = raw["median_us"]
    seen = 0
    for family in document["devices"][0]["families"]:
        for problem in family["problems"]:
            at = place(family["family"], problem["sizes"])
            assert problem["chosen_us"] in times_us[at].values()
            assert problem["vendor_us"] == vendor_us.get(at)
            assert problem["speedup"] == (vendor_us[at] / problem["chosen_us"] if at in vendor_us else None)
            seen += 1
        by_shape = {problem["shape"]: problem for problem in family["problems"]}
        regrets = {item["shape"]: item for item in family["regret"]["m"]["regrets"]}
        # Of a batch an m that lies far from the others has no answer among them.
        assert (
            regrets.keys() <= by_shape.keys()
            if Key(**family["family"]).is_batch
            else (regrets.keys() == by_shape.keys())
        )
        for shape, item in regrets.items():
            at = place(family["family"], by_shape[shape]["sizes"])
            assert item["best_us"] == min(times_us[at].values())
            assert item["chosen_us"] == times_us[at][Config.from_json(item["chosen"])]
    assert seen == len(times_us)
    heat_maps = [
        figure
        for figure in document["figures"].values()
        if figure["layout"]["title"]["text"].startswith("Speed against the vendor")
    ]
    cells = [text for figure in heat_maps for row in figure["data"][0]["text"] for text in row]
    assert sorted(filter(None, cells)) == sorted(
        f"{problem['speedup']:.2f}"
        for family in document["devices"][0]["families"]
        for problem in family["problems"]
        if problem["speedup"] is not None
    )


def test_a_device_is_selected_by_name_or_alias(folder, tmp_path, capsys):
    other = write_folder(
        tmp_path / "x1", [sample(SMALL, 5.0)], device=UNKNOWN_GPU, aliases=("x1",), runs=[run(device=UNKNOWN_GPU)]
    )
    _, out, _ = report(capsys, "--json", folder, other)
    assert len(json.loads(out)["devices"]) == 2
    _, out, _ = report(capsys, "--json", "--device", "x1", folder, other)
    assert [item["device"]["name"] for item in json.loads(out)["devices"]] == ["NVIDIA X1"]
    code, _, err = report(capsys, "--json", "--device", "A100", folder, other)
    assert code == exit_codes.USAGE and "one of H200, NVIDIA H200, NVIDIA X1, x1" in err


def test_devices_do_not_depend_on_the_order_of_sources_whose_power_limit_is_unknown(tmp_path):
    """An unknown limit may be either known one, and those two are different devices."""
    folders = []
    for limit_w, us in ((0, 3.0), (500, 2.0), (700, 1.0)):
        device = dataclasses.replace(H200, power_limit_w=limit_w)
        runs = [run(id=f"run-{limit_w}", device=device)]
        samples = [sample(SMALL, us, run=f"run-{limit_w}")]
        folders.append(write_folder(tmp_path / f"{limit_w}", samples, device=device, runs=runs))
    for ordered in itertools.permutations(folders):
        found = {
            item.fingerprint.power_limit_w: [one.median_us for one in item.measurements]
            for item in sources.load(ordered)
        }
        assert found == {0: [3.0], 500: [2.0], 700: [1.0]}
    for ordered in itertools.permutations(folders[:2]):
        [device] = sources.load(ordered)
        assert device.fingerprint.power_limit_w == 500 and len(device.measurements) == 2


def test_a_decorated_kernel_is_drawn_without_vendor_and_roofline(tmp_path, capsys):
    folder = write_folder(
        tmp_path / "h200", [kernel_sample(64, 10.0, 4), kernel_sample(64, 12.0, 8), kernel_sample(128, 20.0, 8)]
    )
    out = tmp_path / "report.html"
    assert report(capsys, "--out", out, "--op", KERNEL_OP, folder)[0] == exit_codes.OK
    document = embedded(out.read_text())
    [family] = document["devices"][0]["families"]
    assert family["speedup_geomean"] is None and family["roofs"] is None
    assert len(document["figures"]) == 2
    region_map = document["figures"]["figure-0"]
    assert region_map["data"][0]["y"] == ["COLS=1024"]
    assert region_map["data"][0]["x"] == ["64", "128"]
    assert region_map["layout"]["xaxis"]["title"]["text"] == "M"


def test_without_measurements_there_is_no_page(folder, tmp_path, capsys):
    out = tmp_path / "report.html"
    code, _, err = report(capsys, "--out", out, "--op", "matmul", folder)
    assert code == exit_codes.USAGE and "a report needs measurements of matmul" in err
    assert not out.exists()


def test_a_page_that_cannot_be_written_is_named(folder, tmp_path, capsys):
    code, _, err = report(capsys, "--out", tmp_path / "missing" / "report.html", folder)
    assert code == exit_codes.USAGE and "missing/report.html: No such file or directory" in err


def test_many_kernels_each_have_a_number_and_an_entry_in_the_legend():
    samples = [sample(ours(f"64x{16 * idx}x256"), 10.0, m=idx) for idx in range(1, 25)]
    device = sources.DeviceMeasurements(fingerprint=H200, measurements=samples)
    [family] = {problem.key.family for problem in device.problems}
    figure = figures.region_map(family, device.problems)
    cells, *legend = figure["data"]
    numbers = {text.split()[0] for row in cells["text"] for text in row if text}
    assert len(legend) == len(numbers) == 24
    assert {entry["name"].split()[0] for entry in legend} == numbers


def test_regret_is_that_of_the_library(folder):
    [device] = sources.load([folder])
    problems = measures.problems(device.measurements, device.dates)
    assert device.regrets["m"] == regret.of_problems(problems, "m")
