"""Instance types with their prices: the catalogue, your own slots, and the offer that a run trains on.

Prices are of August 2026, in USD an hour: AWS in us-east-1, Google Cloud in us-central1 (host and GPUs
together), Lambda. AWS no longer lists p3 there; its price is the last one, of December 2024. Prices change:
if they matter for a study, give it a price list of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.core.errors import InputError, did_you_mean
from stretto.pricing.billing import Billing

SLOT = "slot"
"""The instance type of a slot of this machine."""

OWN_MACHINE = Billing(minimum_s=0.0)
"""Slots of your own machine are charged by the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A type of node, and its price."""

    name: str
    gpus: int
    usd_per_hour: float
    gpu_type: str = ""
    speed: float = 1.0
    """Speed of one of its GPUs relative to the one the profile was measured on."""
    own: bool = False
    """It is part of your own machines: it costs while a run holds it, and a killed run holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a run can train on: types of nodes, how many at a time, and how they are billed."""

    instances: tuple[Instance, ...]
    max_nodes: int
    billing: Billing = OWN_MACHINE

    @property
    def slots(self) -> int:
        """The largest number of slots at a time."""
        return self.max_nodes * max(instance.gpus for instance in self.instances)


_FIGURES = (
    ("p3.2xlarge", 1, "V100", 3.06),
    ("p3.8xlarge", 4, "V100", 12.24),
    ("p3.16xlarge", 8, "V100", 24.48),
    ("p4d.24xlarge", 8, "A100", 21.957642),
    ("p4de.24xlarge", 8, "A100-80GB", 27.44705),
    ("p5.4xlarge", 1, "H100", 6.88),
    ("p5.48xlarge", 8, "H100", 55.04),
    ("p5en.48xlarge", 8, "H200", 63.296),
    ("p6-b200.48xlarge", 8, "B200", 113.9328),
    ("g4dn.xlarge", 1, "T4", 0.526),
    ("g4dn.12xlarge", 4, "T4", 3.912),
    ("g4dn.metal", 8, "T4", 7.824),
    ("g5.xlarge", 1, "A10G", 1.006),
    ("g5.12xlarge", 4, "A10G", 5.672),
    ("g5.48xlarge", 8, "A10G", 16.288),
    ("g6.xlarge", 1, "L4", 0.8048),
    ("g6.12xlarge", 4, "L4", 4.6016),
    ("g6.48xlarge", 8, "L4", 13.3504),
    ("g6e.xlarge", 1, "L40S", 1.861),
    ("g6e.12xlarge", 4, "L40S", 10.49264),
    ("g6e.48xlarge", 8, "L40S", 30.13118),
    ("a2-highgpu-1g", 1, "A100", 3.67339),
    ("a2-highgpu-4g", 4, "A100", 14.69354),
    ("a2-highgpu-8g", 8, "A100", 29.38708),
    ("a2-ultragpu-8g", 8, "A100-80GB", 40.22162),
    ("a3-highgpu-8g", 8, "H100", 87.83246),
    ("gpu_1x_a10", 1, "A10", 1.29),
    ("gpu_8x_v100", 8, "V100", 6.32),
    ("gpu_8x_a100", 8, "A100", 15.92),
    ("gpu_8x_h100_sxm5", 8, "H100", 31.92),
)

CATALOGUE = tuple(
    Instance(name=name, gpus=gpus, usd_per_hour=usd_per_hour, gpu_type=gpu_type)
    for name, gpus, gpu_type, usd_per_hour in _FIGURES
)


def find_instance(name: str, *, own: Iterable[Instance] = (), where: str = "") -> Instance:
    """The instance type of this name: from your price list, or else from the catalogue."""
    known = {instance.name: instance for instance in (*CATALOGUE, *own)}
    if name in known:
        return known[name]
    meant = did_you_mean(name, known, most=3)
    raise InputError(
        f"there is no price of {name!r}.",
        where=where,
        remedy=f"{meant}Types that are not in the catalogue go into [[cluster.instance]] or a price list.",
    )


def node_type(slots: int, usd_per_slot_hour: float) -> Instance:
    """The type of your own nodes with this many slots."""
    return Instance(name=type_name(slots), gpus=slots, usd_per_hour=slots * usd_per_slot_hour, own=True)


def type_name(slots: int) -> str:
    """The name of that type."""
    return f"{SLOT}s-{slots}"
