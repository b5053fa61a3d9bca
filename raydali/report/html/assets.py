"""The style and the script of report.html, and the frame around its contents. Nothing in it asks the network."""

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #f6f8fa; --card: #ffffff; --rule: #d8dee4;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #cf222e; --c5: #8c959f; --c6: #9a6700;
  --c7: #bf3989; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --calm: #0969da }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b3; --page: #0d1117; --card: #161b22;
  --rule: #30363d; --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; --c4: #ff7b72; --c5: #6e7681;
  --c6: #d29922; --c7: #f778ba; --good: #3fb950; --bad: #ff7b72; --warn: #d29922; --calm: #58a6ff } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 28px 0 10px }
p { margin: 4px 0; overflow-wrap: anywhere } a { color: var(--c0) }
small, .soft, figcaption small { color: var(--soft) } small { font-size: 13px; font-weight: normal }
.badge { display: inline-block; margin: 0 0 6px; padding: 1px 10px; border-radius: 12px; font-size: 13px;
  border: 1px solid currentColor; color: var(--calm) }
.badge.finished { color: var(--good) } .badge.failed, .badge.broken { color: var(--bad) }
.badge.interrupted { color: var(--warn) }
.summary { margin: 10px 0 0; font-size: 16px } .verdict { padding: 8px 12px; border-left: 4px solid var(--calm);
  background: var(--card) }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: 10px; margin: 16px 0 0 }
.figures div { padding: 10px 12px; border: 1px solid var(--rule); border-radius: 8px; background: var(--card) }
.figures dt { font-size: 13px; color: var(--soft) } .figures dd { margin: 0; font-size: 21px; line-height: 1.3 }
.grid2 { display: grid; grid-template-columns: minmax(0, 1fr); gap: 12px }
@media (min-width: 900px) { .grid2 { grid-template-columns: repeat(2, minmax(0, 1fr)) }
  .grid2 > :last-child:nth-child(odd) { grid-column: span 2 } }
figure, .card { margin: 0; padding: 12px 14px; border: 1px solid var(--rule); border-radius: 8px;
  background: var(--card) }
figcaption { font-weight: 600 } figcaption small { display: block }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 8px; padding: 0; list-style: none;
  font-size: 13px; color: var(--soft) }
.legend i { display: inline-block; width: 14px; height: 0; margin-right: 6px; vertical-align: middle;
  border-top: 4px solid var(--c, currentColor) }
.legend i.dashed { border-top-style: dotted }
.legend i.dot, .dot { width: 9px; height: 9px; border: 0; border-radius: 50% }
.legend i.span { height: 10px; border: 0 }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) } .c4 { --c: var(--c4) }
.c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }
.good { --c: var(--good) } .bad { --c: var(--bad) } .warn { --c: var(--warn) } .calm { --c: var(--calm) }
.dot { display: inline-block; margin-right: 7px; background: var(--c) }
.plot { display: grid; grid-template-columns: 54px minmax(0, 1fr); outline-offset: 3px }
.y { position: relative; font-size: 12px; color: var(--soft) }
.y span { position: absolute; right: 6px; transform: translateY(50%); line-height: 1; white-space: nowrap }
.heat .y span { transform: translateY(0) } .heat .y span + span { transform: translateY(-100%) }
.area { position: relative; height: 190px; touch-action: pan-y } .area svg, .area img { display: block; width: 100%;
  height: 100%; overflow: visible } .area img { image-rendering: pixelated; background: var(--page) }
.x { grid-column: 2; position: relative; height: 20px; font-size: 12px; color: var(--soft) }
.x span { position: absolute; top: 5px; transform: translateX(-50%); white-space: nowrap; line-height: 1 }
.x.ends { display: flex; justify-content: space-between; gap: 12px; height: auto; padding-top: 4px }
.x.ends span { position: static; transform: none; white-space: normal }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke } .line.dashed { stroke-dasharray: 5 5 }
.bar { fill: var(--c) }
.grid, .mark { fill: none; stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke }
.mark { stroke: var(--soft); stroke-dasharray: 3 3 }
.cursor { display: none; position: absolute; top: 0; bottom: 0; width: 1px; background: var(--ink); opacity: .6;
  pointer-events: none }
.cut { position: absolute; top: 2px; transform: translateX(-2px); padding: 0 3px; font-size: 12px; white-space: nowrap;
  background: var(--card); border-radius: 3px }
