"""Slot leases: each is a Ray placement group with one bundle, pinned to its node.

Every worker of a gang has its own lease, because a group over several nodes can neither grow nor shrink. A
resize therefore frees exactly the slots it takes away, and the other workers keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stretto.substrate.elastic.workers import Place, Post
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import HOLDS, ReservationRequest

_NODE_LOSS_S = 5.0
"""By then it is known whether a lost lease means a lost node."""
_OVERDUE_S = 20.0
"""Ray grants a lease at once, unless another program holds the slot."""
IDLE_S = 10.0
"""An unused lease is given back after this time, so that others can use the slot or the node can stop."""


class Reservation(Protocol):
    """One slot reserved in Ray."""

    @property
    def holder(self) -> Any:
        """The handle of the `LeaseHolder` that shows which job has it."""

    def release(self) -> None:
        """Give the slot back, or cancel the request for it."""


class Placer(Protocol):
    """Reserves slots in Ray."""

    def reserve(self, request: ReservationRequest) -> Reservation:
        """Reserve a slot on a node as soon as Ray has one."""

    def close(self) -> None:
        """Called when all reservations were released."""


@dataclass(slots=True)
class _Lease:
    number: int
    node: RayNode
    reservation: Reservation
    gpus: str | None = None
    """None until Ray has granted the slot."""
    worker_id: str = ""
    job_id: str = ""
    since_s: float = 0.0
    """When it was asked for, or became idle."""
    noted: bool = False
    """Whether `overdue` has reported it."""

    @property
    def holder(self) -> Any:
        return self.reservation.holder

    @property
    def is_pending(self) -> bool:
        return bool(self.worker_id) and self.gpus is None

    @property
    def is_held(self) -> bool:
        return bool(self.worker_id) and self.gpus is not None


class Leases:
    """Which worker has which lease, and which workers wait. Called in one thread; Ray's events are posted."""

    def __init__(
        self,
        *,
        run: str,
        placer: Placer,
        scratch_of: Callable[[RayNode], Path] | None,
        where: Callable[[str], RayNode | None],
        now_s: Callable[[], float],
        post: Post,
        on_lost: Callable[[str], None],
        idle_s: float = IDLE_S,
    ) -> None:
        """`on_lost` gets the id of the worker whose lease Ray took away."""
        self._run = run
        self._placer = placer
        self._scratch_of = scratch_of
        self._where = where
        self._now_s = now_s
        self._post = post
        self._on_lost = on_lost
        self._idle_s = idle_s
        self._leases: dict[int, _Lease] = {}
        self._count = 0
        self._waiting: dict[str, tuple[str, str]] = {}
        """Workers whose node has no agent yet: their job and node."""
        self._granted: list[str] = []
        self._lease_of: dict[str, _Lease] = {}
        self._revoked: list[tuple[float, str, str]] = []
        """Leases that Ray took away: when, on which node, and whose."""
        self._abandoned: list[str] = []

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        idle = next((s for s in self._leases.values() if not s.worker_id and s.node.name == node), None)
        lease = idle or self._reserve(node)
        if lease is None:
            self._waiting[worker_id] = (job_id, node)
            return
        self._assign(lease, worker_id, job_id)

    def _assign(self, lease: _Lease, worker_id: str, job_id: str) -> None:
        lease.worker_id, lease.job_id = worker_id, job_id
        self._lease_of[worker_id] = lease
        if lease.gpus is not None:
            self._grant(lease)

    def _grant(self, lease: _Lease) -> None:
        self._granted.append(lease.worker_id)
        held = lease.holder.hold.options(name=lease.job_id, concurrency_group=HOLDS).remote(lease.worker_id)
        held.future().add_done_callback(
            lambda future: (
                self._post(lambda: self._revoke(lease.number)) if future.exception() is not None else None
            )
        )

    def withdraw(self, worker_id: str) -> bool:
        if self._waiting.pop(worker_id, None) is not None:
            return True
        lease = self._lease_of.get(worker_id)
        if lease is None or (lease.gpus is not None and worker_id not in self._granted):
            return False
        if lease.gpus is None:
            self._remove(lease)  # it may wait in Ray for long
        else:
            self._granted.remove(worker_id)
            self.give_back(worker_id)
        return True

    def grants(self) -> list[tuple[str, Place]]:
        for worker_id, (job_id, node) in list(self._waiting.items()):
            if self._where(node) is not None:
                del self._waiting[worker_id]
                self.ask(worker_id, job_id, node)
        granted, self._granted = self._granted, []
        return [(worker_id, self._place(self._lease_of[worker_id])) for worker_id in granted]

    def taken(self, node: str) -> bool:
        """Whether a worker has a slot of the node or waits for one."""
        waits = any(asked == node for _, asked in self._waiting.values())
        return waits or any(lease.worker_id and lease.node.name == node for lease in self._leases.values())

    def give_back(self, worker_id: str) -> None:
        self._revoked = [one for one in self._revoked if one[2] != worker_id]
        lease = self._lease_of.pop(worker_id, None)
        if lease is not None and lease.number in self._leases:
            lease.worker_id, lease.since_s = "", self._now_s()
            lease.holder.free.remote(worker_id)
            self._pass_on(lease)

    def _pass_on(self, lease: _Lease) -> None:
        """Give a free lease to a worker that waits for another lease on the same node."""
        pending = (
            one for one in self._leases.values() if one.is_pending and one.node.name == lease.node.name
        )
        waits = next(pending, None)
        if waits is not None and lease.gpus is not None:
            self._remove(waits)
            self._assign(lease, waits.worker_id, waits.job_id)

    def lose(self, node: str) -> None:
        """Drop the leases of a node that is gone."""
        self._drop(lease for lease in list(self._leases.values()) if lease.node.name == node)
        self._revoked = [one for one in self._revoked if one[1] != node]

    def tidy(self) -> None:
        """Give back idle leases, and report workers that lost their lease on a node that still lives."""
        now_s = self._now_s()
        idle = [s for s in self._leases.values() if not s.worker_id and s.since_s < now_s - self._idle_s]
        self._drop(idle)
        known = [one for one in self._revoked if one[0] < now_s - _NODE_LOSS_S]
        self._revoked = [one for one in self._revoked if one not in known]
        for _, _, worker_id in known:
            self._on_lost(worker_id)

    def overdue(self) -> list[tuple[str, str]]:
        """Jobs that have waited long for a slot, and the node; each is reported once."""
        since_s = self._now_s() - _OVERDUE_S
        late = [s for s in self._leases.values() if s.is_pending and s.since_s < since_s and not s.noted]
        for lease in late:
            lease.noted = True
        return [(lease.job_id, lease.node.name) for lease in late]

    def abandoned(self) -> list[str]:
        """The names of the leases that have ended since the last call."""
        names, self._abandoned = self._abandoned, []
        return names

    def close(self) -> None:
        try:
            self._drop(list(self._leases.values()))
        finally:
            self._placer.close()

    def _reserve(self, node: str) -> _Lease | None:
        found = self._where(node)
        if found is None:
            return None
        self._count += 1
        number = self._count
        reservation = self._placer.reserve(
            ReservationRequest(
                name=f"{self._run} lease {number} on {found.name}",
                node=found,
                on_ready=lambda gpus: self._post(lambda: self._ready(number, gpus)),
                on_lost=lambda: self._post(lambda: self._revoke(number)),
            )
        )
        lease = self._leases[number] = _Lease(number, found, reservation, since_s=self._now_s())
        return lease

    def _ready(self, number: int, gpus: str) -> None:
        lease = self._leases.get(number)
        if lease is None:
            return
        lease.gpus = gpus
        if lease.worker_id:
            self._grant(lease)

    def _revoke(self, number: int) -> None:
        """Forget a lease that Ray has taken away."""
        lease = self._leases.get(number)
        if lease is None:
            return
        if lease.worker_id:
            self._revoked.append((self._now_s(), lease.node.name, lease.worker_id))
        self._remove(lease)

    def _place(self, lease: _Lease) -> Place:
        """A process with a GPU may not stay for the next task: it frees GPU memory only when it ends."""
        gpus = lease.gpus or ""
        env = {"STRETTO_SLOT": str(lease.number), **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
        return Place(
            name=str(lease.number),
            home=lease.node.name,
            env=env,
            stays=not gpus,
            scratch=None if self._scratch_of is None else self._scratch_of(lease.node),
        )

    def _drop(self, leases: Iterable[_Lease]) -> None:
        for lease in leases:
            self._remove(lease)

    def _remove(self, lease: _Lease) -> None:
        self._leases.pop(lease.number, None)
        self._abandoned.append(str(lease.number))
        self._lease_of.pop(lease.worker_id, None)
        if lease.worker_id in self._granted:
            self._granted.remove(lease.worker_id)
        if lease.is_held:
            lease.holder.free.remote(lease.worker_id)
        lease.reservation.release()
