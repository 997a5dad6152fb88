"""Places for workers, held in Ray's books: each is a placement group of one bundle, pinned to its node.

A group that spans nodes could neither grow nor give back a part, so a gang has a seat for each worker: what a
decision takes away is free at once, and who stays keeps what they have. The actor in a seat holds its GPU
under the name of the job, and knows which GPU Ray has given it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stretto.substrate.elastic_workers import Place, Post
from stretto.substrate.ray.nodes import RayNode

_SURE_S = 5.0
"""If a whole node is gone, that is known by then."""
_LONG_S = 20.0
"""Ray gives a seat in a moment, unless somebody else has what it takes."""
IDLE_S = 10.0
"""A seat that nobody took for so long is given back: others may want it, and an idle node can go."""


class Sitter:
    """The actor in a seat. `hold` runs for as long as a job has it, and is called as the job is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._freed: set[str] = set()

    def gpus(self) -> str:
        """The seat's GPUs, as CUDA wants them listed."""
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())

    def hold(self, worker_id: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: worker_id in self._freed)

    def free(self, worker_id: str) -> None:
        """Ray may deliver this before the other."""
        with self._changed:
            self._freed.add(worker_id)
            self._changed.notify_all()


@dataclass(slots=True)
class _Seat:
    number: int
    node: RayNode
    group: PlacementGroup
    sitter: Any
    gpus: str | None = None
    """None until somebody could sit down."""
    worker_id: str = ""
    job_id: str = ""
    since_s: float = 0.0
    """When it was asked for, or given back."""
    noted: bool = False
    """It was said that somebody waits for it."""


class Seats:
    """Who sits where, and who waits. Called in one thread only; what Ray says is posted there."""

    def __init__(
        self,
        *,
        run: str,
        resource: str,
        scratch_of: Callable[[RayNode], Path] | None,
        where: Callable[[str], RayNode | None],
        now_s: Callable[[], float],
        post: Post,
        on_lost: Callable[[str], None],
        idle_s: float = IDLE_S,
    ) -> None:
        """`resource` is what a seat takes one of; `on_lost` is told whose seat Ray took away."""
        self._run = run
        self._resource = resource
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
        self._hold(seat, job_id)
        if seat.gpus is not None:
            self._granted.append(worker_id)

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
        waits = next(
            (
                one
                for one in self._seats.values()
                if self._is_pending(one) and one.node.name == seat.node.name
            ),
            None,
        )
        if waits is not None and seat.gpus is not None:
            self._remove(waits)
            self._assign(seat, waits.worker_id, waits.job_id)

    @staticmethod
    def _is_pending(seat: _Seat) -> bool:
        return bool(seat.worker_id) and seat.gpus is None

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
        late = [
            s for s in self._seats.values() if self._is_pending(s) and s.since_s < since_s and not s.noted
        ]
        for seat in late:
            seat.noted = True
        return [(seat.job_id, seat.node.name) for seat in late]

    def abandoned(self) -> list[str]:
        """The places that are no more since this was last asked."""
        names, self._abandoned = self._abandoned, []
        return names

    def close(self) -> None:
        self._drop(list(self._seats.values()))

    def _make(self, node: str) -> _Seat | None:
        found = self._where(node)
        if found is None:
            return None
        self._made += 1
        group = placement_group(
            [{self._resource: 1.0}],
            bundle_label_selector=[{"ray.io/node-id": found.ray_id}],
            name=f"{self._run} seat {self._made} on {found.name}",
        )
        uses = {"num_gpus": 1} if self._resource == "GPU" else {}
        sitter: Any = (
            ray.remote(Sitter)
            .options(
                num_cpus=1 if self._resource == "CPU" else 0,
                max_concurrency=2,
                name=f"{self._run} seat {self._made} on {found.name}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                **uses,
            )
            .remote()
        )
        seat = self._seats[self._made] = _Seat(self._made, found, group, sitter, since_s=self._now_s())
        sitter.gpus.remote().future().add_done_callback(
            lambda future: self._post(lambda: self._sat_down(seat, future))
        )
        return seat

    def _sat_down(self, seat: _Seat, future: Any) -> None:
        if seat.number not in self._seats:
            return
        if future.exception() is not None:
            self._vanish(seat)
            return
        seat.gpus = future.result()
        if seat.worker_id:
            self._granted.append(seat.worker_id)

    def _hold(self, seat: _Seat, job_id: str) -> None:
        held = seat.sitter.hold.options(name=job_id).remote(seat.worker_id)
        held.future().add_done_callback(
            lambda future: self._post(lambda: self._vanish(seat)) if future.exception() is not None else None
        )

    def _vanish(self, seat: _Seat) -> None:
        """Ray has taken the seat away."""
        if seat.number not in self._seats:
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
        remove_placement_group(seat.group)
        if seat.gpus is None:  # with its group goes an actor that is there, but not one that is still to come
            ray.kill(seat.sitter)
