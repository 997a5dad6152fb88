"""Inputs of a gang of workers, and the effects that it asks for."""

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
    """What a job trains; the scheduler does not need to know this."""

    entry: str
    """`path/to/train.py:function`."""
    config: Mapping[str, Value]
    epochs: int | None
    """Train at most this far, whatever the code says."""
    seed: int = 0
    metric: str | None = None
    """The reported value by which a study compares its trials."""
    maximise: bool = True
    waits_for_ack: bool = False
    """After every epoch, wait until the controller has decided about its result."""
    follows_batch: bool = False
    """Whether the scheduler chooses the batch size; otherwise the training code does."""
    describe_only: bool = False
    """Only find out what the training code wants."""
    command: Command | None = None
    """Run this instead; `entry` is then `NO_ENTRY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Time limits for workers, and how often a failed job is started again."""

    grace_s: float = 10.0
    """Time between a request to leave at once and SIGKILL."""
    command_s: float = 10.0
    """The same for a command: between SIGTERM and SIGKILL."""
    park_s: float = 60.0
    """How long a parked gang may take to reach the next step boundary and save a checkpoint."""
    retries: int = 2
    """Restarts after failures without progress in between."""
    heartbeat_s: float = 30.0
    """A worker that sends nothing for this long is lost."""
    yield_s: float = 5.0
    """A group that moves waits this long for its new slots; then it gives up its old ones first."""
    hang_s: float = 3600.0
    """A group without a step for this long hangs. Work between two epochs must be shorter."""

    @property
    def of_commands(self) -> Rules:
        """A worker that ends its command needs a little longer than the command does."""
        return replace(self, grace_s=max(self.grace_s, self.command_s + _ENDING_S))


@dataclass(frozen=True, slots=True)
class Moment:
    """The present time on two clocks."""

    t_s: float
    """Seconds since the start of the run."""
    awake_s: float
    """Seconds in which the loop ran: this clock stops while the process or the machine sleeps."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker's process ended."""

    code: int | None
    """Negative: the signal that ended it. None: unknown, or it never ran; `error` says why."""
    error: str = ""
    final: bool = False
    """Trying again would change nothing."""

    @property
    def text(self) -> str:
        if self.code is None:
            return self.error
        if self.code == -signal.SIGKILL:
            return (
                "a worker was killed (SIGKILL), but not by Stretto: most likely the machine ran out "
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
    """Empty: any node."""


@dataclass(frozen=True, slots=True)
class End:
    """This worker is not needed: SIGTERM, and SIGKILL after the grace."""

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
