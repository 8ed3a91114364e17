"""The report's page in a browser: everything is drawn, and nothing is fetched."""

from __future__ import annotations

import functools
import html.parser
import json
import re
from pathlib import Path

import headless_chromium
import pytest

from stoneware.cli import exit_codes, main
from stoneware.kernels.key import Key

COMMITTED = Path("py/stoneware/tuning_data/nvidia_h200")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main.run(["report", "--out", str(out), str(COMMITTED)]) == exit_codes.OK
    return out


@pytest.fixture(scope="module")
def dom(page) -> str:
    return headless_chromium.dom(page)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@functools.cache
def problems(backend: str | None = None) -> set[Key]:
    """What was measured, or what a backend was measured at."""
    samples = [json.loads(line) for file in COMMITTED.glob("*.jsonl") for line in file.read_text().splitlines()]
    return {
        Key(**sample["key"])
        for sample in samples
        if sample["status"] == "ok" and backend in (None, sample["config"]["backend"])
    }


def test_every_figure_is_drawn(dom):
    # Of each family the maps of speed and of kernels, the roofline and the regrets.
    expected = 4 * len({key.family for key in problems()})
    assert count(r'<div class="figure[^"]*" id="figure-\d+"', dom) == expected
    assert count(r'<svg class="main-svg"', dom) >= expected


def test_every_cell_of_the_heat_maps_is_drawn(dom):
    # One text a cell, in the map of kernels and, beside the vendor's, in that of speed.
    expected = len(problems()) + len(problems("vendor"))
    assert count(r'class="heatmap-label"', dom) == expected


def test_every_point_of_the_rooflines_is_drawn(dom):
    marks = count(r'<path class="point[ "]', dom)
    in_legends = count(r'class="legendpoints"', dom)
    assert len(problems()) <= marks <= len(problems()) + 2 * in_legends


def test_the_page_names_device_kernels_and_layers(dom):
    shown = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    for text in (
        "NVIDIA H200 (sm_90, 132 SMs",
        "vendor torch._scaled_mm",
        "128x128x128",
        "llama3_70b_down  8192 × 28672",
        "nominal roofs",
        "nearest shape",
    ):
        assert text in shown.replace("\xa0", " ").replace("&nbsp;", " "), text


class Loads(html.parser.HTMLParser):
    """What a page would fetch: src and href of elements, and url() of styles."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag, attributes):
        self._tag = tag
        for name, value in attributes:
            if name in ("src", "srcset", "poster", "action", "data") or (name == "href" and tag != "a"):
                self.addresses.append(value or "")
            if name == "style":
                self._add_style(value or "")

    def handle_data(self, data):
        if self._tag == "style":
            self._add_style(data)

    def _add_style(self, text):
        for quoted, bare, imported in re.findall(r"""url\((?:["']([^"']*)["']|([^"')]*))\)|@import\s+([^;]+)""", text):
            self.addresses.append(quoted or bare or imported)


def test_nothing_is_fetched_before_or_after_the_scripts_ran(page, dom):
    for text in (page.read_text(encoding="utf-8"), dom):
        loads = Loads()
        loads.feed(text)
        outside = [address for address in loads.addresses if not address.startswith(("#", "data:", "file:"))]
        assert outside == []


def test_no_button_sends_the_figures_anywhere(dom):
    titles = set(re.findall(r'data-title="([^"]*)"', dom))
    assert titles and not {title for title in titles if "hare" in title or "loud" in title}


def test_no_text_of_an_axis_is_cut_off_or_overlaps(page, tmp_path):
    """Asks the browser for the boxes of all tick labels, per figure and axis."""
    probe = tmp_path / "probe.html"
    probe.write_text(
        page.read_text(encoding="utf-8").replace(
            "</body>",
            """<script>
      const bad = [];
      for (const figure of document.querySelectorAll(".figure")) {
        const frame = figure.getBoundingClientRect();
        for (const axis of [".xtick", ".ytick"]) {
          const boxes = [...figure.querySelectorAll(axis + " text")]
            .map(text => [text.textContent, text.getBoundingClientRect()]);
          for (const [text, box] of boxes)
            if (box.left < frame.left - 1 || box.right > frame.right + 1) bad.push("cut " + text);
          for (let i = 1; i < boxes.length; i++) {
            const a = boxes[i - 1][1], b = boxes[i][1];
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1
                && b.top < a.bottom - 1) bad.push("over " + boxes[i][0]);
          }
        }
      }
      document.body.insertAdjacentHTML("beforeend",
        "<pre id=probe>" + JSON.stringify(bad) + " of " +
        document.querySelectorAll(".xtick text, .ytick text").length + "</pre>");
    </script></body>""",
        ),
        encoding="utf-8",
    )
    [found] = re.findall(r'<pre id="probe">(.*?)</pre>', headless_chromium.dom(probe))
    bad, _, number = found.rpartition(" of ")
    assert bad == "[]" and int(number) > 100
