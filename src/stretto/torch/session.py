"""A worker's connection to its controller, and its stand-in for a script started by hand."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stretto.torch.group import GroupOrder, OrderKind, Rendezvous
from stretto.wire.channel import Channel
from stretto.wire.codec import WireError
from stretto.wire.messages import (
    Ack,
    Beat,
    FinishEpoch,
    Form,
    FromWorker,
    Leave,
    Park,
    SetBatch,
    Task,
    ToWorker,
)

_BEAT_S = 1.0
_ACK_S = 10.0
"""How long a worker waits for the controller's decision on a result."""
GRACE_S = 30.0
"""How long a worker may take to save a checkpoint after its controller is gone."""


class StopTraining(BaseException):
    """Raised to leave the user's training loop, for example because the job is parked."""

    def __init__(self, why: str, *, saved: bool = False, leaves: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.saved = saved
        self.leaves = leaves
        """Whether the process ends, too."""


class Session(Protocol):
    """The source of orders and the destination of reports."""

    @property
    def task(self) -> Task | None:
        """The task from the controller; None in a script started by hand."""

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where groups form in which this worker is rank 0."""

    def send(self, message: FromWorker) -> None: ...

    def next_order(self) -> GroupOrder | None:
        """The controller's next order for this group."""

    def wait_for_form(self, generation: int | None) -> Form | Leave:
        """This worker's place in the group of `generation`; None: in the next group."""

    def wait_for_ack(self, epoch: int) -> None: ...

    def count_step(self) -> None: ...


class StandaloneSession:
    """The session of a script started by hand: no controller, no orders."""

    task: Task | None = None
    rendezvous: Rendezvous | None = None

    def send(self, message: FromWorker) -> None:
        """Drop the message."""

    def next_order(self) -> GroupOrder | None:
        return None

    def wait_for_form(self, generation: int | None) -> Form | Leave:
        raise AssertionError(f"no controller forms group {generation}")

    def wait_for_ack(self, epoch: int) -> None:
        """Do not wait."""

    def count_step(self) -> None:
        """Do not count."""


class ControlledSession:
    """The session of a worker under a controller. Two threads receive messages and send heartbeats."""

    def __init__(self, channel: Channel, *, grace_s: float = GRACE_S) -> None:
        host = os.environ.get("STRETTO_HOST", "127.0.0.1")
        self.rendezvous: Rendezvous | None = Rendezvous(host)
        self._channel = channel
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._task: Task | None = None
        self._is_new = False
        self._forms: dict[int, Form | Leave] = {}
        self._formed = -1
        self._orders: deque[GroupOrder] = deque()
        self._acked = -1
        self._gone = False
        self._steps = 0
        threading.Thread(target=self._listen, name="controller", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    @property
    def task(self) -> Task:
        assert self._task is not None
        return self._task

    def next_task(self) -> Task:
        """Wait for the next task. StopTraining if the controller is gone."""
        with self._changed:
            self._wait(lambda: self._is_new)
            self._is_new = False
            return self.task

    def send(self, message: FromWorker) -> None:
        self._channel.send(message)

    def next_order(self) -> GroupOrder | None:
        with self._changed:
            if self._gone:
                return GroupOrder(OrderKind.PARK)
            waiting = [generation for generation in self._forms if generation > self._formed]
            if waiting:
                return GroupOrder(OrderKind.REGROUP, max(waiting))
            return self._orders.popleft() if self._orders else None

    def wait_for_form(self, generation: int | None) -> Form | Leave:
        with self._changed:

            def found() -> bool:
                return bool(self._forms) if generation is None else generation in self._forms

            self._wait(found)
            self._formed = max(self._forms) if generation is None else generation
            return self._forms[self._formed]

    def wait_for_ack(self, epoch: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._acked >= epoch or bool(self._orders), _ACK_S)

    def count_step(self) -> None:
        self._steps += 1

    def _wait(self, found: Callable[[], bool]) -> None:
        """Wait until `found()` is true. StopTraining if the controller is gone before."""
        self._changed.wait_for(lambda: self._gone or found())
        if not found():
            raise StopTraining("the controller is gone")

    def _listen(self) -> None:
        try:
            for message in self._channel.messages():
                self._take(message)  # type: ignore[arg-type]
        except WireError as error:
            os.write(2, f"stretto: the controller sent an invalid message: {error}\n".encode())
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        time.sleep(self._grace_s)
        os._exit(75)  # the main thread did not reach a step boundary in time, or cannot save

    def _take(self, message: ToWorker) -> None:
        with self._changed:
            match message:
                case Task():
                    self._begin(message)
                case Form() | Leave():
                    self._forms[message.generation] = message
                    # Earlier batch orders were for the old group; the Form has its own batch.
                    self._orders = deque(order for order in self._orders if order.code is not OrderKind.BATCH)
                case SetBatch():
                    self._orders.append(
                        GroupOrder(OrderKind.BATCH, message.batch.atomic, message.batch.accumulation)
                    )
                case Park():
                    self._orders.append(GroupOrder(OrderKind.PARK))
                case FinishEpoch():
                    self._orders.append(GroupOrder(OrderKind.FINISH_EPOCH))
                case Ack():
                    self._acked = message.epoch
            self._changed.notify_all()

    def _begin(self, task: Task) -> None:
        """Start a task; earlier messages belonged to the previous one."""
        self._task, self._is_new = task, True
        self._forms.clear()
        self._orders.clear()
        self._formed = self._acked = -1
        self._steps = 0

    def _beat(self) -> None:
        while self._channel.send(Beat(self._steps)):
            time.sleep(_BEAT_S)
