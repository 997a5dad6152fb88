"""Requests to stop, by Ctrl-C, SIGTERM or SIGHUP: the first one cleanly, the second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """A request to stop, which signal handlers and any thread may make."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.impatient = False
        """The next signal raises KeyboardInterrupt: nothing looks at this flag now."""

    def __call__(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Asks for a clean stop."""
        self._asked.set()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean stop; the second raises KeyboardInterrupt."""
        del number, frame
        if self._asked.is_set() or self.impatient:
            self._asked.set()
            raise KeyboardInterrupt
        self._asked.set()


def _heard() -> list[signal.Signals]:
    """The signals that are not ignored and whose handler Python can restore."""
    return [number for number in SIGNALS if signal.getsignal(number) not in {signal.SIG_IGN, None}]


@contextmanager
def listening(stop: Stop) -> Iterator[None]:
    """Signals ask `stop` while the block runs, except ignored ones, as under nohup.

    Outside the main thread this does nothing, as Python delivers no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.on_signal) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does, unless something in it listens for them."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in _heard() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupting() -> Iterator[Stop]:
    """For Python callers: after a clean stop, KeyboardInterrupt is raised."""
    stop = Stop()
    yield stop
    if stop():
        raise KeyboardInterrupt