.scale { display: flex; align-items: center; gap: 8px; margin: 4px 0 8px; font-size: 13px; color: var(--soft) }
.scale i { flex: 0 1 160px; height: 8px; border-radius: 4px;
  background: linear-gradient(90deg, #440154, #3b528b, #21918c, #5ec962, #fde725) }
output { display: block; min-height: 20px; font-size: 13px; color: var(--soft) }
.strip { position: relative; height: 34px; margin-top: 6px; background: var(--page); border-radius: 4px }
.span { background: var(--c7) } .span.running { background: var(--c2); opacity: .75 }
.strip i { position: absolute; top: 10px; height: 14px; min-width: 1px }
.strip b { position: absolute; top: 2px; bottom: 2px; width: 3px; margin-left: -1px; background: var(--c) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; width: 100% }
th, td { padding: 4px 10px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
td { overflow-wrap: anywhere; min-width: 56px } .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums } th { font-size: 13px; color: var(--soft); font-weight: 600 }
.epochs td, .epochs th { text-align: right; white-space: nowrap } .epochs th:first-child { text-align: left }
.events { margin-top: 12px } .events td:last-child { white-space: nowrap }
@media (max-width: 600px) { .events th:last-child, .events td:last-child { display: none } }
details { margin: 0 } summary { cursor: pointer; color: var(--soft) }
.settings { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 0 24px; margin: 0;
  font-size: 14px } .settings div { display: flex; gap: 12px; padding: 4px 0; border-bottom: 1px solid var(--rule) }
.settings dt { flex: 0 0 45%; color: var(--soft) } .settings dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
.samples img { max-width: 100%; height: auto; background: white }
footer { margin-top: 32px; font-size: 13px; color: var(--soft) }
"""

_SCRIPT = """
'use strict';
const say = (value, share) => value === null ? '\\u2013'
  : share ? (100 * value).toFixed(1) + '%' : Number(value.toPrecision(5)).toLocaleString('en');
const nearest = (xs, x) => xs.reduce((best, other, i) => Math.abs(other - x) < Math.abs(xs[best] - x) ? i : best, 0);
function ofLines(data) {
  const longest = data.lines.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
  const near = longest.length > 1 ? (longest[1] - longest[0]) / 2 : .5;
  return {
    count: longest.length,
    find: x => nearest(longest, data.left + x * (data.right - data.left)),
    at: i => (longest[i] - data.left) / (data.right - data.left),
    text: i => (data.names ? data.names[i] : 'epoch ' + say(longest[i])) + ': ' + data.lines.map(line => {
      const j = nearest(line.x, longest[i]);
      return Math.abs(line.x[j] - longest[i]) > near ? null : line.label + ' ' + say(line.y[j], data.share);
    }).filter(text => text).join(', '),
  };
}
function ofHeat(data) {
  const levels = atob(data.levels), columns = data.epochs.length, upTo = (a, b) => b > a ? a + ' to ' + b : a;
  return {
    count: columns,
    find: x => Math.min(columns - 1, Math.max(0, Math.floor(x * columns))),
    at: i => (i + .5) / columns,
    text: (i, y) => {
      const row = Math.min(data.rows - 1, Math.max(0, Math.floor(y * data.rows)));
      const level = levels.charCodeAt(row * columns + i), first = row * data.of_row;
      const last = Math.min(first + data.of_row, data.ranks) - 1, next = data.epochs[i + 1];
      const until = data.epochs.length > 1 && data.epochs[1] - data.epochs[0] > 1
        ? (next === undefined ? data.last : next - 1) : data.epochs[i];
      return 'rank ' + upTo(first, last) + ', epoch ' + upTo(data.epochs[i], until) + ': '
        + (level ? say(data.low + (level - 1) * data.step, data.share) + data.unit : '\\u2013');
    },
  };
}
for (const figure of document.querySelectorAll('figure.chart')) {
  const data = JSON.parse(figure.querySelector('script').textContent), area = figure.querySelector('.area');
  const chart = data.levels ? ofHeat(data) : ofLines(data), cursor = figure.querySelector('.cursor');
  const output = figure.querySelector('output'), plot = figure.querySelector('.plot');
  let shown = null, height = 0;
  const show = i => {
    shown = i;
    cursor.style.display = 'block';
    cursor.style.left = 100 * chart.at(i) + '%';
    output.textContent = chart.text(i, height);
  };
  const hide = () => { shown = null; cursor.style.display = 'none'; output.textContent = ''; };
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    height = (event.clientY - box.top) / box.height;
    show(chart.find((event.clientX - box.left) / box.width));
  });
  area.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], rise = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move && !(rise && data.levels)) return;
    event.preventDefault();
    if (rise) height = Math.min(1, Math.max(0, height + rise / data.rows));
    show(shown === null ? 0 : Math.min(chart.count - 1, Math.max(0, shown + (move || 0))));
  });
}
const again = Number(document.body.dataset.again);
if (again) setInterval(() => {
  if (!document.hidden && !document.querySelector('details[open], .cursor[style*=block]')) location.reload();
}, 1000 * again);
"""


def section(title: str, contents: str, *, card: bool = False) -> str:
    """A part of a page below its heading; empty where there is nothing in it.

    Args:
        contents: HTML: charts, which stand side by side.
        card: whether they are one card instead.
    """
    inside = f'<div class="{"card" if card else "grid2"}">{contents}</div>'
    return f"<section><h2>{title}</h2>{inside}</section>\n" if contents else ""


def page(title: str, body: str, *, again: float = 0) -> bytes:
    """A whole page as UTF-8.

    Args:
        body: HTML.
        again: seconds after which an open page looks for a newer one; 0: never.
    """
    # The policy keeps what a name or an error may have smuggled in from loading or sending anything.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body data-again="{again:g}"><main>
{body}</main><script>{_SCRIPT}</script></body></html>
"""
    return text.encode("utf-8", "replace")  # names of files need not be UTF-8
