"""A worker without torch: sleeps instead of training, and meets its group through a folder.

Its config says what goes wrong. It keeps one number, the steps done, in `checkpoints/step`. As a real one, it
waits for another task after a good end if its task allows that.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.core.observations import SpeedSample
from stretto.wire.channel import Channel, connect
from stretto.wire.messages import (
    Ack,
    Beat,
    EpochEnd,
    Failed,
    Finished,
    FinishEpoch,
    Form,
    Formed,
    Leave,
    Left,
    Park,
    Ready,
    Report,
    Saved,
    SetBatch,
    Task,
    ToWorker,
)

_LEFT = "left"
"""In the place of the process id of a member that left on its own account."""
STEPS_PER_EPOCH = 5
STEP_S = 0.008


def load(entry: str) -> Callable[..., Any]:
    """The entry says what its import does to the process."""
    if entry == "raise":
        raise ValueError("this module cannot be imported")
    if entry == "threads":
        threading.Thread(target=time.sleep, args=(60.0,), name="prefetch", daemon=True).start()
    if entry == "unknown threads":  # such as those of a library in C
        start_new_thread(time.sleep, (60.0,))
    if entry == "hang":
        sys.stdout.write("importing\n")
        sys.stdout.flush()
        time.sleep(600.0)
    if entry == "crowded":
        _fail_second_fork()
    return print


def _fail_second_fork() -> None:
    """As on a machine that has no room for another process, for once."""
    fork, forks = os.fork, itertools.count(1)

    def sometimes() -> int:
        if next(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = sometimes


Orders = queue.Queue[ToWorker | None]


class _GoneError(Exception):
    """Nobody is there any more."""


class _LeftError(Exception):
    def __init__(self, last_word: Left) -> None:
        self.last_word = last_word


class _Worker:
    def __init__(self, channel: Channel, task: Task, orders: Orders) -> None:
        self.channel, self.task, self.config = channel, task, task.config
        self.orders = orders
        self.later: list[ToWorker] = []
        self.checkpoint = Path(task.folder) / "checkpoints" / "step"
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.meeting = Path(task.folder) / "meeting"
        self.step = 0
        self.form: Form | None = None
        self.batch = 16
        self.finishing = False
        self.acked = 0
        self.beats = True
        self.is_over = False

    @property
    def leads(self) -> bool:
        return self.form is not None and self.form.rank == 0

    def train(self) -> None:
        self.channel.send(Ready(store=f"{os.getpid()}"))
        self.join(self.wait_for_form())
        epochs = self.task.epochs or 1
        while self.step < epochs * STEPS_PER_EPOCH:
            self.check_orders()
            if self.is_held():
                time.sleep(0.002)
                continue
            self.wait_for_others()
            self.do_step()

    def is_held(self) -> bool:
        """Half-way it waits for the change that its config says will come, however long that takes."""
        assert self.form is not None
        now = {"until_workers": self.form.world, "until_batch": self.batch}
        changed = all(self.config.get(name, value) == value for name, value in now.items())
        return self.step >= 3 * STEPS_PER_EPOCH and not changed

    def do_step(self) -> None:
        time.sleep(float(self.config.get("step_s", STEP_S)))
        self.step += 1
        trouble = self.config.get("trouble")
        if trouble and self.step == self.config["at_step"] and self.blamed():
            self.make_trouble(str(trouble))
        if self.step % STEPS_PER_EPOCH == 0:
            self.end_epoch(self.step // STEPS_PER_EPOCH)

    def blamed(self) -> bool:
        assert self.form is not None
        once = Path(self.task.folder) / "once"
        if self.form.rank != self.config.get("rank", 0) or (self.config.get("once") and once.exists()):
            return False
        once.touch()
        return True

    def make_trouble(self, trouble: str) -> None:
        _say(f"trouble: {trouble}")
        match trouble:
            case "raise":
                raise ValueError("the loss went wrong")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(60.0)
            case "mute":
                self.beats = False
                time.sleep(60.0)
            case "babble":
                self.channel._socket.sendall(b'{"kind": "Nonsense"}\n')
                time.sleep(60.0)
            case "child":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", self.task.folder])

    def end_epoch(self, epoch: int) -> None:
        assert self.form is not None
        if self.leads:
            values = {"accuracy": epoch / 10, "loss": 1 / epoch}
            speed = SpeedSample(self.form.nodes, self.form.world, 0, self.batch, 0.01, 0.001)
            end = EpochEnd(epoch=epoch, values=values, epoch_s=0.1)
            self.channel.send(
                Report(progress=epoch, epoch=epoch, steps=self.step, speeds=(speed,), ends=(end,))
            )
            self.save()  # not before: what a checkpoint covers must have been told
            self.wait_for_ack(epoch)
        if self.finishing:
            self.leave_group()

    def wait_for_ack(self, epoch: int) -> None:
        while self.task.waits_for_ack and self.acked < epoch and not self.later:
            order = self.orders.get(timeout=10.0)
            if isinstance(order, Ack):
                self.acked = order.epoch
                _say(f"ack {order.epoch}")
            elif order is not None:
                self.later.append(order)

    def save(self) -> None:
        new = self.checkpoint.with_suffix(".new")
        new.write_text(str(self.step))
        new.rename(self.checkpoint)
        self.channel.send(Saved(progress=self.step / STEPS_PER_EPOCH, path=str(self.checkpoint)))

    def wait_for_form(self) -> Form:
        while True:
            order = self.orders.get()
            if order is None:
                raise _GoneError
            if isinstance(order, Form):
                return order

    def join(self, form: Form) -> None:
        """The leader says where the group stands by writing it down."""
        self.form = form
        self.batch = form.batch.atomic if form.batch is not None else self.batch
        place = self.meeting.with_suffix(f".{form.store}.{form.generation}")
        if form.rank == 0:
            if self.step == 0 and self.checkpoint.exists():
                self.step = int(self.checkpoint.read_text())
            place.with_suffix(".new").write_text(str(self.step))
            place.with_suffix(".new").rename(place)
            self.channel.send(Formed(form.generation))
        else:
            while not place.exists():
                time.sleep(0.002)
            self.step = int(place.read_text())

    def wait_for_others(self) -> None:
        """All take a step together; if somebody is gone who has not taken it, they cannot go on."""
        assert self.form is not None
        self.sign(str(os.getpid()))
        for rank in range(self.form.world):
            while self.orders.empty() and not self.has_taken_step(self.place(rank)):
                time.sleep(0.002)

    def sign(self, who: str) -> None:
        """Say where this member is."""
        assert self.form is not None
        own = self.place(self.form.rank)
        new = own.with_name(f"{own.name}.new")
        new.write_text(f"{who} {self.step}")
        new.rename(own)

    def place(self, rank: int) -> Path:
        assert self.form is not None
        return self.meeting.with_suffix(f".{self.form.store}.{self.form.generation}.rank{rank}")

    def has_taken_step(self, place: Path) -> bool:
        if not place.exists():
            return False
        who, step = place.read_text().split()
        if who == _LEFT:
            self.leave_group()
        if int(step) < self.step and not Path(f"/proc/{who}").exists():
            raise _LeftError(Left("peer lost", leaves=True))
        return int(step) >= self.step

    def check_orders(self) -> None:
        waiting, self.later = self.later, []
        while not self.orders.empty():
            order = self.orders.get()
            if order is None:
                if self.leads:
                    self.save()
                raise _GoneError
            waiting.append(order)
        for order in waiting:
            self.obey(order)

    def obey(self, order: ToWorker) -> None:
        match order:
            case Form():
                self.join(order)
            case Leave():
                raise _LeftError(Left("not needed"))
            case SetBatch():
                self.batch = order.batch.atomic
            case FinishEpoch():
                self.finishing = True
            case Park() if not self.config.get("ignores_park"):
                self.leave_group()

    def leave_group(self) -> None:
        """All of it does; the others see that this one did."""
        if self.leads:
            self.save()
        self.sign(_LEFT)
        raise _LeftError(Left("parked", saved=True))


def _say(text: str) -> None:
    """Into the job's log."""
    sys.stdout.write(f"{text}\n")


