"""What a real run shows while it goes: a display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.app.changes import Change, Changes
from stretto.app.real_board import ENDED, Board, JobLine, Phase
from stretto.app.real_cost import RunMeter
from stretto.app.real_drive import Watcher
from stretto.app.real_expect import corrected
from stretto.app.real_stop import Stop
from stretto.core.events import (
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
)
from stretto.core.units import counted, format_duration
from stretto.planning.forecast import Estimate
from stretto.planning.tuning import Tuning
from stretto.report.names import one_line
from stretto.search.study import Study
from stretto.substrate.local_nodes import SLOT

STOPPING = "stopping: what runs is asked to save and leave; Ctrl-C once more stops at once"
REDRAW_S = 0.5
BEST_EVERY_S = 5.0
"""Lines about the best trial are no closer together: of many improvements in between, the last is told."""
ROWS_BESIDES = 10
"""Lines of the display that are not rows of its table."""
ORDER = (Phase.RUNNING, Phase.STARTING, Phase.PAUSED, Phase.WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a display of a study knows besides what happens."""

    tuning: Tuning
    finish_s: Estimate | None
    usd_per_slot_hour: float
    """Of slots that are simply there."""


@contextmanager
def watching(
    title: str, *, stop: Stop, study: Study | None = None, outlook: Outlook | None = None
) -> Iterator[Watcher]:
    """Shows a run on standard error while the block runs, and whether somebody has asked it to stop."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        lines = PlainLines(console, study, stop)
        try:
            yield lines
        finally:
            lines.close()
        return
    display = Display(console, title, study, outlook, stop)
    with Live(console=console, auto_refresh=False, transient=True, get_renderable=display.render) as live:
        display.live = live
        yield display


class PlainLines:
    """One line for every change worth a note."""

    def __init__(
        self, console: Console, study: Study | None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._console = console
        self._stop = stop
        self._stopping = False
        self._board = Board(study)
        self._changes = Changes()
        self._study = study
        self._begun = False
        self._best: tuple[float, str] | None = None
        """The best value, and whose it is."""
        self._untold: tuple[str, str] | None = None
        """Whose the last improvement is, and what to say of it, until that is told."""
        self._told_s = -math.inf

    def observe(self, event: Event) -> None:
        """Print what is news."""
        self._board.observe(event)
        changes = self._changes.observe(event)
        if not self._begun:  # what had happened before a resumed run went on
            return
        if isinstance(event, JobReported) and event.results and self._study is not None:
            self._note_best(self._study, event)
        for job_id, text in _news(event, changes):
            if self._untold is not None and self._untold[0] == job_id:  # first what it did before
                self._tell_best(event.t_s, 0.0)
            self._say(event.t_s, text)
        self._tell_best(event.t_s, BEST_EVERY_S)

    def tick(self, now_s: float) -> None:
        """From the first moment on, events are news."""
        if not self._begun and self._study is not None and (best := self._board.best()) is not None:
            value = self._board.best_value(best)
            self._best = None if value is None else (value, best.job.id)
        self._begun = True
        self._tell_best(now_s, BEST_EVERY_S)
        if self._stop() and not self._stopping:
            self._stopping = True
            self._say(now_s, STOPPING)

    def close(self) -> None:
        """Tell what was kept back."""
        self._tell_best(self._board.now_s, 0.0)

    def _say(self, t_s: float, text: str) -> None:
        _print(self._console, t_s, text)

    def _tell_best(self, now_s: float, every_s: float) -> None:
        if self._untold is not None and now_s - self._told_s >= every_s:
            self._say(now_s, self._untold[1])
            self._told_s, self._untold = now_s, None

    def _note_best(self, study: Study, event: JobReported) -> None:
        best = self._board.best()
        value = None if best is None else self._board.best_value(best)
        if best is None or value is None or (value, best.job.id) == self._best:
            return
        before, self._best = self._best, (value, best.job.id)
        if before is None or study.score(value) > study.score(before[0]):
            text = f"{best.job.id} has the best {study.metric}: {value:.6g} after epoch {event.epoch}"
            self._untold = best.job.id, text
        elif value == before[0]:  # of equals the first one is named, here as in the end
            text = f"{best.job.id} has the same {study.metric} as {before[1]}: {value:.6g}"
            self._untold = best.job.id, text


def _news(event: Event, changes: list[Change]) -> Iterator[tuple[str, str]]:
    """What to say, each with what it is about; a batch size that changes in place is no news."""
    for change in changes:
        if change.what != "set-batch":
            said = f": {change.said}" if change.said else ""
            yield change.job_id, f"{change.job_id} {change.past}{said}"
    if isinstance(event, JobFinished):
        yield event.job_id, f"{event.job_id} finished"
    for text in (*_trouble(event), *_of_nodes(event)):
        yield event.subject, text


def _print(console: Console, t_s: float, text: str) -> None:
    console.print(f"{format_duration(t_s):>8}  {one_line(text)}", soft_wrap=True, markup=False)


def _trouble(event: Event) -> Iterator[str]:
    """What went wrong in a job, or it says of itself."""
    match event:
        case JobRetried():
            yield f"{event.job_id} is retried ({event.attempt}): {last_line(event.error)}"
        case JobFailed():
            yield f"{event.job_id} failed: {last_line(event.error)}"
        case JobNoted():
            yield f"{event.job_id}: {event.text}"
        case _:
            pass


def _of_nodes(event: Event) -> Iterator[str]:
    """Slots of this machine come and go at once, and without a word."""
    match event:
        case NodeRefused():
            yield f"{event.count} of {event.instance} will not come: {event.why}"
        case NodeLaunched() if event.node.instance != SLOT:
            yield f"node {event.node.id} is launched"
        case NodeAdded() if event.node.instance != SLOT:
            took = f" after {format_duration(event.init_s)}" if event.init_s else ""
            yield f"node {event.node.id} is here{took}: {counted(event.node.gpus, 'slot')}"
        case NodeLost():
            yield f"node {event.node_id} is lost; what ran there goes on elsewhere"
        case NodeDraining():
            yield f"node {event.node_id} will go soon; what runs there moves"
        case _:
            pass


class Display:
    """A bar to the deadline, what is spent, and a row for every job that is not over; above it, troubles."""

    def __init__(
        self, console: Console, title: str, study: Study | None, outlook: Outlook | None, stop: Stop
    ) -> None:
        self._console = console
        self._stop = stop
        self._title = title
        self._study = study
        self._outlook = outlook
        self._board = Board(study)
        self._meter: RunMeter | None = None
        if outlook is not None and outlook.tuning.instances[0].usd_per_hour:
            self._meter = RunMeter(outlook.tuning, outlook.usd_per_slot_hour)
        self._now_s = 0.0
        self._drawn = 0.0
        self._begun = False
        self.live: Live | None = None

    def observe(self, event: Event) -> None:
        """Take note; what no row shows goes above the display."""
        self._board.observe(event)
        if self._begun and self.live is not None:
            for text in (*_trouble(event), *_of_nodes(event)):
                _print(self.live.console, event.t_s, text)
        if self._meter is not None:
            self._meter.observe(event)

    def tick(self, now_s: float) -> None:
        """Draw again: a few times a second at most, but a last time when it is asked to stop."""
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
            clock += f"   spent ${self._meter.cost_usd(max(self._now_s, self._meter.seen_s)):.2f}"
        if outlook.finish_s is not None:
            slowness = self._board.slowness(outlook.tuning.profile)
            eta = corrected(outlook.finish_s, self._now_s, slowness, deadline_s)
            span = f"{format_duration(eta.p10)} to {format_duration(eta.p90)}"
            clock += f"   done after {format_duration(eta.mean)} ({span})"
        best = self._board.best() if self._study is not None else None
        if best is not None and self._study is not None:
            clock += f"   best {self._study.metric} {self._board.best_value(best):.6g} ({best.job.id})"
        yield Text(clock)

    def _counts(self) -> str:
        counts = self._board.counts()
        return ", ".join(f"{count} {where}" for where, count in counts.items()) or "nothing has come yet"

    def _table(self) -> Table:
        metric = "epochs" if self._study is None else self._study.metric
        headings = ("job", "state", "workers", "batch", "epoch", metric, "done after", "why")
        alive = [line for line in self._board.jobs.values() if line.phase not in ENDED]
        alive.sort(key=lambda line: ORDER.index(line.phase))
        room = max(self._console.height - ROWS_BESIDES, 3)
        rows = [self._row(line) for line in alive[:room]]
        table = Table(box=None, pad_edge=False, expand=False)
        for heading, cells in zip(headings, zip(headings, *rows, strict=True), strict=True):
            # Where there is too little room, it is taken from the reasons alone.
            width = None if heading == "why" else max(cell_len(cell) for cell in cells)
            table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=width)
        for row in rows:
            table.add_row(*row)
        if len(alive) > room:
            table.add_row(f"and {len(alive) - room} more")
        return table

    def _row(self, line: JobLine) -> list[str]:
        workers = line.allocation.worker_count
        finish_s = line.finish_s(self._now_s)
        shown = f"{line.work_done / line.job.work.units_per_epoch:.2f}"
        if self._study is not None:
            shown = "-" if line.value is None else f"{line.value:.6g}"
        return [
            one_line(line.job.id),
            str(line.phase) + (f", {line.retries}x retried" if line.retries else ""),
            str(workers or "-"),
            "-" if line.batch is None or line.job.study is not None else str(line.batch.total(workers)),
            str(line.epoch),
            shown,
            "-" if finish_s is None else format_duration(finish_s),
            "" if line.reason is None else one_line(line.reason.text),
        ]


def last_line(text: str) -> str:
    """What a traceback says in the end."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith("log: ")]
    return lines[-1].strip() if lines else ""
