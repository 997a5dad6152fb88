"""What a policy decides, as data, with the reason for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Wish


class ReasonCode(StrEnum):
    """Why a job's allocation is what it is."""

    STARTED = "started"
    GREW = "grew"
    SHRANK = "shrank"
    MOVED = "moved"
    PREEMPTED = "preempted"
    WAITS = "waits"
    KEPT = "kept"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Reason:
    """An enumerated code, and a sentence with the numbers that decided."""

    code: ReasonCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who gets what from now on. A job that is not in `allocations` gets nothing."""

    allocations: Mapping[str, Allocation]
    batches: Mapping[str, BatchChoice] = field(default_factory=dict)
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """For every job whose allocation changes or that is stopped, and for every job that waits."""
    stops: frozenset[str] = frozenset()
    """Jobs that are over before their end: nothing more is expected of them."""
    wish: Wish | None = None
    """The cluster that is wanted; None: as it is."""
    wake_at_s: float | None = None
    """Ask again at this time, whatever else happens."""
    objective: float | None = None
    """What the policy maximised, where it has such a number."""
