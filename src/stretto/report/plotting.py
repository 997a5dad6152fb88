"""Plotly, imported only when a page is asked for; the look and the colours all figures share."""

from __future__ import annotations

import base64
import gzip
import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.core.errors import InputError
from stretto.policies.registry import BUILT_IN
from stretto.report.text import one_line
from stretto.worlds.applications import builtin_catalogue

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK = "#24292f"
GRID = "#e9ebee"
AXIS = {
    "gridcolor": GRID,
    "linecolor": "#9aa0a6",
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": "#9aa0a6",
    "automargin": True,
    "title_standoff": 8,
}
POWERS_OF_TWO = [2**i for i in range(17)]
_DURATIONS = {
    "10s": 10,
    "30s": 30,
    "1m": 60,
    "2m": 120,
    "5m": 300,
    "10m": 600,
    "30m": 1800,
    "1h": 3600,
    "2h": 7200,
    "5h": 18000,
    "10h": 36000,
    "1d": 86400,
    "2d": 172800,
    "7d": 604800,
    "30d": 2592000,
}


def graph_objects() -> Any:
    """The module plotly.graph_objects; InputError if plotly is not installed."""
    try:
        import plotly.graph_objects  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError as error:
        raise InputError(
            "the HTML report needs plotly, which is not installed.",
            remedy="Install it: pip install 'stretto[report]'",
        ) from error
    return plotly.graph_objects


def packed_plotly() -> str:
    """All of plotly.js, gzipped and base64-encoded: 40 % of its size, and browsers can unpack it."""
    graph_objects()
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  (an extra, and slow to import)

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def panels(rows: int, columns: int, titles: Sequence[str], **options: Any) -> Any:
    """A figure of several panels."""
    graph_objects()
    from plotly.subplots import make_subplots  # noqa: PLC0415  (an extra, and slow to import)

    return make_subplots(rows=rows, cols=columns, subplot_titles=list(titles), **options)


def styled(figure: Any, height: int, **layout: Any) -> Any:
    """Give a figure the common look: calm axes, the legend in one line above."""
    figure.update_layout(
        template="none",
        height=height,
        # Room at the top for the legend and, where there are panels, their titles; at the right for buttons.
        margin={"l": 64, "r": 44, "t": 80 if figure.layout.annotations else 50, "b": 52},
        modebar={"orientation": "v", "color": "#b6bcc4", "activecolor": INK},
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "xanchor": "left"},
    )
    figure.update_layout(**layout)
    figure.update_xaxes(**AXIS)
    figure.update_yaxes(**AXIS)
    figure.update_annotations(font={"size": 13.5, "color": INK})
    return figure


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit of a time axis."""

    name: str
    seconds: float

    def axis(self, end_s: float) -> dict[str, Any]:
        """The settings of a time axis from 0 to `end_s`."""
        return {"title_text": f"time ({self.name})", "range": [0, end_s / self.seconds]}


def time_unit(end_s: float) -> TimeUnit:
    """The unit in which a run of this length has readable numbers."""
    units = (TimeUnit("hours", 3600.0), TimeUnit("minutes", 60.0))
    return next((unit for unit in units if end_s >= 2 * unit.seconds), TimeUnit("seconds", 1.0))


def duration_axis(low_s: float, high_s: float) -> dict[str, Any]:
    """A logarithmic axis in seconds with readable ticks."""
    shown = math.log10(max(low_s, 1.0) / 1.3), math.log10(max(high_s, 1.0) * 1.3)
    tick = {"tickvals": list(_DURATIONS.values()), "ticktext": list(_DURATIONS)}
    return {"type": "log", "range": shown, **tick}


def doubling_axis(title: str) -> dict[str, Any]:
    """A logarithmic axis with a tick at every power of two."""
    return {"type": "log", "title_text": title, "tickvals": POWERS_OF_TWO}


def safe(text: str) -> str:
    """Text escaped for browsers and for Plotly, which both interpret tags."""
    return html.escape(one_line(text))


def wrapped(text: str, width: int = 64) -> str:
    """`safe` text on several lines."""
    return "<br>".join(safe(line) for line in textwrap.wrap(text, width))


# Okabe and Ito's set without its yellow, which is too light for lines on white.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C564B")
_DASHES = ("solid", "6px,3px", "2px,3px", "9px,3px,2px,3px")
# Tol's muted set, dark and light in turn, so that neighbours differ.
_FILLS = (
    "#332288",
    "#44AA99",
    "#CC6677",
    "#DDCC77",
    "#117733",
    "#88CCEE",
    "#882255",
    "#999933",
    "#AA4499",
)


@dataclass(frozen=True, slots=True)
class LineStyle:
    colour: str
    dash: str


@dataclass(frozen=True, slots=True)
class Palette:
    policies: tuple[str, ...]
    applications: tuple[str, ...]

    @staticmethod
    def of(policies: Iterable[str], applications: Iterable[str]) -> Palette:
        """Built-in names come first, so that they look the same on every page."""
        return Palette(
            tuple(dict.fromkeys([*BUILT_IN, *policies])),
            tuple(dict.fromkeys([*sorted(builtin_catalogue().entries), *sorted(applications)])),
        )

    def policy(self, name: str) -> LineStyle:
        return line_style(self.policies.index(name))

    def application(self, name: str, shade: int = 0) -> str:
        """The application's colour; jobs of one application differ in shade (0, 1 or 2)."""
        turn, index = divmod(self.applications.index(name), len(_FILLS))
        return lighter(_FILLS[index], min(0.4 * (turn % 2) + 0.16 * shade, 0.7))


def line_style(index: int) -> LineStyle:
    # Each round of colours shifts the dashes, so that 32 lines all look different.
    turn = index // len(_LINES)
    return LineStyle(_LINES[index % len(_LINES)], _DASHES[(index + turn) % len(_DASHES)])


def ramp(count: int) -> list[str]:
    """Colours for ordered lines, light to dark blue."""
    return [lighter("#08306B", 0.62 * (1 - i / max(count - 1, 1))) for i in range(count)]


def lighter(colour: str, share: float) -> str:
    """The colour mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
