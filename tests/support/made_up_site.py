"""A cluster that is made up: which nodes there are, and what of them a run has, is up to the test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stretto.core.cluster import Node
from stretto.driving.local_target import ThisMachine
from stretto.driving.target import OpenTarget
from stretto.inputs.cluster import slots_offer
from stretto.pricing.instances import Offer
from stretto.runs.folder import RunFolder
from stretto.substrate.fleet.provision import NodeFleet


def _no_fleet(folder: RunFolder, purpose: str) -> NodeFleet | None:
    del folder, purpose
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpCluster(ThisMachine):
    """Its workers are this machine's."""

    there: tuple[Node, ...]
    kept: tuple[Node, ...] = ()
    """What a run has from its start."""
    idle: tuple[Node, ...] = ()
    """What can be measured on."""
    offered: Offer | None = None
    """None: its slots."""
    look: Callable[[], OpenTarget] | None = None
    """What is there when it is looked at again; None: the same."""
    make_fleet: Callable[[RunFolder, str], NodeFleet | None] = _no_fleet

    words = "the cluster"
    mark = " on Ray"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.there

    @property
    def held(self) -> tuple[Node, ...]:
        return self.kept

    @property
    def to_measure_on(self) -> tuple[Node, ...]:
        return self.idle

    @property
    def offer(self) -> Offer:
        return self.offered or slots_offer(self.slots, self.machine)

    def look_again(self) -> OpenTarget:
        return self if self.look is None else self.look()

    def fleet(self, folder: RunFolder, purpose: str = "") -> NodeFleet | None:
        return self.make_fleet(folder, purpose)
