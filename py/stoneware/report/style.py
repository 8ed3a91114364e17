"""The style sheet of the report's page, and the script of its filter; the page is readable without both."""

from __future__ import annotations

import bisect

EDGES = (0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)
"""Speed-ups at which the colour of a cell changes; from 0.98 to 1.02 both are equally fast."""

LIGHT = ("#8f3f00", "#bd6410", "#e39545", "#f1b97c", "#f8d7b2", "#fcebda", "#f1f2f4",
         "#e0edf8", "#c0dcf2", "#93c4e9", "#5ea6dc", "#2b78ba", "#0d4f8b")  # fmt: skip
"""A colour for each step of EDGES, from slower (orange) to faster (blue), distinct for every kind of
colour vision."""

DARK = ("#f7b26b", "#d98837", "#ab611b", "#834914", "#5e3712", "#402a14", "#2b2f36",
        "#1a3049", "#1b4265", "#1f5989", "#2c74b0", "#529bd8", "#8cc6f5")  # fmt: skip

_STRONG = 2
"""On how many colours at each end the text has the colour of the background."""


def step(speedup: float) -> int:
    """The index of a speed-up's colour in LIGHT and DARK."""
    return bisect.bisect_right(EDGES, speedup)


def is_strong(idx: int) -> bool:
    """Whether text on the colour has the background's colour."""
    return idx < _STRONG or idx >= len(LIGHT) - _STRONG


def _cells(colours: tuple[str, ...], inverse: str) -> str:
    return "".join(
        f".s{idx}{{background:{colour}{f';color:{inverse}' if is_strong(idx) else ''}}}"
        for idx, colour in enumerate(colours)
    )


STYLE = (
    f"""
:root {{ color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d5dae0; --page: #fff; --bar: #f6f8fa;
  --m0: #440154; --m1: #31688e; --m2: #2a9d78; --m3: #d18b00; }}
{_cells(LIGHT, "#fff")}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e8eb; --soft: #9aa4af; --line: #3a414a; --page: #14171b; --bar: #1c2026;
    --m0: #c9a0dc; --m1: #6cb2e0; --m2: #55d3a0; --m3: #ffd24d; }}
  {_cells(DARK, "#10141a")}
}}
"""
    + """
* { box-sizing: border-box; }
html { scroll-padding-top: calc(var(--top, 96px) + 8px); }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--page); margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 8px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 20px 0 8px; } h2 { font-size: 20px; margin: 40px 0 6px; }
h3 { font-size: 16px; margin: 24px 0 6px; } p { max-width: 100ch; margin: 6px 0 12px; }
.soft, small { color: var(--soft); } small { font-size: 12px; }
header { position: sticky; top: 0; z-index: 3; background: var(--bar); border-bottom: 1px solid var(--line); }
header > * { max-width: 1240px; margin: 0 auto; padding: 8px 24px; }
nav { display: flex; gap: 4px 18px; flex-wrap: wrap; white-space: nowrap; }
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: 3px; }
form { display: none; gap: 16px; align-items: center; flex-wrap: wrap; padding-top: 0; } .js form { display: flex; }
select, input { font: inherit; padding: 2px 6px; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 5px; max-width: 60vw; }
.scroll { overflow-x: auto; margin: 8px 0 14px; padding-bottom: 2px; }
.scroll::-webkit-scrollbar { height: 12px; } .scroll::-webkit-scrollbar-track { background: var(--bar); }
.scroll::-webkit-scrollbar-thumb { background: var(--soft); border: 3px solid var(--bar); border-radius: 6px; }
.scroll.more { mask-image: linear-gradient(to left, transparent, #000 36px); }
table { border-collapse: separate; border-spacing: 2px; font-size: 14px; }
th { font-weight: 600; text-align: left; } th small { font-weight: 400; display: block; }
th, td { padding: 3px 10px; vertical-align: top; } td { font-variant-numeric: tabular-nums; }
.heat table { table-layout: fixed; width: max-content; } .heat td, .n { text-align: right; white-space: nowrap; }
.heat td, .heat th { width: 84px; padding: 3px 8px; vertical-align: middle; }
.heat th.n { white-space: normal; }
.heat td:empty::after { content: "–"; color: var(--soft); }
.heat th:first-child { width: 290px; position: sticky; left: 0; background: var(--page); overflow-wrap: break-word; }
.plain th, .plain td { border-bottom: 1px solid var(--line); } .plain { border-spacing: 0; font-size: 13px; }
.plain td { overflow-wrap: anywhere; max-width: 420px; }
.legend { display: flex; flex-wrap: wrap; font-size: 12px; margin: 6px 0; } .legend span { padding: 2px 7px; }
svg { display: block; min-width: 560px; width: 100%; max-width: 860px; font-size: 12px; }
svg text { fill: var(--ink); } .grid { stroke: var(--line); }
circle { r: 4px; fill: var(--c); } .roof { fill: none; stroke: var(--soft); stroke-width: 2; }
.m0 { --c: var(--m0); } .m1 { --c: var(--m1); } .m2 { --c: var(--m2); } .m3 { --c: var(--m3); }
.torch { fill: var(--page); stroke: var(--c); stroke-width: 1.5; }
.above { stroke: var(--ink); stroke-width: 1.5; }
details { margin: 8px 0; } summary { cursor: pointer; font-weight: 600; } summary h2 { display: inline; }
[hidden] { display: none !important; }
@media (min-width: 1100px) { .heat.scroll { overflow: visible; }
  .heat thead th { position: sticky; top: var(--top, 0); z-index: 1; background: var(--page); }
  .heat thead th:first-child { z-index: 2; } }
@media (max-width: 700px) { main, header > * { padding-left: 12px; padding-right: 12px; } h1 { font-size: 21px; }
  nav { flex-wrap: nowrap; overflow-x: auto; } form { flex-wrap: nowrap; gap: 8px; font-size: 13px; }
  form label { min-width: 0; } select, input { max-width: 30vw; }
  .heat td, .heat th { width: 55px; padding: 3px 2px; font-size: 12px; } .heat th.n { font-size: 11px; }
  .heat th:first-child { width: 116px; } }
"""
)

