"""From the lines that a command prints to what the controller is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.events import JobReported
from stretto.core.job import Job, Tier
from stretto.substrate.process_reports import Progress, Setup, read_report
from stretto.substrate.process_trials import Mark


@dataclass(frozen=True, slots=True)
class Seen:
    """What a line was."""

    report: bool = False
    result: bool = False
    """Of a trial: an epoch's result, which was not known before."""
    problems: tuple[str, ...] = ()
    """What had to be left out, as far as it was not said since the command was started."""


@dataclass(slots=True)
class PrintedAccount:
    """The ledger of a job that runs a command."""

    job: Job
    metric: str | None
    progress: Progress = field(default_factory=Progress)
    missed: tuple[bytes, ...] = ()
    """Lines from before this process, of which nobody knows whether they were told."""
    _mark: Mark = field(default_factory=Mark)
    _waiting: list[JobReported] = field(default_factory=list)
    _problems: set[str] = field(default_factory=set)

    @property
    def reached(self) -> Progress:
        return self.progress

    @property
    def complete(self) -> bool:
        """A trial that has shown its last epoch is done, whatever its command still does."""
        last_epoch = self.job.work.epochs
        return self.metric is not None and last_epoch is not None and self.progress.result_epoch >= last_epoch

    def begin(self, setup: Setup, *, t_s: float) -> None:
        """The command is started; first of all, what was missed is told."""
        for line in self.missed:
            self.read_missed(line, setup, t_s=t_s)
        self.missed = ()
        self._mark = Mark(0 if self.job.tier is Tier.RIGID else self.progress.result_epoch)
        self._problems.clear()

    def read(self, line: bytes, setup: Setup, *, t_s: float) -> Seen:
        """Hold what a line says; it is told with the others."""
        reading = read_report(line, setup, self.progress, t_s=t_s, mark=self._mark)
        self._mark = reading.mark
        new = tuple(problem for problem in reading.problems if problem not in self._problems)
        self._problems.update(new)
        if reading.report is None or self.complete:
            return Seen(problems=new)
        self._hold(reading.report)
        return Seen(report=True, result=bool(reading.report.results), problems=new)

    def read_missed(self, line: bytes, setup: Setup, *, t_s: float) -> Seen:
        """Likewise, of a line from before the present start: only results that are not known yet count."""
        report = read_report(line, setup, self.progress, t_s=t_s, mark=Mark(counts=False)).report
        if report is not None and report.results and not self.complete:
            self._hold(report)
        return Seen()  # nothing that the present start has shown

    def tell(self, *, t_s: float, resize_s: float | None = None) -> list[JobReported]:
        reports, self._waiting = self._waiting, []
        last = len(reports) - 1
        return [
            replace(report, t_s=t_s, resize_s=resize_s if position == last else None)
            for position, report in enumerate(reports)
        ]

    def _hold(self, report: JobReported) -> None:
        self.progress = self.progress.after(report)
        self._waiting.append(report)


def lines_of(metrics: Path) -> tuple[bytes, ...]:
    """What is in a job's metrics file."""
    return tuple(metrics.read_bytes().splitlines()) if metrics.is_file() else ()
