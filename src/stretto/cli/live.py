"""What a terminal shows during a real run: a live display or plain lines, and progress bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.core.events import Event
from stretto.core.units import format_duration, format_usd
from stretto.driving.drive import Observer
from stretto.driving.stop import Stop, signals_interrupt
from stretto.journal.folds.cost import CostMeter
from stretto.launch.expect import corrected
from stretto.launch.progress import (
    STOPPING,
    ProgressLines,
    Reported,
    measuring_line,
    node_lines,
    nothing_reported,
    trouble_lines,
)
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Tuning
from stretto.profiling.probe_data import ProbeProgress
from stretto.report.plan_text import is_priced
from stretto.report.text import one_line
from stretto.runs.folder import RunFolder
from stretto.runs.live_state import ENDED, JobPhase, LiveJob, LiveState
from stretto.runs.metrics_files import metrics_text
from stretto.search.study import Study

REDRAW_S = 0.5
ROWS_BESIDES = 10
"""Lines of the display outside its table."""
LAST_REPORT = "last report"
REPORT_ROOM = 32
"""The width of the last report if there is too little room for all of it."""
ORDER = (JobPhase.RUNNING, JobPhase.STARTING, JobPhase.PAUSED, JobPhase.WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The plan and the prices that a display of a study compares events with."""

    tuning: Tuning
    finish_s: Estimate | None
    usd_per_slot_hour: float
    """The price of the user's own slots."""


