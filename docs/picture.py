"""Draws docs/tune.svg, the picture of the README, from the folder of a real run (`make picture`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.core.units import format_duration
from stretto.journal.folds.history import History, JobHistory, history_of
from stretto.report.figures.gantt import rows_of, stays_of
from stretto.runs.folder import RunFolder

WIDTH, LEFT, RIGHT = 900, 92, 24
SLOTS_TOP, ROW = 56, 34
CURVES_GAP, CURVES_HEIGHT = 34, 190
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""For trials that grew, the best first; the others are grey."""
GREY, INK, PALE = "#c3c8ce", "#24292f", "#6a737d"


@dataclass(frozen=True)
class Scale:
    """Where times and values are on the picture."""

    end_s: float
    curves_top: float

    def x(self, t_s: float) -> float:
        return LEFT + t_s / self.end_s * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.curves_top + CURVES_HEIGHT * (1.0 - value)


def picture(history: History) -> str:
    """The trials on each slot over time, and below them their metric over the same time."""
    jobs = list(history.jobs.values())
    slots = rows_of((), history).count
    scale = Scale(max(hold.end_s for job in jobs for hold in job.holds), SLOTS_TOP + slots * ROW + CURVES_GAP)
    grown = sorted((job for job in jobs if _largest(job) > 1), key=_best, reverse=True)
    colours = {job.job.id: COLOURS[index % len(COLOURS)] for index, job in enumerate(grown)}
    took, best = format_duration(scale.end_s), max(map(_best, jobs))
    headline = f"{len(jobs)} trials on {slots} slots in {took}: {best:.1%} accuracy"
    height = scale.curves_top + CURVES_HEIGHT + 32
    frame = f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="17" fill="{INK}">{headline}</text>',
        _text(LEFT, 42, "Every trial starts on one slot; the weak ones stop, the best ones grow.", "start"),
        *_slots(history, scale, colours),
        _text(LEFT, scale.curves_top - 12, "accuracy of every trial", "start"),
        *_axes(scale),
        *_curves(jobs, scale, colours),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _slots(history: History, scale: Scale, colours: Mapping[str, str]) -> Iterator[str]:
    rows = rows_of((), history)
    for row in range(rows.count):
        yield _text(LEFT - 10, SLOTS_TOP + (row + 0.62) * ROW, f"slot {row + 1}", "end")
    for stay in stays_of(history, rows):
        name, left, right = stay.job.id, scale.x(stay.start_s), scale.x(stay.end_s)
        top, height = SLOTS_TOP + stay.first_row * ROW, stay.rows * ROW
        yield (
            f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{height}" rx="3" '
            f'fill="{colours.get(name, GREY)}" stroke="#ffffff" stroke-width="1.5"/>'
        )
        if name in colours and right - left > 24:
            number = name.rpartition("-")[2].lstrip("0") or "0"
            yield _text((left + right) / 2, top + height / 2 + 5, number, fill="#ffffff")


def _axes(scale: Scale) -> Iterator[str]:
    for value in (0.0, 0.5, 1.0):
        y = scale.y(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e3e6ea"/>'
        yield _text(LEFT - 10, y + 4, f"{value:.0%}", "end")
    for quarter in range(5):
        t_s = scale.end_s * quarter / 4
        yield _text(
            scale.x(t_s), scale.y(0.0) + 20, format_duration(t_s), "end" if quarter == 4 else "middle"
        )


def _curves(jobs: list[JobHistory], scale: Scale, colours: Mapping[str, str]) -> Iterator[str]:
    for job in sorted(jobs, key=lambda job: job.job.id in colours):
        colour = colours.get(job.job.id, GREY)
        for start_s, end_s in _periods(job):
            points = [
                f"{scale.x(t_s):.1f},{scale.y(value):.1f}"
                for t_s, value in job.result_times()
                if value is not None and start_s < t_s <= end_s
            ]
            if points:
                line = f'fill="none" stroke="{colour}" stroke-width="2.2"'
                yield f'<polyline points="{" ".join(points)}" {line}/>'
                x, y = points[-1].split(",")
                yield f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>'


def _periods(job: JobHistory) -> Iterator[tuple[float, float]]:
    """The periods in which the trial trained without a pause; a result may come a second late."""
    start_s = end_s = -1.0
    for hold in job.holds:
        if hold.start_s > end_s + 1.0:
            yield start_s, end_s + 1.0
            start_s = hold.start_s
        end_s = hold.end_s
    yield start_s, end_s + 1.0


def _largest(job: JobHistory) -> int:
    return max((hold.allocation.worker_count for hold in job.holds), default=0)


def _best(job: JobHistory) -> float:
    return max((value for _, value in job.result_times() if value is not None), default=0.0)


def _text(x: float, y: float, text: str, anchor: str = "middle", *, fill: str = PALE) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="13" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    folder = RunFolder(Path(sys.argv[1]))
    Path(__file__).with_name("tune.svg").write_text(picture(history_of(folder.events())))
