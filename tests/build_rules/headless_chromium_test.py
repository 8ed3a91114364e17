"""Headless Chromium runs a page's scripts, renders its SVG and text, and reports a failing script."""

from __future__ import annotations

import base64
import json
import pathlib
import re
import struct

import headless_chromium
import pytest

_RED, _BLUE = (255, 0, 0), (0, 0, 255)
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20" style="display:block">'
    '<rect width="20" height="20" fill="#ff0000"/><path d="M20 0h20v20h-20z" fill="#0000ff"/></svg>'
)


@pytest.fixture
def page(tmp_path):
    """Writes a page with `body`; returns its path."""

    def write(body: str) -> pathlib.Path:
        path = tmp_path / "a page.html"
        path.write_text(
            f"<!doctype html><meta charset=utf-8><style>body{{margin:0}}</style><body><p id=result></p>{body}"
        )
        return path

    return write


def result(page: pathlib.Path) -> str:
    """What the page's scripts left in its paragraph `result`."""
    found = re.search(r'<p id="result">(.*?)</p>', headless_chromium.dom(page))
    assert found
    return found[1]


def pixels(page, picture: pathlib.Path, points: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Red, green and blue of a PNG file at `points`; the browser itself decodes it."""
    data = base64.b64encode(picture.read_bytes()).decode()
    return [tuple(pixel) for pixel in json.loads(result(page(
        f"""<canvas id=canvas width=400 height=400></canvas>
        <img src="data:image/png;base64,{data}" onload='
          const context = canvas.getContext("2d");
          context.drawImage(this, 0, 0);
          document.getElementById("result").textContent = JSON.stringify({json.dumps(points)}.map(
            ([x, y]) => [...context.getImageData(x, y, 1, 1).data].slice(0, 3)));'>"""
    )))]  # fmt: skip


def test_an_inline_script_changes_the_dom(page):
    assert result(page("<script>result.textContent = 'made by ' + 'a script'</script>")) == ("made by a script")


def test_a_timer_changes_the_dom(page):
    script = "<script>setTimeout(() => { result.textContent = 'late' }, 3000)</script>"
    assert result(page(script)) == "late"


def test_svg_made_by_a_script_is_laid_out(page):
    body = """<svg width=200 height=100><g id=group transform="translate(30 0)"></g></svg><script>
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("width", 50); rect.setAttribute("height", 25);
    document.getElementById("group").append(rect);
    const box = rect.getBoundingClientRect();
    result.textContent = [box.left, box.width, box.height];</script>"""
    assert result(page(body)) == "30,50,25"


def test_a_screenshot_shows_svg(page, tmp_path):
    picture = tmp_path / "picture.png"
    headless_chromium.screenshot(page(f"<style>p{{display:none}}</style>{_SVG}"), picture, width=400, height=300)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", data[16:24]) == (400, 300)
    found = pixels(page, picture, [(10, 10), (30, 10), (60, 60)])
    assert found == [_RED, _BLUE, (255, 255, 255)]


def test_text_is_drawn_in_the_fonts_that_came_with_it(page):
    """DejaVu's own widths; without any font they are 0."""
    body = """<canvas id=canvas></canvas><script>
    const context = canvas.getContext("2d");
    const width = (family, text) => {
      context.font = `100px ${family}`; return context.measureText(text).width;
    };
    result.textContent = JSON.stringify(
      ["sans-serif", "serif", "monospace"].flatMap(f => [width(f, "m"), width(f, "i")]));
    </script>"""
    found = json.loads(result(page(body)))
    # Advance widths of DejaVu Sans, Serif and Sans Mono 2.37 are out of 2048 units a font size.
    units = [1995, 569, 1942, 655, 1233, 1233]
    assert found == pytest.approx([unit * 100 / 2048 for unit in units], abs=1)


def test_a_failing_script_is_an_error_that_names_it(page):
    with pytest.raises(headless_chromium.PageError, match="nosuch is not defined"):
        headless_chromium.dom(page("<script>nosuch()</script>"))


def test_a_missing_page_is_an_error_that_names_it(tmp_path):
    with pytest.raises(headless_chromium.PageError, match=r"absent\.html is none"):
        headless_chromium.dom(tmp_path / "absent.html")
