"""What Pollux says of a job that waits, and of a change of batch."""

from __future__ import annotations

from stretto.core.job import Tier
from stretto.core.units import counted
from stretto.policies.base import JobView

EXACT_FROM = 100.0
"""Goodput from which whole examples a second are exact enough."""


def why_waits(job: JobView, gpus: int, fair_gpus: int) -> str:
    """The sentence for a job that holds nothing, in words that stay the same while it waits."""
    least = job.job.worker.requested if job.job.tier is Tier.RIGID else job.job.worker.min
    if least > gpus:
        return f"needs {counted(least, 'slot')}, the cluster has {gpus}"
    return f"others gain more; a fair share is {counted(fair_gpus, 'slot')}"


def why_batch(old_goodput: float, new_goodput: float) -> str:
    """The sentence for a job that keeps its slots and gets another batch."""
    gain = new_goodput / old_goodput - 1.0
    new, old = _per_s(new_goodput), _per_s(old_goodput)
    return f"its new batch has a goodput of {new} examples/s, the old one {old} ({gain:+.0%})"


def _per_s(goodput: float) -> str:
    return f"{goodput:,.0f}" if goodput >= EXACT_FROM else f"{goodput:.3g}"
