"""The true delays of nodes that a simulated cloud launches, and log-normal draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stretto.core.errors import PolicyError
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.planning.profile import SpreadBelief
from stretto.pricing.instances import Instance
from stretto.worlds.curves import Floats


def lognormal(mean: float, sd: float, count: int, rng: np.random.Generator) -> Floats:
    """Log-normal draws with this mean and standard deviation; a mean of 0 is never exceeded.

    exp(N(mu, s^2)) has mean exp(mu + s^2 / 2) and relative variance exp(s^2) - 1.
    """
    if mean == 0.0 or sd == 0.0:
        return np.full(count, mean)
    variance = math.log1p((sd / mean) ** 2)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)


@dataclass(frozen=True, slots=True)
class CloudNode:
    """One node that was requested: its resources and its delays."""

    capacity: Resources
    queue_s: float
    init_s: float


class Cloud(Protocol):
    """Where the nodes of a simulation come from."""

    def launch(self, instance: str, count: int, request: int) -> Sequence[CloudNode]:
        """The nodes for this request, `count` or fewer. The same request number gets the same answer."""


def instance_of(node_id: str) -> str:
    """The type of a rented node, from its id."""
    return node_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalCloud:
    """Launches every requested node, after log-normal delays."""

    instances: tuple[Instance, ...]
    queue_s: SpreadBelief
    """The nodes of a request share one queueing delay .."""
    init_s: SpreadBelief
    """.. and then each draws its own time to initialise."""
    seed: int

    def launch(self, instance: str, count: int, request: int) -> Sequence[CloudNode]:
        kind = next((kind for kind in self.instances if kind.name == instance), None)
        if kind is None:
            there = ", ".join(kind.name for kind in self.instances)
            raise PolicyError(f"a node of type {instance!r} was wished for; there are {there}.")
        queue_rng = child_rng(self.seed, "queue", str(request))
        init_rng = child_rng(self.seed, "init", str(request))
        queue_s = float(lognormal(self.queue_s.mean, self.queue_s.sd, 1, queue_rng)[0])
        inits_s = lognormal(self.init_s.mean, self.init_s.sd, count, init_rng).tolist()
        return [CloudNode(Resources(gpu=kind.gpus), queue_s, init_s) for init_s in inits_s]
