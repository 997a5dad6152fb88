"""Places for workers, held in Ray's books: each is a placement group of one bundle, pinned to its node.

A group that spans nodes could neither grow nor give back a part, so a gang has a seat for each worker: what a
decision takes away is free at once, and who stays keeps what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stretto.substrate.elastic.workers import Place, Post
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import HOLDS, Wanted

_SURE_S = 5.0
"""If a whole node is gone, that is known by then."""
_LONG_S = 20.0
"""Ray gives a seat in a moment, unless somebody else has what it takes."""
IDLE_S = 10.0
"""A seat that nobody took for so long is given back: others may want it, and an idle node can go."""


class Kept(Protocol):
    """One seat in Ray's books."""

    @property
    def sitter(self) -> Any:
        """The handle of the `Sitter` that shows whose it is."""

    def leave(self) -> None:
        """Give it back, whether or not it was had."""


class Keeper(Protocol):
    """How seats are kept."""

    def keep(self, wanted: Wanted) -> Kept:
        """Take a seat on a node as soon as Ray has one."""

    def close(self) -> None:
        """All seats were left."""


@dataclass(slots=True)
class _Seat:
    number: int
    node: RayNode
    kept: Kept
    gpus: str | None = None
    """None until somebody could sit down."""
    worker_id: str = ""
    job_id: str = ""
    since_s: float = 0.0
    """When it was asked for, or given back."""
    noted: bool = False
    """It was said that somebody waits for it."""

    @property
    def sitter(self) -> Any:
        return self.kept.sitter

    @property
    def is_pending(self) -> bool:
        return bool(self.worker_id) and self.gpus is None

    @property
    def is_held(self) -> bool:
        return bool(self.worker_id) and self.gpus is not None


