"""What can be rented: instance types and their prices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A type of node that can be rented by the hour."""

    name: str
    gpus: int
    usd_per_hour: float
    gpu_type: str = ""
    speed: float = 1.0
    """Speed of one of its GPUs relative to the one the profile was measured on."""
    own: bool = False
    """Part of one's own machines: it costs while a run has it, and a run that was killed has nothing."""
