"""Events: the facts of a run. Each is written to the journal before anything else follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from stretto.core.cluster import Node, Wish
from stretto.core.decision import Reason
from stretto.core.instructions import Instruction
from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first event of a run, with the `identity` that must be the same to resume it."""

    kind: ClassVar[str] = "run-started"
    t_s: float
    identity: dict[str, str]
    nodes: tuple[Node, ...]

    @property
    def subject(self) -> str:
        return self.identity["policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused:
    """The user stopped the run; nothing of it runs until it is resumed."""

    kind: ClassVar[str] = "run-paused"
    t_s: float

    @property
    def subject(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """The run continues after it was stopped or killed; jobs that ran then are started again."""

    kind: ClassVar[str] = "run-resumed"
    t_s: float
    down_s: float
    """Time since the last event before, in which nothing ran; rented nodes cost unless the run was paused."""

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
    log: str = ""
    """The path of the job's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReported(_AboutJob):
    """A job's progress and its measurements since the last report, as aggregates."""

    kind: ClassVar[str] = "job-reported"
    work_done: float
    """Statistical units done so far."""
    epoch: int
    """Epochs completed."""
    speeds: tuple[SpeedSample, ...] = ()
    noise: NoiseSample | None = None
    losses: tuple[LossPoint, ...] = ()
    results: tuple[Result, ...] = ()
    """For a trial: one result for every epoch completed since the last report."""
    resize_s: float | None = None
    """How long the last start or resize took, reported once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(_AboutJob):
    kind: ClassVar[str] = "checkpoint-saved"
    work_done: float
    path: str = ""
    best: bool = False
    """For a trial: whether it has the best epoch so far; it is then kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRetried(_AboutJob):
    """The job failed, and the substrate restarts it on the same nodes from its checkpoint."""

    kind: ClassVar[str] = "job-retried"
    attempt: int
    """The number of this attempt since the job last made progress, from 1."""
    error: str
    log: str = ""
    """The path of the job's log."""


class NoteKind(StrEnum):
    """What a note says of a job that was told to leave."""

    NOT_SAVED = "not-saved"
    """It did not save its state."""
    NOT_BEGUN = "not-begun"
    """It had not begun to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNoted(_AboutJob):
    """A note for readers of the job's history, without any effect."""

    kind: ClassVar[str] = "job-noted"
    text: str
    about: NoteKind | None = None
    log: str = ""
    """The path of the job's log, if the text is about a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(_AboutJob):
    """A worker died; its job stops training and everything it held is free again."""

    kind: ClassVar[str] = "worker-lost"
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunched:
    """A requested node begins to start up, and to cost."""

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
    """How long its request waited, which costs nothing."""
    init_s: float = 0.0
    """How long its start-up took, which is billed."""

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
    """The node is gone, with everything on it."""

    kind: ClassVar[str] = "node-lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased(_AboutNode):
    """The node was given back, perhaps during its start-up, and costs nothing from now on."""

    kind: ClassVar[str] = "node-released"
    never_came: bool = False
    """Whether the request was refused: then there was no node, as far as we know, and nothing is billed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining(_AboutNode):
    """The node will be lost soon, so no new tasks are placed there."""

    kind: ClassVar[str] = "node-draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefused:
    """Requested nodes will not come: they were refused, granted only in part, or not here in time.

    They are not requested again until the policy does so.
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
    """A policy decided: the instructions to the substrate, the reasons, and the policy's memory."""

    kind: ClassVar[str] = "decided"
    t_s: float
    policy: str
    instructions: tuple[Instruction, ...]
    reasons: dict[str, Reason]
    memory: Any
    wake_at_s: float | None = None
    wish: Wish | None = None
    """The requested cluster, if it changed."""

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
