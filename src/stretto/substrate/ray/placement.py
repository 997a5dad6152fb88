"""How a seat is kept: with an actor in it, which tells its GPU, or by its placement group alone.

An actor is a process of Ray's, and takes a second of processor time to start; a CPU has no number that one
would have to be asked for.
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
"""The threads of an actor in which `Sitter.hold` waits: as many as it has seats."""
_CREATED = "CREATED"
_REMOVED = "REMOVED"
_SOON_S = 0.002
"""Ray needs about so long for a group that there is room for."""
_LATEST_S = 0.25
"""One that there is no room for is looked at so often in the end."""
_CHECK_S = 2.0
"""How often it is looked at whether all that were there still are."""
_SHARE = 0.01
"""Of one core, for that: Ray's table has every group the cluster ever had."""
_EASY = 4.0
"""Between looks at those that are to come, so many times as long as the last took."""
_END_S = 5.0
"""For the last look, if Ray does not answer."""


class Sitter:
    """An actor that shows whose a seat is: `hold` runs for as long as a job has it, called as the job is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._freed: set[str] = set()

    def hold(self, worker_id: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: worker_id in self._freed)
            self._freed.remove(worker_id)

    def free(self, worker_id: str) -> None:
        """Ray may deliver this before the other."""
        with self._changed:
            self._freed.add(worker_id)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A seat to be taken; who is told of it is so in any thread, perhaps when it was just left."""

    name: str
    node: RayNode
    on_ready: Callable[[str], None]
    """Somebody can sit down; with the seat's GPUs as CUDA wants them listed."""
    on_lost: Callable[[], None]
    """Ray has taken it away."""


def _group(resource: str, wanted: Wanted) -> PlacementGroup:
    made: PlacementGroup = placement_group(
        [{resource: 1.0}],
        bundle_label_selector=[{"ray.io/node-id": wanted.node.ray_id}],
        name=wanted.name,
    )
    return made


class GpuSitter(Sitter):
    """The actor in a seat."""

    def gpus(self) -> str:
        """The seat's GPUs, as CUDA wants them listed."""
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


@dataclass(slots=True)
class _GpuSeat:
    group: PlacementGroup
    sitter: Any
    sits: bool = False

    def leave(self) -> None:
        remove_placement_group(self.group)
        if not self.sits:  # with its group goes an actor that is there, but not one that is still to come
            ray.kill(self.sitter)


class GpuKeeper:
    """An actor in every seat: only that is told which GPU it is. If it ends, the seat was taken away."""

    def keep(self, wanted: Wanted) -> _GpuSeat:
        group = _group("GPU", wanted)
        sitter: Any = (
            _RAY.remote(concurrency_groups={HOLDS: 1})(GpuSitter)
            .options(
                num_cpus=0,
                num_gpus=1,
                name=wanted.name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote()
        )
        seat = _GpuSeat(group, sitter)

        def answer(future: Any) -> None:
            if future.exception() is not None:
                wanted.on_lost()
                return
            seat.sits = True
            wanted.on_ready(future.result())

        sitter.gpus.remote().future().add_done_callback(answer)
        return seat

    def close(self) -> None:
        """Its actors went with their seats."""


@dataclass(frozen=True, slots=True)
class _CpuSeat:
    group: PlacementGroup
    sitter: Any
    watch: GroupWatch

    def leave(self) -> None:
        self.watch.forget(self.group)
        remove_placement_group(self.group)


class CpuKeeper:
    """The group is all there is of a seat; the node's agent shows whose it is."""

    def __init__(self, agent_of: Callable[[str], Any]) -> None:
        """`agent_of` gives the handle of a node's agent."""
        self._agent_of = agent_of
        self._watch = GroupWatch()

    def keep(self, wanted: Wanted) -> _CpuSeat:
        group = _group("CPU", wanted)
        self._watch.add(group, on_ready=lambda: wanted.on_ready(""), on_lost=wanted.on_lost)
        return _CpuSeat(group, self._agent_of(wanted.node.name), self._watch)

    def close(self) -> None:
        self._watch.close()


def state_of(group: PlacementGroup) -> str:
    """What Ray's table says of a group."""
    told: str = _table(group).get("state", _REMOVED)
    return told


def created() -> set[str]:
    """The ids of all groups that are there; of the whole cluster, as Ray has no table of ours."""
    return {one for one, told in _table().items() if told["state"] == _CREATED}


def _table(*group: PlacementGroup) -> Any:
    if not ray.is_initialized():  # whoever asks for the table then has Ray started
        raise ConnectionError
    return placement_group_table(*group)


@dataclass(slots=True)
class _Watched:
    group: PlacementGroup
    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    is_here: bool = False


class GroupWatch:
    """Sees when groups come and when they are taken away, in one thread, which the first of them starts.

    Ray can wait for one group to come, and in its older versions for the first of several with a process for
    each; for the end of one it cannot.
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
        """Guards all that follows."""
        self._watched: dict[PlacementGroup, _Watched] = {}
        self._newest_s = 0.0
        """When one was last added."""
        self._is_new = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch of seats", daemon=True)

    def add(
        self, group: PlacementGroup, *, on_ready: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        """They are called in the thread, perhaps when the group was just forgotten; `on_lost` is the last."""
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
        """Until it is time to look again; False in the end."""
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
        """Not of a Ray that we are done with: it may be gone while an earlier question had to wait."""
        with self._changed:
            if self._closed:
                return
        with contextlib.suppress(Exception):  # a Ray that does not answer is for others to notice
            question()

    def _look_at(self, one: _Watched) -> None:
        state = self._state_of(one.group)
        if state == _CREATED:
            one.is_here = True
            one.on_ready()
        elif state == _REMOVED:
            self._lose(one)

    def _look_at_all(self) -> None:
        here = self._all(is_here=True)  # before the table: what comes meanwhile is not missed
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
