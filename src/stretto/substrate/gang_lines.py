"""From the lines that a command prints to what the controller is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.events import JobReported
from stretto.core.job import Job, Tier
from stretto.substrate.process_end import Asked
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
    wrong: str = ""
    """Why the metric it has does not count, the first time."""
    passes: bool = False
    """It is the first to show an epoch after the last one."""


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
    _has_shown_wrong: bool = False
    _passed: bool = False

    @property
    def asked(self) -> Asked:
        return Asked.of(self.job, self.metric)

    @property
    def reached(self) -> Progress:
        return self.progress

    @property
    def complete(self) -> bool:
        """A job that has shown its last epoch is done, whatever its command still does."""
        return self._passed or self.asked.is_shown(self.progress)

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
        passes, was_complete = not self._passed and self.asked.is_passed(reading), self.complete
        self._passed |= passes
        wrong = "" if self._has_shown_wrong else reading.wrong
        self._has_shown_wrong |= bool(wrong)
        if reading.report is None or was_complete:
            return Seen(problems=new, wrong=wrong, passes=passes)
        self._hold(reading.report)
        result = bool(reading.report.results)
        return Seen(report=True, result=result, problems=new, wrong=wrong, passes=passes)

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
