"""Placement groups: how a slot is reserved in Ray.

A GPU slot needs an actor in its group, because only the actor learns the number of its GPU. A CPU has no
number, so its group is enough, which saves the second of CPU time that an actor takes to start.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stretto.substrate.ray.nodes import RayNode

_RAY: Any = ray  # parts of it have no types
HOLDS = "holds"
"""The concurrency group of `LeaseHolder.hold`: an actor has one thread per lease."""
_CREATED = "CREATED"
_REMOVED = "REMOVED"
_SOON_S = 0.002
"""Ray needs about this long for a group that fits."""
_LATEST_S = 0.25
"""The longest interval between polls of a group that does not fit."""
_CHECK_S = 2.0
"""How often to check that the groups still exist."""
_SHARE = 0.01
"""Of one core, at most, for these checks: Ray's table has every group that the cluster ever had."""
_EASY = 4.0
"""Pause between polls of waiting groups, as a multiple of the time the last poll took."""
_END_S = 5.0
"""How long `close` waits for Ray to answer a last poll."""


class LeaseHolder:
    """An actor that shows in Ray's dashboard which job has a lease, by a call of `hold` in the job's name."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._freed: set[str] = set()

    def hold(self, worker_id: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: worker_id in self._freed)
            self._freed.remove(worker_id)

    def free(self, worker_id: str) -> None:
        """End `hold`, also if Ray delivers this call first."""
        with self._changed:
            self._freed.add(worker_id)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A lease that is being acquired. Callbacks may run in any thread, even after release."""

    name: str
    node: RayNode
    on_ready: Callable[[str], None]
    """The slot is ours; the argument is for CUDA_VISIBLE_DEVICES, empty for a CPU."""
    on_lost: Callable[[], None]
    """Ray has taken it away."""


def _group(resource: str, request: ReservationRequest) -> PlacementGroup:
    made: PlacementGroup = placement_group(
        [{resource: 1.0}],
        bundle_label_selector=[{"ray.io/node-id": request.node.ray_id}],
        name=request.name,
    )
    return made


class GpuLeaseHolder(LeaseHolder):
    """The actor in a GPU's placement group."""

    def gpus(self) -> str:
        """The GPUs of the group, for CUDA_VISIBLE_DEVICES."""
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


@dataclass(slots=True)
class _GpuReservation:
    group: PlacementGroup
    holder: Any
    has_actor: bool = False

    def release(self) -> None:
        remove_placement_group(self.group)
        if (
            not self.has_actor
        ):  # removing the group ends an actor that has started, but not one that still starts
            ray.kill(self.holder)


