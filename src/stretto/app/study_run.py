"""A study under a policy, in simulated time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.app.history import History, JobHistory, history_of
from stretto.app.study_file import StudyFile
from stretto.app.threads import one_blas_thread
from stretto.control.controller import Controller, Settings
from stretto.core.cluster import Node
from stretto.core.resources import Resources
from stretto.journal.base import Journal, MemoryJournal
from stretto.planning.tuning import Tuning
from stretto.policies.registry import make_policy, rents_nodes
from stretto.pricing.meter import CostMeter
from stretto.search.samplers import ListedSampler, Sampler, make_sampler
from stretto.search.source import TrialSource, trials_ahead
from stretto.substrate.sim import Physics, SimSubstrate
from stretto.worlds.cloud import node_name
from stretto.worlds.curves import Curves
from stretto.worlds.trials import StudyWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What a study came to; one row of the table."""

    policy: str
    deadline_s: float | None
    seed: int
    best_metric: float | None
    """The best value any trial showed by the end; None if none showed a number."""
    trials_started: int
    gpu_hours: float
    """Held by trials, starting and resizing included."""
    cost_usd: float
    finished_s: float
    """When the last trial ended, or the deadline if that came first."""


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One simulation of a study: its numbers, and everything that happened in it."""

    result: StudyResult
    history: History
    file: StudyFile


def simulate_study(
    file: StudyFile,
    curves: Curves,
    policy: str,
    *,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
    journal: Journal | None = None,
) -> StudyRun:
    """Run the study under the named policy until its trials end or its deadline comes.

    `seed` makes another world of the same kind, and other draws of trials. A policy that rents starts
    without nodes; any other has the file's fixed cluster, and pays for it, from the start.
    """
    journal = journal if journal is not None else MemoryJournal()
    tuning = file.tuning
    chosen = make_policy(policy, options=options, tuning=tuning)
    rents = rents_nodes(chosen)
    nodes = () if rents else fixed_cluster(file)
    world = StudyWorld(curves, file.world.profile, instances=tuning.instances, nodes=nodes, seed=seed)
    world.check_epochs(tuning.study.max_epochs)
    deadline_s = tuning.limits.deadline_s
    gpus = _most_gpus(tuning) if rents else sum(node.gpus for node in nodes)
    sampler = _sampler(file, curves, seed)
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
        ).run()
    history = history_of(journal.events(), 0.0 if deadline_s is None else deadline_s)
    return StudyRun(_result(file, policy, seed, history, journal), history, file)


def with_limits(
    file: StudyFile, *, deadline_s: float | None = None, budget_usd: float | None = None
) -> StudyFile:
    """The same study under other limits; those that are None stay as the file has them."""
    limits = file.tuning.limits
    changed = dataclasses.replace(
        limits,
        deadline_s=limits.deadline_s if deadline_s is None else deadline_s,
        budget_usd=limits.budget_usd if budget_usd is None else budget_usd,
    )
    return dataclasses.replace(file, tuning=dataclasses.replace(file.tuning, limits=changed))


def fixed_cluster(file: StudyFile) -> tuple[Node, ...]:
    """The nodes of a policy that does not rent: of the file's first instance type."""
    instance = file.tuning.instances[0]
    return tuple(
        Node(node_name(instance.name, number), Resources(gpu=instance.gpus), instance.name)
        for number in range(1, file.fixed_nodes + 1)
    )


def _most_gpus(tuning: Tuning) -> int:
    return tuning.max_nodes * max(instance.gpus for instance in tuning.instances)


def _sampler(file: StudyFile, curves: Curves, seed: int) -> Sampler:
    """Curves that were measured bring their own configurations; any other are drawn from the space."""
    if curves.configs is not None:
        return ListedSampler(curves.configs, seed)
    return make_sampler(file.sampler, file.space, file.tuning.study, seed)


def _result(file: StudyFile, policy: str, seed: int, history: History, journal: Journal) -> StudyResult:
    tuning = file.tuning
    meter = CostMeter(tuning.instances, tuning.billing)
    for event in journal.events():
        meter.observe(event)
    trials = list(history.jobs.values())
    deadline_s = tuning.limits.deadline_s
    over = all(trial.end_s is not None for trial in trials)
    finished_s = history.end_s if over or deadline_s is None else deadline_s
    return StudyResult(
        policy=policy,
        deadline_s=deadline_s,
        seed=seed,
        best_metric=_best(tuning, trials),
        trials_started=sum(trial.starts > 0 for trial in trials),
        gpu_hours=sum(trial.gpu_s for trial in trials) / 3600.0,
        cost_usd=meter.cost_usd(max(finished_s, history.end_s)),
        finished_s=finished_s,
    )


def _best(tuning: Tuning, trials: list[JobHistory]) -> float | None:
    values = [result.value for trial in trials for result in trial.results if result.value is not None]
    return max(values, key=tuning.study.score, default=None)
