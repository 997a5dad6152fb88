"""The cost meter: what a run has cost, as a fold over its events; and a budget as a hard cap."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import NOTHING, Allocation
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
    WorkerLost,
)
from stretto.core.instructions import Action
from stretto.core.job import Job
from stretto.core.units import HOUR_S
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance


@dataclass(slots=True)
class _Held:
    """A node that is or was paid for."""

    usd_per_s: float
    begin_s: float
    end_s: float | None = None
    own: bool = False


@dataclass(slots=True)
class _Use:
    """What one job holds now, and since when."""

    job: Job
    allocation: Allocation = NOTHING
    usd_per_s: float = 0.0
    since_s: float = 0.0


class CostMeter:
    """Counts money while events come in.

    A node is paid for from when it begins to start up until it is given back or lost; nodes that are there
    when the run starts, from then. Nodes of no instance type cost nothing, nor do those that were refused.
    Billed per function, the GPU time that jobs hold costs a GPU's share of its node's price. Every node is
    given the data, for its price. The time until a paused run is resumed costs nothing. After a run was
    killed that holds for one's own nodes only: what was rented is still there.
    """

    def __init__(self, instances: Iterable[Instance], billing: Billing) -> None:
        self._instances = {instance.name: instance for instance in instances}
        self._billing = billing
        self._node_prices: dict[str, float] = {}
        """USD a second and GPU, of every node ever seen."""
        self._here: dict[str, _Held] = {}
        self._gone: list[_Held] = []
        self._uses: dict[str, _Use] = {}
        self._used_usd = 0.0
        self._seen_s = 0.0
        self._paused = False

    @property
    def seen_s(self) -> float:
        """When the last event was."""
        return self._seen_s

    @property
    def usd_per_s(self) -> float:
        """What a second costs now; rounding and least charges aside."""
        if self._billing.per is Per.FUNCTION:
            return sum(use.usd_per_s for use in self._uses.values())
        return sum(held.usd_per_s for held in self._here.values())

    def cost_usd(self, until_s: float) -> float:
        """Everything up to `until_s`, which is not before the last event."""
        if until_s < self._seen_s:
            raise ValueError(f"the cost until {until_s} s is asked for; the run is at {self._seen_s} s")
        held = [*self._gone, *self._here.values()]
        data_usd = self._billing.usd_per_new_node * len(held)
        if self._billing.per is Per.FUNCTION:
            running = sum(use.usd_per_s * (until_s - use.since_s) for use in self._uses.values())
            return data_usd + self._used_usd + running
        held_s = np.array([(until_s if one.end_s is None else one.end_s) - one.begin_s for one in held])
        prices = np.array([one.usd_per_s for one in held])
        return data_usd + float(self._billing.charged_s(held_s) @ prices)

    def observe(self, event: Event) -> None:
        """Take note of what happened."""
        self._seen_s = max(self._seen_s, event.t_s)
        match event:
            case RunStarted():
                for node in event.nodes:
                    self._take(node, event.t_s)
            case RunResumed():
                self._pass_over(event.down_s)
            case NodeLaunched():
                self._take(event.node, event.t_s)
            case NodeAdded():
                self._take(event.node, event.t_s - event.init_s)
            case NodeReleased() | NodeLost():
                self._give_back(event)
            case JobSubmitted():
                self._uses[event.job.id] = _Use(event.job)
            case Decided():
                self._decided(event)
            case JobFinished() | JobFailed() | WorkerLost():
                self._hold(event.job_id, NOTHING, event.t_s)
        self._paused = isinstance(event, RunPaused)

    def _pass_over(self, down_s: float) -> None:
        """What is held was not paid for in the time just gone, as if it had been taken so much later."""
        for held in self._here.values():
            if self._paused or held.own:
                held.begin_s += down_s
        for use in self._uses.values():
            use.since_s += down_s

    def _take(self, node: Node, begin_s: float) -> None:
        if not node.instance or node.id in self._here:
            return
        if node.instance not in self._instances:
            raise InputError(
                f"node {node.id!r} is a {node.instance!r}, which has no price.",
                remedy=f"There are prices of {', '.join(self._instances) or 'nothing'}.",
            )
        instance = self._instances[node.instance]
        self._node_prices[node.id] = instance.usd_per_hour / HOUR_S / instance.gpus
        self._here[node.id] = _Held(instance.usd_per_hour / HOUR_S, begin_s, own=instance.own)

    def _give_back(self, event: NodeReleased | NodeLost) -> None:
        held = self._here.pop(event.node_id, None)
        if held is not None and not (isinstance(event, NodeReleased) and event.never_came):
            held.end_s = event.t_s
            self._gone.append(held)
        for job_id, use in self._uses.items():
            if event.node_id in use.allocation.nodes:
                self._hold(job_id, NOTHING, event.t_s)

    def _decided(self, event: Decided) -> None:
        for instruction in event.instructions:
            if instruction.action is not Action.SET_BATCH:
                self._hold(instruction.job_id, instruction.allocation, event.t_s)

    def _hold(self, job_id: str, allocation: Allocation, t_s: float) -> None:
        """From now on the job holds `allocation`; what it held until now is added up."""
        use = self._uses[job_id]
        self._used_usd += use.usd_per_s * (t_s - use.since_s)
        use.since_s, use.allocation = t_s, allocation
        use.usd_per_s = sum(
            taken.gpu * self._node_prices.get(node, 0.0) for node, taken in allocation.uses(use.job).items()
        )


class Purse:
    """Watches what a run costs and says when it must end so as not to cost more than its budget."""

    def __init__(self, instances: Iterable[Instance], billing: Billing, budget_usd: float) -> None:
        self._meter = CostMeter(instances, billing)
        self._step_s = billing.granularity_s
        self._budget_usd = budget_usd
        self._empty_s: float | None = None

    def observe(self, event: Event) -> None:
        """Take note of what happened."""
        self._meter.observe(event)
        self._empty_s = None

    def ends_s(self) -> float:
        """When the budget is spent if nothing changes; infinite if nothing costs anything."""
        if self._empty_s is None:
            now_s, rate = self._meter.seen_s, self._meter.usd_per_s
            left_usd = self._budget_usd - self._meter.cost_usd(now_s)
            # Time is charged in whole steps, and the last one is paid for in full.
            self._empty_s = now_s + max(left_usd / rate - self._step_s, 0.0) if rate > 0 else math.inf
        return self._empty_s
