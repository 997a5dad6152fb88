"""Replays a real study under other policies, in simulated time.

- Trials: those of the run, in the order in which they were drawn.
- Speeds: fitted to the timed epochs by least squares, log epoch time = trial + workers. The profile's
  speed-up stands in for numbers of workers that were not seen.
- Starts: as long as in the run. Loading the training code once is added to the finish of every policy, and to
  the cost of policies that hold all nodes from the start.
- Rented nodes: as late as in the run. A policy that does not rent waits once for its nodes, and pays for
  their start.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import InputError
from stretto.core.events import Event, JobReported, NodeAdded
from stretto.core.units import HOUR_S, counted, format_duration
from stretto.inputs.cluster import machine_instance
from stretto.inputs.study import StudyFile, WorldSpec
from stretto.journal.folds.history import JobHistory, history_of
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.policies.registry import Options, make_policy, rents_nodes
from stretto.pricing.instances import SLOT
from stretto.runs.folder import RunFolder
from stretto.runs.results import TuneResult, measuring_usd, run_outline, run_tuning, tune_result
from stretto.runs.status import ending_of
from stretto.search.samplers import ListedSampler, RandomSampler
from stretto.search.space import Config
from stretto.search.study import Study
from stretto.simulation.studies import StudyResult, never, simulate_study
from stretto.worlds.curves import ROW
from stretto.worlds.replay import RecordedCurves, RecordedTrial, ValueSource, by_epoch

BELIEF_WEIGHT = 0.1
"""Weight of the profile's speed-up, relative to one timed epoch."""


@dataclass(frozen=True, slots=True)
class Times:
    """The fit to the timed epochs: log epoch time = trial + workers + deviation."""

    by_trial: Mapping[int, float]
    """exp(trial): time of an epoch with one worker, by the trial's number."""
    scaling: Scaling
    epoch_sd: float

    @staticmethod
    def of(trials: Sequence[JobHistory], believed: Scaling) -> Times:
        timed = [
            (row, result.workers, math.log(result.epoch_s))
            for row, trial in enumerate(trials)
            for result in trial.results
            if result.epoch_s
        ]
        if not timed:
            return Times({}, believed, 0.0)
        rows, workers, log_s = (np.array(column) for column in zip(*timed, strict=True))
        counts = sorted({*workers.tolist()} - {1})
        is_count = (workers[:, None] == np.array(counts, dtype=int)).astype(float)
        # The best term of a trial is the mean residual after the terms of the workers. So only the terms of
        # the workers are solved for: a column per trial would be a matrix of trials times epochs.
        matrix = is_count - _trial_means(rows, is_count)[rows]
        target = log_s - _trial_means(rows, log_s)[rows]
        believed_logs = np.array([-math.log(believed.speedup(count)) for count in counts])
        square = matrix.T @ matrix + BELIEF_WEIGHT**2 * np.eye(len(counts))
        solved = np.linalg.solve(square, matrix.T @ target + BELIEF_WEIGHT**2 * believed_logs)
        left = log_s - is_count @ solved
        logs = _trial_means(rows, left)
        return Times(
            {row: math.exp(logs[row]) for row in np.unique(rows).tolist()},
            _corrected(believed, dict(zip(counts, np.exp(-solved).tolist(), strict=True))),
            float((left - logs[rows]).std()),
        )

    def relative(self, row: int) -> float | None:
        return self.by_trial[row] / fmean(self.by_trial.values()) if row in self.by_trial else None

    def profile(self, believed: Profile) -> Profile:
        """The true speeds; as believed if no epoch was timed."""
        if not self.by_trial:
            return believed
        times_s = list(self.by_trial.values())
        latency = Latency(
            epoch_s=fmean(times_s),
            trial_sd=float(np.std(times_s) / np.mean(times_s)),
            epoch_sd=self.epoch_sd,
        )
        return dataclasses.replace(believed, latency=latency, scaling=self.scaling)


