"""Simulates a study under a policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.control.controller import Controller, Settings
from stretto.core.cluster import Node, node_name
from stretto.core.errors import InputError, StrettoError
from stretto.core.resources import Resources
from stretto.inputs.arguments import (
    given,
    given_budget_usd,
    given_deadline_s,
    given_options,
    given_text,
    given_whole,
)
from stretto.inputs.study import StudyFile
from stretto.journal.base import Journal, MemoryJournal
from stretto.journal.folds.cost import BudgetCap, CostMeter
from stretto.journal.folds.history import History, JobHistory, history_of
from stretto.planning.tuning import Tuning
from stretto.policies.registry import make_policy, rents_nodes
from stretto.search.samplers import ListedSampler, Sampler, make_sampler
from stretto.search.source import TrialSource, trials_ahead
from stretto.search.study import Study
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.system.threads import one_blas_thread
from stretto.worlds.curves import Curves
from stretto.worlds.trials import StudyWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study; one row of the table."""

    policy: str
    deadline_s: float | None
    seed: int
    best_metric: float | None
    """The best value of any trial; None if no trial reported a number."""
    trials_started: int
    gpu_hours: float
    """GPU hours that trials held, starts and resizes included."""
    cost_usd: float
    finished_s: float
    """Time when the last trial ended, the deadline came, or the budget was spent."""
    ended_by: Literal["trials", "deadline", "budget"]
    """What ended it."""


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One simulation of a study: its result, and everything that happened."""

    result: StudyResult
    history: History
    file: StudyFile


class OutOfTimeError(StrettoError):
    """A simulation was stopped early."""


def never() -> bool:
    """Never stops a simulation."""
    return False


def simulate_study(
    file: StudyFile,
    curves: Curves,
    policy: str,
    *,
    deadline: float | str | None = None,
    budget_usd: float | None = None,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
    journal: Journal | None = None,
    stop: Callable[[], bool] = never,
) -> StudyRun:
    """Runs the study under a policy until all trials end, the deadline comes or the budget is spent.

    `curves` are the learning curves of the trials, such as `load_curves(file.world.curves)`.
    `deadline` (seconds or a text such as 20m) and `budget_usd` replace the limits of the file.
    Another `seed` draws another world and other trials. A policy that rents starts without nodes; any other
    has the fixed cluster of the file, and pays for it, from the start.
    Raises OutOfTimeError once `stop` returns true.
    """
    if isinstance(curves, str):
        raise InputError(f"{curves!r} names curves.", where="curves", remedy=f"Give load_curves({curves!r}).")
    given_whole(seed, "seed")
    journal = journal if journal is not None else MemoryJournal(with_memory=False)
    file = with_trials_of(with_limits_as(file, deadline, budget_usd), curves)
    tuning = file.tuning
    chosen = make_policy(
        given_text(policy, "policy", "hypersched"), options=given_options(options), tuning=tuning
    )
    rents = rents_nodes(chosen)
    nodes = () if rents else fixed_cluster(file)
    world = StudyWorld(curves, file.world.profile, instances=tuning.instances, nodes=nodes, seed=seed)
    world.check_epochs(tuning.study.max_epochs)
    deadline_s = tuning.limits.deadline_s
    gpus = _most_gpus(tuning) if rents else sum(node.gpus for node in nodes)
    sampler = _sampler(file, curves, seed)
    budget_usd = tuning.limits.budget_usd
    cap = None
    if budget_usd is not None:
        cap = BudgetCap(CostMeter(tuning.instances, tuning.billing), budget_usd)
    with one_blas_thread():
        Controller(
            policy=chosen,
            substrate=SimSubstrate(
                world.truth_of,
                physics=Physics(restart_s=file.world.profile.start_s),
                seed=seed,
                cloud=world.cloud if rents else None,
            ),
            journal=journal,
            nodes=nodes,
            arrivals=TrialSource(
                tuning.study, sampler, most_gpus=gpus, ahead=trials_ahead(tuning.study, sampler, gpus)
            ),
            settings=Settings(seed=seed, until_s=math.inf if deadline_s is None else deadline_s),
            limit=cap,
            stop=stop,
        ).run()
    if stop():
        raise OutOfTimeError(f"the simulation of {tuning.study.name} was stopped before it was over.")
    spent_s = math.inf if cap is None else cap.ends_s()
    return _summarise(file, policy, seed, journal, spent_s)


def with_limits_as(file: StudyFile, deadline: float | str | None, budget_usd: float | None) -> StudyFile:
    """The study with the limits of a caller."""
    given(file, StudyFile, "study", 'Give read_study("study.toml").')
    return with_limits(file, deadline_s=given_deadline_s(deadline), budget_usd=given_budget_usd(budget_usd))


def with_limits(
    file: StudyFile, *, deadline_s: float | None = None, budget_usd: float | None = None
) -> StudyFile:
    """The study with other limits; None keeps the limit of the file, infinity removes it."""
    limits = file.tuning.limits
    changed = dataclasses.replace(
        limits,
        deadline_s=_other_limit(limits.deadline_s, deadline_s),
        budget_usd=_other_limit(limits.budget_usd, budget_usd),
    )
    return dataclasses.replace(file, tuning=dataclasses.replace(file.tuning, limits=changed))


def _other_limit(old: float | None, new: float | None) -> float | None:
    if new is None:
        return old
    return new if new < math.inf else None


def with_trials_of(file: StudyFile, curves: Curves) -> StudyFile:
    """The study with at most as many trials as there are curves."""
    study = file.tuning.study
    if curves.configs is None or len(curves.configs) >= study.trials:
        return file
    fewer = dataclasses.replace(study, trials=len(curves.configs))
    return dataclasses.replace(file, tuning=dataclasses.replace(file.tuning, study=fewer))


def fixed_cluster(file: StudyFile) -> tuple[Node, ...]:
    """The nodes of a policy that does not rent, of the first instance type in the file."""
    instance = file.tuning.instances[0]
    return tuple(
        Node(node_name(instance.name, number), Resources(gpu=instance.gpus), instance.name)
        for number in range(1, file.fixed_nodes + 1)
    )


def _most_gpus(tuning: Tuning) -> int:
    return tuning.max_nodes * max(instance.gpus for instance in tuning.instances)


def _sampler(file: StudyFile, curves: Curves, seed: int) -> Sampler:
    """Measured curves have their own configurations; otherwise they are drawn from the space."""
    if curves.configs is not None:
        if file.sampler != "random":
            raise InputError(
                f"sampler {file.sampler} has nothing to draw: {curves.name} is a table of configurations.",
                where=str(file.path),
                remedy='Set sampler = "random", or take curves that answer to any configuration.',
            )
        return ListedSampler(curves.configs, seed)
    return make_sampler(file.sampler, file.space, file.tuning.study, seed)


def _summarise(file: StudyFile, policy: str, seed: int, journal: Journal, spent_s: float) -> StudyRun:
    tuning = file.tuning
    deadline_s = math.inf if tuning.limits.deadline_s is None else tuning.limits.deadline_s
    cut_s = min(deadline_s, spent_s)
    history = history_of(journal.events(), cut_s if cut_s < math.inf else 0.0)
    trials = list(history.jobs.values())
    over = all(trial.end_s is not None for trial in trials) or cut_s == math.inf
    finished_s = history.end_s if over else cut_s
    meter = CostMeter(tuning.instances, tuning.billing)
    for event in journal.events():
        meter.observe(event)
    result = StudyResult(
        policy=policy,
        deadline_s=tuning.limits.deadline_s,
        seed=seed,
        best_metric=best_metric(tuning.study, trials),
        trials_started=sum(trial.starts > 0 for trial in trials),
        gpu_hours=sum(trial.gpu_s for trial in trials) / 3600.0,
        cost_usd=meter.cost_usd(max(finished_s, history.end_s)),
        finished_s=finished_s,
        ended_by="trials" if over else "budget" if spent_s < deadline_s else "deadline",
    )
    return StudyRun(result, history, file)


def best_metric(study: Study, trials: Iterable[JobHistory]) -> float | None:
    """The best value of all trials; a trial that diverged does not count."""
    values = [
        result.value
        for trial in trials
        if not trial.diverged
        for result in trial.results
        if result.value is not None
    ]
    return max(values, key=study.score, default=None)
