"""A worker's line to its controller, and what it is when there is none."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
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
"""A controller that takes longer to decide on a result is not waited for."""
GRACE_S = 30.0
"""How long a worker whose controller is gone may take to save its state."""


class StopTraining(BaseException):
    """Leave the training loop now: parked, dismissed, or nobody wants the result any more."""

    def __init__(self, why: str, *, saved: bool = False, leaves: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.saved = saved
        self.leaves = leaves
        """The process ends, too."""


class Session(Protocol):
    """Where orders come from and reports go."""

    @property
    def task(self) -> Task | None:
        """What was asked for; None when somebody runs the script by hand."""

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where groups that this worker leads come together."""

    def send(self, message: FromWorker) -> None: ...

    def next_order(self) -> GroupOrder | None:
        """What the controller wants this group to do next."""

    def wait_for_form(self, generation: int | None) -> Form | Leave:
        """The place in a group: of this generation, or of the first that comes."""

    def wait_for_ack(self, epoch: int) -> None: ...

    def count_step(self) -> None: ...


class StandaloneSession:
    """Nobody to report to: the script was started by hand."""

    task: Task | None = None
    rendezvous: Rendezvous | None = None

    def send(self, message: FromWorker) -> None:
        """Nobody listens."""

    def next_order(self) -> GroupOrder | None:
        return None

    def wait_for_form(self, generation: int | None) -> Form | Leave:
        raise AssertionError(f"nobody forms group {generation}")

    def wait_for_ack(self, epoch: int) -> None:
        """Nobody decides."""

    def count_step(self) -> None:
        """Nobody watches."""


class ControlledSession:
    """Listens and beats in threads of its own; orders are taken up at step boundaries."""

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
        """What is to be trained now. Departure if nothing more will come."""
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

    def _wait(self, found: object) -> None:
        """Until something is there. Without a controller it never will be."""
        assert callable(found)
        self._changed.wait_for(lambda: self._gone or found())
        if not found():
            raise StopTraining("the controller is gone")

    def _listen(self) -> None:
        try:
            for message in self._channel.messages():
                self._take(message)  # type: ignore[arg-type]
        except WireError as error:
            os.write(2, f"stretto: the controller makes no sense: {error}\n".encode())
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        time.sleep(self._grace_s)
        os._exit(75)  # the main thread did not get to a step boundary, or cannot save

    def _take(self, message: ToWorker) -> None:
        with self._changed:
            match message:
                case Task():
                    self._begin(message)
                case Form() | Leave():
                    self._forms[message.generation] = message
                    # A batch that was ordered before was for the group as it was; the Form has its own.
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
        """Whatever else was said concerned the task before."""
        self._task, self._is_new = task, True
        self._forms.clear()
        self._orders.clear()
        self._formed = self._acked = -1
        self._steps = 0

    def _beat(self) -> None:
        while self._channel.send(Beat(self._steps)):
            time.sleep(_BEAT_S)
