"""The report of a benchmark, from its JSON alone."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree

import matplotlib
import pytest
from bench_rows import report, row
from matplotlib import pyplot

from tools.bench import report as program

WHERE = "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130"


def layers() -> dict:
    """A layers.json: torch takes twice as long at one token, and 1.25 times as long at 4,096."""
    rows = [
        {"tokens": tokens, "step": {f"{name}, graph": {"median_ms": ms} for name, ms in times.items()}}
        for tokens, times in (
            (1, {"torch bf16": 8.0, "stoneware rowwise": 4.0}),
            (4096, {"torch bf16": 100.0, "stoneware rowwise": 80.0}),
        )
    ]
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
    return {"machine": machine, "parts": {"inference": {"num_layers": 32, "rows": rows}}}


def swept() -> dict:
    """A sweep.json of one weight: ours is faster at 96, torch at 104."""
    us = {"stoneware": [10.0, 12.0], "torch, row scales": [15.0, 16.0], "torch, tensor scales": [11.0, 11.0]}
    row = {"set": "fp8_row", "n": 160, "k": 256, "m": [96, 104]}
    times = {name: {"median_us": times, "spread_us": [0.1, 0.1], "count": 9} for name, times in us.items()}
    return {"machine": layers()["machine"], "rows": [{**row, "device_us": times}, {**row, "set": "bf16"}]}


def texts(path) -> list[str]:
    return [element.text for element in xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def pictures(folder) -> list:
    return [
        *program.write(report(), folder),
        *program.write_layers(layers(), folder),
        *program.write_sweep(swept(), folder),
    ]


def test_the_plot_of_a_model_shows_tokens_per_second_before_and_after(tmp_path):
    [path] = program.write_layers(layers(), tmp_path)
    text = "\n".join(texts(path))
    for words in ("125 tokens/s", "250 tokens/s, 2.00 times as many", "51,200 tokens/s, 1.25 times as many"):
        assert words in text, words


def test_the_plot_of_a_sweep_has_a_line_for_each_call_of_what_was_timed(tmp_path):
    [path] = program.write_sweep(swept(), tmp_path)
    text = texts(path)
    assert {"fp8_row, 160 × 256", "stoneware", "torch, row scales", "torch, tensor scales"} <= set(text)
    assert not any("bf16" in words for words in text)
    assert program.write_sweep({**swept(), "rows": []}, tmp_path) == []


def test_titles_name_the_gpu_torch_and_what_is_compared(tmp_path):
    files = pictures(tmp_path)
    for path in (path for path in files if path.suffix == ".svg"):
        text = " ".join(texts(path))
        gpu = "a GPU, torch 2" if path.name.startswith("bench") else "NVIDIA H100"
        assert gpu in text and "torch" in text and "compared with" in text, path


def test_every_colour_of_text_and_page_changes_in_dark_mode(tmp_path):
    files = pictures(tmp_path)
    for path in (path for path in files if path.suffix == ".svg"):
        svg = path.read_text()
        [sheet] = re.findall(r"@media \(prefers-color-scheme: dark\)\{(.*)\}</style>", svg)
        replaced = set(re.findall(r"(?:fill|stroke): #\w+(?=\")", sheet))
        used = set(re.findall(r'<text style="[^"]*?(fill: #\w+)', svg)) | {"fill: #ffffff"}
        assert used <= replaced and "<image" not in svg, path
        assert all("fill: " in text for text in re.findall(r'<text style="([^"]*)"', svg)), path


def test_equal_input_gives_equal_bytes_and_the_page_shows_each_picture(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        files = program.write(report(), folder)
    assert sorted(path.name for path in files) == [
        "bench.md", "bench_host_time.svg", "bench_roofline.svg", "bench_speedup_grouped_mm.svg",
        "bench_speedup_scaled_mm.svg",
    ]  # fmt: skip
    page = (folders[0] / "bench.md").read_text()
    for path in files:
        assert path.read_bytes() == (folders[0] / path.name).read_bytes()
        assert path.name == "bench.md" or f"({path.name})" in page


def test_a_map_says_each_ratio_and_leaves_out_what_has_no_figure(tmp_path):
    rows = [
        row(1, stoneware=10.0, torch_mm=12.5), row(16, stoneware=10.0, torch_mm=7.5),
        row(1, layer="down", stoneware=10.0), row(16, layer="down", stoneware=10.0, torch_mm=90.0),
    ]  # fmt: skip
    program.write(report(rows=rows), tmp_path)
    drawn = xml.etree.ElementTree.parse(tmp_path / "bench_speedup_matmul.svg")
    said = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in said if text in ("1.25", "0.75", "9.00", "nan")] == ["1.25", "0.75", "9.00"]
    assert "down  64 × 32" in said and "16" in said


def test_the_first_map_compares_with_the_same_scales_whatever_torch_was_timed_with_first():
    rows = [row(1, stoneware=10.0, torch_tensor=11.0, torch_row=20.0, family="scaled_mm")]
    with matplotlib.rc_context(program._STYLE):
        figure = program.speedup_map(rows, "scaled_mm", WHERE)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    pyplot.close(figure)
    assert titles[0] == "compared with torch's kernel with the same scales" and "faster kernel" in titles[1]
    assert shown == ["2.00", "1.10"]


def test_no_text_of_a_plot_is_cut():
    layer, family = "deepseek_v3_expert_gate_up", "scaled_mm, fp8 with block scales 1x128 and 128x128"
    calls = {"stoneware": {"median_us": 5.0, "spread_us": 1.0}, "torch_block": {"median_us": 20.0, "spread_us": 9.0}}
    rows = [row(m, layer=layer, stoneware=10.0, torch_row=12.5, torch_tensor=11.0) for m in (1, 16)]
    figures = [
        program.speedup_map(rows, family, WHERE),
        program.roofline([{**one, "family": "long"} for one in rows], {"long": family}, WHERE),
        program.host_bars({"long": {"allocating": calls}}, {"long": family}, WHERE),
        program.tokens_per_second(layers()),
        program.times_over_m(swept()),
    ]
    for figure in figures:
        with matplotlib.rc_context(program._STYLE):
            figure.draw_without_rendering()
            drawn = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert drawn.x0 >= 0 and drawn.x1 <= width and drawn.y0 >= 0 and drawn.y1 <= height
        pyplot.close(figure)


def test_a_run_without_any_figure_has_a_page_and_no_pictures(tmp_path):
    problems = ["matmul: no figure"]
    files = program.write(report(rows=[], host_us={}, first_calls=[], problems=problems), tmp_path)
    assert [path.name for path in files] == ["bench.md"]
    assert "PROBLEM: matmul: no figure" in files[0].read_text()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
