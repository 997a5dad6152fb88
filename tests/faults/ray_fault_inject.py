"""Everything that is done to the nodes of a Ray cluster while jobs train on it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from fault_seen import Step, marks_of, steps_of
from ray_bench import SmallCluster, raylet_of
from ray_fault_run import RayRun

_LOOK_S = 0.1
_START_S = 120.0
_PATIENCE_S = 30.0
"""Whoever has not trained again by then is not waited for; the run's end tells whether that was right."""
_FROZEN_S = 25.0
"""Longer than an agent may be silent: the node is given up, and then moves again."""
_THAWED_S = 5.0
_IDLE_SHARE = 0.2
"""Of the nodes that are killed, so many may have no workers."""
_END_S = 180.0


class Kind(StrEnum):
    """What can be done to a cluster."""

    POWER = "node killed, with all on it"
    RAYLET = "raylet killed, workers outlive it"
    FROZEN = "node stopped (SIGSTOP), goes on later"
    AGENT = "agent killed"
    WORKER = "worker killed"
    THAWED = "node that was stopped killed in the end"
    ADD = "node added"


NODE_KILLS = (Kind.POWER, Kind.RAYLET, Kind.FROZEN)
"""These cost the cluster a node."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done."""

    kind: Kind
    t_s: float
    node: str
    jobs: frozenset[str] = frozenset()
    """That had a worker where it struck."""
    pids: frozenset[int] = frozenset()
    """Of those workers."""
    marks: frozenset[str] = frozenset()
    """Stretches of training that had begun before."""

    def again_s(self, steps: Iterable[Step]) -> dict[str, float]:
        """How long it took each job that was struck to train again; a job that was over before is not in."""
        concerned = [step for step in steps if step.job_id in self.jobs]
        before = self.marks | {step.mark for step in concerned if step.pid in self.pids}
        found: dict[str, float] = {}
        for step in concerned:
            if step.mark not in before:
                found.setdefault(step.job_id, step.t_s - self.t_s)
        return found


@dataclass(frozen=True, slots=True)
class _Frozen:
    node: str
    pids: tuple[int, ...]
    next_s: float
    """When it thaws, or, once that was, when what is left of it is cleared away."""
    thawed: bool = False


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    job_id: str
    nursery: int


@dataclass(frozen=True, slots=True)
class _Target:
    node: str
    tree: tuple[int, ...]
    """Its processes, the raylet first."""
    workers: tuple[_Worker, ...]


class Storm:
    """Strikes a cluster under a run, in the main thread."""

    def __init__(self, run: RayRun, cluster: SmallCluster, *, gpus: int, seed: int) -> None:
        """Nodes that are added have so many GPUs."""
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self._run = run
        self._cluster = cluster
        self._gpus = gpus
        self._chance = random.Random(seed)
        self._frozen: list[_Frozen] = []

    def rage(self, kinds: Iterable[Kind]) -> None:
        """Do all of these, in order, and let the jobs end."""
        self._wait(lambda: bool(self._steps()), _START_S)
        for kind in kinds:
            if self._run.is_over:
                self.problems.append(f"the run was over before: {kind}")
                break
            fault = self._strike(kind)
            self.faults.append(fault)
            self._see_it_train_again(fault)
        self._run.source.enough()
        self._wait(lambda: self._run.is_over, _END_S)
        if not self._run.is_over:
            self.problems.append(f"the jobs did not end within {_END_S:g} s of the last fault")
        self._clear_away()

    def _see_it_train_again(self, fault: Fault) -> None:
        """Now and then the next fault comes before this one is over."""
        if self._chance.random() < 0.75 and fault.kind is not Kind.FROZEN:
            self._wait(lambda: fault.jobs <= fault.again_s(self._steps()).keys(), _PATIENCE_S)
        self._wait(lambda: False, self._chance.uniform(0.0, 2.0))

    def _wait(self, done: Callable[[], bool], within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while not done() and time.monotonic() < end_s and not self._run.is_over:
            self._thaw()
            time.sleep(_LOOK_S)

    def _steps(self) -> list[Step]:
        return steps_of(self._run.folder.path)

    # The faults

    def _strike(self, kind: Kind) -> Fault:
        if kind is Kind.ADD:
            return Fault(kind, time.monotonic(), self._cluster.add(self._gpus))
        self._wait(lambda: any(target.workers for target in self._targets()), _PATIENCE_S)
        marks = marks_of(self._run.folder.path, None)  # it takes a while: the target must be as it is now
        target = self._choose(kind)
        struck = self._chance.sample(target.workers, 1) if kind is Kind.WORKER else target.workers
        fault = _fault(kind, target.node, struck, marks)
        self._do(kind, target, struck)
        return fault

    def _do(self, kind: Kind, target: _Target, struck: Sequence[_Worker]) -> None:
        match kind:
            case Kind.POWER:
                _signal(target.tree, signal.SIGKILL)
                self._cluster.kill(target.node)
            case Kind.RAYLET:
                self._cluster.kill(target.node)
            case Kind.FROZEN:
                _signal(target.tree, signal.SIGSTOP)
                self._frozen.append(_Frozen(target.node, target.tree, time.monotonic() + _FROZEN_S))
            case Kind.AGENT:
                _signal({_parent(worker.nursery) for worker in struck}, signal.SIGKILL)
            case Kind.WORKER:
                _signal([worker.pid for worker in struck], signal.SIGKILL)

    def _choose(self, kind: Kind) -> _Target:
        """Mostly a node with workers."""
        targets = self._targets()
        busy = [target for target in targets if target.workers]
        if kind in NODE_KILLS and (not busy or self._chance.random() < _IDLE_SHARE):
            return self._chance.choice(targets)
        return self._chance.choice(busy)

    def _targets(self) -> list[_Target]:
        """Nodes that nothing was done to."""
        frozen = {one.node for one in self._frozen}
        return [self._target(node) for node in self._cluster.raylets if node not in frozen]

    def _target(self, node: str) -> _Target:
        tree = _tree_of(raylet_of(self._cluster.raylets[node]))
        return _Target(node, tree, self._workers(tree))

    def _thaw(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self._frozen if one.next_s <= now_s]
        for one in due:
            self._frozen.remove(one)
            if one.thawed:  # jobs may be on it again
                marks = marks_of(self._run.folder.path, None)
                struck = self._target(one.node).workers
                self.faults.append(_fault(Kind.THAWED, one.node, struck, marks))
                self._cluster.kill(one.node)
            else:
                _signal(one.pids, signal.SIGCONT)
                self._frozen.append(replace(one, thawed=True, next_s=now_s + _THAWED_S))

    def _clear_away(self) -> None:
        """Frozen nodes move again, and find that they are gone."""
        for one in self._frozen:
            _signal(one.pids, signal.SIGCONT)
        self._frozen.clear()

    # The processes

    def _workers(self, tree: tuple[int, ...]) -> tuple[_Worker, ...]:
        """By the log they write to."""
        found = []
        for pid in tree:
            with suppress(OSError):
                output = Path(f"/proc/{pid}/fd/1").readlink()
                if output.name == "stdout.log" and output.is_relative_to(self._run.folder.path / "jobs"):
                    found.append(_Worker(pid, output.parent.name, _parent(pid)))
        return tuple(found)


def _fault(kind: Kind, node: str, struck: Sequence[_Worker], marks: frozenset[str]) -> Fault:
    jobs, pids = frozenset(one.job_id for one in struck), frozenset(one.pid for one in struck)
    return Fault(kind, time.monotonic(), node, jobs, pids, marks)


def _tree_of(root: int) -> tuple[int, ...]:
    """A process and all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tuple(tree)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