class Seats:
    """Who sits where, and who waits. Called in one thread only; what Ray says is posted there."""

    def __init__(
        self,
        *,
        run: str,
        keeper: Keeper,
        scratch_of: Callable[[RayNode], Path] | None,
        where: Callable[[str], RayNode | None],
        now_s: Callable[[], float],
        post: Post,
        on_lost: Callable[[str], None],
        idle_s: float = IDLE_S,
    ) -> None:
        """`on_lost` is told whose seat Ray took away."""
        self._run = run
        self._keeper = keeper
        self._scratch_of = scratch_of
        self._where = where
        self._now_s = now_s
        self._post = post
        self._on_lost = on_lost
        self._idle_s = idle_s
        self._seats: dict[int, _Seat] = {}
        self._made = 0
        self._waiting: dict[str, tuple[str, str]] = {}
        """Workers whose node is not there, with their job and node."""
        self._granted: list[str] = []
        self._seat_of: dict[str, _Seat] = {}
        self._vanished: list[tuple[float, str, str]] = []
        """When, on which node, whose."""
        self._abandoned: list[str] = []

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        idle = next((s for s in self._seats.values() if not s.worker_id and s.node.name == node), None)
        seat = idle or self._make(node)
        if seat is None:
            self._waiting[worker_id] = (job_id, node)
            return
        self._assign(seat, worker_id, job_id)

    def _assign(self, seat: _Seat, worker_id: str, job_id: str) -> None:
        seat.worker_id, seat.job_id = worker_id, job_id
        self._seat_of[worker_id] = seat
        if seat.gpus is not None:
            self._grant(seat)

    def _grant(self, seat: _Seat) -> None:
        self._granted.append(seat.worker_id)
        held = seat.sitter.hold.options(name=seat.job_id, concurrency_group=HOLDS).remote(seat.worker_id)
        held.future().add_done_callback(
            lambda future: (
                self._post(lambda: self._vanish(seat.number)) if future.exception() is not None else None
            )
        )

    def withdraw(self, worker_id: str) -> bool:
        if self._waiting.pop(worker_id, None) is not None:
            return True
        seat = self._seat_of.get(worker_id)
        if seat is None or (seat.gpus is not None and worker_id not in self._granted):
            return False
        if seat.gpus is None:
            self._remove(seat)  # Ray may keep it waiting for long
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
        return [(worker_id, self._place(self._seat_of[worker_id])) for worker_id in granted]

    def taken(self, node: str) -> bool:
        """Whether somebody is on the node, or waits to be."""
        waits = any(asked == node for _, asked in self._waiting.values())
        return waits or any(seat.worker_id and seat.node.name == node for seat in self._seats.values())

    def give_back(self, worker_id: str) -> None:
        self._vanished = [one for one in self._vanished if one[2] != worker_id]
        seat = self._seat_of.pop(worker_id, None)
        if seat is not None and seat.number in self._seats:
            seat.worker_id, seat.since_s = "", self._now_s()
            seat.sitter.free.remote(worker_id)
            self._hand_on(seat)

    def _hand_on(self, seat: _Seat) -> None:
        """Whoever waits until Ray has room on the node for another seat can have this one."""
        pending = (one for one in self._seats.values() if one.is_pending and one.node.name == seat.node.name)
        waits = next(pending, None)
        if waits is not None and seat.gpus is not None:
            self._remove(waits)
            self._assign(seat, waits.worker_id, waits.job_id)

    def lose(self, node: str) -> None:
        """The node is gone, and its seats with it."""
        self._drop(seat for seat in list(self._seats.values()) if seat.node.name == node)
        self._vanished = [one for one in self._vanished if one[1] != node]

    def tidy(self) -> None:
        """Give back what stays empty, and tell whose seat was lost on a node that was not."""
        now_s = self._now_s()
        idle = [s for s in self._seats.values() if not s.worker_id and s.since_s < now_s - self._idle_s]
        self._drop(idle)
        known = [one for one in self._vanished if one[0] < now_s - _SURE_S]
        self._vanished = [one for one in self._vanished if one not in known]
        for _, _, worker_id in known:
            self._on_lost(worker_id)

    def overdue(self) -> list[tuple[str, str]]:
        """Jobs that wait for long, and on which node; each is told once."""
        since_s = self._now_s() - _LONG_S
        late = [s for s in self._seats.values() if s.is_pending and s.since_s < since_s and not s.noted]
        for seat in late:
            seat.noted = True
        return [(seat.job_id, seat.node.name) for seat in late]

    def abandoned(self) -> list[str]:
        """The places that are no more since this was last asked."""
        names, self._abandoned = self._abandoned, []
        return names

    def close(self) -> None:
        try:
            self._drop(list(self._seats.values()))
        finally:
            self._keeper.close()

    def _make(self, node: str) -> _Seat | None:
        found = self._where(node)
        if found is None:
            return None
        self._made += 1
        number = self._made
        kept = self._keeper.keep(
            Wanted(
                name=f"{self._run} seat {number} on {found.name}",
                node=found,
                on_ready=lambda gpus: self._post(lambda: self._sat_down(number, gpus)),
                on_lost=lambda: self._post(lambda: self._vanish(number)),
            )
        )
        seat = self._seats[number] = _Seat(number, found, kept, since_s=self._now_s())
        return seat

    def _sat_down(self, number: int, gpus: str) -> None:
        seat = self._seats.get(number)
        if seat is None:
            return
        seat.gpus = gpus
        if seat.worker_id:
            self._grant(seat)

    def _vanish(self, number: int) -> None:
        """Ray has taken the seat away."""
        seat = self._seats.get(number)
        if seat is None:
            return
        if seat.worker_id:
            self._vanished.append((self._now_s(), seat.node.name, seat.worker_id))
        self._remove(seat)

    def _place(self, seat: _Seat) -> Place:
        """GPU memory is given back only when a process ends, so there nobody stays."""
        gpus = seat.gpus or ""
        env = {"STRETTO_SLOT": str(seat.number), **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
        return Place(
            name=str(seat.number),
            home=seat.node.name,
            env=env,
            stays=not gpus,
            scratch=None if self._scratch_of is None else self._scratch_of(seat.node),
        )

    def _drop(self, seats: Iterable[_Seat]) -> None:
        for seat in seats:
            self._remove(seat)

    def _remove(self, seat: _Seat) -> None:
        self._seats.pop(seat.number, None)
        self._abandoned.append(str(seat.number))
        self._seat_of.pop(seat.worker_id, None)
        if seat.worker_id in self._granted:
            self._granted.remove(seat.worker_id)
        if seat.is_held:
            seat.sitter.free.remote(seat.worker_id)
        seat.kept.leave()
