"""Asked to stop by Ctrl-C or SIGTERM: the first time cleanly, the second time at once; and who then saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether somebody asked. May be asked from a signal handler or from any thread."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.impatient = False
        """The next signal interrupts whatever is going on: nothing is looking at this flag now."""

    def __call__(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Stop cleanly at the next occasion."""
        self._asked.set()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """What a signal does; the second one raises KeyboardInterrupt."""
        del number, frame
        if self._asked.is_set() or self.impatient:
            self._asked.set()
            raise KeyboardInterrupt
        self._asked.set()


def _heard() -> list[signal.Signals]:
    """Signals that are not ignored, and whose handler Python can put back."""
    return [number for number in SIGNALS if signal.getsignal(number) not in {signal.SIG_IGN, None}]


@contextmanager
def listening(stop: Stop) -> Iterator[None]:
    """Signals ask `stop` while the block runs, but for those that are ignored, as under nohup.

    Outside the main thread Python training over none.
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
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does, wherever nothing in it listens for them."""

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
    """For who calls from Python: a request to stop is obeyed first, and then interrupts the caller, too."""
    stop = Stop()
    yield stop
    if stop():
        raise KeyboardInterrupt