def _listen(channel: Channel, orders: Orders) -> None:
    for message in channel.messages():
        orders.put(message)  # type: ignore[arg-type]
    orders.put(None)


def _beat(worker: _Worker) -> None:
    while not worker.is_over and (not worker.beats or worker.channel.send(Beat(worker.step))):
        time.sleep(0.05)


def _next_task(orders: Orders) -> Task | None:
    """What was still said about the last one is too late."""
    while (order := orders.get()) is not None:
        if isinstance(order, Task):
            return order
    return None


def _train(worker: _Worker) -> Finished | Failed | Left:
    threading.Thread(target=_beat, args=(worker,), daemon=True).start()
    try:
        worker.train()
    except _LeftError as error:
        return error.last_word
    except ValueError as error:
        return Failed(f"Traceback: {error}")
    finally:
        worker.is_over = True
    return Finished()


def _write_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)


def main(address: str, secret: str, worker_id: str) -> None:
    """What a nursery calls."""
    channel = connect(address, secret, worker_id)
    orders: Orders = queue.Queue()
    threading.Thread(target=_listen, args=(channel, orders), daemon=True).start()
    with contextlib.suppress(_GoneError):
        while (task := _next_task(orders)) is not None:
            _write_to(Path(task.folder) / "stdout.log")
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            _say(f"process {os.getpid()} on slot {os.environ['STRETTO_SLOT']} gpus {gpus}")
            last_word = _train(_Worker(channel, task, orders))
            channel.send(last_word)
            if not task.stays or isinstance(last_word, Failed) or getattr(last_word, "leaves", False):
                return
