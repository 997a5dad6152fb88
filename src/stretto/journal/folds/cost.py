"""What a run has cost, as a fold over its events; and its budget as a hard cap."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import (
    Event,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
)
from stretto.core.job import Job
from stretto.core.units import HOUR_S
from stretto.journal.folds.holdings import Holdings
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance, node_type, type_name


@dataclass(slots=True)
class _PaidNode:
    """A node that costs or did cost money."""

    usd_per_s: float
    begin_s: float
    end_s: float | None = None
    own: bool = False


@dataclass(slots=True)
class _Use:
    """What a job holds now: its price, and since when."""

    job: Job
    usd_per_s: float = 0.0
    since_s: float = 0.0


class CostMeter:
    """Adds up what a run costs while its events come in.

    - A node costs from its launch until it is released or lost. A node that is there when the run starts
      costs from then on. Nodes that were refused, or released before they came, cost nothing.
    - A node without an instance type costs `usd_per_slot_hour` for each slot; nothing if that is None.
    - `Per.FUNCTION` charges for the GPU time that jobs hold: a GPU's share of the price of its node. Every
      node is charged for receiving the data set.
    - While a run is paused nothing costs anything. After a kill that holds for your own nodes only: rented
      nodes were still up.
    """

    def __init__(
        self, instances: Iterable[Instance], billing: Billing, usd_per_slot_hour: float | None = None
    ) -> None:
        self.billing = billing
        self._instances = {instance.name: instance for instance in instances}
        self._usd_per_slot_hour = usd_per_slot_hour
        self._node_prices: dict[str, float] = {}
        """USD per second and GPU, for every node so far."""
        self._here: dict[str, _PaidNode] = {}
        self._gone: list[_PaidNode] = []
        self._holdings = Holdings()
        self._uses: dict[str, _Use] = {}
        self._used_usd = 0.0
        self._seen_s = 0.0
        self._paused = False

    @property
    def seen_s(self) -> float:
        """The time of the last event."""
        return self._seen_s

    @property
    def usd_per_s(self) -> float:
        """The present price of a second, without rounding and minimum charges."""
        if self.billing.per is Per.FUNCTION:
            return sum(use.usd_per_s for use in self._uses.values())
        return sum(node.usd_per_s for node in self._here.values())

    def cost_usd(self, until_s: float) -> float:
        """The cost up to `until_s`, which must not be before the last event."""
        if until_s < self._seen_s:
            raise ValueError(f"the cost until {until_s} s is asked for; the run is at {self._seen_s} s")
        nodes = [*self._gone, *self._here.values()]
        data_usd = self.billing.usd_per_new_node * len(nodes)
        if self.billing.per is Per.FUNCTION:
            running = sum(use.usd_per_s * (until_s - use.since_s) for use in self._uses.values())
            return data_usd + self._used_usd + running
        held_s = np.array([(until_s if node.end_s is None else node.end_s) - node.begin_s for node in nodes])
        prices = np.array([node.usd_per_s for node in nodes])
        return data_usd + float(self.billing.charged_s(held_s) @ prices)

    def observe(self, event: Event) -> None:
        """Add an event."""
        self._seen_s = max(self._seen_s, event.t_s)
        for handover in self._holdings.observe(event):
            if handover.after is not handover.before:
                self._hold(handover.job_id, handover.after, event.t_s)
        match event:
            case RunStarted():
                for node in event.nodes:
                    self._add_node(node, event.t_s)
            case RunResumed():
                self._skip(event.down_s)
            case NodeLaunched():
                self._add_node(event.node, event.t_s)
            case NodeAdded():
                self._add_node(event.node, event.t_s - event.init_s)
            case NodeReleased() | NodeLost():
                self._remove_node(event)
            case JobSubmitted():
                self._uses[event.job.id] = _Use(event.job)
            case _:
                pass
        self._paused = isinstance(event, RunPaused)

    def _skip(self, down_s: float) -> None:
        """Leave out the time that has just passed: what is held counts as held from that much later."""
        for node in self._here.values():
            if self._paused or node.own:
                node.begin_s += down_s
        for use in self._uses.values():
            use.since_s += down_s

    def _add_node(self, node: Node, begin_s: float) -> None:
        instance = self._type_of(node)
        if instance is None or node.id in self._here:
            return
        usd_per_s = instance.usd_per_hour / HOUR_S
        self._node_prices[node.id] = usd_per_s / instance.gpus
        self._here[node.id] = _PaidNode(usd_per_s, begin_s, own=instance.own)

    def _type_of(self, node: Node) -> Instance | None:
        """The type that gives a node its price; None if it costs nothing."""
        slot_usd, own_name = self._usd_per_slot_hour, type_name(node.gpus)
        if not node.instance and slot_usd is None:
            return None
        if (found := self._instances.get(node.instance or own_name)) is not None:
            return found
        if slot_usd is not None and node.instance in {"", own_name}:
            return node_type(node.gpus, slot_usd)
        raise InputError(
            f"node {node.id!r} is a {node.instance!r}, which has no price.",
            remedy=f"There are prices of {', '.join(self._instances) or 'nothing'}.",
        )

    def _remove_node(self, event: NodeReleased | NodeLost) -> None:
        node = self._here.pop(event.node_id, None)
        if node is not None and not (isinstance(event, NodeReleased) and event.never_came):
            node.end_s = event.t_s
            self._gone.append(node)

    def _hold(self, job_id: str, allocation: Allocation, t_s: float) -> None:
        """The job holds `allocation` from now on; what it held until now is added up."""
        use = self._uses[job_id]
        self._used_usd += use.usd_per_s * (t_s - use.since_s)
        use.since_s = t_s
        use.usd_per_s = sum(
            taken.gpu * self._node_prices.get(node, 0.0) for node, taken in allocation.uses(use.job).items()
        )


class BudgetCap:
    """Says when a run must end so that it does not cost more than its budget; the controller ends it then.

    That is `reserve_s` before the budget is spent: stopping and saving take time, too.
    """

    def __init__(self, meter: CostMeter, budget_usd: float, reserve_s: float = 0.0) -> None:
        self._meter = meter
        self._budget_usd = budget_usd
        self._reserve_s = reserve_s
        self._spent_s: float | None = None

    def observe(self, event: Event) -> None:
        """Add an event."""
        self._meter.observe(event)
        self._spent_s = None

    def ends_s(self) -> float:
        """When the run must end if nothing changes; infinite if nothing costs anything."""
        if self._spent_s is None:
            now_s, rate = self._meter.seen_s, self._meter.usd_per_s
            left_usd = self._budget_usd - self._meter.cost_usd(now_s)
            # Time is charged in whole steps, and the last step is paid in full.
            step_s = self._meter.billing.granularity_s
            self._spent_s = now_s + max(left_usd / rate - step_s, 0.0) if rate > 0 else math.inf
        return max(self._spent_s - self._reserve_s, 0.0)
