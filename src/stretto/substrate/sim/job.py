"""One simulated job: its progress, its speed, and what it measures."""

from __future__ import annotations

import numpy as np

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.events import JobReported
from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample
from stretto.core.seeds import child_rng
from stretto.models.noise import step_gain
from stretto.worlds.truth import StepTime, TrialTruth, Truth

NO_TIME = StepTime(0.0, 0.0)


class Instruments:
    """Measurements of a job: the truth with a relative error."""

    def __init__(self, job: Job, error: float, seed: int) -> None:
        self._error = error
        self._rng = child_rng(seed, "instruments", job.id)

    def read(self, truth: float) -> float:
        return truth * float(np.exp(self._rng.normal(0.0, self._error))) if self._error else truth

    def read_step(self, truth: StepTime) -> StepTime:
        """A measured step. Computing and waiting have separate errors, so the wait stays part of the step."""
        if not self._error:
            return truth
        pass_s, sync_s = self.read(truth.step_s - truth.sync_s), self.read(truth.sync_s)
        return StepTime(pass_s + sync_s, sync_s)


class SimJob:
    """A simulated job. Progress is linear from `_since_s` on, at `_rate` statistical units a second."""

    reports_epochs = False
    """Whether it reports at the end of each epoch instead of at regular times."""

    def __init__(self, job: Job, truth: Truth, instruments: Instruments) -> None:
        self.job = job
        self.truth = truth
        self.allocation: Allocation = NOTHING
        self.epoch = 0
        self.ready_s = 0.0
        """When the last start or resize is over."""
        self.version = 0
        """Raised with every new plan, so that milestones of an old plan are recognised."""
        self.slowdown = 0.0
        self._instruments = instruments
        self._batch = BatchChoice(0)
        self._noise: NoiseSample | None = None
        self._step = NO_TIME
        self._rate = 0.0
        self._units = 0.0
        self._since_s = 0.0
        self._ran: dict[tuple[Allocation, BatchChoice], StepTime] = {}
        self._losses: list[LossPoint] = []
        self._resize_s: float | None = None

    def start(self, now_s: float, allocation: Allocation, batch: BatchChoice, restart_s: float) -> None:
        self.allocation = allocation
        self.ready_s = self._since_s = now_s + restart_s
        self._resize_s = restart_s
        self.set_batch(batch)

    def set_batch(self, batch: BatchChoice) -> None:
        self._batch = batch
        self._set_rate()

    def park(self) -> None:
        self.allocation = NOTHING
        self.slowdown = 0.0

    def disturb(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self._set_rate()

    def epoch_left_s(self) -> float:
        """Time to the end of this epoch at the present rate."""
        return (self.truth.units_at(self.epoch + 1) - self._units) / self._rate

    def advance(self, now_s: float) -> None:
        """Updates progress to `now_s`, within this epoch."""
        if self.allocation and now_s > self._since_s:
            done = self._units + self._rate * (now_s - self._since_s)
            self._units = min(done, self.truth.units_at(self.epoch + 1))
            self._since_s = now_s
            self._ran[self.allocation, self._batch] = self._step

    def end_epoch(self, now_s: float) -> None:
        self.advance(now_s)
        self.epoch += 1
        self._units = self.truth.units_at(self.epoch)
        loss = self.truth.loss_at(self.epoch)
        self._losses.append(LossPoint(self.epoch, None if loss is None else self._instruments.read(loss)))
        if self.epoch < self.truth.epochs:
            self._set_rate()

    def report(self, now_s: float) -> JobReported:
        """What was measured since the last report."""
        read, read_step = self._instruments.read, self._instruments.read_step
        ran, self._ran = self._ran, {}
        losses, self._losses = tuple(self._losses), []
        resize_s, self._resize_s = self._resize_s, None
        noise = self._noise
        return JobReported(
            t_s=now_s,
            job_id=self.job.id,
            work_done=self._units,
            epoch=self.epoch,
            speeds=tuple(
                SpeedSample(
                    nodes=len(allocation.nodes),
                    workers=allocation.worker_count,
                    servers=allocation.server_count,
                    atomic=batch.atomic,
                    step_s=measured.step_s,
                    sync_s=measured.sync_s,
                )
                for (allocation, batch), measured in ((key, read_step(step)) for key, step in ran.items())
            ),
            noise=None if noise is None else NoiseSample(read(noise.sqr), read(noise.var)),
            losses=losses,
            results=self._take_results(),
            resize_s=resize_s,
        )

    def _take_results(self) -> tuple[Result, ...]:
        return ()

    def _set_rate(self) -> None:
        self._step = self.truth.step_time(self.allocation, self._batch.atomic)
        total_batch = self._batch.total(self.allocation.worker_count)
        self._noise = self.truth.noise_at(total_batch, self.epoch)
        gain = step_gain(self._noise, self.job.batch.initial, total_batch)
        step_s = self._step.total_s(self._batch.accumulation)
        self._rate = gain / step_s * (1.0 - self.slowdown)


class SimTrial(SimJob):
    """A simulated trial: it reports its metric after every epoch, and epoch times vary."""

    reports_epochs = True
    truth: TrialTruth

    def __init__(self, job: Job, truth: TrialTruth, instruments: Instruments) -> None:
        super().__init__(job, truth, instruments)
        self._results: list[Result] = []
        self._epoch_began_s: float | None = None
        """Start of this epoch; None once it was interrupted."""

    def start(self, now_s: float, allocation: Allocation, batch: BatchChoice, restart_s: float) -> None:
        super().start(now_s, allocation, batch, restart_s)
        untouched = self._units == self.truth.units_at(self.epoch)
        self._epoch_began_s = self.ready_s if untouched else None

    def end_epoch(self, now_s: float) -> None:
        super().end_epoch(now_s)
        began_s, self._epoch_began_s = self._epoch_began_s, now_s
        result = Result(
            epoch=self.epoch,
            value=self.truth.result_at(self.epoch),
            epoch_s=None if began_s is None else now_s - began_s,
            workers=self.allocation.worker_count,
            nodes=len(self.allocation.workers),
        )
        self._results.append(result)

    def _take_results(self) -> tuple[Result, ...]:
        results, self._results = tuple(self._results), []
        return results

    def _set_rate(self) -> None:
        super()._set_rate()
        slowness = self.truth.slowness_at(self.epoch, self.allocation)
        self._step = StepTime(self._step.step_s * slowness, self._step.sync_s * slowness)
        self._rate /= slowness
