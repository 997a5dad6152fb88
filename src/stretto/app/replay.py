"""What other policies would have made of a real run: simulated in a world of what the run showed.

A study is replayed with the trials it had, in the order it drew them. True speeds come from its timed epochs:
log epoch time = trial + workers, by least squares, where the profile's speed-up stands in for numbers of
workers that were not seen. A start takes what starts took; loading the training code, once, is added to every
policy's finish.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from stretto.app.history import JobHistory, history_of
from stretto.app.real_expect import machine_instance
from stretto.app.real_result import TuneResult, ending_of, run_outline, run_tuning, tune_result
from stretto.app.run_folder import RunFolder
from stretto.app.study_file import StudyFile, WorldSpec
from stretto.app.study_run import StudyResult, simulate_study
from stretto.core.errors import InputError
from stretto.core.events import Event, JobReported
from stretto.core.units import HOUR_S
from stretto.planning.profile import Latency, Profile, Scaling
from stretto.policies.registry import Options, make_policy, rents_nodes
from stretto.search.samplers import ListedSampler, RandomSampler
from stretto.search.space import Config
from stretto.search.study import Study
from stretto.substrate.local_nodes import SLOT
from stretto.worlds.curves import ROW
from stretto.worlds.replay import Origin, RecordedCurves, RecordedTrial, by_epoch

BELIEF_WEIGHT = 0.1
"""How much the profile's speed-up counts against one timed epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy would have reached, and how much of what it saw was really so."""

    result: StudyResult
    shares: dict[Origin, float]
    """Of the epochs it saw: recorded, extrapolated beyond a trial's last, drawn for trials never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyReplay:
    """A real study beside what policies would have made of it."""

    study: Study
    actual: TuneResult
    replayed: tuple[Replayed, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What the journal of a real study shows."""

    curves: RecordedCurves
    profile: Profile
    """The speeds that were really so."""
    loading_s: float
    """What the very first start took longer than others."""


def is_study(folder: RunFolder) -> bool:
    """Whether a run's folder is of a study that was tuned, and not of jobs."""
    return folder.begun_spec().is_study


def replay(folder: RunFolder, policies: Sequence[str], *, options: Options | None = None) -> StudyReplay:
    """The study that was tuned in a run's folder, as it was and under these policies."""
    spec = folder.begun_spec()
    if not spec.is_study:
        raise InputError(
            "is not the run of a study.", where=str(folder.path), remedy="Name one that was tuned."
        )
    file, events = study_of_run(folder), list(folder.events())
    moved = ("Its limits were raised on the way; others know the last ones from the start.",)
    seed = spec.seed
    return StudyReplay(
        study=file.tuning.study,
        actual=tune_result(folder, ending_of(folder)),
        replayed=replay_study(file, events, policies, seed=seed, options=options),
        notes=record_of(file, events, seed).curves.notes + (moved if spec.past_limits else ()),
    )


def study_of_run(folder: RunFolder) -> StudyFile:
    """The study as the run was begun with it, on this machine."""
    spec = folder.begun_spec()
    outline = run_outline(folder, spec)
    tuning = run_tuning(folder, outline, spec)
    return StudyFile(
        tuning=tuning,
        space=outline.space,
        sampler=outline.sampler,
        fixed_nodes=tuning.max_nodes,
        world=WorldSpec(curves=folder.name, profile=tuning.profile),
        path=outline.path,
    )


def replay_study(
    file: StudyFile,
    events: Iterable[Event],
    policies: Sequence[str],
    *,
    seed: int = 0,
    options: Options | None = None,
) -> tuple[Replayed, ...]:
    """The study of a real run under other policies, or its own; empty if it showed no epoch."""
    record = record_of(file, list(events), seed)
    if not record.curves.trials:
        return ()
    chosen = options or {}
    return tuple(_replay(file, record, policy, seed, chosen.get(policy)) for policy in policies)


def record_of(file: StudyFile, events: Sequence[Event], seed: int) -> StudyRecord:
    """What the journal shows of the trials' curves and speeds."""
    trials = list(history_of(events).jobs.values())
    times = _Times.of(trials, file.tuning.profile.scaling)
    recorded = {
        row: RecordedTrial(_values(trial), times.relative(row))
        for row, trial in enumerate(trials)
        if trial.results
    }
    starts_s = [
        event.resize_s for event in events if isinstance(event, JobReported) and event.resize_s is not None
    ]
    start_s = median(starts_s[1:] or starts_s or [file.tuning.profile.start_s])
    curves = RecordedCurves(
        name=f"the run of {file.tuning.study.name}",
        metric=file.tuning.study.metric,
        direction=file.tuning.study.direction,
        configs=_listed([trial.job.config for trial in trials], file, seed),
        trials=recorded,
        notes=_notes(file, recorded),
    )
    loading_s = max(starts_s[0] - start_s, 0.0) if starts_s else 0.0
    return StudyRecord(
        curves=curves,
        profile=dataclasses.replace(times.profile(file.tuning.profile), start_s=start_s),
        loading_s=loading_s,
    )


def _replay(
    file: StudyFile, record: StudyRecord, policy: str, seed: int, options: Mapping[str, str] | None
) -> Replayed:
    world = _without_loading(_on_one_machine(file, policy, options), record)
    run = simulate_study(world, record.curves, policy, seed=seed, options=options)
    seen = Counter(
        record.curves.origin(trial.job.config, result.epoch)
        for trial in run.history.jobs.values()
        for result in trial.results
    )
    held = sum(instance.usd_per_hour for instance in world.tuning.instances[:1]) * world.fixed_nodes
    result = dataclasses.replace(
        run.result,
        deadline_s=file.tuning.limits.deadline_s,
        finished_s=run.result.finished_s + record.loading_s,
        cost_usd=run.result.cost_usd + held * record.loading_s / HOUR_S,
    )
    return Replayed(result=result, shares={origin: seen[origin] / max(seen.total(), 1) for origin in Origin})


