"""The input of tuning policies and the planner: study, limits, instances to rent, and believed speeds."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.units import HOUR_S
from stretto.planning.profile import Profile
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance
from stretto.search.study import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The time and money that a study may take."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    q: float = 0.9
    """The probability with which a plan must keep the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A study, and the conditions under which it runs."""

    study: Study
    profile: Profile
    instances: tuple[Instance, ...]
    max_nodes: int
    """The most nodes held at the same time."""
    billing: Billing = field(default_factory=Billing)
    limits: Limits = field(default_factory=Limits)
    own: tuple[Instance, ...] = ()
    """Our own nodes, one entry each: they are not rented, and cost as long as the study runs, used or not."""

    @property
    def own_usd_per_s(self) -> float:
        return sum(node.usd_per_hour for node in self.own) / HOUR_S

    def instance(self, name: str) -> Instance:
        return next(instance for instance in self.instances if instance.name == name)
