"""Stops a study early if its trials cannot be compared."""

from __future__ import annotations

from stretto.core.errors import InputError, last_line
from stretto.core.events import Event, JobFailed, JobFinished, JobReported
from stretto.driving.drive import Observer
from stretto.runs.folder import RunFolder
from stretto.runs.results import check_reported
from stretto.search.study import Study

UNCOMPARED_EPOCHS = 10
"""Code that reports nothing is stopped at the first comparison; without one, after this many epochs."""


SAME_FAILURES = 3
"""If this many trials fail in the same way before any result, the training code is at fault."""


class EarlyStop:
    """Stops a run whose training code gives the study nothing to compare.

    - Other metrics than the study's: stopped at the first report.
    - No metrics: stopped at the first comparison.
    - The first trials fail in the same way: stopped, before more of them do.

    Events before a resume do not count, since the script may have been fixed.
    """

    def __init__(self, folder: RunFolder, study: Study, observer: Observer) -> None:
        self._folder = folder
        self._metric = study.metric
        first_needed = study.rungs[0] if study.rungs else UNCOMPARED_EPOCHS
        self._patience = min(first_needed, study.max_epochs)
        self._observer = observer
        self._reports = 0
        self._epoch = 0
        """The last epoch that any trial has reported."""
        self._failures: list[JobFailed] = []
        self._begun = False
        self._sound = False
        self._problem: InputError | None = None

    def observe(self, event: Event) -> None:
        """Passes an event on, and checks the first reports and failures."""
        self._observer.observe(event)
        if not self._begun:
            self._sound |= isinstance(event, JobReported) and bool(event.results)
        if not self._begun or self._sound or self._problem is not None:
            return
        try:
            self._look_at(event)
        except InputError as problem:
            self._problem = problem

    def tick(self, now_s: float) -> None:
        """Passes the tick on, and raises what was found: by now it is journaled and shown."""
        self._observer.tick(now_s)
        self._begun = True
        if self._problem is not None:
            raise self._problem

    def _look_at(self, event: Event) -> None:
        match event:
            case JobReported():
                self._reports += 1
                self._sound = self._shows(event)
            case JobFinished():
                self._sound = check_reported(self._folder, self._metric, epochs=self._epoch, patience=0)
            case JobFailed():
                self._failures.append(event)
                self._check_failures()
            case _:
                pass

    def _shows(self, event: JobReported) -> bool:
        if event.results:
            return True
        # A command's epochs are known only from its files; these are read at reports 1, 2, 4, 8, ..
        if event.epoch <= self._epoch and self._reports.bit_count() != 1:
            return False
        self._epoch = max(self._epoch, event.epoch)
        return check_reported(self._folder, self._metric, epochs=self._epoch, patience=self._patience)

    def _check_failures(self) -> None:
        if len(self._failures) < SAME_FAILURES or len({last_line(one.error) for one in self._failures}) > 1:
            return
        raise InputError(
            f"the first {SAME_FAILURES} trials failed in the same way, without any result.",
            where=str(self._folder.path),
            remedy=f"The last one: {self._failures[-1].error.strip()}",
            log=self._failures[-1].log,
        )