def _on_one_machine(file: StudyFile, policy: str, options: Mapping[str, str] | None) -> StudyFile:
    """The machine as a real run has it: slots to rent one by one, or one node with all of them."""
    tuning = file.tuning
    rents = rents_nodes(make_policy(policy, options=options, tuning=tuning))
    if rents or tuning.instances[0].name != SLOT:
        return file
    whole = dataclasses.replace(tuning, instances=(machine_instance(tuning),), max_nodes=1)
    return dataclasses.replace(file, tuning=whole, fixed_nodes=1)


def _without_loading(file: StudyFile, record: StudyRecord) -> StudyFile:
    """The study in the recorded world, with the time that is left once the training code is loaded."""
    limits = file.tuning.limits
    left_s = None if limits.deadline_s is None else max(limits.deadline_s - record.loading_s, 1.0)
    return dataclasses.replace(
        file,
        sampler="random",
        tuning=dataclasses.replace(file.tuning, limits=dataclasses.replace(limits, deadline_s=left_s)),
        world=WorldSpec(curves=record.curves.name, profile=record.profile),
    )


def _values(trial: JobHistory) -> tuple[float | None, ...]:
    """By epoch; a trial that failed has no number from there on."""
    values = by_epoch((result.epoch, result.value) for result in trial.results)
    return values if trial.failed_s is None else (*values, None)


def _listed(drawn: Sequence[Config], file: StudyFile, seed: int) -> tuple[Config, ...]:
    """Configurations of all trials, placed so that the seed's order of a list is the order of the run."""
    trials = file.tuning.study.trials
    more = RandomSampler(file.space, seed)
    configs = [*drawn, *(more.ask(number) for number in range(len(drawn), trials))]
    order = ListedSampler([((ROW, place),) for place in range(len(configs))], seed)
    places = [int(order.ask(number)[0][1]) for number in range(len(configs))]
    listed: list[Config] = [()] * len(configs)
    for number, place in enumerate(places):
        listed[place] = ((ROW, number), *configs[number])
    return tuple(listed)


def _notes(file: StudyFile, recorded: Mapping[int, RecordedTrial]) -> tuple[str, ...]:
    study = file.tuning.study
    never = study.trials - len(recorded)
    longest = max((len(trial.values) for trial in recorded.values()), default=0)
    notes = [
        f"{len(recorded)} trials showed up to {longest} of {study.max_epochs} epochs; the rest is continued."
    ]
    if never:
        notes.append(
            f"{never} of {study.trials} trials never showed an epoch; they get curves of those that did."
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Times:
    """Timed epochs taken apart: log epoch time = trial + workers + deviation."""

    by_trial: Mapping[int, float]
    """exp(trial): time of an epoch with one worker, by the trial's number."""
    scaling: Scaling
    epoch_sd: float

    @staticmethod
    def of(trials: Sequence[JobHistory], believed: Scaling) -> _Times:
        timed = [
            (row, result.workers, math.log(result.epoch_s))
            for row, trial in enumerate(trials)
            for result in trial.results
            if result.epoch_s
        ]
        if not timed:
            return _Times({}, believed, 0.0)
        rows = sorted({row for row, _, _ in timed})
        counts = sorted({workers for _, workers, _ in timed} - {1})
        columns = {("trial", row): index for index, row in enumerate(rows)}
        columns |= {("workers", workers): len(rows) + index for index, workers in enumerate(counts)}
        matrix = np.zeros((len(timed) + len(counts), len(columns)))
        target = np.zeros(len(timed) + len(counts))
        for index, (row, workers, log_s) in enumerate(timed):
            matrix[index, columns["trial", row]] = 1.0
            if workers > 1:
                matrix[index, columns["workers", workers]] = 1.0
            target[index] = log_s
        for index, workers in enumerate(counts, start=len(timed)):
            matrix[index, columns["workers", workers]] = BELIEF_WEIGHT
            target[index] = -BELIEF_WEIGHT * math.log(believed.speedup(workers))
        solved = np.linalg.lstsq(matrix, target, rcond=None)[0]
        errors = (matrix @ solved - target)[: len(timed)]
        seen = {workers: math.exp(-solved[columns["workers", workers]]) for workers in counts}
        return _Times(
            {row: math.exp(solved[columns["trial", row]]) for row in rows},
            _corrected(believed, seen),
            float(errors.std()),
        )

    def relative(self, row: int) -> float | None:
        return self.by_trial[row] / fmean(self.by_trial.values()) if row in self.by_trial else None

    def profile(self, believed: Profile) -> Profile:
        """The true speeds; as believed where no epoch was timed."""
        if not self.by_trial:
            return believed
        times_s = list(self.by_trial.values())
        latency = Latency(
            epoch_s=fmean(times_s),
            trial_sd=float(np.std(times_s) / np.mean(times_s)),
            epoch_sd=self.epoch_sd,
        )
        return dataclasses.replace(believed, latency=latency, scaling=self.scaling)


def _corrected(believed: Scaling, seen: Mapping[int, float]) -> Scaling:
    """The speed-up that was seen, and the believed one for other numbers of workers."""
    points = {**dict(believed.points), **seen, 1: 1.0}
    return dataclasses.replace(believed, points=tuple(sorted(points.items())))
