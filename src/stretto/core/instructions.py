"""The controller's instructions to a substrate.

Instructions are numbered, and carrying one out twice changes nothing. So a controller that was killed can
repeat the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stretto.core.allocation import Allocation, BatchChoice


class Action(StrEnum):
    START = "start"
    """Start, or continue from the last checkpoint, with this allocation."""
    RESIZE = "resize"
    """Change to this allocation: resize in place if the job can, otherwise restart it."""
    PARK = "park"
    """Save a checkpoint and give everything back; the job will start again later."""
    STOP = "stop"
    """End the job and give everything back."""
    SET_BATCH = "set-batch"
    """Change the batch size in place."""


@dataclass(frozen=True, slots=True)
class Instruction:
    number: int
    action: Action
    job_id: str
    allocation: Allocation
    batch: BatchChoice
