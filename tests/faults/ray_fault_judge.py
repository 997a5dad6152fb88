"""Whether jobs came to what they come to on nodes that are never disturbed, and what they lost on the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import fault_judge
from fault_seen import Step, ends_of, steps_of
from fault_train import BATCH, EXAMPLES, STEPS
from live_processes import eventually, pids_with
from ray_fault_inject import Fault, Kind
from ray_fault_run import RayRun, lr_of, seed_of
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeLost,
)
from stretto.runs.deadline import EndedBy

_RAY: Any = ray  # parts of it have no types
_TIDY_S = 20.0
_UNNOTICED_S = 20.0
"""How long jobs may still be sent to a node that was struck: a little more than an agent may be silent."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A job that began again from a checkpoint."""

    job_id: str
    t_s: float
    behind: bool
    """It went back further than where it had begun the time before."""
    lost_s: float
    """Of training: from the step that the checkpoint stands before to what struck it."""
    lost_steps: int
    asked_for: bool
    """Something had struck it since it last began."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things took that set a bound to what may be lost."""

    save_s: float
    """The longest from a step boundary until what was saved there was told to be safe."""
    step_s: float
    """The longest between the beginnings of two steps of a stretch."""


def problems(run: RayRun, faults: Sequence[Fault]) -> Iterator[str]:
    """Everything that is not as it should be after a run's end."""
    if run.error is not None or run.ended_by is not EndedBy.JOBS:
        yield f"the run ended by {run.ended_by}: {run.error!r}"
    yield from leaks(run.folder.path)
    events = list(run.folder.events())
    for job_id in [event.job.id for event in events if isinstance(event, JobSubmitted)]:
        about = [event for event in events if event.subject == job_id]
        for problem in _problems_of_job(run, job_id, about):
            yield f"{job_id}: {problem}"
    for restart in restarts(run, faults):
        if restart.behind:
            yield f"{restart.job_id}: it fell back behind where it had begun before, {restart}"
        if not restart.asked_for:
            why = [e.error for e in events if isinstance(e, JobRetried) and e.job_id == restart.job_id]
            yield f"{restart.job_id}: it began again though nothing had struck it, {restart}, retries {why}"


def leaks(folder: Path) -> Iterator[str]:
    """What is left of a run in this folder, while its cluster goes on."""
    if not eventually(lambda: not pids_with(str(folder)), _TIDY_S):
        yield f"processes are left behind: {pids_with(str(folder))}"
    if not eventually(lambda: not groups(), _TIDY_S):
        yield f"placement groups are left: {groups()}"
    if not eventually(lambda: not _actors(), _TIDY_S):
        yield f"actors are left: {_actors()}"


def groups() -> list[str]:
    """Placement groups of the connected cluster that are there or to come."""
    known = _RAY.util.placement_group_table().values()
    return [f"{one['name']} {one['state']}" for one in known if one["state"] != "REMOVED"]


def _actors() -> list[str]:
    """Also those without a name: as Ray's own table has them."""
    actors = _RAY._private.state.actors().values()  # the public list needs a dashboard
    return [f"{one['Name']} {one['State']}" for one in actors if one["State"] != "DEAD"]


def _problems_of_job(run: RayRun, job_id: str, events: list[Event]) -> Iterator[str]:
    failed = [event.error for event in events if isinstance(event, JobFailed)]
    if failed or sum(isinstance(event, JobFinished) for event in events) != 1:
        yield f"it did not finish once: {failed}"
    losses = [one for event in events if isinstance(event, JobReported) for one in event.losses]
    if [one.epoch for one in losses] != list(range(1, run.epochs + 1)):
        yield f"its epochs were told as {[one.epoch for one in losses]}"
    truth = fault_judge.undisturbed(lr_of(job_id), seed_of(job_id), run.epochs)
    steps: fault_judge.Steps = {}
    for step in steps_of(run.folder.path, job_id):
        steps.setdefault((step.mark, step.step), []).append(step)
    told = [(one.epoch, one.loss) for one in losses]
    ends = ends_of(run.folder.path / "jobs" / job_id)
    for epoch, loss in [*told, *((end.epoch, end.loss) for end in ends)]:
        right = truth[epoch - 1]
        if loss is None or not math.isclose(loss, right, rel_tol=fault_judge.TOLERANCE):
            yield f"loss {loss} after epoch {epoch}, undisturbed {right}"
    for end in ends:
        yield from fault_judge.problems_of_lineage(end, steps)


# What was lost


