"""Shares out a cluster by marginal gain: the job that saves most time per share of the cluster gets more.

Every job first gets its minimum, in order. Then the step with the largest marginal gain is granted, again and
again, until no step saves time or fits. A step is n more workers, servers or both, n = 1, 2, 4, ..

    gain = factor (T(before) - T(after)) / D

T is the job's remaining time. D is the dominant share of what is added: its largest share of any one resource
of the cluster. Shares make jobs comparable that are short of different resources. Steps may be larger than
one because gains need not fall: one more worker may save nothing where four do, or nothing without a server.

Restart penalty: T is `resize_s` longer for all counts but those the job runs with now. One extra step leads
straight to these.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from stretto.core.resources import TOLERANCE, Resources

TaskCounts = tuple[int, int]
"""(workers, servers)."""
NONE: TaskCounts = (0, 0)
RemainingTime = Callable[[int, int], float]
"""Seconds to the end of a job with this many workers and servers; infinite if it cannot train with them."""
Step = tuple[float, int, int, int]
"""(minus the gain, claim, workers added, servers added): the smallest is best; ties: the first claim."""
UNITS: tuple[TaskCounts, ...] = ((0, 1), (1, 0), (1, 1))
"""Steps are multiples of these, servers first."""


def _unknown_s(_workers: int, _servers: int) -> float:
    return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one job may get, and how long it would take with it."""

    worker: Resources
    server: Resources
    """Zero for a job without servers."""
    least: TaskCounts
    """Granted before any job gets more; if it does not fit, the job gets nothing."""
    most: TaskCounts
    targets: tuple[TaskCounts, ...] = ()
    """Counts to try out: the first that fits is granted after the minimum, whatever its gain."""
    remaining_s: RemainingTime = _unknown_s
    factor: float = 1.0
    """Weight of its gain; below 1 if its remaining time is a guess."""
    held: TaskCounts = NONE
    """The counts it runs with now."""
    resize_s: float = 0.0
    """The restart penalty of any other counts."""


def share_out(claims: Sequence[Claim], free: Resources, cluster: Resources) -> list[TaskCounts]:
    """Counts for each claim, in order; together they fit in `free`. Shares are relative to `cluster`."""
    dealer = _Dealer(claims, free, cluster)
    dealer.give_least()
    dealer.give_targets()
    dealer.give_by_gain()
    return dealer.counts


class _Unit(NamedTuple):
    """One worker, one server or one of both, for one claim."""

    workers: int
    servers: int
    needs: tuple[tuple[int, float], ...]
    """(resource, amount) of each resource that it needs."""
    share: float
    """Dominant share."""


class _Dealer:
    """The free resources and the counts granted so far."""

    def __init__(self, claims: Sequence[Claim], free: Resources, cluster: Resources) -> None:
        self._claims = claims
        self._free = [amount + TOLERANCE / 2 for amount in free.amounts()]
        self._cluster = cluster.amounts()
        self.counts: list[TaskCounts] = [NONE] * len(claims)

    def give_least(self) -> None:
        for index, claim in enumerate(self._claims):
            self._give(index, *claim.least)

    def give_targets(self) -> None:
        for index, claim in enumerate(self._claims):
            if self.counts[index] == NONE:
                continue
            workers, servers = self.counts[index]
            for target in claim.targets:
                if self._give(index, target[0] - workers, target[1] - servers):
                    break

    def give_by_gain(self) -> None:
        growing = [i for i, claim in enumerate(self._claims) if self._may_grow(i, claim)]
        units = {i: [self._unit(self._claims[i], *counts) for counts in UNITS] for i in growing}
        line = [step for i in growing if (step := self._best_step(i, units[i])) is not None]
        heapq.heapify(line)
        while line:
            _, index, workers, servers = line[0]
            # A step that no longer fits is replaced by the best one that does.
            self._give(index, workers, servers)
            step = self._best_step(index, units[index])
            if step is None:
                heapq.heappop(line)
            else:
                heapq.heapreplace(line, step)

    def _may_grow(self, index: int, claim: Claim) -> bool:
        return self.counts[index] != NONE and not claim.targets and claim.least != claim.most

    def _give(self, index: int, workers: int, servers: int) -> bool:
        needs = self._unit(self._claims[index], workers, servers).needs
        if any(need > self._free[resource] for resource, need in needs):
            return False
        for resource, need in needs:
            self._free[resource] -= need
        had_workers, had_servers = self.counts[index]
        self.counts[index] = (had_workers + workers, had_servers + servers)
        return True

    def _best_step(self, index: int, units: Sequence[_Unit]) -> Step | None:
        """The fitting step with the largest marginal gain; None if none saves time."""
        claim, (workers, servers) = self._claims[index], self.counts[index]
        now_s = _with_resize(claim, workers, servers)
        best, best_step = 0.0, None
        for more_workers, more_servers, share in self._fitting_steps(index, units):
            then_s = _with_resize(claim, workers + more_workers, servers + more_servers)
            if not then_s < now_s:
                continue
            gain = claim.factor * (now_s - then_s) / share if share > 0 else inf
            if gain > best:
                best, best_step = gain, (-gain, index, more_workers, more_servers)
        return best_step

    def _fitting_steps(self, index: int, units: Sequence[_Unit]) -> Iterator[tuple[int, int, float]]:
        """(workers, servers, dominant share) of the steps that fit, and of the step back to `held`."""
        claim, (workers, servers) = self._claims[index], self.counts[index]
        free, most_workers, most_servers = self._free, claim.most[0] - workers, claim.most[1] - servers
        for unit in units:
            limit = inf
            if unit.workers:
                limit = most_workers
            if unit.servers and most_servers < limit:
                limit = most_servers
            for resource, need in unit.needs:
                limit = min(limit, free[resource] / need)
            lump = 1
            while lump <= limit:
                yield lump * unit.workers, lump * unit.servers, lump * unit.share
                lump *= 2
        more_workers, more_servers = claim.held[0] - workers, claim.held[1] - servers
        if (
            0 <= more_workers <= most_workers
            and 0 <= more_servers <= most_servers
            and more_workers + more_servers
        ):
            back = self._unit(claim, more_workers, more_servers)
            if all(need <= free[resource] for resource, need in back.needs):
                yield more_workers, more_servers, back.share

    def _unit(self, claim: Claim, workers: int, servers: int) -> _Unit:
        amounts = (
            workers * worker + servers * server
            for worker, server in zip(claim.worker.amounts(), claim.server.amounts(), strict=True)
        )
        needs = tuple((resource, need) for resource, need in enumerate(amounts) if need > 0)
        shares = (
            need / self._cluster[resource] if self._cluster[resource] else inf for resource, need in needs
        )
        return _Unit(workers, servers, needs, max(shares, default=0.0))


def _with_resize(claim: Claim, workers: int, servers: int) -> float:
    resize_s = 0.0 if (workers, servers) == claim.held else claim.resize_s
    return claim.remaining_s(workers, servers) + resize_s
