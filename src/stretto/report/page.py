"""The frame of a report: one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.core.errors import InputError
from stretto.report.plotting import FONT, INK, packed_plotly, safe
from stretto.report.tables import Block, Summary

STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f6f7f9; color: {INK}; font: 15px/1.55 {FONT}; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 32px 24px 80px; }}
h1 {{ font-size: 28px; line-height: 1.25; margin: 8px 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 21px; margin: 44px 0 6px; padding-top: 18px; border-top: 1px solid #dfe2e6; }}
h3 {{ font-size: 17px; margin: 30px 0 4px; }}
h2, h3, td {{ overflow-wrap: anywhere; }}
p {{ margin: 6px 0 10px; max-width: 80ch; }}
.lead {{ font-size: 16.5px; }}
.name {{ font-weight: 600; margin: 18px 0 -4px; }}
.quiet {{ color: #59636e; font-size: 14px; }}
nav {{ background: #fff; border: 1px solid #dfe2e6; border-radius: 8px; padding: 10px 20px; margin: 20px 0; }}
nav > ul {{ display: flex; flex-wrap: wrap; gap: 4px 44px; list-style: none; margin: 0; padding: 0; }}
nav ul ul {{ margin: 0; padding-left: 18px; font-size: 14px; }}
a {{ color: #0a58a8; text-decoration: none; }}
a:hover {{ text-decoration: underline; }}
.card {{ background: #fff; border: 1px solid #dfe2e6; border-radius: 8px; padding: 10px; margin: 12px 0; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px; text-align: right; border-bottom: 1px solid #eceef1; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
td {{ white-space: nowrap; }}
th {{ font-weight: 600; color: #59636e; font-size: 13px; }}
tr.block td {{ font-weight: 600; padding-top: 16px; }}
td.best {{ font-weight: 700; color: #0b6b3a; }}
td.best::before {{ content: "\\2217\\00a0"; }}
td.unfinished {{ font-weight: 700; color: #b3261e; }}
table.facts td {{ text-align: left; vertical-align: top; white-space: normal; }}
table.facts td:first-child {{ white-space: nowrap; color: #59636e; width: 1%; }}
summary {{ cursor: pointer; font-weight: 600; margin: 14px 0; }}
@media print {{ body {{ background: #fff; }} nav {{ display: none; }} .card {{ break-inside: avoid; }} }}
"""

# Plotly is unpacked once the text can be read. Figures are drawn when they come near the window: a page with
# many of them opens at once.
SCRIPT = """
const OPTIONS = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]};
function draw(place) {
  if (place.dataset.drawn) return;
  place.dataset.drawn = "yes";
  const spec = JSON.parse(document.getElementById(place.id + "-data").textContent);
  Plotly.newPlot(place, spec.data, spec.layout, OPTIONS);
}
const places = [...document.querySelectorAll(".figure")];
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(
    new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}
function begin() {
  const watcher = new IntersectionObserver(
    entries => entries.filter(entry => entry.isIntersecting).forEach(entry => draw(entry.target)),
    {rootMargin: "800px"});
  places.forEach(place => watcher.observe(place));
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach(one => { one.open = true; });
    places.forEach(draw);
  });
}
unpack(document.getElementById("plotly").textContent).then(begin, error => {
  places.forEach(place => { place.textContent = "This browser cannot draw the figure: " + error; });
});
"""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser loads nothing from the network."""


@dataclass(slots=True)
class Page:
    """An HTML page. Sections are added from top to bottom; the table of contents follows from them."""

    title: str
    lead: str
    _contents: list[tuple[int, str, str]] = field(default_factory=list)
    _body: list[str] = field(default_factory=list)
    _figures: int = 0

    def heading(self, level: int, title: str) -> None:
        """Add a heading of level 2 or 3."""
        anchor = f"s{len(self._contents) + 1}"
        self._contents.append((level, anchor, title))
        self._body.append(f'<h{level} id="{anchor}">{safe(title)}</h{level}>')

    def text(self, sentence: str, kind: str = "") -> None:
        self._body.append(f'<p class="{kind}">{safe(sentence)}</p>' if kind else f"<p>{safe(sentence)}</p>")

    def html(self, markup: str) -> None:
        """Add markup, whose texts are escaped already."""
        self._body.append(markup)

    def figure(self, figure: Any, label: str) -> None:
        self._figures += 1
        name = f"figure-{self._figures}"
        # JSON within HTML: no character may end the script element.
        data = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        self._body.append(
            f'<div class="card"><div class="figure" id="{name}" role="img" aria-label="{safe(label)}" '
            f'style="height:{figure.layout.height}px"></div></div>'
            f'<script type="application/json" id="{name}-data">{data}</script>'
        )

    def render(self) -> str:
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{safe(self.title)}</title><style>{STYLE}</style></head><body><main>",
                f'<h1>{safe(self.title)}</h1><p class="quiet">{safe(self.lead)}</p>',
                f'<nav aria-label="Contents">{self._table_of_contents()}</nav>',
                "<noscript><p>The figures of this page are drawn by JavaScript, which is off.</p></noscript>",
                *self._body,
                f'</main><script type="text/plain" id="plotly">{packed_plotly()}</script>',
                f"<script>{SCRIPT}</script></body></html>\n",
            ]
        )

    def _table_of_contents(self) -> str:
        parts: list[str] = []
        for level, anchor, title in self._contents:
            link = f'<a href="#{anchor}">{safe(title)}</a>'
            if level == 2:
                parts.append(("</ul></li>" if parts else "") + f"<li>{link}<ul>")
            else:
                parts.append(f"<li>{link}</li>")
        return f"<ul>{''.join(parts)}</ul></li></ul>"


def write_page(path: Path | str, page: str) -> None:
    """Write the page, and its folder if missing; InputError if that fails."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the report cannot be written: {error.strerror}.",
            where=str(path),
            remedy="Give a file in a folder that may be written to.",
        ) from error


def table_html(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{safe(text)}</th>" for text in heading)
    body = "".join(f"<tr>{''.join(f'<td>{safe(text)}</td>' for text in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="card scroll">{table}</div>'


def summary_html(summary: Summary) -> str:
    """The table of runs; column heads show their meaning on hover."""
    heads = "".join(
        f'<th title="{safe(column.meaning)}">{safe(column.title)}</th>' for column in summary.columns
    )
    width = len(summary.columns) + 2
    blocks = "".join(_block_html(block, width) for block in summary.blocks)
    return (
        '<div class="card scroll"><table><thead><tr><th>policy</th>'
        f"<th>jobs done</th>{heads}</tr></thead><tbody>{blocks}</tbody></table></div>"
    )


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{safe(name)}</td><td>{safe(value)}</td></tr>" for name, value in facts)
    return f'<div class="card"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _block_html(block: Block, width: int) -> str:
    rows = [f'<tr class="block"><td colspan="{width}">{safe(block.title)}</td></tr>']
    for row in block.rows:
        done = f"<td{' class=unfinished' if row.unfinished else ''}>{row.completed}</td>"
        cells = "".join(
            f'<td class="best">{safe(cell.text)}</td>' if cell.best else f"<td>{safe(cell.text)}</td>"
            for cell in row.cells
        )
        rows.append(f"<tr><td>{safe(row.policy)}</td>{done}{cells}</tr>")
    return "".join(rows)