@dataclass(frozen=True, slots=True)
class _Stretch:
    steps: tuple[Step, ...]
    """One worker's part in each, in order."""
    pids: frozenset[int]
    decided_s: float
    """When it was decided that it should be, and on which nodes."""
    nodes: frozenset[str]

    def is_struck_by(self, fault: Fault) -> bool:
        """Also on a node where no worker was seen when it was struck, which nobody knew at first."""
        there = fault.node in self.nodes and self.decided_s < fault.t_s + _UNNOTICED_S
        return bool(fault.pids & self.pids) or (there and fault.kind not in {Kind.WORKER, Kind.ADD})


def restarts(run: RayRun, faults: Sequence[Fault]) -> list[Restart]:
    """All of a run."""
    return [
        _restart(before, after, faults)
        for stretches in _stretches(run).values()
        for before, after in itertools.pairwise(stretches)
    ]


def pace(run: RayRun, faults: Sequence[Fault]) -> Pace:
    """How fast the run was at its slowest, as far as nothing had struck those whose pace it is."""
    stretches = _stretches(run)
    steps_s = [
        after.t_s - before.t_s
        for one in itertools.chain.from_iterable(stretches.values())
        for before, after in itertools.pairwise(one.steps)
        if not any(one.is_struck_by(fault) and fault.t_s < after.t_s for fault in faults)
    ]
    saves_s = []
    for event in run.folder.events():
        if isinstance(event, CheckpointSaved):
            safe_s = run.began_s + event.t_s
            begun_s = _begun_s(stretches[event.job_id], _step_of(event), safe_s)
            saves_s += [] if begun_s is None else [safe_s - begun_s]
    return Pace(save_s=max(saves_s), step_s=max(steps_s))


def until_known_s(run: RayRun, faults: Sequence[Fault]) -> list[float]:
    """How long it took to find out that a node was lost, of all that were."""
    lost = [
        (event.node_id, run.began_s + event.t_s)
        for event in run.folder.events()
        if isinstance(event, NodeLost)
    ]
    times = (
        [t_s - fault.t_s for node, t_s in lost if node == fault.node and t_s > fault.t_s] for fault in faults
    )
    return [min(one) for one in times if one]


def _stretches(run: RayRun) -> dict[str, list[_Stretch]]:
    """By job, in the order in which they began."""
    by_mark: dict[tuple[str, str], list[Step]] = {}
    for step in steps_of(run.folder.path):
        by_mark.setdefault((step.job_id, step.mark), []).append(step)
    starts = _starts(run)
    found: dict[str, list[_Stretch]] = {}
    for (job_id, _), steps in by_mark.items():
        first_parts = {step.step: step for step in reversed(steps)}
        ordered = tuple(first_parts[number] for number in sorted(first_parts))
        decided_s, nodes = [one for one in starts[job_id] if one[0] <= ordered[0].t_s][-1]
        pids = frozenset(step.pid for step in steps)
        found.setdefault(job_id, []).append(_Stretch(ordered, pids, decided_s, nodes))
    return found


def _starts(run: RayRun) -> dict[str, list[tuple[float, frozenset[str]]]]:
    """When and where each job was told to start."""
    found: dict[str, list[tuple[float, frozenset[str]]]] = {}
    for event in run.folder.events():
        for told in event.instructions if isinstance(event, Decided) else ():
            where = frozenset(told.allocation.nodes)
            found.setdefault(told.job_id, []).append((run.began_s + event.t_s, where))
    return found


def _restart(before: _Stretch, after: _Stretch, faults: Sequence[Fault]) -> Restart:
    first = after.steps[0]
    struck_s = [fault.t_s for fault in faults if before.is_struck_by(fault) and fault.t_s < first.t_s]
    end_s = min(struck_s, default=first.t_s)
    again = [step for step in before.steps if step.step >= first.step and step.t_s < end_s]
    return Restart(
        job_id=first.job_id,
        t_s=first.t_s,
        behind=first.step < before.steps[0].step,
        lost_s=end_s - again[0].t_s if again else 0.0,
        lost_steps=len(again),
        asked_for=bool(struck_s),
    )


def _step_of(event: CheckpointSaved) -> int:
    """The step that a checkpoint stands before."""
    epoch, part = divmod(event.work_done / STEPS, 1.0)
    return int(epoch) * STEPS + math.ceil(round(part * EXAMPLES) / BATCH)


def _begun_s(stretches: list[_Stretch], number: int, before_s: float) -> float | None:
    """When the stretch of that time had begun the step; None if it had not."""
    steps = [one.steps for one in stretches if one.steps[0].t_s <= before_s][-1]
    return next((step.t_s for step in steps if step.step == number and step.t_s <= before_s), None)
