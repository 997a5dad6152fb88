"""What the controller tells a substrate to do.

Instructions are numbered in the order they are given and carrying one out twice changes nothing, so
that a controller that was killed may repeat the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stretto.core.allocation import Allocation, BatchChoice


class Action(StrEnum):
    START = "start"
    """Begin, or go on from the last checkpoint, with this allocation."""
    RESIZE = "resize"
    """Go from the present allocation to this one; one step with a cost of its own, not a stop and a start."""
    PARK = "park"
    """Save the state and give everything back; the job will be started again."""
    STOP = "stop"
    """Give everything back for good."""
    SET_BATCH = "set-batch"
    """Change the batch size in place."""


@dataclass(frozen=True, slots=True)
class Instruction:
    number: int
    action: Action
    job_id: str
    allocation: Allocation
    batch: BatchChoice
