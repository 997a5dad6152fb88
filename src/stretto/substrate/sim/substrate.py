"""The simulated substrate: jobs progress in simulated time, as their truth says.

Progress is linear between two events. Events come from a heap of epoch ends and a regular tick at which every
running job reports; a trial reports at the end of each epoch instead. The rate of a job changes only at the
end of an epoch, with an instruction, or when a neighbour starts or stops to disturb it. Requested nodes come
from a cloud, if there is one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stretto.core.cluster import Node, Wish, node_name
from stretto.core.errors import JournalError
from stretto.core.events import (
    Decided,
    Event,
    JobFinished,
    JobReported,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
    NodeRefused,
    NodeReleased,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.sim.job import Instruments, SimJob, SimTrial
from stretto.worlds.cloud import Cloud
from stretto.worlds.truth import TrialTruth, Truth


@dataclass(frozen=True, slots=True, order=True)
class _Coming:
    """The next event of a request: a node is launched, and later it is ready."""

    t_s: float
    number: int
    is_ready: bool
    event: NodeLaunched | NodeAdded = field(compare=False)

    @property
    def node(self) -> Node:
        return self.event.node


class SimCloud:
    """Turns requests into nodes, after the delays of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._here: dict[str, str] = {}
        """Instance type by node."""
        self._starting: set[str] = set()
        self._coming: list[_Coming] = []
        self._requests = 0
        self._asked = 0

    def next_s(self) -> float:
        return self._coming[0].t_s if self._coming else math.inf

    def deliver(self) -> NodeLaunched | NodeAdded:
        """The next event."""
        event = heapq.heappop(self._coming).event
        if isinstance(event, NodeLaunched):
            self._starting.add(event.node.id)
        else:
            self._starting.discard(event.node.id)
            self._here[event.node.id] = event.node.instance
        return event

    def provision(self, now_s: float, wish: Wish) -> list[NodeReleased | NodeRefused]:
        """Requests missing nodes and gives back surplus ones, first those that would come last."""
        refused: list[NodeRefused] = []
        gone = [node_id for node_id in wish.release if self._here.pop(node_id, None) is not None]
        wanted = Counter(dict(wish.nodes))
        for instance in sorted({*wanted, *(coming.node.instance for coming in self._coming)}):
            here = sum(1 for kind in self._here.values() if kind == instance)
            on_the_way = sorted(
                coming
                for coming in self._coming
                if coming.node.instance == instance and isinstance(coming.event, NodeAdded)
            )
            missing = wanted[instance] - here - len(on_the_way)
            if missing > 0:
                refused += self._request(now_s, instance, missing)
            elif missing < 0:
                gone += self._cancel({coming.node.id for coming in on_the_way[missing:]})
        return [*(NodeReleased(t_s=now_s, node_id=node_id) for node_id in gone), *refused]

    def _request(self, now_s: float, instance: str, count: int) -> list[NodeRefused]:
        """Requests nodes; returns what the cloud refuses."""
        launches = self._cloud.launch(instance, count, self._requests)
        for launch in launches:
            self._asked += 1
            node = Node(node_name(instance, self._asked), launch.capacity, instance)
            begun_s = now_s + launch.queue_s
            ready_s = begun_s + launch.init_s
            added = NodeAdded(t_s=ready_s, node=node, queue_s=launch.queue_s, init_s=launch.init_s)
            launched = NodeLaunched(t_s=begun_s, node=node)
            heapq.heappush(self._coming, _Coming(begun_s, self._asked, is_ready=False, event=launched))
            heapq.heappush(self._coming, _Coming(ready_s, self._asked, is_ready=True, event=added))
        self._requests += 1
        missing = count - len(launches)
        why = f"the cloud had {len(launches)} of {count}"
        return [NodeRefused(t_s=now_s, instance=instance, count=missing, why=why)] if missing else []

    def _cancel(self, nodes: set[str]) -> list[str]:
        """Cancels requests; returns the nodes that are starting up, which are released."""
        self._coming = [coming for coming in self._coming if coming.node.id not in nodes]
        heapq.heapify(self._coming)
        launched = sorted(nodes & self._starting)
        self._starting -= nodes
        return launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """The rules of the simulated world, whatever the policies believe."""

    restart_s: float = 30.0
    """The restart penalty: every start and resize holds its GPUs this long without progress."""
    interference: float = 0.0
    """Share of its speed that a job on several nodes loses while it shares a node with another such job."""
    report_s: float = 30.0
    """Jobs report at multiples of this."""
    whole_seconds: bool = False
    """Round the rest of every epoch to whole seconds, as in the published simulator."""
    noise: float = 0.0
    """Relative error of each reported time, loss and gradient statistic."""


EPS = 1e-9
"""Rounding error of times."""

_NOT_THIS_RUN = (
    "A journal continues only the simulation that wrote it. Use the same workload, settings, seed and "
    "version, or another file."
)


