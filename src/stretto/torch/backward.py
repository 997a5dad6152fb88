"""Detects the end of a backward pass and starts the exchange of gradients.

All workers must exchange gradients in the same order, but gradients arrive in any order. So the optimizers
take turns, in the order in which they were prepared. Only the first one may exchange gradients while the
backward pass is still running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_NO_TASK = -1


class Participant(Protocol):
    """Something that waits for gradients."""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients arrived since the last `collect`."""

    def launch(self) -> None:
        """All gradients are there: start the remaining exchanges."""

    def collect(self) -> None:
        """Wait for the exchanges."""


class Backward:
    """Calls the participants, in their order, when a backward pass is over."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._task = _NO_TASK
        self.when_over: Callable[[], None] = lambda: None
        """Called after all participants have collected their gradients."""

    def add(self, participant: Participant) -> None:
        self._participants.append(participant)

    def may_begin(self, participant: Participant) -> bool:
        """Whether this participant may start before the backward pass is over."""
        return self._participants[0] is participant

    def gradient_came(self) -> None:
        """Call this for every gradient during the backward pass."""
        # A nested backward pass, or one after a failed one, has another task id.
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001

    def _end(self) -> None:
        self._task = _NO_TASK
        there = [one for one in self._participants if one.has_gradients]
        for one in there:
            one.launch()
        for one in there:
            one.collect()
        self.when_over()
