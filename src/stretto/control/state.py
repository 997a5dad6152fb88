"""The state of a run: a fold over its journal."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.cluster import Node, Wish
from stretto.core.decision import Reason
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunResumed,
    RunStarted,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.models.belief import FittedBelief
from stretto.models.observations import Observations
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.policies.base import ClusterView, JobView, Memory


@dataclass(slots=True)
class JobState:
    """What is known of one job that is not finished."""

    job: Job
    belief: FittedBelief
    observed: Observations
    allocation: Allocation = NOTHING
    batch: BatchChoice | None = None
    gpus: int = 0
    starts: int = 0
    attained_gpu_s: float = 0.0
    counted_until_s: float = 0.0
    held_s: float = 0.0
    begun_s: float = 0.0
    """When its last start or resize was asked for, or begun anew."""
    epoch_since_s: float | None = None
    """When it began the epoch it is in; None until it is known to train again."""
    work_done: float = 0.0
    epoch: int = 0
    results: tuple[Result, ...] = ()
    start_times_s: tuple[float, ...] = ()

    def hold(self, t_s: float, allocation: Allocation) -> None:
        """From now on the job holds `allocation`; what it held until now is added up."""
        self.attained_gpu_s += self.gpus * (t_s - self.counted_until_s)
        self.held_s += (t_s - self.counted_until_s) if self.allocation else 0.0
        self.counted_until_s = t_s
        self.begin(t_s)
        self.allocation = allocation
        self.gpus = allocation.gpus(self.job)
        if not allocation:
            self.batch = None

    def begin(self, t_s: float) -> None:
        """What it did of an epoch so far counts no more."""
        self.begun_s, self.epoch_since_s = t_s, None

    def view(self, now_s: float) -> JobView:
        since_s = now_s - self.counted_until_s
        return JobView(
            job=self.job,
            allocation=self.allocation,
            batch=self.batch,
            age_s=now_s - self.job.submit_s,
            attained_gpu_s=self.attained_gpu_s + self.gpus * since_s,
            held_s=self.held_s + since_s if self.allocation.workers else self.held_s,
            start_age_s=now_s - self.begun_s,
            epoch_age_s=None if self.epoch_since_s is None else now_s - self.epoch_since_s,
            restarts=max(0, self.starts - 1),
            work_done=self.work_done,
            epoch=self.epoch,
            results=self.results,
            start_times_s=self.start_times_s,
            belief=self.belief,
        )


@dataclass(slots=True)
class RunState:
    """Everything the controller knows; `apply` is the only way it changes."""

    share_priors: bool = False
    """Whether a new job starts from what finished jobs of its application showed."""
    resize_s: float = DEFAULT_RESIZE_S
    """What a start or resize of an application takes while none was seen."""
    nodes: dict[str, Node] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    jobs: dict[str, JobState] = field(default_factory=dict)
    memory: Memory = None
    wake_at_s: float | None = None
    wish: Wish | None = None
    """The cluster last asked for, without what was given back then, and refused or lost since."""
    refused: tuple[NodeRefused, ...] = ()
    arrivals: tuple[NodeAdded, ...] = ()
    decisions: int = 0
    instructions: int = 0
    _reasons: dict[str, Reason] = field(default_factory=dict)
    _priors: dict[str, Observations] = field(default_factory=dict)

    def is_news(self, job_id: str, reason: Reason) -> bool:
        """Whether a job's reason is another than was last recorded."""
        return self._reasons.get(job_id) != reason

    def view(self, now_s: float) -> ClusterView:
        return ClusterView(
            now_s=now_s,
            nodes=tuple(node for node in self.nodes.values() if node.id not in self.draining),
            jobs=tuple(state.view(now_s) for state in self.jobs.values()),
            refused=self.refused,
            arrivals=self.arrivals,
        )

    def apply(self, event: Event) -> None:
        match event:
            case JobSubmitted():
                self._submit(event.job)
            case JobReported() | JobRetried() | JobFinished() | JobFailed() | WorkerLost():
                if event.job_id in self.jobs:  # else it was stopped, and this was still on its way
                    self._heard_of(event)
            case RunStarted():
                self.nodes = {node.id: node for node in event.nodes}
            case Decided():
                self._decided(event)
            case NodeAdded() | NodeLost() | NodeReleased() | NodeDraining():
                self._change_nodes(event)
            case NodeRefused():
                self.refused += (event,)
                self._expect_less(event.instance, event.count)
            case RunResumed():
                self._begin_all(event.t_s)
            case NodeLaunched() | CheckpointSaved() | JobNoted():
                pass

    def _begin_all(self, t_s: float) -> None:
        for state in self.jobs.values():
            state.begin(t_s)

    def _heard_of(self, event: JobReported | JobRetried | JobFinished | JobFailed | WorkerLost) -> None:
        match event:
            case JobReported():
                self._report(event)
            case JobFinished():
                self._remember(self.jobs.pop(event.job_id))
            case JobFailed():
                self.jobs.pop(event.job_id)
            case WorkerLost():
                self.jobs[event.job_id].hold(event.t_s, NOTHING)
            case JobRetried():
                self.jobs[event.job_id].begin(event.t_s)

    def _submit(self, job: Job) -> None:
        observed = Observations()
        prior = self._priors.setdefault(job.application, Observations()) if self.share_priors else None
        belief = FittedBelief(job, observed, prior, self.resize_s)
        self.jobs[job.id] = JobState(job, belief, observed)

    def _report(self, event: JobReported) -> None:
        state = self.jobs[event.job_id]
        state.work_done, state.epoch = event.work_done, event.epoch
        for sample in event.speeds:
            state.observed.add_speed(sample)
        if event.noise is not None:
            state.observed.set_noise(event.noise)
        state.observed.losses.extend(event.losses)
        if event.results:
            state.results += event.results
            state.epoch_since_s = event.t_s
        if event.resize_s is not None:
            state.observed.resizes_s.append(event.resize_s)
            state.start_times_s += (event.resize_s,)
            state.epoch_since_s = max(state.epoch_since_s or 0.0, state.begun_s + event.resize_s)

    def _remember(self, state: JobState) -> None:
        """A finished job's observations become the prior of its application."""
        if not self.share_priors:
            return
        prior = self._priors.setdefault(state.job.application, Observations())
        for sample in state.observed.speeds.values():
            prior.add_speed(sample)
        prior.noise = state.observed.first_noise or prior.noise
        prior.resizes_s.extend(state.observed.resizes_s)

    def _decided(self, event: Decided) -> None:
        self.memory = event.memory
        self.wake_at_s = event.wake_at_s
        if event.wish is not None:
            self._wished(event.wish)
        self._reasons.update(event.reasons)
        self.decisions += 1
        for instruction in event.instructions:
            self._instructed(event.t_s, instruction)

    def _instructed(self, t_s: float, instruction: Instruction) -> None:
        self.instructions = instruction.number
        if instruction.action is Action.STOP:
            del self.jobs[instruction.job_id]
            return
        state = self.jobs[instruction.job_id]
        state.batch = instruction.batch
        if instruction.action is not Action.SET_BATCH:
            state.hold(t_s, instruction.allocation)
            state.starts += instruction.action is not Action.PARK

    def _wished(self, wish: Wish) -> None:
        """Nodes that are given back are out of reach at once, though they may take a while to go."""
        self.wish = Wish(wish.nodes)
        for node_id in wish.release:
            self.nodes.pop(node_id, None)

    def _expect_less(self, instance: str, count: int) -> None:
        """Whoever wants these nodes still must wish for them again."""
        if self.wish is not None:
            self.wish = self.wish.less(instance, count)

    def _change_nodes(self, event: NodeAdded | NodeLost | NodeReleased | NodeDraining) -> None:
        if isinstance(event, NodeAdded):
            self.draining.discard(event.node.id)
            self.nodes[event.node.id] = event.node
            if event.node.instance:
                self.arrivals += (event,)
            return
        node = self.nodes.get(event.node_id)
        if node is not None and node.instance and event.node_id not in self.draining:
            self._expect_less(node.instance, 1)
        if isinstance(event, NodeDraining):
            self.draining.add(event.node_id)
            return
        self.draining.discard(event.node_id)
        self.nodes.pop(event.node_id, None)
        for state in self.jobs.values():
            if event.node_id in state.allocation.nodes:
                state.hold(event.t_s, NOTHING)
