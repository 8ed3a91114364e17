"""The report's page in a browser: everything is shown, the filter works, and nothing is fetched."""

from __future__ import annotations

import html
import html.parser
import json
import re
from pathlib import Path

import headless_chromium
import pytest

from stoneware.kernels.key import Key
from stoneware.report import figures, sources, verdict
from stoneware.report import page as report_page

COMMITTED = Path("py/stoneware/tuning_data/nvidia_h200")
# One unnamed shape in ten is shown, chosen by n and k, which are mostly multiples of the step.
_UNNAMED_SHARE = 10
_SHAPE_STEP = 64


@pytest.fixture(scope="module")
def device() -> sources.DeviceMeasurements:
    """The committed measurements of models' shapes, and a tenth of those of no model, which are three of four."""
    [device] = sources.load([COMMITTED])
    device.samples = [
        (run, sample)
        for run, sample in device.samples
        if figures.models(sample.key) or (sample.key.n + sample.key.k) // _SHAPE_STEP % _UNNAMED_SHARE == 0
    ]
    return device


@pytest.fixture(scope="module")
def page(device, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    out.write_text(report_page.page([device], title="Stoneware report"), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def dom(page) -> str:
    return headless_chromium.dom(page)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def problems(device: sources.DeviceMeasurements, backend: str | None = None) -> set[Key]:
    """What was measured, or what a backend was measured at."""
    samples = (item for _, item in device.samples if item.status == "ok")
    return {item.key for item in samples if backend in (None, item.config.backend)}


def shown(dom: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", dom, flags=re.DOTALL)


def test_every_problem_is_in_a_table_and_in_a_roofline(device, dom):
    assert count("<circle ", dom) == len(problems(device)) > 2000
    per_problem = re.findall(r"(\d+)</span> problems: times and kernels", dom)
    assert sum(map(int, per_problem)) == len(problems(device))
    assert count(r"m=\d+: \d", shown(dom)) == len(problems(device, "vendor"))  # under the pointer of a cell


def test_all_rooflines_have_the_same_axes(dom):
    figures = re.findall(r"<svg .*?</svg>", dom, flags=re.DOTALL)
    assert len({tuple(re.findall("<text.*?</text>", figure)) for figure in figures}) == 1


def test_the_page_names_device_kernels_and_layers(dom):
    for text in (
        "NVIDIA H200 (sm_90, 132 SMs",
        "torch._scaled_mm",
        "128x128x128",
        "8192 × 28672<small>llama3_<wbr>70b_<wbr>down",
        "NVIDIA H200 data sheet",
    ):
        assert text in shown(dom), text


# Functions' bodies that look at the page, in the order in which they run; each begins with an empty filter.
PROBES = {
    "wide": """
        const boxes = [...page.querySelectorAll("section.op .scroll.heat")].filter(box => box.clientWidth);
        const wide = boxes.filter(box => box.scrollWidth > box.clientWidth + 1);
        const bars = wide.map(box => box.offsetHeight - box.clientHeight);
        const marked = wide.filter(box => box.classList.contains("more")).length;
        wide[0].scrollLeft = 9999;
        wide[0].dispatchEvent(new Event("scroll"));
        return {wide: wide.length, marked, bar: Math.min(...bars), atEnd: wide[0].classList.contains("more")};
    """,
    "filter": """
        const [model, shape, count] = ["model", "shape", "count"].map(id => page.getElementById(id));
        const rows = () => [...page.querySelectorAll(".heat [data-find]:not([hidden])")].map(row => row.dataset.find);
        const all = rows().length;
        model.value = "falcon_40b";
        model.dispatchEvent(new Event("input"));
        const ofModel = rows();
        const sections = page.querySelectorAll("section.op:not([hidden])").length;
        model.value = "";
        shape.value = "4096 × 14336 down";
        shape.dispatchEvent(new Event("input"));
        return {all, ofModel, sections, ofShape: rows(), count: count.textContent};
    """,
    "model": """
        const model = page.getElementById("model");
        const count = selector => page.querySelectorAll(selector).length;
        const text = () => page.querySelector("[data-place=d0]").textContent;
        const all = text();
        model.value = "llama3_8b";
        model.dispatchEvent(new Event("input"));
        const counts = [...page.querySelectorAll("section.op:not([hidden]) summary > .count")];
        const found = {
          text: text(), title: page.getElementById("d0").textContent, points: count("circle:not([hidden])"),
          problems: counts.map(element => Number(element.textContent)),
          sections: [...page.querySelectorAll("section.op:not([hidden]) [data-place]")].map(e => e.textContent),
          links: [...page.querySelectorAll("nav a:not([hidden])")].map(link => link.textContent),
          unnamed: count("details.unnamed:not([hidden])"),
        };
        model.value = "";
        model.dispatchEvent(new Event("input"));
        return {...found, isWhole: text() == all, unnamedOfAll: count("details.unnamed:not([hidden])"),
                unfolded: count("details.unnamed[open]")};
    """,
    "unnamed": """
        const row = page.querySelector("details.unnamed tr[data-find]");
        const shape = page.getElementById("shape");
        shape.value = row.dataset.find;
        shape.dispatchEvent(new Event("input"));
        return {isOpen: row.closest("details").open, isHidden: row.hidden};
    """,
    "narrow": """
        for (const details of page.querySelectorAll("details")) details.open = true;
        const cut = [];
        for (const svg of page.querySelectorAll("svg")) {
          const frame = svg.getBoundingClientRect();
          for (const text of svg.querySelectorAll("text")) {
            const box = text.getBoundingClientRect();
            if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
              cut.push(text.textContent);
          }
        }
        return {width: page.documentElement.scrollWidth, cut, texts: page.querySelectorAll("svg text").length};
    """,
}


@pytest.fixture(scope="module")
def found(page, tmp_path_factory) -> dict[str, dict]:
    """What each of PROBES finds in the page, in a frame of 500 pixels.

    One browser runs them all: to lay out the page takes seconds.
    """
    text, probes = (json.dumps(value).replace("<", "\\u003c") for value in (page.read_text(encoding="utf-8"), PROBES))
    path = tmp_path_factory.mktemp("probe") / "probe.html"
    path.write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><iframe width="500" height="900"></iframe><script>
        const frame = document.querySelector("iframe");
        frame.srcdoc = {text};
        frame.onload = () => {{
          const page = frame.contentDocument, found = {{}};
          for (const [name, script] of Object.entries({probes})) {{
            found[name] = Function("page", script)(page);
            for (const id of ["model", "shape"]) page.getElementById(id).value = "";
            page.getElementById("shape").dispatchEvent(new Event("input"));
          }}
          document.body.insertAdjacentHTML("beforeend", "<pre id=probe></pre>");
          document.getElementById("probe").textContent = JSON.stringify(found);
        }};</script>""",
        encoding="utf-8",
    )
    [result] = re.findall(r'<pre id="probe">(.*?)</pre>', headless_chromium.dom(path))
    return json.loads(html.unescape(result))


def test_a_narrow_page_does_not_scroll_sideways_and_no_text_of_a_figure_is_cut(found):
    result = found["narrow"]
    assert result["width"] <= 500 and result["cut"] == [] and result["texts"] > 50


def test_the_filter_keeps_the_shapes_of_a_model_or_text(found):
    result = found["filter"]
    assert result["ofModel"] and all("falcon_40b" in row for row in result["ofModel"]) and result["sections"] == 1
    assert result["ofShape"] and all("4096x14336" in row and "down" in row for row in result["ofShape"])
    assert result["count"] == f"{len(result['ofShape'])} of {result['all']} shapes"


def test_a_model_has_a_verdict_tables_and_rooflines_of_its_own(found, device):
    result = found["model"]
    own = verdict.sections(one for one in device.problems if "llama3_8b" in figures.models(one.key))
    assert result["title"] == "NVIDIA H200: the verdict for llama3_8b"
    for section in own:
        mean = verdict.means(section.same_scales)["all"]
        assert f"{section.title}vs. " in result["text"] and f"{mean:.2f}x" in result["text"]
        sentence = f"{mean:.2f} times as fast as torch with the same scales over {len(section.same_scales)} problems"
        assert any(text.startswith(sentence) for text in result["sections"])
    assert result["points"] == sum(result["problems"]) == sum(len(section.problems) for section in own)
    assert result["unnamed"] == 0 and len(result["sections"]) == len(own)
    assert "matmul bf16" in result["links"] and "grouped_mm bf16" not in result["links"]
    assert result["isWhole"] and result["unnamedOfAll"] > 0 and result["unfolded"] == 0


def test_shapes_of_no_model_are_found_by_their_sizes(found):
    result = found["unnamed"]
    assert result == {"isOpen": True, "isHidden": False}


def test_a_wide_table_shows_that_it_scrolls(found):
    result = found["wide"]
    assert result["wide"] == result["marked"] > 3 and result["bar"] >= 10 and not result["atEnd"]


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
