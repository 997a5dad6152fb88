"""When a command has done what was asked of it, and what is to be said of its end."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.job import Job
from stretto.core.units import counted
from stretto.substrate.leaving import KILLED
from stretto.substrate.process_reports import Progress, Reading


@dataclass(frozen=True, slots=True)
class Asked:
    """How far a command is to go; whatever it does after that does not count."""

    epochs: int | None
    """None: as far as it goes by itself."""
    metric: str | None
    """Of a trial: only epochs that show it count."""

    @classmethod
    def of(cls, job: Job, metric: str | None) -> Asked:
        return cls(job.work.epochs, metric)

    def is_shown(self, progress: Progress) -> bool:
        """Whether the last epoch that counts was shown."""
        return self.epochs is not None and self._shown(progress) >= self.epochs

    def is_passed(self, reading: Reading) -> bool:
        """Whether a line shows an epoch after the last: the command will not end soon by itself."""
        told = 0 if reading.report is None else reading.report.epoch
        return self.epochs is not None and max(told, reading.mark.epoch) > self.epochs

    def why_ended(self, progress: Progress) -> str:
        """Why a command that had not ended by itself was asked to."""
        if self.is_shown(progress):
            shown = counted(self._shown(progress), "epoch")
            return f"its command was ended: it has shown {shown}, all that were asked for"
        return f"its command was ended: it went on after epoch {self.epochs}, the last that was asked for"

    def what_lacks(self, progress: Progress) -> str:
        """Of a command that has ended by itself; empty if it has shown all that was asked for."""
        if self.epochs is None or self.is_shown(progress):
            return ""
        shown = self._shown(progress)
        what = "" if self.metric is None else f" with {self.metric}"
        if self.metric is None and shown == self.epochs - 1:
            what = "; epochs count from 1, when they are completed"
        return f"its command ended by itself and has shown {shown} of {counted(self.epochs, 'epoch')}{what}"

    def _shown(self, progress: Progress) -> int:
        return progress.epoch if self.metric is None else progress.result_epoch


def failed_late(how: str) -> str:
    """Of a command that has shown all, and then failed."""
    return f"after the last epoch that was asked for its command failed: {how}"


def killed_leaving(grace_s: float) -> str:
    """Of a command that was asked to stop."""
    return f"{KILLED}, {grace_s:g} s after SIGTERM"