@contextmanager
def watching(
    title: str,
    *,
    stop: Stop,
    study: Study | None = None,
    outlook: Outlook | None = None,
    reported: Reported = nothing_reported,
) -> Iterator[Observer]:
    """Shows a run on standard error while the block runs, and any request to stop it."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        lines = PlainLines(console, study, stop, reported)
        try:
            yield lines
        finally:
            lines.close()
        return
    display = Display(console, title, study, outlook, stop, reported)
    with Live(console=console, auto_refresh=False, transient=True, get_renderable=display.render) as live:
        display.live = live
        yield display


def _print(console: Console, t_s: float, text: str) -> None:
    console.print(f"{format_duration(t_s):>8}  {one_line(text)}", soft_wrap=True, markup=False)


class PlainLines(ProgressLines):
    """One line on a console for every change worth a note."""

    def __init__(
        self,
        console: Console,
        study: Study | None,
        stop: Callable[[], bool] = lambda: False,
        reported: Reported = nothing_reported,
    ) -> None:
        super().__init__(partial(_print, console), study, stop, reported)


class Display:
    """A bar to the deadline, the money spent, and a row for every job that is not over; problems above it."""

    def __init__(
        self,
        console: Console,
        title: str,
        study: Study | None,
        outlook: Outlook | None,
        stop: Stop,
        reported: Reported = nothing_reported,
    ) -> None:
        self._console = console
        self._stop = stop
        self._reported = reported
        self._title = title
        self._study = study
        self._outlook = outlook
        self._board = LiveState(study)
        self._meter: CostMeter | None = None
        if outlook is not None and is_priced(outlook.tuning):
            self._meter = CostMeter(
                outlook.tuning.instances, outlook.tuning.billing, outlook.usd_per_slot_hour
            )
        self._now_s = 0.0
        self._drawn = 0.0
        self._begun = False
        self.live: Live | None = None

    def observe(self, event: Event) -> None:
        """Follows an event; what no row shows goes above the display."""
        self._board.observe(event)
        if self._begun and self.live is not None:
            for text in (*trouble_lines(event), *node_lines(event)):
                _print(self.live.console, event.t_s, text)
        if self._meter is not None:
            self._meter.observe(event)

    def tick(self, now_s: float) -> None:
        """Redraws at most a few times a second, and at once after a request to stop."""
        self._now_s, self._begun = now_s, True
        if self.live is not None and (self._stop() or time.monotonic() - self._drawn >= REDRAW_S):
            self._drawn = time.monotonic()
            self.live.refresh()

    def render(self) -> RenderableType:
        """The whole display."""
        parts: list[RenderableType] = [Text(one_line(self._title), style="bold")]
        parts += (
            [Text(format_duration(self._now_s))] if self._outlook is None else self._progress(self._outlook)
        )
        parts += [Text(STOPPING, style="bold")] if self._stop() else []
        parts += [Text(self._counts()), self._table()]
        return Group(*parts)

    def _progress(self, outlook: Outlook) -> Iterator[RenderableType]:
        deadline_s = outlook.tuning.limits.deadline_s
        clock = format_duration(self._now_s)
        if deadline_s is not None:
            bar = Table.grid()
            bar.add_row(ProgressBar(total=deadline_s, completed=min(self._now_s, deadline_s), width=60))
            yield bar
            clock += f" of {format_duration(deadline_s)}"
        if self._meter is not None:
            clock += f"   spent {format_usd(self._meter.cost_usd(max(self._now_s, self._meter.seen_s)))}"
        if outlook.finish_s is not None:
            slowness = self._board.slowness(outlook.tuning.profile)
            eta = corrected(outlook.finish_s, self._now_s, slowness, deadline_s)
            span = f"{format_duration(eta.p10)} to {format_duration(eta.p90)}"
            clock += f"   done after {format_duration(eta.mean)} ({span})"
        best = self._board.best() if self._study is not None else None
        if best is not None and self._study is not None:
            clock += f"   best {self._study.metric} {self._best_text(best)}"
        yield Text(clock)

    def _best_text(self, line: LiveJob) -> str:
        result = self._board.best_result(line)
        return "" if result is None else f"{result.value:.6g} ({line.job.id}, epoch {result.epoch})"

    def _counts(self) -> str:
        counts = self._board.counts()
        return ", ".join(f"{count} {where}" for where, count in counts.items()) or "no job yet"

    def _table(self) -> Table:
        shown = ("epochs", LAST_REPORT) if self._study is None else ("epoch", self._study.metric)
        headings = ("job", "state", "workers", "batch", *shown, "done after", "why")
        alive = [line for line in self._board.jobs.values() if line.phase not in ENDED]
        alive.sort(key=lambda line: ORDER.index(line.phase))
        room = max(self._console.height - ROWS_BESIDES, 3)
        rows = [self._row(line) for line in alive[:room]]
        table = Table(box=None, pad_edge=False, expand=False)
        for heading, cells in zip(headings, zip(headings, *rows, strict=True), strict=True):
            # If there is too little room, reasons and long reports are cut.
            width = None if heading == "why" else max(cell_len(cell) for cell in cells)
            if heading == LAST_REPORT and width is not None:
                width = min(width, REPORT_ROOM)
            table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=width)
        for row in rows:
            table.add_row(*row)
        if len(alive) > room:
            table.add_row(f"and {len(alive) - room} more")
        return table

    def _row(self, line: LiveJob) -> list[str]:
        workers = line.allocation.worker_count
        finish_s = line.finish_s(self._now_s)
        if self._study is None:
            last = one_line(metrics_text(self._reported(line.job.id, line.epoch)))
            shown = [f"{line.work_done / line.job.work.units_per_epoch:.2f}", last or "-"]
        else:
            shown = [str(line.epoch), "-" if line.value is None else f"{line.value:.6g}"]
        return [
            one_line(line.job.id),
            str(line.phase) + (f", {line.retries}x retried" if line.retries else ""),
            str(workers or "-"),
            "-" if line.batch is None or line.job.study is not None else str(line.batch.total(workers)),
            *shown,
            "-" if finish_s is None else format_duration(finish_s),
            "" if line.reason is None else one_line(line.reason.text),
        ]


@contextmanager
def measuring(where: str = "", *, resumes: bool = False) -> Iterator[Callable[[ProbeProgress], None]]:
    """Shows on standard error what a probe does while the block runs, on a terminal or in plain lines.

    Ctrl-C ends the command with a message: there is nothing to resume yet, unless it `resumes` a run.
    """
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:

            def show(progress: ProbeProgress) -> None:
                text = measuring_line(progress, where)
                if not console.is_terminal:
                    print(text, file=sys.stderr, flush=True)
                elif shown.tasks:
                    shown.update(shown.tasks[0].id, description=text)
                else:
                    shown.add_task(text, total=None)

            yield show
    except KeyboardInterrupt:
        if resumes:
            print("stopped before the run continued; nothing has changed.", file=sys.stderr)
        else:
            print("stopped while measuring; nothing was begun.", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def stoppable(folder: RunFolder) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with a message, also between two phases, when nothing listens."""
    try:
        with signals_interrupt():
            yield
    except KeyboardInterrupt:
        begun = "; the same command resumes the run" if folder.is_begun else ""
        print(f"stopped{begun or ' before training began; nothing was begun'}.", file=sys.stderr)
        raise typer.Exit(1) from None
