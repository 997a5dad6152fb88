"""What goes into a gang of workers, and what comes out of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.core.events import Event
from stretto.core.job import Value
from stretto.substrate.elastic.command import Command
from stretto.wire.messages import ToWorker

_ENDING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What to train for a job, beyond what its scheduler needs to know."""

    entry: str
    """`path/to/train.py:function`."""
    config: Mapping[str, Value]
    epochs: int | None
    """Train no further than this, whatever the code says."""
    seed: int = 0
    metric: str | None = None
    """Of a trial: which of the reported values the study compares."""
    maximise: bool = True
    waits_for_ack: bool = False
    """After every epoch, wait until the controller has decided on its result."""
    follows_batch: bool = False
    """The batch size is the scheduler's to choose; otherwise the training code keeps its own."""
    describe_only: bool = False
    """Only find out what would be trained."""
    command: Command | None = None
    """Run this instead; `entry` is then `NO_ENTRY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How much patience workers are met with."""

    grace_s: float = 10.0
    """Between being asked to go at once and being killed."""
    command_s: float = 10.0
    """Of the grace, what a command has between SIGTERM and SIGKILL; its worker needs a little more."""
    park_s: float = 60.0
    """For the way to the next step boundary and a checkpoint there, when a gang is parked."""
    retries: int = 2
    """Fresh starts after something went wrong, without progress in between."""
    heartbeat_s: float = 30.0
    """A worker that is silent for so long is lost."""
    yield_s: float = 5.0
    """A group that is to move waits so long for its new slots; then it gives up its own first."""
    hang_s: float = 3600.0
    """A group that takes no step for so long hangs; whatever code does between two epochs must be shorter."""

    @property
    def of_commands(self) -> Rules:
        """A worker that ends its command needs a little longer than the command."""
        return replace(self, grace_s=max(self.grace_s, self.command_s + _ENDING_S))


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, on two clocks."""

    t_s: float
    """Of the run."""
    awake_s: float
    """Time in which somebody listened: it stands still while this process or the machine sleeps."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's process ended."""

    code: int | None
    """Negative: the signal that ended it. None: it never ran, or nobody saw its end; `error` says why."""
    error: str = ""
    final: bool = False
    """Trying again would change nothing."""

    @property
    def text(self) -> str:
        if self.code is None:
            return self.error
        if self.code == -signal.SIGKILL:
            return (
                "a worker was killed (SIGKILL) and nobody here asked for it: most likely the machine ran out "
                "of memory. Give it a smaller model or batch, or fewer slots."
            )
        if self.code >= 0:
            return f"a worker ended (exit code {self.code}) without saying why"
        try:
            return f"a worker was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"a worker was ended by signal {-self.code}"


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker as soon as a slot is free."""

    worker_id: str
    node: str = ""
    """Where; empty: wherever there is one."""


@dataclass(frozen=True, slots=True)
class End:
    """Nobody needs this worker: SIGTERM, and SIGKILL after the grace."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL, now."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: str
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Write:
    """Add to a log."""

    log: str
    text: str


@dataclass(frozen=True, slots=True)
class Emit:
    event: Event


Effect = Spawn | End | Kill | Send | Write | Emit
