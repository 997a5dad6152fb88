"""What happens. Every event is a fact that is journaled before anything is done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from stretto.core.cluster import Node, Wish
from stretto.core.decision import Reason
from stretto.core.instructions import Instruction
from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first event of a run, and what must be the same for it to be continued."""

    kind: ClassVar[str] = "run-started"
    t_s: float
    identity: dict[str, str]
    nodes: tuple[Node, ...]

    @property
    def subject(self) -> str:
        return self.identity["policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused:
    """Somebody asked the run to stop, and nothing of it runs any more until it is resumed."""

    kind: ClassVar[str] = "run-paused"
    t_s: float

    @property
    def subject(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """The run goes on after it was stopped or killed; what ran then is started again."""

    kind: ClassVar[str] = "run-resumed"
    t_s: float
    down_s: float
    """Since the last event before: nothing ran. What was rented is paid for, unless the run was paused."""

    @property
    def subject(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    kind: ClassVar[str] = "job-submitted"
    t_s: float
    job: Job

    @property
    def subject(self) -> str:
        return self.job.id


@dataclass(frozen=True, slots=True, kw_only=True)
class _AboutJob:
    t_s: float
    job_id: str

    @property
    def subject(self) -> str:
        return self.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished(_AboutJob):
    kind: ClassVar[str] = "job-finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed(_AboutJob):
    kind: ClassVar[str] = "job-failed"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReported(_AboutJob):
    """Progress and measurements since the last report, as aggregates."""

    kind: ClassVar[str] = "job-reported"
    work_done: float
    """Statistical units done so far."""
    epoch: int
    """Epochs completed."""
    speeds: tuple[SpeedSample, ...] = ()
    noise: NoiseSample | None = None
    losses: tuple[LossPoint, ...] = ()
    results: tuple[Result, ...] = ()
    """Of a trial: one for every epoch completed since the last report."""
    resize_s: float | None = None
    """How long the last start or resize took, reported once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(_AboutJob):
    kind: ClassVar[str] = "checkpoint-saved"
    work_done: float
    path: str = ""
    best: bool = False
    """Of a trial: it holds the best epoch so far, and is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRetried(_AboutJob):
    """Something went wrong in the job; the substrate starts it again where it was, from its checkpoint."""

    kind: ClassVar[str] = "job-retried"
    attempt: int
    """1 for the first time since it last made progress."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNoted(_AboutJob):
    """The job said something that a reader of its history should know; nothing follows from it."""

    kind: ClassVar[str] = "job-noted"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(_AboutJob):
    """A worker died on its own; the gang stands still and everything it held is free again."""

    kind: ClassVar[str] = "worker-lost"
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunched:
    """A node that was wished for begins to start up, and to cost."""

    kind: ClassVar[str] = "node-launched"
    t_s: float
    node: Node

    @property
    def subject(self) -> str:
        return self.node.id


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdded:
    kind: ClassVar[str] = "node-added"
    t_s: float
    node: Node
    queue_s: float = 0.0
    """How long its request waited; nothing is paid for that."""
    init_s: float = 0.0
    """How long it then took to be of use, which is paid for."""

    @property
    def subject(self) -> str:
        return self.node.id


@dataclass(frozen=True, slots=True, kw_only=True)
class _AboutNode:
    t_s: float
    node_id: str

    @property
    def subject(self) -> str:
        return self.node_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(_AboutNode):
    """The node and everything on it is gone."""

    kind: ClassVar[str] = "node-lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased(_AboutNode):
    """The node, which may still have been starting up, was given back and costs nothing from now on."""

    kind: ClassVar[str] = "node-released"
    never_came: bool = False
    """It was refused: as far as is known there was no such node, and nothing is paid for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining(_AboutNode):
    """The node will be lost soon: nothing new is placed there."""

    kind: ClassVar[str] = "node-draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefused:
    """Nodes that were asked for will not come: refused, only in part granted, or not here in time.

    Nothing is asked for in their place until somebody wishes again.
    """

    kind: ClassVar[str] = "node-refused"
    t_s: float
    instance: str
    count: int
    why: str

    @property
    def subject(self) -> str:
        return self.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A policy decided: what the substrate was told, why, and what the policy wants to remember."""

    kind: ClassVar[str] = "decided"
    t_s: float
    policy: str
    instructions: tuple[Instruction, ...]
    reasons: dict[str, Reason]
    memory: Any
    wake_at_s: float | None = None
    wish: Wish | None = None
    """The cluster that was asked for, where that was news."""

    @property
    def subject(self) -> str:
        return self.policy


Event = (
    RunStarted
    | RunPaused
    | RunResumed
    | JobSubmitted
    | JobFinished
    | JobFailed
    | JobReported
    | CheckpointSaved
    | JobRetried
    | JobNoted
    | WorkerLost
    | NodeLaunched
    | NodeAdded
    | NodeLost
    | NodeReleased
    | NodeDraining
    | NodeRefused
    | Decided
)

EVENT_TYPES: tuple[type[Event], ...] = (
    RunStarted,
    RunPaused,
    RunResumed,
    JobSubmitted,
    JobFinished,
    JobFailed,
    JobReported,
    CheckpointSaved,
    JobRetried,
    JobNoted,
    WorkerLost,
    NodeLaunched,
    NodeAdded,
    NodeLost,
    NodeReleased,
    NodeDraining,
    NodeRefused,
    Decided,
)
