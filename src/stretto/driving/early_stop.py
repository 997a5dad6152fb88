"""Ends a study early whose trials cannot be compared."""

from __future__ import annotations

from stretto.core.errors import InputError, last_line
from stretto.core.events import Event, JobFailed, JobFinished, JobReported
from stretto.driving.drive import Observer
from stretto.runs.folder import RunFolder
from stretto.runs.results import check_reported
from stretto.search.study import Study

UNCOMPARED_EPOCHS = 10
"""Code that reports nothing has until the first comparison; in a study without any, so many epochs."""


SAME_FAILURES = 3
"""Trials that fail alike, before any has shown something: the fault is not theirs."""


class EarlyStop:
    """Ends a run whose training code can give the study nothing to compare.

    Code that reports other metrics than the study's is believed to have another name for it, and ended at
    the first report; code that reports nothing has a while; code that fails alike in trial after trial,
    before any has shown something, is not tried again and again. What was wrong before a run is resumed may
    have been mended since.
    """

    def __init__(self, folder: RunFolder, study: Study, observer: Observer) -> None:
        self._folder = folder
        self._metric = study.metric
        first_needed = study.rungs[0] if study.rungs else UNCOMPARED_EPOCHS
        self._patience = min(first_needed, study.max_epochs)
        self._observer = observer
        self._reports = 0
        self._epoch = 0
        """The latest that any trial has reported."""
        self._failures: list[JobFailed] = []
        self._begun = False
        self._sound = False
        self._problem: InputError | None = None

    def observe(self, event: Event) -> None:
        """Look at the first reports and failures, and pass everything on."""
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
        """Pass it on, and end the run if need be: not before what happened is journaled and shown."""
        self._observer.tick(now_s)
        self._begun = True
        if self._problem is not None:
            raise self._problem

    def _look_at(self, event: Event) -> None:
        match event:
            case JobReported():
                self._reports += 1
                self._sound = self._shows(event)
            case JobFinished():  # it came to its end without
                self._sound = check_reported(self._folder, self._metric, epochs=self._epoch, patience=0)
            case JobFailed():
                self._failures.append(event)
                self._check_failures()
            case _:
                pass

    def _shows(self, event: JobReported) -> bool:
        if event.results:
            return True
        # A command's epochs are known only from its files, which are read ever more rarely.
        if event.epoch <= self._epoch and self._reports.bit_count() != 1:
            return False
        self._epoch = max(self._epoch, event.epoch)
        return check_reported(self._folder, self._metric, epochs=self._epoch, patience=self._patience)

    def _check_failures(self) -> None:
        if len(self._failures) < SAME_FAILURES or len({last_line(one.error) for one in self._failures}) > 1:
            return
        raise InputError(
            f"the first {SAME_FAILURES} trials failed, all in the same way, and none has shown anything.",
            where=str(self._folder.path),
            remedy=f"The last one: {self._failures[-1].error.strip()}",
            log=self._failures[-1].log,
        )
