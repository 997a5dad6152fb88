"""The value of each size to each job, evaluated in batches and only up to sizes that may be chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stretto.allocate.placements import Placement
from stretto.models.goodput import Ints
from stretto.models.speed import Floats

FULL_MENU = 1300
"""Up to this many (job, size) pairs, menus are complete from the start; beyond, they grow on demand."""
DENSE_MENU = 6000
"""Up to this many (job, size) pairs, menus have every size; beyond, only whole nodes after the first node."""


class Values(Protocol):
    """The value of each outcome for each job. The solver maximises the sum."""

    @property
    def nothing(self) -> Floats:
        """By job: the value of holding nothing."""

    @property
    def keep(self) -> Floats:
        """By job: the value of staying exactly as it is, if it holds something."""

    def changed(self, job: Ints, nodes: Ints, gpus: Ints) -> Floats:
        """Value of a new placement of `gpus` GPUs on `nodes` nodes."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One job as the solver sees it."""

    held: Placement
    min_gpus: int
    max_gpus: int
    pinned: bool = False
    """Keeps exactly what it holds."""

    @property
    def stays(self) -> bool:
        return self.pinned and bool(self.held)

    def takes(self, gpus: int) -> bool:
        """Whether it may be given this many GPUs (it may always keep what it holds)."""
        return max(self.min_gpus, 1) <= gpus <= self.max_gpus


class Menus:
    """The value of every offered size to every job, if placed on the fewest nodes."""

    def __init__(
        self, node_gpus: Sequence[int], contenders: Sequence[Contender], values: Values, max_nodes: int
    ) -> None:
        self._values = values
        self._contenders = contenders
        self._fewest = _fewest_nodes(node_gpus)
        self._most = sum(nodes <= max_nodes for nodes in self._fewest) - 1
        self._node_size = max(node_gpus, default=0)
        self._odd: dict[tuple[int, int, int], float] = {}
        self.nothing: list[float] = values.nothing.tolist()
        self.keep: list[float] = values.keep.tolist()
        self.sizes: list[list[int]] = [[] for _ in contenders]
        """By job: the offered sizes, rising."""
        self.worth: list[dict[int, float]] = [{} for _ in contenders]
        """By job: the value of each offered size."""
        largest = max(one.max_gpus for one in contenders)
        fair = -(-sum(node_gpus) // len(contenders))
        complete = len(contenders) * largest <= FULL_MENU
        self.extend(range(len(contenders)), largest if complete else max(2 * fair, self._node_size))

    def extend(self, jobs: Iterable[int], reach: int) -> bool:
        """Put the sizes up to `reach` on the menus of `jobs`; False if there are none to add."""
        step = 1 if len(self._contenders) * reach <= DENSE_MENU else self._node_size
        wanted = [(job, size) for job in jobs for size in self._further_sizes(job, reach, step)]
        if not wanted:
            return False
        job_column, size_column = (np.array(column, dtype=np.int64) for column in zip(*wanted, strict=True))
        worth = self._values.changed(job_column, np.array(self._fewest)[size_column], size_column)
        for (job, size), value in zip(wanted, worth.tolist(), strict=True):
            self.sizes[job].append(size)
            self.worth[job][size] = value
        return True

    def value(self, job: int, placement: Placement) -> float:
        """The value of a placement to the job."""
        if not placement:
            return self.nothing[job]
        if placement == self._contenders[job].held:
            return self.keep[job]
        gpus = sum(count for _, count in placement)
        if len(placement) == self._fewest[gpus] and gpus in self.worth[job]:
            return self.worth[job][gpus]
        key = (job, len(placement), gpus)
        if key not in self._odd:
            self._odd[key] = float(self._values.changed(*(np.array([part]) for part in key))[0])
        return self._odd[key]

    def _further_sizes(self, job: int, reach: int, step: int) -> Iterable[int]:
        """Sizes above those on the menu: every size on a single node, then in steps."""
        one = self._contenders[job]
        if one.stays:
            return ()
        top = min(one.max_gpus, reach, self._most)
        bottom = max(one.min_gpus, 1, self.sizes[job][-1] + 1 if self.sizes[job] else 1)
        start = -(-max(bottom, self._node_size + 1) // step) * step if step else bottom
        return (*range(bottom, min(top, self._node_size) + 1), *range(start, top + 1, max(step, 1)))


def _fewest_nodes(node_gpus: Sequence[int]) -> list[int]:
    """The fewest nodes of the empty cluster that hold 0, 1, 2, .. GPUs."""
    fewest = [0]
    for nodes, gpus in enumerate(sorted(node_gpus, reverse=True), start=1):
        fewest.extend([nodes] * gpus)
    return fewest
