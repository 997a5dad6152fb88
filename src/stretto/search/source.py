"""The trials of a study as jobs. A few wait in advance; when one starts, the next is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from stretto.core.errors import JournalError
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported, JobSubmitted
from stretto.core.instructions import Action
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.search.samplers import Sampler
from stretto.search.space import Config
from stretto.search.study import Study

ANY_BATCH = BatchLimits(initial=1024, requested=1024, max=1024, per_gpu_min=1, per_gpu_max=1024)
"""For trials whose training code sets the batch size. This batch can be split over any number of GPUs."""

_AS_BEGUN = "; to resume a study, use the same file, seed and versions as before, or begin another journal"


def trials_ahead(study: Study, sampler: Sampler, gpus: int) -> int:
    """How many trials should wait: one per GPU; only one if the sampler learns, so that it draws late."""
    return 1 if sampler.learns else min(study.trials, gpus)


@dataclass(slots=True)
class _Trial:
    """A trial that is not over."""

    number: int
    config: Config
    started: bool = False
    epoch: int = 0
    value: float | None = None


class TrialSource:
    """Hands out the trials of a study.

    `ahead` trials wait at any time; when one starts, another is drawn. If a trial is stopped before its first
    start, no more trials are drawn.
    """

    def __init__(
        self, study: Study, sampler: Sampler, *, most_gpus: int, ahead: int, elastic: bool = True
    ) -> None:
        """Trials that are not `elastic` cannot continue from a checkpoint, so each always has one GPU."""
        self._study = study
        self._sampler = sampler
        self._most_gpus = most_gpus if elastic else 1
        self._tier = Tier.ELASTIC if elastic else Tier.RIGID
        self._ahead = ahead
        self._total = study.trials if sampler.size is None else min(study.trials, sampler.size)
        self._trials: dict[str, _Trial] = {}
        self._drawn = 0
        self._waiting = 0
        self._seen_s = 0.0

    @property
    def to_come(self) -> int:
        return self._total - self._drawn

    def next_s(self) -> float:
        return self._seen_s if self._waiting < self._ahead and self._drawn < self._total else math.inf

    def due(self, now_s: float) -> Sequence[Job]:
        self._seen_s = now_s
        jobs: list[Job] = []
        while self.next_s() <= now_s:
            jobs.append(self._draw(now_s))
        return jobs

    def observe(self, event: Event) -> None:
        self._seen_s = max(self._seen_s, event.t_s)
        match event:
            case JobReported():
                self._reported(event)
            case Decided():
                for instruction in event.instructions:
                    self._instructed(instruction.action, instruction.job_id)
            case JobSubmitted() if event.job.study == self._study.name:
                self._submitted(event.job)
            case JobFinished():
                self._over(event.job_id)
            case JobFailed():
                self._over(event.job_id, failed=True)

    def _draw(self, now_s: float) -> Job:
        number = self._drawn
        config = self._sampler.ask(number)
        job = self._job(number, config, now_s)
        self._trials[job.id] = _Trial(number, config)
        self._drawn += 1
        self._waiting += 1
        return job

    def _job(self, number: int, config: Config, now_s: float) -> Job:
        return Job(
            id=f"trial-{number:03d}",
            application=self._study.name,
            submit_s=now_s,
            worker=Role(demand=Resources(gpu=1), min=1, max=self._most_gpus),
            tier=self._tier,
            batch=ANY_BATCH,
            work=Work(units_per_epoch=1.0, epochs=self._study.max_epochs),
            study=self._study.name,
            config=config,
        )

    def _submitted(self, job: Job) -> None:
        """On resume, draw each journaled trial again: this restores the state of the sampler."""
        if job.id in self._trials:
            return
        if not self.to_come:
            raise JournalError(
                f"the journal has {job.id} and this study no more than {self._total} trials{_AS_BEGUN}"
            )
        again = self._draw(job.submit_s)
        for field in fields(Job):
            old, new = getattr(job, field.name), getattr(again, field.name)
            if old != new:
                raise JournalError(f"{job.id} had {field.name} {old} and now has {new}{_AS_BEGUN}")

    def _instructed(self, action: Action, job_id: str) -> None:
        trial = self._trials.get(job_id)
        if trial is None:
            return
        if action is Action.START and not trial.started:
            trial.started = True
            self._waiting -= 1
        elif action is Action.STOP:
            if not trial.started:
                self._total = self._drawn
            self._over(job_id)

    def _reported(self, event: JobReported) -> None:
        trial = self._trials.get(event.job_id)
        if trial is None:  # it was stopped, and this was still on its way
            return
        for result in event.results:
            trial.epoch, trial.value = result.epoch, result.value
            self._sampler.tell(trial.number, trial.config, result.epoch, result.value, final=False)

    def _over(self, job_id: str, *, failed: bool = False) -> None:
        trial = self._trials.pop(job_id, None)
        if trial is None:
            return
        if not trial.started:
            self._waiting -= 1
        value = None if failed else trial.value
        self._sampler.tell(trial.number, trial.config, trial.epoch, value, final=True)
