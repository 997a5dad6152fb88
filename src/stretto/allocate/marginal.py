"""Sharing out a cluster by marginal gain: whoever saves most time per share of the cluster gets more.

Every job gets its minimum, in order. Then the best step of all goes out, again and again. A step is n more
workers, n more servers, or n of both, n = 1, 2, 4, ..; its gain is the time it saves over what it takes:

    gain = factor (T(before) - T(after)) / D

with T the job's remaining time and D the dominant share of what is added: its largest part of any one
resource of the whole cluster. A share and not an amount, so that jobs short of different resources compare.
Steps of more than one because gains need not fall: one more worker may save nothing where four would, and
one worker nothing without a server. It ends when no step saves anything or nothing more fits.

Going on exactly as before is the one choice without a restart: T is `resize_s` longer everywhere else, and
one step leads straight there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from stretto.core.resources import TOLERANCE, Resources

Counts = tuple[int, int]
"""(workers, servers)."""
NONE: Counts = (0, 0)

RemainingTime = Callable[[int, int], float]
"""Seconds to the end of a job with so many workers and servers; infinite where it would stand still."""


def _unknown_s(_workers: int, _servers: int) -> float:
    return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one job may be given, and what it would make of it."""

    worker: Resources
    server: Resources
    """Nothing, for a job without servers."""
    least: Counts
    """Given before anybody gets more; if it does not fit the job gets nothing."""
    most: Counts
    targets: tuple[Counts, ...] = ()
    """The first of these that fits is given next, whatever it gains: counts to be tried out."""
    remaining_s: RemainingTime = _unknown_s
    factor: float = 1.0
    """Below 1 for a job whose remaining time is a guess."""
    held: Counts = NONE
    """What it runs with now."""
    resize_s: float = 0.0
    """What any other counts cost it first."""


def share_out(claims: Sequence[Claim], free: Resources, cluster: Resources) -> list[Counts]:
    """Counts for each claim, in order; together they fit in `free`. Shares are parts of `cluster`."""
    dealer = _Dealer(claims, free, cluster)
    dealer.give_least()
    dealer.give_targets()
    dealer.give_by_gain()
    return dealer.counts


Amounts = tuple[float, ...]
Step = tuple[float, int, int, int]
"""(minus the gain, claim, workers added, servers added): the smallest is best; ties: the first claim."""


class _Dealer:
    """What is left, and what everybody has so far."""

    def __init__(self, claims: Sequence[Claim], free: Resources, cluster: Resources) -> None:
        self._claims = claims
        self._free = [amount + TOLERANCE / 2 for amount in free.amounts()]
        self._cluster = cluster.amounts()
        self._demands = [(claim.worker.amounts(), claim.server.amounts()) for claim in claims]
        self.counts: list[Counts] = [NONE] * len(claims)

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
        open_claims = (i for i, claim in enumerate(self._claims) if self._may_grow(i, claim))
        line = [step for i in open_claims if (step := self._best_step(i)) is not None]
        heapq.heapify(line)
        while line:
            _, index, workers, servers = line[0]
            # A step that no longer fits is replaced by the best that does; room only shrinks.
            self._give(index, workers, servers)
            step = self._best_step(index)
            if step is None:
                heapq.heappop(line)
            else:
                heapq.heapreplace(line, step)

    def _may_grow(self, index: int, claim: Claim) -> bool:
        return self.counts[index] != NONE and not claim.targets and claim.least != claim.most

    def _give(self, index: int, workers: int, servers: int) -> bool:
        taken = self._needs(index, workers, servers)
        if not self._fits(taken):
            return False
        self._free = [have - used for have, used in zip(self._free, taken, strict=True)]
        had_workers, had_servers = self.counts[index]
        self.counts[index] = (had_workers + workers, had_servers + servers)
        return True

    def _best_step(self, index: int) -> Step | None:
        """The fitting step of the highest gain per share; None if none saves time."""
        claim, (workers, servers) = self._claims[index], self.counts[index]
        now_s = _with_resize(claim, workers, servers)
        best, best_step = 0.0, None
        for more_workers, more_servers, share in self._fitting_steps(index):
            then_s = _with_resize(claim, workers + more_workers, servers + more_servers)
            if not then_s < now_s:
                continue
            gain = claim.factor * (now_s - then_s) / share if share > 0 else inf
            if gain > best:
                best, best_step = gain, (-gain, index, more_workers, more_servers)
        return best_step

    def _fitting_steps(self, index: int) -> Iterator[tuple[int, int, float]]:
        """(workers, servers, dominant share) of the steps there is room for, servers first."""
        claim, (workers, servers) = self._claims[index], self.counts[index]
        room_workers, room_servers = claim.most[0] - workers, claim.most[1] - servers
        for one_worker, one_server in ((0, 1), (1, 0), (1, 1)):
            limit = min(room_workers if one_worker else inf, room_servers if one_server else inf)
            lump = 1
            while lump <= limit:
                needs = self._needs(index, lump * one_worker, lump * one_server)
                if not self._fits(needs):
                    break
                yield lump * one_worker, lump * one_server, self._share(needs)
                lump *= 2
        back = claim.held[0] - workers, claim.held[1] - servers
        if min(back) >= 0 and back != NONE and back[0] <= room_workers and back[1] <= room_servers:
            needs = self._needs(index, *back)
            if self._fits(needs):
                yield *back, self._share(needs)

    def _needs(self, index: int, workers: int, servers: int) -> Amounts:
        worker, server = self._demands[index]
        return tuple(workers * w + servers * s for w, s in zip(worker, server, strict=True))

    def _fits(self, needs: Amounts) -> bool:
        return all(need <= have for need, have in zip(needs, self._free, strict=True) if need > 0)

    def _share(self, needs: Amounts) -> float:
        """Dominant share of what fits, so that the cluster has some of all it needs."""
        return max(
            (need / have for need, have in zip(needs, self._cluster, strict=True) if need > 0), default=0.0
        )


def _with_resize(claim: Claim, workers: int, servers: int) -> float:
    resize_s = 0.0 if (workers, servers) == claim.held else claim.resize_s
    return claim.remaining_s(workers, servers) + resize_s
