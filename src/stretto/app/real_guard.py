"""What ends a study early: money that must be kept back, a metric that never comes."""

from __future__ import annotations

from stretto.app.real_cost import as_billed
from stretto.app.real_drive import Watcher
from stretto.app.real_result import check_reported
from stretto.app.run_folder import RunFolder
from stretto.core.events import Event, JobReported
from stretto.pricing.purse import Purse
from stretto.search.study import Study

UNCOMPARED_EPOCHS = 10
"""A metric is to be there by the first comparison; in a study without any, by so many epochs."""


class Reserve:
    """A budget that ends a while earlier, to leave money for the last checkpoints."""

    def __init__(self, purse: Purse, reserve_s: float) -> None:
        self._purse = purse
        self._reserve_s = reserve_s

    def observe(self, event: Event) -> None:
        """Take note of what happened."""
        self._purse.observe(as_billed(event))

    def ends_s(self) -> float:
        """When the run must be over, as things stand."""
        return max(self._purse.ends_s() - self._reserve_s, 0.0)


class MetricGuard:
    """Ends a run whose training code trains on and on, but never reports what the study compares."""

    def __init__(self, folder: RunFolder, study: Study, watcher: Watcher) -> None:
        self._folder = folder
        self._metric = study.metric
        first_needed = study.rungs[0] if study.rungs else UNCOMPARED_EPOCHS
        self._patience = min(first_needed, study.max_epochs)
        self._watcher = watcher
        self._reports = 0
        self._sound = False

    def observe(self, event: Event) -> None:
        """Look at the first reports, and pass everything on."""
        if isinstance(event, JobReported) and not self._sound:
            self._reports += 1
            self._sound = self._shows(event)
        self._watcher.observe(event)

    def _shows(self, event: JobReported) -> bool:
        if any(result.value is not None for result in event.results):
            return True
        # A command's epochs are known only from its files, which are read ever more rarely.
        if event.epoch < self._patience and self._reports.bit_count() != 1:
            return False
        return check_reported(self._folder, self._metric, epochs=event.epoch, patience=self._patience)

    def tick(self, now_s: float) -> None:
        """Pass it on."""
        self._watcher.tick(now_s)