class SimSubstrate:
    """A cluster in arithmetic."""

    changes_batch_in_place = True

    def __init__(
        self,
        truth_of: Callable[[Job], Truth],
        *,
        physics: Physics,
        seed: int = 0,
        cloud: Cloud | None = None,
    ) -> None:
        self._truth_of = truth_of
        self._cloud = None if cloud is None else SimCloud(cloud)
        self._physics = physics
        self._seed = seed
        self._now_s = 0.0
        self._reported_s = 0.0
        self._jobs: dict[str, SimJob] = {}
        self._active: dict[str, SimJob] = {}
        self._milestones: list[tuple[float, int, str]] = []
        self._ready: deque[Event] = deque()
        self._last_instruction = 0

    def now_s(self) -> float:
        return self._now_s

    def admit(self, job: Job) -> None:
        instruments = Instruments(job, self._physics.noise, self._seed)
        truth = self._truth_of(job)
        self._jobs[job.id] = (
            SimTrial(job, truth, instruments)
            if isinstance(truth, TrialTruth)
            else SimJob(job, truth, instruments)
        )

    def apply(self, instructions: Sequence[Instruction]) -> None:
        fresh = [one for one in instructions if one.number > self._last_instruction]
        for instruction in fresh:
            self._last_instruction = instruction.number
            self._carry_out(instruction)
        if fresh:
            self._disturb()

    def provision(self, wish: Wish) -> None:
        if self._cloud is not None:
            self._ready.extend(self._cloud.provision(self._now_s, wish))

    def next_event(self, until_s: float) -> Event | None:
        while True:
            if self._ready:
                return self._ready.popleft()
            node_s = math.inf if self._cloud is None else self._cloud.next_s()
            time_s = min(self._next_milestone_s(), self._next_report_s(), node_s)
            if time_s == math.inf == until_s:
                return None
            if time_s > until_s:
                self._now_s = max(self._now_s, until_s)
                return None
            self._now_s = time_s
            if self._cloud is not None and node_s <= time_s:
                self._ready.append(self._cloud.deliver())
            elif self._next_milestone_s() <= time_s:
                _, _, job_id = heapq.heappop(self._milestones)
                self._end_epoch(self._active[job_id])
            else:
                self._report_all()

    def recover(self, history: Iterable[Event]) -> None:
        """Repeats the history: the events follow from the instructions."""
        for event in history:
            if isinstance(
                event, JobReported | JobFinished | NodeLaunched | NodeAdded | NodeReleased | NodeRefused
            ):
                self._repeat(event.t_s, event)
            elif isinstance(event, JobSubmitted):
                self._repeat(event.t_s, None)
                self._readmit(event.job)
            elif isinstance(event, Decided):
                self._repeat(event.t_s, None)
                self.apply(event.instructions)
                if event.wish is not None:
                    self.provision(event.wish)

    def close(self) -> None:
        self._active.clear()

    def _readmit(self, job: Job) -> None:
        try:
            self.admit(job)
        except KeyError as error:
            raise JournalError(f"job {job.id} is not in the workload. {_NOT_THIS_RUN}") from error

    def _repeat(self, t_s: float, recorded: Event | None) -> None:
        again = self.next_event(t_s)
        if again != recorded:
            raise JournalError(f"by {t_s} s there was {recorded}, and now there is {again}. {_NOT_THIS_RUN}")

    def _carry_out(self, instruction: Instruction) -> None:
        job = self._jobs[instruction.job_id]
        job.advance(self._now_s)
        if instruction.action in {Action.PARK, Action.STOP}:
            job.park()
            self._active.pop(instruction.job_id, None)
            return
        if instruction.action is Action.SET_BATCH:
            job.set_batch(instruction.batch)
        else:
            job.start(self._now_s, instruction.allocation, instruction.batch, self._physics.restart_s)
            self._active[instruction.job_id] = job
        self._plan(job)

    def _disturb(self) -> None:
        """After a change of placements, finds jobs that share a node with another job on several nodes."""
        if self._physics.interference == 0.0:
            return
        spanning: dict[str, int] = {}
        for job in self._active.values():
            if len(job.allocation.nodes) > 1:
                for node in job.allocation.nodes:
                    spanning[node] = spanning.get(node, 0) + 1
        for job in self._active.values():
            nodes = job.allocation.nodes
            hit = len(nodes) > 1 and any(spanning[node] > 1 for node in nodes)
            slowdown = self._physics.interference if hit else 0.0
            if slowdown != job.slowdown:
                job.advance(self._now_s)
                job.disturb(slowdown)
                self._plan(job)

    def _plan(self, job: SimJob) -> None:
        """Schedules the end of this epoch if it comes before the next report."""
        job.version += 1
        left_s = job.epoch_left_s()
        start_s = max(self._now_s, job.ready_s)
        if job.reports_epochs or start_s + left_s <= self._next_report_s():
            end_s = start_s + (round(left_s) if self._physics.whole_seconds else left_s)
            heapq.heappush(self._milestones, (end_s, job.version, job.job.id))

    def _next_milestone_s(self) -> float:
        """Time of the first valid milestone."""
        while self._milestones:
            time_s, version, job_id = self._milestones[0]
            job = self._active.get(job_id)
            if job is not None and job.version == version:
                return time_s
            heapq.heappop(self._milestones)
        return math.inf

    def _next_report_s(self) -> float:
        """Time of the next report, a multiple of the report interval."""
        if all(job.reports_epochs for job in self._active.values()):
            return math.inf
        report_s = self._physics.report_s
        unreported = math.floor(self._reported_s / report_s + EPS) + 1
        to_come = math.ceil(self._now_s / report_s - EPS)
        return max(unreported, to_come) * report_s

    def _end_epoch(self, job: SimJob) -> None:
        job.end_epoch(self._now_s)
        if job.epoch < job.truth.epochs:
            self._plan(job)
            if job.reports_epochs:
                self._ready.append(job.report(self._now_s))
            return
        del self._active[job.job.id]
        self._ready.append(job.report(self._now_s))
        job.park()
        self._ready.append(JobFinished(t_s=self._now_s, job_id=job.job.id))
        self._disturb()

    def _report_all(self) -> None:
        self._reported_s = self._now_s
        for job in self._active.values():
            if job.reports_epochs:
                continue
            job.advance(self._now_s)
            if self._now_s > job.ready_s:
                self._ready.append(job.report(self._now_s))
            self._plan(job)
