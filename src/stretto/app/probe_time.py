"""How long a study may be measured before it begins, by the time until its deadline."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_S = 90.0
"""The longest that a probe takes, once it trains and an epoch has ended."""
PROBE_SHARE = 1 / 8
"""Of the time until the deadline, at most so much goes to a probe."""
FIRST_EPOCH_S = 600.0
"""Without a deadline, so long the end of a first epoch is waited for."""
LOADING_S = 300.0
"""Training that shows nothing for so long is not waited for; its time is not the probe's."""
LOADING_SHARE = 3 / 4
"""Of the time until the deadline, at most so much goes to waiting for a first sign of training: the run must
load the training code once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTime:
    """What a probe may take."""

    usual_s: float
    """Once it trains."""
    first_epoch_s: float
    """From its start, if no epoch and no step was timed before."""
    loading_s: float = LOADING_S
    """From its start, until anything is heard of it."""


def probe_time(deadline_s: float | None) -> ProbeTime:
    """For a study that has so long until its deadline."""
    if deadline_s is None:
        return ProbeTime(usual_s=PROBE_S, first_epoch_s=FIRST_EPOCH_S)
    share_s = deadline_s * PROBE_SHARE
    return ProbeTime(
        usual_s=min(PROBE_S, share_s),
        first_epoch_s=share_s,
        loading_s=min(LOADING_S, deadline_s * LOADING_SHARE),
    )
