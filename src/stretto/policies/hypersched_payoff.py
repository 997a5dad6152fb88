"""Whether a resize of HyperSched's pays by the deadline, and the words for one that does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.core.units import counted
from stretto.planning.profile import Scaling
from stretto.policies.hypersched_rules import GAIN, ends_more_epochs, resize_gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """What is believed of every resize that could be asked for now."""

    scaling: Scaling
    left_s: float
    startup_s: float
    """How long a trial stands still for a resize."""
    whole_epochs: bool
    """Only epochs that end by the deadline count; else, as published, progress alone."""

    def gain(self, held: int, share: int, *, wait_s: float = 0.0) -> float:
        """Times the progress from `wait_s` to the deadline; without bound for a trial that stands still."""
        if not held:
            return math.inf
        speeds = self.scaling.speedup(held), self.scaling.speedup(share)
        return resize_gain(*speeds, self.left_s - wait_s, self.startup_s)

    def is_worth(self, single_s: float, held: int, share: int, *, wait_s: float = 0.0) -> bool:
        """Whether a trial whose epochs take `single_s` on one GPU should be resized `wait_s` from now."""
        if self.gain(held, share, wait_s=wait_s) <= GAIN:
            return False
        if not self.whole_epochs:
            return True
        epoch_s = single_s / self.scaling.speedup(held) if held else math.inf
        new_epoch_s = single_s / self.scaling.speedup(share)
        return ends_more_epochs(epoch_s, new_epoch_s, self.left_s - wait_s, self.startup_s)

    def why_not(self, held: int, share: int) -> str:
        """Why a trial is not resized, at one of its results."""
        stays = f"Stays on {counted(held, 'slot')}:"
        if share < held and self.scaling.speedup(share) <= self.scaling.speedup(held):
            return f"{stays} no other trial would come further with some of them {self._by_then}."
        resize = f"with {share}, after a resize of {self._startup}, it would"
        if self.gain(held, share) > GAIN:
            return f"{stays} {resize} end no more epochs in the {self.left_s:.0f} s left."
        return f"{stays} {resize} make less than {GAIN:g} times the progress {self._by_then}."

    @property
    def _by_then(self) -> str:
        return "without a deadline" if math.isinf(self.left_s) else "by the deadline"

    @property
    def _startup(self) -> str:
        return f"{self.startup_s:.0f} s" if self.startup_s >= 10.0 else f"{self.startup_s:.2g} s"
