"""Launches a node to measure a training on, if there is none yet, and releases it afterwards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, NodeAdded, NodeRefused
from stretto.core.units import format_duration
from stretto.driving.request import CheckedStudy
from stretto.driving.stop import Stop, listening
from stretto.driving.target import OpenTarget
from stretto.inputs.profile import MeasuredProfile, ProbedNode
from stretto.journal.folds.cost import CostMeter
from stretto.pricing.instances import Instance, Offer
from stretto.profiling.probe_data import OnProgress, ProbeProgress
from stretto.substrate.fleet.provision import NodeFleet
from stretto.system.identity import RunLock

PURPOSE = "probe"
LOOK_S = 0.2
ELSEWHERE = (
    "Or let a node join, or measure elsewhere with `stretto profile`, and write "
    '[profile] file = "profile.json" in the study.'
)

Measure = Callable[[OpenTarget, tuple[Node, ...], float], MeasuredProfile]
"""Measures on nodes of a target; the number is the time before the deadline to keep for starting nodes."""


def instance_to_probe(offer: Offer) -> Instance:
    """The instance to measure on: the first type of the speed that profiles refer to."""
    return next((one for one in offer.instances if one.speed == 1.0), offer.instances[0])


def on_launched_node(
    checked: CheckedStudy, target: OpenTarget, measure: Measure, on_progress: OnProgress
) -> MeasuredProfile:
    """Launches one node of the study, measures there, and releases it.

    The nodes of the study will take as long to start, so that time is kept before the deadline.
    """
    rented, left_s = checked.outline.rented, checked.left_s(time.monotonic())
    assert rented is not None
    with ExitStack() as last:
        # This also ends what a killed probe has left, so no other process may measure meanwhile.
        last.callback(RunLock(checked.folder.path / "lock", patience_s=0.0).release)
        fleet = target.fleet(checked.folder, PURPOSE)
        assert fleet is not None
        node = last.enter_context(
            lent_node(
                fleet,
                rented.offer,
                within_s=rented.nodes.start_s if left_s is None else min(rented.nodes.start_s, left_s),
                on_progress=on_progress,
            )
        )
        there = target.look_again()
        left_s, deadline_s = checked.left_s(time.monotonic()), checked.limits.deadline_s
        if left_s is not None and deadline_s is not None and left_s <= node.start_s:
            raise InputError(
                f"the deadline of {format_duration(deadline_s)} leaves no time to measure: "
                f"a {node.instance.name} takes {format_duration(node.start_s)} to start.",
                remedy="Give a later one; with a [profile] nothing has to be measured.",
            )
        # Other runs may have nodes there; those of the autoscaler have other names and belong to one run.
        lent = tuple(one for one in there.nodes if one.id == node.added.node.id) or there.nodes
        measured = measure(there, lent, node.start_s)
    return dataclasses.replace(measured, node=node.told(measured.loading_s))


@dataclass(slots=True)
class LentNode:
    """The launched node and its cost."""

    instance: Instance
    added: NodeAdded
    cost_usd: float = 0.0
    """Known once it was released."""

    @property
    def start_s(self) -> float:
        return self.added.queue_s + self.added.init_s

    def told(self, loading_s: float) -> ProbedNode:
        """What the profile keeps of the node. Its start-up includes loading the training code."""
        return ProbedNode(
            instance=self.instance.name,
            queue_s=self.added.queue_s,
            init_s=self.added.init_s + loading_s,
            cost_usd=self.cost_usd,
        )


@contextmanager
def lent_node(
    fleet: NodeFleet,
    offer: Offer,
    *,
    within_s: float,
    on_progress: OnProgress = lambda _: None,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LentNode]:
    """A node of a fleet of its own, released however the block ends, also by a signal."""
    instance, begun_s = instance_to_probe(offer), now_s()
    meter = CostMeter(offer.instances, offer.billing)
    stop = Stop()
    stop.impatient = True
    with ExitStack() as last:
        last.enter_context(listening(stop))
        last.callback(fleet.close)
        on_progress(ProbeProgress(0.0, within_s, f"waiting for a {instance.name}, launched for this"))
        told: list[Event] = [*fleet.provision(Wish(((instance.name, 1),)), 0.0)]
        while (added := _come(told, instance, within_s, now_s() - begun_s)) is None:
            sleep(LOOK_S)
            told += fleet.look(now_s() - begun_s)
        for event in told:
            meter.observe(event)
        node = LentNode(instance, added)
        yield node
    node.cost_usd = meter.cost_usd(now_s() - begun_s)


def _come(told: list[Event], instance: Instance, within_s: float, gone_s: float) -> NodeAdded | None:
    for event in told:
        if isinstance(event, NodeRefused):
            raise InputError(
                f"no {instance.name} was launched to measure on: {event.why}.",
                remedy=f"Fix what launches it. {ELSEWHERE}",
            )
    if gone_s >= within_s:
        raise InputError(
            f"no {instance.name} to measure on was there after {format_duration(within_s)}.",
            remedy=f"Give it more time: a later deadline, or start_timeout in [ray]. {ELSEWHERE}",
        )
    return next((e for e in told if isinstance(e, NodeAdded) and e.node.instance == instance.name), None)