def _trial_means(rows: NDArray[np.int_], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each trial's values, by the trial's number; 0 where it has none."""
    sums = np.zeros((rows.max() + 1, *values.shape[1:]))
    np.add.at(sums, rows, values)
    sizes = np.maximum(np.bincount(rows), 1)
    return sums / sizes.reshape(-1, *(1 for _ in values.shape[1:]))


def _corrected(believed: Scaling, seen: Mapping[int, float]) -> Scaling:
    """The measured speed-up, and the believed one for other numbers of workers."""
    points = {**dict(believed.points), **seen, 1: 1.0}
    return dataclasses.replace(believed, points=tuple(sorted(points.items())))


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """A range of values that no trial showed."""

    low: float
    high: float

    @property
    def text(self) -> str:
        low, high = f"{self.low:.4f}", f"{self.high:.4f}"
        return f"{low if low == high else f'{low}-{high}'} (extrapolated)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy would have reached, and which part of the results it saw was recorded."""

    result: StudyResult
    """Its best metric was recorded, in an epoch that the policy would have seen."""
    extrapolated: Extrapolated | None
    """Range of its best metric if extrapolated values could be better; None if they could not."""
    shares: dict[ValueSource, float]
    """Shares of the epochs it saw: recorded, extrapolated, or drawn for trials that never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyReplay:
    """A real study, and what other policies would have reached."""

    study: Study
    actual: TuneResult
    replayed: tuple[Replayed, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What the journal of a real study recorded."""

    curves: RecordedCurves
    profile: Profile
    """The true speeds."""
    loading_s: float
    """How much longer the very first start took than others."""
    delays: Delays | None
    """Delays of rented nodes; None if there were none."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of rented nodes."""

    queue_s: Spread
    init_s: Spread
    """Time to initialise; it is charged, unlike the time in the queue."""

    @staticmethod
    def of(events: Iterable[Event]) -> Delays | None:
        """The delays of nodes that were seen coming; others say nothing."""
        came = [one for one in events if isinstance(one, NodeAdded) and one.queue_s + one.init_s > 0.0]
        if not came:
            return None
        return Delays(_spread([one.queue_s for one in came]), _spread([one.init_s for one in came]))


@dataclass(frozen=True, slots=True)
class _Lead:
    """Time before a policy can begin."""

    wait_s: float
    paid_s: float
    """Part of it that is charged for all nodes."""

    @staticmethod
    def of(record: StudyRecord, *, rents: bool) -> _Lead:
        nodes = None if rents else record.delays
        queue_s, init_s = (0.0, 0.0) if nodes is None else (nodes.queue_s.mean, nodes.init_s.mean)
        return _Lead(queue_s + init_s + record.loading_s, init_s + record.loading_s)


def replay(
    folder: RunFolder,
    policies: Sequence[str],
    *,
    options: Options | None = None,
    stop: Callable[[], bool] = never,
) -> StudyReplay:
    """Replays the study of a run folder under its own policy and these.

    Raises OutOfTimeError once `stop` returns true.
    """
    spec = folder.begun_spec()
    if not spec.is_study:
        raise InputError(
            "is not the run of a study.", where=str(folder.path), remedy="Name one that was tuned."
        )
    file, events = study_of_run(folder), list(folder.events())
    record = record_of(file, events, spec.seed)
    return StudyReplay(
        study=file.tuning.study,
        actual=tune_result(folder, ending_of(folder)),
        replayed=replay_study(file, events, policies, seed=spec.seed, options=options, stop=stop),
        notes=(
            *record.curves.notes,
            *_conditions(
                record, moved=bool(spec.past_limits), rented=_all_rent(file, policies, options or {})
            ),
        ),
    )


def _all_rent(file: StudyFile, policies: Iterable[str], options: Options) -> bool:
    return all(
        rents_nodes(make_policy(name, options=options.get(name), tuning=file.tuning)) for name in policies
    )


def _conditions(record: StudyRecord, *, moved: bool, rented: bool) -> Iterator[str]:
    """How the conditions of other policies differ from the run."""
    if moved:
        yield "Its limits were raised during the run; other policies know the final ones from the start."
    if record.delays is not None and not rented:
        took = format_duration(record.delays.queue_s.mean + record.delays.init_s.mean)
        yield (
            f"Its nodes took {took} to come on average; a policy that does not rent waits that long "
            "before it begins, and keeps its nodes to the end."
        )


def study_of_run(folder: RunFolder) -> StudyFile:
    """The study with which the run was started, on this machine."""
    spec = folder.begun_spec()
    outline = run_outline(folder, spec)
    tuning = run_tuning(outline, spec, measuring_usd(folder, spec.asked["study"]))
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
    stop: Callable[[], bool] = never,
) -> tuple[Replayed, ...]:
    """The study of a real run under these policies; empty if it recorded no epoch."""
    record = record_of(file, list(events), seed)
    if not record.curves.trials:
        return ()
    chosen = options or {}
    return tuple(
        _replay(file, record, policy, seed=seed, options=chosen.get(policy), stop=stop) for policy in policies
    )


