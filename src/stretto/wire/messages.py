"""The messages between workers and their controller. Each is one JSON object on one line.

A worker's life, seen from the controller:

    worker                       controller
    ------                       ----------
                                 Task          what to train, and where its files go
    Ready                                      the training code is about to begin its first epoch
                                 Form          become rank r of a group of n; also for survivors of a resize
    Formed                                     the group trains
    Described, Report, Saved, Note             from rank 0 only
    Printed, Flooded                           from rank 0 of a command
    Beat                                       from every worker, all the time
                                 Ack           the results up to an epoch were seen and decided on
                                 SetBatch, Park, FinishEpoch    to rank 0: the group agrees on a step
                                 Park, LetEnd, EndNow           to every rank of a command
                                 Leave         to a member that is not part of the next group
    Finished | Failed | Left                   the end of this task; another task may follow
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.job import Value
from stretto.core.observations import NoiseSample, SpeedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOrder:
    """A command to run instead of a training function: one process in each worker."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """Environment variables in addition to those of the node and of torchrun."""
    cwd: str
    """The working folder; empty: the worker's own."""
    keys: tuple[str, ...]
    """An output line with one of these keys is a report."""
    tells_missed: bool
    """Whether rank 0 first sends the lines that the metrics file already has."""
    restarts: int
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    metric: str | None = None
    """In a trial: the study's metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train."""

    job_id: str
    entry: str
    """`path/to/train.py:function`."""
    config: dict[str, Value]
    folder: str
    """The job's folder, for `metrics.jsonl` and `checkpoints/`."""
    epochs: int | None
    """Maximum number of epochs, even if the code asks for more."""
    seed: int
    metric: str | None = None
    """The study's metric; the checkpoint of the best epoch is kept, too."""
    maximise: bool = True
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 2
    waits_for_ack: bool = False
    """After each epoch, wait for the controller's decision: a trial may end there."""
    describe_only: bool = False
    """Stop at the first loop over a loader, after sending `Described`."""
    tensorboard: bool = False
    store: str = ""
    """An fsspec URL such as `s3://bucket/run/jobs/a`; checkpoints are copied there for other nodes."""
    stays: bool = False
    """After success, wait for another task: reusing a process saves its start-up time."""
    command: CommandOrder | None = None
    """If given, run this command; nothing is imported."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Examples per worker and pass, and additional passes per step."""

    atomic: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Become rank `rank` of the group of this generation, at the next step boundary."""

    generation: int
    rank: int
    world: int
    nodes: int
    store: str
    """Rank 0's `Ready.store`, where the group forms."""
    share_state: bool
    """Whether rank 0 sends its state to all, because a worker is new."""
    batch: BatchOrder | None
    """None: the training code chooses the batch size."""
    neighbours: tuple[str, ...] = ()
    """The `Ready.store` of all workers on the same node, this one included, by rank."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Exit at the step boundary at which the others form this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class SetBatch:
    """Use this batch from the next step boundary on."""

    batch: BatchOrder


@dataclass(frozen=True, slots=True)
class Park:
    """Save a checkpoint at the next step boundary, and exit."""


@dataclass(frozen=True, slots=True)
class FinishEpoch:
    """Save a checkpoint at the end of the current epoch, and exit."""


@dataclass(frozen=True, slots=True)
class LetEnd:
    """The command has reported its last epoch: give it the grace to end by itself."""


@dataclass(frozen=True, slots=True)
class EndNow:
    """Kill the command, without the grace."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The controller has decided on the results up to this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is ready to join a group."""

    store: str
    """`host:port/prefix` in its own key-value store, to be used if it becomes rank 0."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The group of this generation trains."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The data and batch sizes of the training code."""

    examples: int
    """Examples per epoch."""
    batch: int
    """The initial total batch size."""
    adaptive: bool
    max_batch: int
    per_worker_min: int
    per_worker_max: int
    accumulation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The metrics of one completed epoch."""

    epoch: int
    """Completed epochs, including this one."""
    values: dict[str, float]
    epoch_s: float | None
    """None if it was interrupted or the group changed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The progress of training, and measurements since the last report."""

    progress: float
    """Epochs done, with the done part of the current one; statistical epochs if the batch is adaptive."""
    epoch: int
    """Completed epochs."""
    steps: int
    speeds: tuple[SpeedSample, ...] = ()
    noise: NoiseSample | None = None
    ends: tuple[EpochEnd, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint is safely stored."""

    progress: float
    path: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of a command's output that may be a report."""

    text: str
    missed: bool = False
    """Whether it was printed before this start, and may have been sent then."""


@dataclass(frozen=True, slots=True)
class Flooded:
    """The command prints so fast that lines are left out."""


@dataclass(frozen=True, slots=True)
class Note:
    """A notice for the user, shown in the run's history."""

    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: the worker is alive and has made this many steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The training function returned."""

    leaves: bool = False
    """Whether its process ends, too: needed if it has child processes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The training function raised, or the command failed."""

    traceback: str
    final: bool = False
    """Whether a retry would fail the same way."""


@dataclass(frozen=True, slots=True)
class Left:
    """The worker left its group as ordered, or because a peer was lost."""

    why: str
    saved: bool = False
    """Whether a checkpoint of this moment exists."""
    leaves: bool = False
    """Whether its process ends, too, even if its task has `stays`."""
    killed: bool = False
    """Whether it is a command that did not end in time when it was asked to."""


ToWorker = Task | Form | Leave | SetBatch | Park | FinishEpoch | LetEnd | EndNow | Ack
FromWorker = (
    Ready | Formed | Described | Report | Saved | Printed | Flooded | Note | Beat | Finished | Failed | Left
)
Message = ToWorker | FromWorker
