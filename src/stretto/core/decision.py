"""A policy's decision as data, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Wish


class ReasonCode(StrEnum):
    """What happens to a job in a decision."""

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
    """Why a job's allocation is what it is: a code, and a sentence with the deciding numbers."""

    code: ReasonCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What each job gets from now on. A job that is not in `allocations` gets nothing."""

    allocations: Mapping[str, Allocation]
    batches: Mapping[str, BatchChoice] = field(default_factory=dict)
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """A reason for every job that changes, stops or waits."""
    stops: frozenset[str] = frozenset()
    """Jobs to end now, before they are complete."""
    wish: Wish | None = None
    """The requested cluster; None: as it is."""
    wake_at_s: float | None = None
    """Decide again at this time, whatever else happens."""
    objective: float | None = None
    """The value that the policy maximised, if it has one."""