def record_of(file: StudyFile, events: Sequence[Event], seed: int) -> StudyRecord:
    """The curves and speeds of the trials in the journal."""
    trials = list(history_of(events).jobs.values())
    times = Times.of(trials, file.tuning.profile.scaling)
    recorded = {
        row: RecordedTrial(_values(trial), times.relative(row), failed=trial.failed_s is not None)
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
    profile = dataclasses.replace(times.profile(file.tuning.profile), start_s=start_s)
    delays = Delays.of(events)
    if delays is not None:
        profile = dataclasses.replace(profile, queue_s=delays.queue_s, init_s=delays.init_s)
    loading_s = max(starts_s[0] - start_s, 0.0) if starts_s else 0.0
    return StudyRecord(curves=curves, profile=profile, loading_s=loading_s, delays=delays)


def _replay(
    file: StudyFile,
    record: StudyRecord,
    policy: str,
    *,
    seed: int,
    options: Mapping[str, str] | None,
    stop: Callable[[], bool],
) -> Replayed:
    rents = rents_nodes(make_policy(policy, options=options, tuning=file.tuning))
    lead, machine = _Lead.of(record, rents=rents), file if rents else _on_one_machine(file)
    usd_per_s = machine.tuning.instances[0].usd_per_hour * machine.fixed_nodes / HOUR_S
    paid_usd = 0.0 if rents else usd_per_s * lead.paid_s
    world = _without(machine, record, lead, paid_usd)
    run = simulate_study(world, record.curves, policy, seed=seed, options=options, stop=stop)
    best, extrapolated = _reached(file.tuning.study, record.curves, run.history.jobs.values())
    seen = Counter(
        record.curves.origin(trial.job.config, result.epoch)
        for trial in run.history.jobs.values()
        for result in trial.results
    )
    result = dataclasses.replace(
        run.result,
        best_metric=best,
        deadline_s=file.tuning.limits.deadline_s,
        finished_s=run.result.finished_s + lead.wait_s,
        cost_usd=run.result.cost_usd + paid_usd,
    )
    return Replayed(
        result=result,
        extrapolated=extrapolated,
        shares={origin: seen[origin] / max(seen.total(), 1) for origin in ValueSource},
    )


def _reached(
    study: Study, curves: RecordedCurves, trials: Iterable[JobHistory]
) -> tuple[float | None, Extrapolated | None]:
    """The best recorded value, and the range of the best if extrapolated values may be better."""
    shown: list[float] = []
    worst: list[float] = []
    most: list[float] = []
    for trial in trials:
        if not trial.results:
            continue
        config, epochs = trial.job.config, trial.results[-1].epoch
        if (value := curves.best_shown(config, epochs)) is not None:
            shown.append(value)
        if (between := curves.best_range(config, epochs)) is not None:
            worst.append(between[0])
            most.append(between[1])
    best = max(shown, key=study.score, default=None)
    if not most:
        return best, None
    high, low = max(most, key=study.score), max(worst, key=study.score) if best is None else best
    if best is not None and study.score(high) <= study.score(best):
        return best, None
    return best, Extrapolated(min(low, high), max(low, high))


def _on_one_machine(file: StudyFile) -> StudyFile:
    """All slots of the machine as one node, for policies that do not rent."""
    tuning = file.tuning
    if tuning.instances[0].name != SLOT:
        return file
    whole = dataclasses.replace(tuning, instances=(machine_instance(tuning),), max_nodes=1)
    return dataclasses.replace(file, tuning=whole, fixed_nodes=1)


def _without(file: StudyFile, record: StudyRecord, lead: _Lead, paid_usd: float) -> StudyFile:
    """The study with the time and money that are left when a policy can begin."""
    limits = file.tuning.limits
    left = dataclasses.replace(
        limits,
        deadline_s=None if limits.deadline_s is None else max(limits.deadline_s - lead.wait_s, 1.0),
        budget_usd=None if limits.budget_usd is None else max(limits.budget_usd - paid_usd, 0.0),
    )
    return dataclasses.replace(
        file,
        sampler="random",
        tuning=dataclasses.replace(file.tuning, limits=left),
        world=WorldSpec(curves=record.curves.name, profile=record.profile),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), pstdev(values))


def _values(trial: JobHistory) -> tuple[float | None, ...]:
    """Values by epoch; after a failure they are not a number."""
    values = by_epoch((result.epoch, result.value) for result in trial.results)
    return values if trial.failed_s is None else (*values, None)


def _listed(drawn: Sequence[Config], file: StudyFile, seed: int) -> tuple[Config, ...]:
    """The configurations of all trials, placed so that the sampler lists them in the order of the run."""
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
    short = sum(len(trial.values) < study.max_epochs for trial in recorded.values())
    rest = f"; what {short} of them did not show is extrapolated" if short else ""
    notes = [f"{counted(len(recorded), 'trial')} showed up to {longest} of {study.max_epochs} epochs{rest}."]
    if never:
        notes.append(
            f"{never} of {study.trials} trials never showed an epoch; they get curves of those that did."
        )
    return tuple(notes)
