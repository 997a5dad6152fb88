"""In which batches optimizers step, and so where a new worker may join.

A new worker can join code that steps with every batch at any time. Code that accumulates gradients by hand,

    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()

counts its batches, but a new worker's count begins at 0. It steps with the same batches as its peers only if
it joins where the pattern of steps begins again. We learn this pattern: a sequence seen twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LONGEST = 1024
"""After this many batches without a pattern we stop searching."""
_RECOVERY = 16
"""After this many steps in a row, an earlier batch without a step counts as an exception."""
_NOWHERE = (-1, -1)


class StepPattern:
    """The repeating pattern of steps. A batch is a number whose bits say which optimizers stepped."""

    def __init__(self) -> None:
        self.count = 0
        """Batches recorded."""
        self.pattern: list[int] = []
        """The repeating sequence; empty while unknown."""
        self.is_broken = False
        """Whether a pattern failed to hold, or none was found in time."""
        self._batches: list[int] = []
        self._streak = 0

    @property
    def begins_anew(self) -> bool:
        return bool(self.pattern) and self.count % len(self.pattern) == 0

    @property
    def is_plain(self) -> bool:
        """Whether every batch has the same steps."""
        return len(self.pattern) == 1

    def record(self, steps: int, needed: int) -> None:
        """Record a batch. In a pattern, each of the `needed` optimizers steps at least once."""
        self.count += 1
        if self.pattern:
            if steps != self.pattern[(self.count - 1) % len(self.pattern)]:
                self.pattern, self.is_broken = [], True
        elif self.is_broken:
            self._streak = self._streak + 1 if steps & needed == needed else 0
            if self._streak >= _RECOVERY:
                self.pattern, self._streak = [steps], 0
        else:
            self._batches.append(steps)
            self._look(needed)

    def _look(self, needed: int) -> None:
        half, odd = divmod(len(self._batches), 2)
        first, there = self._batches[:half], 0
        for steps in first:
            there |= steps
        if not odd and there & needed == needed and first == self._batches[half:]:
            self.pattern, self._batches = first, []
        elif len(self._batches) >= _LONGEST:
            self._batches, self.is_broken = [], True

    def state(self) -> list[Any]:
        return [self.count, list(self.pattern), self.is_broken, list(self._batches), self._streak]

    def restore(self, state: list[Any]) -> None:
        self.count, self.pattern, self.is_broken, self._batches, self._streak = state


class StepPatterns:
    """Two patterns: of the current loop, for its own index, and of the run, for counters over all loops."""

    def __init__(self) -> None:
        self._run, self._loop = StepPattern(), StepPattern()
        self._at: list[int] = [-1, -1]
        """The epoch and the number of the current loop."""
        self._steps_of: dict[int, int] = {}
        """For each loop of an epoch, which optimizers stepped when it last ran to its end."""
        self._ends_evenly: dict[int, bool] = {}
        """Whether the pattern held until the end then."""
        self._stepped = 0
        """The optimizers that stepped in the current loop."""
        self._is_idle = True
        """Whether nothing was trained in the current loop."""
        self.length_asked_in: tuple[int, int] = _NOWHERE
        """The epoch and number of the loop in which this worker's code last called len(loader)."""
        self._agreed_length_asked_in: tuple[int, int] = _NOWHERE
        """The same of rank 0, known to all workers. Such code may step with the last batch."""
        self.always_steps = True
        """Whether every optimizer has stepped with every batch so far."""
        self._usual: int | None = None
        """The optimizers that step with every batch, once known; a shortcut, as most code is of this kind."""

    def begin(self, epoch: int, loop: int) -> None:
        """A loop begins, or a new worker joins the current one."""
        if self._at == [epoch, loop]:
            return
        self._at = [epoch, loop]
        self._loop, self._usual = StepPattern(), None
        self._stepped, self._is_idle = 0, True

    def record(self, steps: int, optimizers: int, *, waits: bool, asked_length: bool) -> None:
        """Record a batch: which of the `optimizers` stepped, and whether gradients wait for a later step."""
        if asked_length:
            self.length_asked_in = self._here
        if steps == self._usual:
            self._loop.count += 1
            self._run.count += 1
            return
        if not steps and not waits and self._is_idle:
            return
        everyone = (1 << optimizers) - 1
        self._is_idle = False
        self._stepped |= steps
        self.always_steps &= steps == everyone
        self._loop.record(steps, self._steps_of.get(self._at[1]) or everyone)
        self._run.record(steps, everyone)
        plain = self._loop.is_plain and self._run.is_plain and self.always_steps
        self._usual = steps if plain else None

    def agree(self, length_asked_in: tuple[int, int]) -> None:
        """Take over rank 0's `length_asked_in`: all workers must decide alike where a new worker joins."""
        self._agreed_length_asked_in = length_asked_in

    @property
    def _here(self) -> tuple[int, int]:
        return self._at[0], self._at[1]

    @property
    def _asks(self) -> bool:
        return self._agreed_length_asked_in == self._here

    def end(self) -> None:
        """The loop ran to its end."""
        self._steps_of[self._at[1]] = self._stepped
        self._ends_evenly[self._at[1]] = bool(self._loop.pattern)

    @property
    def may_save(self) -> bool:
        """Whether a run can resume from here without a loss.

        In a loop that only evaluates, what the code has summed up so far would be lost.
        """
        return self.always_steps and not self._is_idle

    def may_join(self, batches: Callable[[], int]) -> bool:
        """Whether a new worker may join here, within a loop of `batches()` batches."""
        if self._is_idle:
            return False
        if self._loop.is_plain:
            return True
        if self._run.pattern and (self._run.is_plain or self._run.count > self._loop.count):
            return self._run.begins_anew
        if not self._loop.begins_anew:
            return False
        # Code may step with the last batch, too, but a new worker would not recognise the last batch.

        even = batches() % len(self._loop.pattern) == 0
        return even or self._asks or self._ends_evenly.get(self._at[1], False)

    @property
    def may_join_between_epochs(self) -> bool:
        return self.always_steps or self._run.is_broken or self._run.begins_anew

    def state(self) -> dict[str, Any]:
        return {
            "run": self._run.state(),
            "loop": self._loop.state(),
            "at": list(self._at),
            "steps_of": dict(self._steps_of),
            "ends_evenly": dict(self._ends_evenly),
            "flags": [self._stepped, self._is_idle, self._asks, self.always_steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._usual = None
        self._run.restore(state["run"])
        self._loop.restore(state["loop"])
        self._at = list(state["at"])
        self._steps_of, self._ends_evenly = dict(state["steps_of"]), dict(state["ends_evenly"])
        self._stepped, self._is_idle, asks, self.always_steps = state["flags"]
        self.length_asked_in = self._agreed_length_asked_in = self._here if asks else _NOWHERE
