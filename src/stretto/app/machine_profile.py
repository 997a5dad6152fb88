"""What is believed of trials that run on the machine where they were probed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stretto.planning.learning import LatencyPosterior
from stretto.planning.profile import Profile

PACE_SD = 0.065
"""How much a machine's pace differs from what it was during a probe, relative to it.
`benchmarks/prediction.py --calibrate` measures it on other studies than the benchmark reports on: 0.05 at one
time, 0.08 at another, but 0.28 of a network whose epochs take milliseconds."""
CROWD_SD = 0.2
"""How much epochs beside busy neighbours differ from those of a worker that had the machine to itself, where
only these were timed, relative to them. Chosen by hand."""
LONE_CHANCE = 1.08
"""By so much some seconds of training differ from the next ones, whoever trains beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile(Profile):
    """Of trials that run where they were probed: all slots busy, and what changes when few of them are."""

    slots: int
    lone_epoch: float
    """Time of an epoch while the other slots are idle, relative to when they are busy."""
    lone_start_s: float
    gang_start_s: float
    """What a start or resize to several workers costs."""

    def epoch_factor(self, busy: int) -> float:
        """Time of an epoch while so many slots are busy, relative to all of them: linear in between."""
        return self.lone_epoch + (1.0 - self.lone_epoch) * self._crowding(busy)

    def start_s_at(self, busy: int, workers: int = 1) -> float:
        """What a start of so many workers costs while so many slots are busy."""
        if workers > 1:
            return self.gang_start_s
        return self.lone_start_s + (self.start_s - self.lone_start_s) * self._crowding(busy)

    def _crowding(self, busy: int) -> float:
        return (min(busy, self.slots) - 1) / (self.slots - 1) if self.slots > 1 else 1.0


def beyond_chance(ratio: float) -> float:
    """Of time alone to time in company, what is not chance; idle neighbours slow nobody down."""
    return min(ratio * LONE_CHANCE, 1.0)


def at_another_time(
    latency: LatencyPosterior, rng: np.random.Generator, *, crowded: bool = False
) -> LatencyPosterior:
    """The same machine later: one factor of mean 1 for all that runs on it, exp(s z - s^2 / 2).

    `crowded`: by then it is busier than it was, too.
    """
    draws, sd = latency.draws, float(np.hypot(PACE_SD, CROWD_SD)) if crowded else PACE_SD
    normal = rng.standard_normal(len(draws.epoch_s))
    later_s = draws.epoch_s * np.exp(sd * normal - sd**2 / 2.0)
    return LatencyPosterior(replace(draws, epoch_s=later_s))
