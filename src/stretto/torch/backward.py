"""The end of a backward pass, which all optimizers' gradients share.

Workers must exchange in one order, whatever order their gradients come in: so the optimizers take turns in
the order in which they were prepared, and only the first may begin before the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_NONE = -1


class Participant(Protocol):
    """Whoever waits for gradients."""

    @property
    def has_gradients(self) -> bool:
        """Whether some came since the last `collect`."""

    def launch(self) -> None:
        """No more gradients come: start what was not started yet."""

    def collect(self) -> None:
        """Wait for what was started."""


class Backward:
    """Tells participants when a backward pass is over, in their order."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._task = _NONE
        self.when_over: Callable[[], None] = _nothing
        """Called when all participants have collected their gradients."""

    def add(self, participant: Participant) -> None:
        self._participants.append(participant)

    def may_begin(self, participant: Participant) -> bool:
        """Whether this one may start before the others' gradients are there."""
        return self._participants[0] is participant

    def gradient_came(self) -> None:
        """To be called for every gradient, while gradients are computed."""
        # A backward pass within another, or after one that broke off, has a number of its own.
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task != self._task:
            self._task = task
            _at_end_of_backward(self._end)

    def _end(self) -> None:
        self._task = _NONE
        there = [one for one in self._participants if one.has_gradients]
        for one in there:
            one.launch()
        for one in there:
            one.collect()
        self.when_over()


def _nothing() -> None:
    """Nobody waits for the end."""


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
