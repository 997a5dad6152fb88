"""What workers and their controller say to each other. Every message is one JSON object on one line.

A worker's life, seen from the controller:

    worker                       controller
    ------                       ----------
                                 Task          what to train, and where its files go
    Ready                                      warm: the training code stands before its first epoch
                                 Form          become rank r of a group of n; also tells survivors of a resize
    Formed                                     the group trains
    Described, Report, Saved, Note             from rank 0 only
    Printed                                    likewise, where a command runs instead of training code
    Beat                                       from everybody, all the time
                                 Ack           the results up to an epoch were seen and decided on
                                 SetBatch, Park, FinishEpoch    to rank 0: the group agrees on a step
                                 Park, LetEnd  to every rank, where a command runs
                                 Leave         to a member that is not part of the next group
    Finished | Failed | Left                   the last word on this task; another may come
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.job import Value
from stretto.core.observations import NoiseSample, SpeedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOrder:
    """A command to run instead of training code: one process in each worker, told its rank."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """What it is told beyond the environment of its node and its part in the group."""
    cwd: str
    """Empty: the worker's own."""
    keys: tuple[str, ...]
    """A line of its output that has one of these is a report."""
    tells_missed: bool
    """First of all, the first process tells what the metrics file has already."""
    restarts: int
    grace_s: float
    """Between SIGTERM and SIGKILL."""
    metric: str | None = None
    """Of a trial: the key that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train."""

    job_id: str
    entry: str
    """`path/to/train.py:function`."""
    config: dict[str, Value]
    folder: str
    """Of the job: `metrics.jsonl` and `checkpoints/` go there."""
    epochs: int | None
    """Train no further than this, whatever the code says."""
    seed: int
    metric: str | None = None
    """Of a study: the checkpoint of its best epoch is kept too."""
    maximise: bool = True
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 2
    waits_for_ack: bool = False
    """After reporting an epoch, go on only when the controller has decided (a trial may end there)."""
    describe_only: bool = False
    """Go no further than the first loader: it is enough to know what would be trained."""
    tensorboard: bool = False
    store: str = ""
    """An fsspec URL, such as `s3://bucket/run/jobs/a`: checkpoints are kept there, too, for other nodes."""
    stays: bool = False
    """After a good end, wait for another task: a process that is there costs nothing to start."""
    command: CommandOrder | None = None
    """Run this; nothing is imported then."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Examples a worker processes at once, and passes added before each step."""

    atomic: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Be rank `rank` of the group of this generation, from the next step boundary on."""

    generation: int
    rank: int
    world: int
    nodes: int
    store: str
    """What rank 0 said when it was Ready: where the group meets."""
    share_state: bool
    """Somebody is new: rank 0 (a survivor, or whoever loads the checkpoint) gives its state to all."""
    batch: BatchOrder | None
    """None: the batch size is the training code's own affair."""
    neighbours: tuple[str, ...] = ()
    """What those on the same node said when they were Ready, this one included, by rank."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Not part of this generation: exit at the boundary where the others form it."""

    generation: int


@dataclass(frozen=True, slots=True)
class SetBatch:
    batch: BatchOrder


@dataclass(frozen=True, slots=True)
class Park:
    """Save a checkpoint at the next step boundary, and leave."""


@dataclass(frozen=True, slots=True)
class FinishEpoch:
    """Save a checkpoint when the present epoch is over, and leave."""


@dataclass(frozen=True, slots=True)
class LetEnd:
    """The command has shown all that was wanted of it: it may end by itself within the grace."""


@dataclass(frozen=True, slots=True)
class Ack:
    epoch: int


@dataclass(frozen=True, slots=True)
class Ready:
    store: str
    """`host:port/corner` in a key-value store of its own, for the case that it becomes rank 0."""


@dataclass(frozen=True, slots=True)
class Formed:
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the training code turned out to want."""

    examples: int
    """Of one epoch."""
    batch: int
    """Total batch size it asks for."""
    adaptive: bool
    max_batch: int
    per_worker_min: int
    per_worker_max: int
    accumulation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The metrics reported for one completed epoch."""

    epoch: int
    """Epochs completed, this one included."""
    values: dict[str, float]
    epoch_s: float | None
    """None if it was interrupted or the group changed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far training is, and what was measured since the last report."""

    progress: float
    """Epochs done, with the part of the present one; statistical epochs if the batch is adaptive."""
    epoch: int
    """Epochs completed and reported."""
    steps: int
    speeds: tuple[SpeedSample, ...] = ()
    noise: NoiseSample | None = None
    ends: tuple[EpochEnd, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    progress: float
    path: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of a command's output that may be a report."""

    text: str
    missed: bool = False
    """It is from before the present start, and nobody knows whether it was told then."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something a reader of the run's history should know."""

    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """I am alive, and have taken so many steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The training function returned."""

    leaves: bool = False
    """Its process ends, too: it has children that nobody else would end."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The training function raised, or the command failed."""

    traceback: str
    final: bool = False
    """Trying again would change nothing."""


@dataclass(frozen=True, slots=True)
class Left:
    """Gone as asked, or because a peer was lost (then somebody else says why)."""

    why: str
    saved: bool = False
    """A checkpoint of this very moment exists."""
    leaves: bool = False
    """Its process ends, too, though its task allowed it to stay."""


ToWorker = Task | Form | Leave | SetBatch | Park | FinishEpoch | LetEnd | Ack
FromWorker = Ready | Formed | Described | Report | Saved | Printed | Note | Beat | Finished | Failed | Left
Message = ToWorker | FromWorker