class GpuPlacer:
    """Reserves GPUs, each with an actor that learns which GPU it is. If the actor ends, the lease is lost."""

    def reserve(self, request: ReservationRequest) -> _GpuReservation:
        group = _group("GPU", request)
        holder: Any = (
            _RAY.remote(concurrency_groups={HOLDS: 1})(GpuLeaseHolder)
            .options(
                num_cpus=0,
                num_gpus=1,
                name=request.name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote()
        )
        lease = _GpuReservation(group, holder)

        def answer(future: Any) -> None:
            if future.exception() is not None:
                request.on_lost()
                return
            lease.has_actor = True
            request.on_ready(future.result())

        holder.gpus.remote().future().add_done_callback(answer)
        return lease

    def close(self) -> None:
        """Nothing to do: the actors end with their groups."""


@dataclass(frozen=True, slots=True)
class _CpuReservation:
    group: PlacementGroup
    holder: Any
    watch: GroupWatch

    def release(self) -> None:
        self.watch.forget(self.group)
        remove_placement_group(self.group)


class CpuPlacer:
    """Reserves CPUs by a placement group alone; the node's agent shows which job has it."""

    def __init__(self, agent_of: Callable[[str], Any]) -> None:
        """`agent_of` gives the handle of a node's agent."""
        self._agent_of = agent_of
        self._watch = GroupWatch()

    def reserve(self, request: ReservationRequest) -> _CpuReservation:
        group = _group("CPU", request)
        self._watch.add(group, on_ready=lambda: request.on_ready(""), on_lost=request.on_lost)
        return _CpuReservation(group, self._agent_of(request.node.name), self._watch)

    def close(self) -> None:
        self._watch.close()


def state_of(group: PlacementGroup) -> str:
    """The state of a group in Ray's table."""
    told: str = _table(group).get("state", _REMOVED)
    return told


def created() -> set[str]:
    """The ids of all created groups of the cluster; Ray has no table of ours alone."""
    return {one for one, told in _table().items() if told["state"] == _CREATED}


def _table(*group: PlacementGroup) -> Any:
    if not ray.is_initialized():  # asking for the table would start Ray
        raise ConnectionError
    return placement_group_table(*group)


@dataclass(slots=True)
class _Watched:
    group: PlacementGroup
    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    is_here: bool = False


class GroupWatch:
    """Notices when groups are created and when they are removed, by polling in one thread.

    Ray can wait for the creation of one group but not for its removal. In older versions, waiting for the
    first of several takes a process for each. The first group starts the thread.
    """

    def __init__(
        self,
        *,
        state_of: Callable[[PlacementGroup], str] = state_of,
        created: Callable[[], set[str]] = created,
        check_s: float = _CHECK_S,
    ) -> None:
        self._state_of = state_of
        self._created = created
        self._check_s = check_s
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._watched: dict[PlacementGroup, _Watched] = {}
        self._newest_s = 0.0
        """When a group was last added."""
        self._is_new = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch of leases", daemon=True)

    def add(
        self, group: PlacementGroup, *, on_ready: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        """Both are called in the polling thread, even just after `forget`; after `on_lost` comes nothing."""
        with self._changed:
            self._watched[group] = _Watched(group, on_ready, on_lost)
            self._newest_s, self._is_new = time.monotonic(), True
            self._changed.notify_all()
            if not self._closed and self._thread.ident is None:
                self._thread.start()

    def forget(self, group: PlacementGroup) -> None:
        with self._changed:
            self._watched.pop(group, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        took_s, check_at_s = 0.0, time.monotonic() + self._check_s
        while self._wait(took_s, check_at_s):
            began_s = time.monotonic()
            checks = began_s >= check_at_s
            for one in self._all(is_here=False):
                self._ask(functools.partial(self._look_at, one))
            if checks:
                self._ask(self._look_at_all)
            took_s = time.monotonic() - began_s
            if checks:
                check_at_s = began_s + max(self._check_s, took_s / _SHARE)

    def _wait(self, took_s: float, check_at_s: float) -> bool:
        """Wait until the next look; False after `close`."""
        with self._changed:
            now_s = time.monotonic()
            rest_s: float | None = check_at_s - now_s
            if not self._watched:
                rest_s = None
            elif not all(one.is_here for one in self._watched.values()):
                rest_s = max(min(now_s - self._newest_s, _LATEST_S), _SOON_S, _EASY * took_s)
            self._changed.wait_for(lambda: self._closed or self._is_new, rest_s)
            self._is_new = False
            return not self._closed

    def _ask(self, question: Callable[[], None]) -> None:
        """Ask Ray, unless `close` was called: Ray may be gone by then."""
        with self._changed:
            if self._closed:
                return
        with contextlib.suppress(Exception):  # the agents notice a Ray that does not answer
            question()

    def _look_at(self, one: _Watched) -> None:
        state = self._state_of(one.group)
        if state == _CREATED:
            one.is_here = True
            one.on_ready()
        elif state == _REMOVED:
            self._lose(one)

    def _look_at_all(self) -> None:
        here = self._all(is_here=True)  # before the table is read: a new group must not look lost
        there = self._created() if here else set()
        for one in here:
            if one.group.id.hex() not in there:
                self._lose(one)

    def _all(self, *, is_here: bool) -> list[_Watched]:
        with self._changed:
            return [one for one in self._watched.values() if one.is_here is is_here]

    def _lose(self, one: _Watched) -> None:
        self.forget(one.group)
        one.on_lost()
