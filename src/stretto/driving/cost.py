"""What a real run costs: nodes that are rented by their type, nodes of one's own by their slots."""

from __future__ import annotations

from dataclasses import replace

from stretto.core.cluster import Node
from stretto.core.events import Event, NodeAdded, RunStarted
from stretto.inputs.cluster import MOST_SLOTS, OWN_MACHINE, Offer, node_type, type_name
from stretto.inputs.profile import spent_usd
from stretto.planning.profile import Profile
from stretto.planning.tuning import Tuning
from stretto.pricing.instances import Instance
from stretto.pricing.meter import CostMeter
from stretto.runs.folder import RunFolder, Tables

STOPPING_S = (2.0, 15.0)
"""What it is expected to take to save all trials and end: at least, and at most."""


class RunMeter(CostMeter):
    """Counts the money of a run."""

    def __init__(self, offer: Offer | Tuning, usd_per_slot_hour: float) -> None:
        super().__init__(priced_types(offer, usd_per_slot_hour), offer.billing)

    def observe(self, event: Event) -> None:
        """Take note of what happened."""
        super().observe(as_billed(event))


def own_meter(usd_per_slot_hour: float) -> RunMeter:
    """For a run that rents nothing."""
    return RunMeter(Offer(instances=(), max_nodes=0, billing=OWN_MACHINE), usd_per_slot_hour)


def measuring_usd(folder: RunFolder, study: Tables) -> float:
    """What it cost to measure a study's speed, by the tables of its file: those with a [profile] did not."""
    return 0.0 if "profile" in study else spent_usd(folder.profile)


def left_usd(budget_usd: float | None, spent_usd: float) -> float | None:
    """What is left of a budget; None is no limit."""
    return None if budget_usd is None else budget_usd - spent_usd


def stopping_s(profile: Profile) -> float:
    """How long stopping a run is expected to take, which a budget must pay for, too.

    A trial is started again once it was saved, so that a start takes no less than saving does.
    """
    least_s, most_s = STOPPING_S
    return min(max(profile.start_s, least_s), most_s)


def priced_types(offer: Offer | Tuning, usd_per_slot_hour: float) -> tuple[Instance, ...]:
    """Every type that a node of a run may be of once it is billed."""
    own = {type_name(slots): node_type(slots, usd_per_slot_hour) for slots in range(1, MOST_SLOTS + 1)}
    return tuple({**own, **{instance.name: instance for instance in offer.instances}}.values())


def as_billed(event: Event) -> Event:
    """A node that is simply there, as one of the type that its slots make it."""
    match event:
        case RunStarted():
            return replace(event, nodes=tuple(_billed(node) for node in event.nodes))
        case NodeAdded():
            return replace(event, node=_billed(event.node))
        case _:
            return event


def _billed(node: Node) -> Node:
    return node if node.instance else replace(node, instance=type_name(node.gpus))
