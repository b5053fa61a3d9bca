"""A picture of the scoreboard: horizontal bars, as SVG."""

from html import escape
from typing import Any

LEFT, RIGHT, LINE, TOP = 250, 700, 24, 56
PLACES = {"disk": "the local disk", "s3": "S3"}
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933 } .small { font-size: 11.5px; fill: #52606d }
  .card { fill: #ffffff } .bar { fill: #bcd0f2 } .ours { fill: #5fb3a5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #9aa5b1 } .card { fill: #1e2129 }
    .bar { fill: #2c4f8f } .ours { fill: #1f7a6c }
  }
"""


def bars(rows: list[dict[str, Any]], place: str, title: str) -> str:
    """Draw the rows from "disk" or "s3" in their order: a bar, or the reason why the row was not measured."""
    rows = [row for row in rows if row["peer"] != "ceiling" and row["from"] == place]
    longest = max((row["images_per_second"] or 0 for row in rows), default=0) or 1
    height = TOP + LINE * len(rows) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" aria-labelledby="title">',
        f'<title id="title">Images per second of each loader from {place}: {escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect width="860" height="{height}" rx="8" class="card"/>',
        f'<text x="24" y="24">Images per second from {PLACES[place]}, with nothing that uses them</text>',
        f'<text x="24" y="42" class="small">{escape(title.partition(";")[0])}</text>',
    ]
    for line, row in enumerate(rows):
        y = TOP + LINE * line
        parts.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(row["name"])}</text>')
        if row["error"]:
            reason = row["error"] if len(row["error"]) <= 80 else row["error"][:79] + "…"
            parts.append(f'<text x="{LEFT}" y="{y + 14}" class="small">{escape(reason)}</text>')
            continue
        width = (RIGHT - LEFT) * row["images_per_second"] / longest
        kind = "ours" if row["peer"] == "raydali" else "bar"
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="18" rx="3" class="{kind}"/>')
        parts.append(f'<text x="{LEFT + width + 8:.1f}" y="{y + 14}">{row["images_per_second"]:,.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])
