"""A cloud without chance, plans by hand, and what came of them: for the tests of RubberBand's executor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import stretto.policies.rubberband.drift as planning_seam
from stretto.control.controller import Controller, Settings
from stretto.core.cluster import Node
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    NodeAdded,
    NodeLost,
    NodeReleased,
)
from stretto.core.instructions import Action
from stretto.core.resources import Resources
from stretto.journal.base import MemoryJournal
from stretto.planning.forecast import Forecast, StudyProgress
from stretto.planning.forecast import Outcome as Planned
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.profile import Estimate, Spread
from stretto.planning.tuning import Tuning
from stretto.policies.rubberband.policy import RubberBand
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.cloud import CloudNode
from tuning_world import Curve, CurveTruth, Draws, Outcome, make_trial, steady, trial_id, tuning

QUEUE_S, INIT_S, START_S = 30.0, 20.0, 5.0


@dataclass(frozen=True)
class SteadyCloud:
    """Every node takes equally long; a request may be cut short, and its last nodes may come later."""

    gpus: int = 4
    most: int = 99
    """Of any request no more nodes than this come."""
    late_s: float = 0.0
    """Each node of a request takes this much longer than the one before."""

    def launch(self, instance: str, count: int, request: int) -> Sequence[CloudNode]:
        del instance, request
        return [
            CloudNode(Resources(gpu=self.gpus), QUEUE_S, INIT_S + self.late_s * number)
            for number in range(min(count, self.most))
        ]


@dataclass(frozen=True)
class MoodyCloud(SteadyCloud):
    """Gives so many nodes to the first request, to the second, ..; then all."""

    gives: tuple[int, ...] = ()

    def launch(self, instance: str, count: int, request: int) -> Sequence[CloudNode]:
        most = self.gives[request] if request < len(self.gives) else count
        return super().launch(instance, min(count, most), request)


def stage(
    first: int, last: int, trials: int, gpus: int, nodes: int, *, at_once: int | None = None
) -> StagePlan:
    return StagePlan(
        first_epoch=first,
        last_epoch=last,
        trials=trials,
        gpus_per_trial=gpus,
        at_once=at_once or trials,
        nodes=nodes,
        instance="four",
    )


def forecast(stages: Sequence[StagePlan], finish_s: float) -> Forecast:
    return Forecast(
        plan=Plan(tuple(stages)),
        finish_s=Estimate(finish_s, finish_s, finish_s),
        cost_usd=Estimate(1.0, 1.0, 1.0),
        due_s=finish_s,
        due_usd=1.0,
        p_on_time=None,
        p_in_budget=None,
    )


@dataclass
class Script:
    """Stands in for the planner: these plans in turn, and what it was asked."""

    plans: list[list[StagePlan]]
    finish_s: float = 1000.0
    feasible: bool = True
    asked: list[tuple[Tuning, StudyProgress | None]] = field(default_factory=list)

    def __call__(
        self,
        conditions: Tuning,
        rng: np.random.Generator,
        *,
        start: StudyProgress | None = None,
        **options: str,
    ) -> Planned:
        assert isinstance(rng, np.random.Generator)
        assert set(options) == {"planner", "rule"}
        again = sum(_is_under_way(before) for _, before in self.asked)
        self.asked.append((conditions, start))
        made = forecast(self.plans[again + 1 if _is_under_way(start) else 0], self.finish_s)
        return Planned(
            feasible=self.feasible,
            chosen=made if self.feasible else None,
            cheapest=made,
            fastest=made,
            static=None,
            frontier=(),
            earliest=made,
            doubts=(),
        )


def _is_under_way(start: StudyProgress | None) -> bool:
    return start is not None and start.elapsed_s > 0


def follow(patch: pytest.MonkeyPatch, script: Script) -> Script:
    """Let the policy's plans come from the script."""
    patch.setattr(planning_seam, "plan_study", script)
    return script


def study(trials: int, rungs: tuple[int, ...], max_epochs: int, *, deadline_s: float | None = None) -> Tuning:
    """Epochs of 10 s on one GPU, linear scaling, and a cloud as believed."""
    conditions = tuning(trials=trials, rungs=rungs, max_epochs=max_epochs, epoch_s=10.0, start_s=START_S)
    profile = replace(conditions.profile, queue_s=Spread(QUEUE_S), init_s=Spread(INIT_S))
    limits = replace(conditions.limits, deadline_s=deadline_s)
    return replace(conditions, profile=profile, limits=limits)


