"""When in a loop optimizers step, and so where a newcomer may join.

Code that steps with every batch can be joined anywhere. Code that accumulates gradients by hand,

    for i, (x, y) in enumerate(loader):
        (loss_of(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()

counts its batches, and a newcomer's count begins at 0. It would step at other moments than its peers, unless
it joins where the pattern of steps begins anew. So the pattern is learnt: it is what came twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LONGEST = 1024
"""Batches without a pattern, after which there is none."""
_RECOVERY = 16
"""Steps in a row, after which a batch without one was an exception."""
_NOWHERE = (-1, -1)


class StepPattern:
    """Beats, one for each batch: which optimizers were told to step, as the bits of a number."""

    def __init__(self) -> None:
        self.count = 0
        """Beats since the pattern began to be looked for."""
        self.pattern: list[int] = []
        """What repeats; empty while that is not known."""
        self.is_broken = False
        """There was a pattern, or time enough to see one, and it did not hold."""
        self._beats: list[int] = []
        self._streak = 0

    @property
    def begins_anew(self) -> bool:
        return bool(self.pattern) and self.count % len(self.pattern) == 0

    @property
    def is_plain(self) -> bool:
        """Every batch is a step."""
        return len(self.pattern) == 1

    def beat(self, steps: int, needed: int) -> None:
        """A batch is done. A pattern has all `needed` optimizers in it, or something is still to come."""
        self.count += 1
        if self.pattern:
            if steps != self.pattern[(self.count - 1) % len(self.pattern)]:
                self.pattern, self.is_broken = [], True
        elif self.is_broken:
            self._streak = self._streak + 1 if steps & needed == needed else 0
            if self._streak >= _RECOVERY:
                self.pattern, self._streak = [steps], 0
        else:
            self._beats.append(steps)
            self._look(needed)

    def _look(self, needed: int) -> None:
        half, odd = divmod(len(self._beats), 2)
        first, there = self._beats[:half], 0
        for steps in first:
            there |= steps
        if not odd and there & needed == needed and first == self._beats[half:]:
            self.pattern, self._beats = first, []
        elif len(self._beats) >= _LONGEST:
            self._beats, self.is_broken = [], True

    def state(self) -> list[Any]:
        return [self.count, list(self.pattern), self.is_broken, list(self._beats), self._streak]

    def restore(self, state: list[Any]) -> None:
        self.count, self.pattern, self.is_broken, self._beats, self._streak = state


class StepPatterns:
    """The rhythm of the present loop, whose index begins at 0, and that of the run, for other counters."""

    def __init__(self) -> None:
        self._run, self._loop = StepPattern(), StepPattern()
        self._at: list[int] = [-1, -1]
        """The epoch and the number of the present loop."""
        self._steps_of: dict[int, int] = {}
        """Which optimizers step in an epoch's loops, as seen in the last one that came to its end."""
        self._ends_evenly: dict[int, bool] = {}
        """Whether the pattern held to the end of that one."""
        self._stepped = 0
        """The optimizers that stepped in the present loop."""
        self._is_idle = True
        """Nothing was trained in the present loop."""
        self.length_asked_in: tuple[int, int] = _NOWHERE
        """The loop in which this worker's code asked for the loader's length last: its epoch and number."""
        self._agreed_length_asked_in: tuple[int, int] = _NOWHERE
        """The same of rank 0, as all workers know it. Such code may step with the last batch."""
        self.always_steps = True
        """Every batch so far was a step of every optimizer, or nothing was trained."""
        self._usual: int | None = None
        """What steps with every batch, once that is known: most code is of this kind."""

    def begin(self, epoch: int, loop: int) -> None:
        """A loop begins, unless it is the one that a newcomer joins."""
        if self._at == [epoch, loop]:
            return
        self._at = [epoch, loop]
        self._loop, self._usual = StepPattern(), None
        self._stepped, self._is_idle = 0, True

    def beat(self, steps: int, optimizers: int, *, waits: bool, asked_length: bool) -> None:
        """A batch is done: which optimizers stepped, of how many, and whether gradients wait for a step."""
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
        self._loop.beat(steps, self._steps_of.get(self._at[1]) or everyone)
        self._run.beat(steps, everyone)
        plain = self._loop.is_plain and self._run.is_plain and self.always_steps
        self._usual = steps if plain else None

    def agree(self, length_asked_in: tuple[int, int]) -> None:
        """Rank 0's `asked_in`: only what all workers know may decide where somebody joins."""
        self._agreed_length_asked_in = length_asked_in

    @property
    def _here(self) -> tuple[int, int]:
        return self._at[0], self._at[1]

    @property
    def _asks(self) -> bool:
        return self._agreed_length_asked_in == self._here

    def end(self) -> None:
        """The loop came to its end."""
        self._steps_of[self._at[1]] = self._stepped
        self._ends_evenly[self._at[1]] = bool(self._loop.pattern)

    @property
    def may_save(self) -> bool:
        """Whether somebody who goes on from here later does so as if nothing had happened.

        Of a loop that only looks at data, what it has added up so far would be lost.
        """
        return self.always_steps and not self._is_idle

    def may_join(self, batches: Callable[[], int]) -> bool:
        """Whether a newcomer may join here, amid a loop of so many batches."""
        if self._is_idle:
            return False
        if self._loop.is_plain:
            return True
        if self._run.pattern and (self._run.is_plain or self._run.count > self._loop.count):
            return self._run.begins_anew
        if not self._loop.begins_anew:
            return False
        # Code may step with the last batch, too, of which a newcomer could not tell that it is the last.
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
