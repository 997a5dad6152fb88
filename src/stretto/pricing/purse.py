"""A budget that is a hard cap: when the money will be gone, as things stand."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stretto.core.events import Event
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance
from stretto.pricing.meter import CostMeter


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