def controller_for(
    conditions: Tuning,
    curves: Sequence[Curve],
    journal: MemoryJournal,
    *,
    cloud: SteadyCloud = SteadyCloud(),
    epoch_s: Sequence[float] | None = None,
    ahead: int = 8,
    replan: float = 0.0,
    agreed: Planned | None = None,
    nodes: Sequence[Node] = (),
    until_s: float = math.inf,
    substrate: type[SimSubstrate] = SimSubstrate,
) -> Controller:
    truths = {
        trial_id(number): CurveTruth(
            curve=curve,
            epochs=conditions.study.max_epochs,
            epoch_s=conditions.profile.latency.epoch_s if epoch_s is None else epoch_s[number],
            scaling=conditions.profile.scaling,
        )
        for number, curve in enumerate(curves)
    }
    return Controller(
        policy=RubberBand(tuning=conditions, replan=replan, agreed=agreed),
        substrate=substrate(lambda job: truths[job.id], physics=Physics(restart_s=START_S), cloud=cloud),
        journal=journal,
        nodes=nodes,
        arrivals=Draws([make_trial(conditions, number) for number in range(len(curves))], ahead),
        settings=Settings(until_s=until_s),
    )


def execute(conditions: Tuning, curves: Sequence[Curve], **options: object) -> Outcome:
    journal = MemoryJournal()
    controller = controller_for(conditions, curves, journal, **options)  # type: ignore[arg-type]
    controller.run()
    return Outcome(conditions, list(journal.events()), controller.decision_s)


def nodes_at(events: Sequence[Event]) -> list[tuple[float, int]]:
    """How many nodes are here, whenever that changes."""
    here = 0
    seen: list[tuple[float, int]] = []
    for event in events:
        step = isinstance(event, NodeAdded) - isinstance(event, NodeReleased | NodeLost)
        if step:
            here += step
            if seen and seen[-1][0] == event.t_s:
                seen.pop()
            seen.append((event.t_s, here))
    return seen


def placed(events: Sequence[Event]) -> list[tuple[float, str, tuple[tuple[str, int], ...]]]:
    return [
        (event.t_s, one.job_id, one.allocation.workers)
        for event in events
        if isinstance(event, Decided)
        for one in event.instructions
        if one.action in {Action.START, Action.RESIZE}
    ]


def assert_within_nodes(events: Sequence[Event]) -> None:
    """At every instant trials hold no more of a node than it has, and nothing of a node that is not here."""
    room: dict[str, int] = {}
    held: dict[str, tuple[tuple[str, int], ...]] = {}
    for event in events:
        if isinstance(event, NodeAdded):
            room[event.node.id] = event.node.gpus
        elif isinstance(event, NodeReleased | NodeLost):
            room.pop(event.node_id, None)
            held = {trial: tasks for trial, tasks in held.items() if event.node_id not in dict(tasks)}
        elif isinstance(event, JobFinished | JobFailed):
            held.pop(event.job_id, None)
        elif isinstance(event, Decided):
            held.update((one.job_id, one.allocation.workers) for one in event.instructions)
            taken: dict[str, int] = {}
            for tasks in held.values():
                for node, count in tasks:
                    taken[node] = taken.get(node, 0) + count
            assert all(count <= room[node] for node, count in taken.items())


BEST_LAST = steady(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, epochs=7)


def two_stages() -> list[StagePlan]:
    return [stage(1, 4, 4, 1, 1), stage(5, 8, 2, 2, 1)]


class Mishaps(SimSubstrate):
    """Something goes wrong at 58 s: a node or a trial is lost, or a node begins to drain."""

    mishap: Event = NodeLost(t_s=58.0, node_id="four-2")

    def next_event(self, until_s: float) -> Event | None:
        due_s, self._happened = self.mishap.t_s, getattr(self, "_happened", False)
        event = super().next_event(until_s if self._happened else min(until_s, due_s))
        if event is not None or self._happened or until_s < due_s:
            return event
        self._happened = True
        self._strike()
        return self.mishap

    def _strike(self) -> None:
        gone = self.mishap
        assert self._cloud is not None
        if isinstance(gone, NodeLost):
            self._cloud._here.pop(gone.node_id)
            struck = [job for job in self._active.values() if gone.node_id in job.allocation.nodes]
        else:
            struck = [self._active[gone.job_id]] if isinstance(gone, JobFailed) else []
        for job in struck:
            job.advance(self._now_s)
            job.park()
            del self._active[job.job.id]