SCRIPT = """
document.documentElement.classList.add("js");
const [model, shape, count] = ["model", "shape", "count"].map(id => document.getElementById(id));
const all = selector => [...document.querySelectorAll(selector)];
const isShown = element => !!element.querySelector("[data-find]:not([hidden])");
const sizes = shape => [...shape.matchAll(/[nk]=(\\d+)/g)].map(size => size[1]).join("x");
const places = all("div[data-place]").map(element => ({element, text: element.innerHTML}));
function filter() {
  const words = shape.value.toLowerCase().replace(/\\s*[x×*,]\\s*(?=\\d)/g, "x").split(/\\s+/).filter(Boolean);
  for (const row of all("tr[data-find]")) {
    const text = " " + (row.dataset.find || sizes(row.cells[0].textContent)) + " ";
    const isOfModel = !model.value || text.includes(" " + model.value + " ");
    row.hidden = !isOfModel || !words.every(word => text.includes(word));
  }
  for (const point of all("circle"))
    point.toggleAttribute("hidden", !!model.value && !(point.dataset.find || "").split(" ").includes(model.value));
  for (const {element, text} of places) {
    const key = `[data-place="${element.dataset.place}"][data-model="${model.value}"]`;
    const template = model.value && document.querySelector("template" + key);
    element.innerHTML = template ? template.innerHTML : model.value ? "" : text;
  }
  for (const name of all(".of-model")) name.textContent = model.value && " for " + model.value;
  for (const part of all("details.unnamed")) {
    part.hidden = !isShown(part);
    if (words.length && !part.hidden) part.open = true;
  }
  for (const section of all("section.op")) section.hidden = !isShown(section);
  for (const other of all("details[id$=other]")) {
    other.hidden = !isShown(other);
    if ((model.value || words.length) && !other.hidden) other.open = true;
  }
  for (const link of all("nav a")) {
    const target = document.getElementById(link.hash.slice(1));
    link.hidden = !!target && (target.closest("section.op") || target).hidden;
  }
  for (const table of all("details > summary > .count")) {
    const rows = [...table.closest("details").querySelectorAll("tr[data-find]")];
    table.textContent = rows.filter(row => !row.hidden).length;
  }
  const rows = all(".heat tr[data-find]"), shown = rows.filter(row => !row.hidden).length;
  count.textContent = shown == rows.length ? "" : shown + " of " + rows.length + " shapes";
  measure();
}
function mark(box) { box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1); }
function measure() {
  document.documentElement.style.setProperty("--top", document.querySelector("header").offsetHeight + "px");
  all(".scroll").forEach(mark);
}
for (const field of [model, shape]) field.addEventListener("input", filter);
for (const name of ["resize", "toggle"]) addEventListener(name, measure, true);
addEventListener("scroll", event => { if (event.target.matches?.(".scroll")) mark(event.target); }, true);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
filter();
"""
