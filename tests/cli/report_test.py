"""`stoneware report`: its numbers are those of the samples, and its page shows them without a script."""

from __future__ import annotations

import collections
import dataclasses
import errno
import html
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    key,
    ours,
    run,
    sample,
    write_folder,
)

from stoneware.cli import exit_codes, main
from stoneware.kernels.config import KernelConfig
from stoneware.report import sources, style, verdict
from stoneware.tuning import samples as sample_format

SMALL, BIG = ours("64x16x256"), ours("64x64x256")
COMMITTED = Path("py/stoneware/tuning_data/nvidia_h200")


def report(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.run(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def page(capsys, out: Path, *arguments: str) -> str:
    assert report(capsys, "--out", out, *arguments)[0] == exit_codes.OK
    return out.read_text(encoding="utf-8")


def cells(text: str) -> list[tuple[str, str]]:
    """The speed-ups of the tables by shape: what each cell shows, and what it says under the pointer."""
    return [
        (cell_text, html.unescape(hover))
        for hover, cell_text in re.findall(r'<td class="s\d+" title="([^"]*)">([\d.]+)x', text)
    ]


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


def test_json_has_the_documented_keys(folder, capsys):
    code, out, err = report(capsys, "--json", folder)
    assert (code, err) == (exit_codes.OK, "")
    document = json.loads(out)
    assert set(document) == {"command", "exit_code", "out", "devices"} and document["out"] is None
    [device] = document["devices"]
    assert set(device) == {"device", "aliases", "sources", "digests", "statuses", "runs", "verdict", "families"}
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
    }
    assert [problem["speedup"] for problem in family["problems"]] == [1.6, 1.1, 1.0]
    assert family["speedup_least"] == 1.0


def test_the_verdict_is_the_geometric_mean_by_band_of_m(folder, capsys):
    _, out, _ = report(capsys, "--json", folder)
    [section] = json.loads(out)["devices"][0]["verdict"]
    geomeans = {"1–16": 1.6, "17–128": pytest.approx(1.1**0.5), "129–2048": None, "over 2048": None}
    assert section["same_scales"] == {"count": 3, "geomeans": {**geomeans, "all": pytest.approx(1.76 ** (1 / 3))}}
    assert section["any_scales"]["count"] == 0 and section["share_ours"] == pytest.approx(2 / 3)


def test_the_verdict_compares_with_torchs_fastest_of_any_scales(tmp_path, capsys):
    tensor = key(scales="tensor")
    block_alone = key(scales="block", m=64)
    folder = write_folder(
        tmp_path / "h200",
        [
            sample(SMALL, 10.0),
            sample(VENDOR, 16.0),
            sample(SMALL, 10.0, key=tensor),
            sample(VENDOR, 11.0, key=tensor),
            # Without tensor scales torch's fastest is not known.
            sample(SMALL, 10.0, m=64),
            sample(VENDOR, 16.0, m=64),
            sample(VENDOR, 90.0, key=block_alone),
        ],
    )
    _, out, _ = report(capsys, "--json", folder)
    row, other, block = json.loads(out)["devices"][0]["verdict"]
    assert [(item["title"], item["same_scales"]["geomeans"]["all"]) for item in (row, other)] == [
        ("scaled_mm fp8, row scales", 1.6),
        ("scaled_mm fp8, tensor scales", 1.1),
    ]
    assert [item["any_scales"]["geomeans"]["all"] for item in (row, other, block)] == [1.1, 1.1, None]
    assert "torch's fastest, any scales, 1 problems" in page(capsys, tmp_path / "x.html", folder)


def test_ops_come_in_the_order_of_use_and_other_layouts_are_folded(tmp_path, capsys):
    keys = [
        key(op="matmul", a_dtype="bf16", b_dtype="bf16", scales="none", layout="nn"),
        key(scales="block"),
        key(scales="row"),
        key(op="matmul", a_dtype="bf16", b_dtype="bf16", scales="none"),
    ]
    folder = write_folder(tmp_path / "h200", [sample(VENDOR, 10.0, key=problem_key) for problem_key in keys])
    text = page(capsys, tmp_path / "x.html", folder)
    assert re.findall(r'<section class="op"><h2 id="d0-\d">([^<]*)<', text) == [
        "matmul bf16",
        "scaled_mm fp8, row scales",
        "scaled_mm fp8, block scales",
        "matmul bf16, layout nn",
    ]
    folded = text[text.index("<summary><h2>Other layouts and dtypes</h2></summary>") :]
    assert "matmul bf16, layout nn<span" in folded and "block scales<span" not in folded


@pytest.mark.parametrize(
    ("names", "title"),
    [
        ({"op": "matmul", "a_dtype": "fp16", "b_dtype": "fp16", "out_dtype": "fp16"}, "matmul fp16"),
        ({"op": "matmul", "a_dtype": "fp16", "b_dtype": "fp16", "out_dtype": "bf16"}, "matmul fp16, bf16 result"),
        ({"scales": "row", "out_dtype": "fp16"}, "scaled_mm fp8, row scales, fp16 result"),
        ({"scales": "row", "a_dtype": "e5m2"}, "scaled_mm fp8 (e5m2) × fp8, row scales"),
    ],
)
def test_titles_say_what_differs_from_the_usual(names, title):
    scales = {"scales": "none"} if names.get("op") == "matmul" else {}
    assert verdict.title(key(**scales, **names)) == title


def test_a_cell_is_the_mean_of_its_band_and_names_kernels(folder, capsys, tmp_path):
    text = page(capsys, tmp_path / "x.html", folder)
    assert [cell_text for cell_text, _ in cells(text)] == ["1.60", "1.10", "1.00"]
    assert cells(text)[0][1].startswith("m=16: 1.60, sm90: ")
    assert cells(text)[0][1].endswith("10.0 µs, torch 16.0 µs")


def test_groups_are_named_in_titles_rows_and_shapes(tmp_path, capsys):
    samples = [
        item
        for num_groups in (8, 32)
        for item in (
            grouped_sample(GROUPED, 10.0, num_groups=num_groups),
            grouped_sample(GROUPED_VENDOR, 15.0, num_groups=num_groups),
        )
    ]
    folder = write_folder(tmp_path / "h200", samples)
    _, out, _ = report(capsys, "--json", folder)
    families = json.loads(out)["devices"][0]["families"]
    assert [family["title"] for family in families] == ["grouped_mm bf16"]
    problem, _ = families[0]["problems"]
    assert (problem["shape"], problem["speedup"]) == ("m=16 n=4096 k=14336 groups=8", 1.5)
    # With 32 groups it is not a layer of a known model.
    text = page(capsys, tmp_path / "x.html", folder)
    assert '<details class="unnamed"><summary>1 shapes that belong to no model of the list</summary>' in text
    rows = re.findall(r'<tr data-find="([^"]*)"><th>([^<]*)<', text)
    assert rows == [
        ("mixtral_8x7b mixtral_8x7b_down 8x4096x14336", "8 × 4096 × 14336"),
        ("32x4096x14336", "32 × 4096 × 14336"),
    ]


def test_page_names_what_hung_and_escapes_it(folder, capsys, tmp_path):
    out = tmp_path / "report.html"
    report(capsys, "--out", out, folder)
    text = out.read_text()
    assert "it was hung &lt;here&gt;" in text and "it was hung <here>" not in text


def test_names_that_look_like_html_are_escaped(tmp_path, capsys):
    name = '</script><b onload="x">'
    device = dataclasses.replace(H200, name=name)
    folder = write_folder(tmp_path / "x", [sample(SMALL, 10.0)], device=device, runs=[run(device=device)])
    text = page(capsys, tmp_path / "report.html", folder)
    assert name not in text and text.count("</script>") == 1
    assert html.escape(name) in text


def test_what_is_not_printable_is_escaped_in_the_page(tmp_path, capsys):
    """Values of kernels, messages of failed candidates and paths may hold anything; 0xff is not valid UTF-8."""
    bad = "\x1b[31m\x9b5m\u202e\a"
    config = KernelConfig(kwargs=(("MODE", f"fast{bad}"),))
    samples = [
        dataclasses.replace(kernel_sample(64, 10.0), config=config),
        dataclasses.replace(bad_sample(BIG, "hung"), detail=f"hung{bad}"),
    ]
    folder = write_folder(tmp_path / f"h200{bad}\udcff", samples)
    text = page(capsys, tmp_path / "report.html", folder)
    cell_text = r"\x1b[31m\x9b5m\u202e\x07"
    assert text.replace("\n", "").isprintable()
    assert f"fast{cell_text}" in text and f"hung{cell_text}" in text and rf"h200{cell_text}\udcff" in text


def test_a_figure_names_its_gpu_and_torch(folder, capsys, tmp_path):
    text = page(capsys, tmp_path / "x.html", folder)
    assert re.search(r"<h3>Roofline of scaled_mm fp8, row scales: NVIDIA H200, torch 2\.[\d.]+", text)


def test_a_roof_that_is_exceeded_says_why(tmp_path, capsys):
    folder = write_folder(tmp_path / "h200", [sample(SMALL, 1.0), sample(SMALL, 100.0, m=64)])
    text = page(capsys, tmp_path / "x.html", folder)
    assert "A circled problem is above it: operands that stay in the L2 cache are not read from memory" in text
    assert len(re.findall(r'<circle [^>]*class="m\d above"', text)) == 1


def test_colours_change_at_the_edges_and_the_middle_is_as_fast():
    assert style.step(1.0) == len(style.LIGHT) // 2 == len(style.DARK) // 2
    assert [style.step(speedup) for speedup in (0.1, 0.97, 1.03, 9.0)] == [0, 5, 7, len(style.DARK) - 1]


@given(st.integers(1, 10**6))
def test_every_m_has_one_band_and_coarse_bands_are_made_of_fine_ones(m):
    of_m = key(m=m)
    idx = verdict.band(of_m, verdict.BANDS)
    assert (0, *verdict.BANDS)[idx] < m <= (*verdict.BANDS, m)[idx]
    assert set(verdict.COARSE_BANDS) < set(verdict.BANDS)


def test_committed_samples_are_drawn_as_they_are(capsys, tmp_path):
    """The speed of every cell, computed here from the files alone, is what the page holds."""
    if not COMMITTED.exists():
        pytest.skip("runs in the root of the repository")
    out = tmp_path / "report.html"
    code, printed, _ = report(capsys, "--json", "--out", out, COMMITTED)
    assert code == exit_codes.OK
    text, document = out.read_text(encoding="utf-8"), json.loads(printed)
    vendor_us, times_us = {}, {}
    for file in COMMITTED.glob("*.jsonl"):
        for _, item in sample_format.read_samples(file):
            if item.status != "ok":
                continue
            at = place(item.key.kind.to_json(), item.key.sizes)
            us = float(f"{item.median_us:.4g}")  # like in entries
            times_us.setdefault(at, {})[item.config] = us
            if item.config.backend == "vendor":
                vendor_us[at] = us
    seen = 0
    for family in document["devices"][0]["families"]:
        for problem in family["problems"]:
            at = place(family["family"], problem["sizes"])
            assert problem["chosen_us"] in times_us[at].values()
            assert problem["vendor_us"] == vendor_us.get(at)
            assert problem["speedup"] == (vendor_us[at] / problem["chosen_us"] if at in vendor_us else None)
            seen += 1
    assert seen == len(times_us)
    assert len(text.encode()) < 430 * seen
    counts = collections.Counter(
        speedup for _, hover in cells(text) for speedup in re.findall(r"m=\d+: ([\d.]+)", hover)
    )
    assert counts == collections.Counter(
        f"{problem['speedup']:.2f}"
        for family in document["devices"][0]["families"]
        for problem in family["problems"]
        if problem["speedup"] is not None
    )


def test_each_device_has_its_own_numbers(folder, tmp_path, capsys):
    other = write_folder(
        tmp_path / "x1", [sample(SMALL, 5.0)], device=UNKNOWN_GPU, aliases=("x1",), runs=[run(device=UNKNOWN_GPU)]
    )
    _, out, _ = report(capsys, "--json", folder, other)
    names = [(item["device"]["name"], item["aliases"]) for item in json.loads(out)["devices"]]
    assert names == [("NVIDIA H200", ["H200"]), ("NVIDIA X1", ["x1"])]
    assert "NVIDIA X1: the verdict" in page(capsys, tmp_path / "x.html", folder, other)


def test_devices_do_not_depend_on_the_order_of_sources_whose_power_limit_is_unknown(tmp_path):
    """An unknown limit may be either known one, and those two are different devices."""
    folders = []
    for limit_w, us in ((0, 3.0), (500, 2.0), (700, 1.0)):
        device = dataclasses.replace(H200, power_limit_w=limit_w)
        runs = [run(id=f"run-{limit_w}", device=device)]
        samples = [sample(SMALL, us, run=f"run-{limit_w}")]
        folders.append(write_folder(tmp_path / f"{limit_w}", samples, device=device, runs=runs))
    for ordered in itertools.permutations(folders):
        medians = {
            item.fingerprint.power_limit_w: [sample.median_us for _, sample in item.samples]
            for item in sources.load(ordered)
        }
        assert medians == {0: [3.0], 500: [2.0], 700: [1.0]}
    for ordered in itertools.permutations(folders[:2]):
        [device] = sources.load(ordered)
        assert device.fingerprint.power_limit_w == 500 and len(device.samples) == 2


def test_a_decorated_kernel_is_drawn_without_vendor_and_roofline(tmp_path, capsys):
    folder = write_folder(
        tmp_path / "h200", [kernel_sample(64, 10.0, 4), kernel_sample(64, 12.0, 8), kernel_sample(128, 20.0, 8)]
    )
    text = page(capsys, tmp_path / "x.html", "--op", KERNEL_OP, folder)
    assert "2 problems. Torch's kernel was not measured." in html.unescape(text)
    assert not cells(text) and "<svg" not in text
    assert "<td>M=64 COLS=1024<" in text or "<td>COLS=1024 M=64<" in text


def test_without_measurements_there_is_no_page(folder, tmp_path, capsys):
    out = tmp_path / "report.html"
    code, _, err = report(capsys, "--out", out, "--op", "matmul", folder)
    assert code == exit_codes.USAGE and "a report needs measurements of matmul" in err
    assert not out.exists()


def test_a_page_that_cannot_be_written_is_named(folder, tmp_path, capsys):
    code, _, err = report(capsys, "--out", tmp_path / "missing" / "report.html", folder)
    assert code == exit_codes.USAGE and "missing/report.html: No such file or directory" in err


def test_a_page_replaces_a_link_and_leaves_its_target(folder, tmp_path, capsys):
    target, out = tmp_path / "target.html", tmp_path / "report.html"
    target.write_text("mine")
    out.symlink_to(target)
    text = page(capsys, out, folder)
    assert not out.is_symlink() and text.endswith("</html>\n")
    assert target.read_text() == "mine"


def test_a_page_that_was_not_written_whole_leaves_the_old_one(folder, tmp_path, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "report.html"
    out.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    code, _, err = report(capsys, "--out", out, folder)
    assert code == exit_codes.ENVIRONMENT and "report.html: No space left on device" in err
    assert out.read_text() == "old" and not list(tmp_path.glob(".*"))


def test_op_that_is_not_known_here_is_drawn_without_a_roofline(tmp_path, capsys):
    folder = write_folder(tmp_path / "h200", [sample(SMALL, 10.0), sample(VENDOR, 16.0)])
    sample_file = folder / "scaled_mm.jsonl"
    (folder / "newer.jsonl").write_text(sample_file.read_text().replace('"op":"scaled_mm"', '"op":"newer"'))
    sample_file.unlink()
    text = page(capsys, tmp_path / "x.html", folder)
    assert [cell_text for cell_text, _ in cells(text)] == ["1.60"] and "<svg" not in text
