"""A Ray cluster as the ground of workers: nodes with an agent each, leases on them, and their warm-up.

So what a node takes until it trains is its delay, which is learned and planned with, and not that of whatever
happens to be started on it first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, JobNoted, NodeAdded, NodeDraining, NodeLost, NodeReleased
from stretto.journal.folds.nodes import Record
from stretto.substrate.elastic.fork_servers import Saying
from stretto.substrate.elastic.workers import Place, Post
from stretto.substrate.fleet.nodes import Resource
from stretto.substrate.ray.agent import Charge, Do, News, Said
from stretto.substrate.ray.agents import AgentLine, RemoteNursery
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.leases import Seats
from stretto.substrate.ray.log_shipping import lay_down
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import CpuKeeper, GpuKeeper

LOADING_S = 120.0
"""A node that has not loaded the code by then is told of all the same: its workers will say why."""


@dataclass(slots=True)
class _Arrival:
    event: NodeAdded
    missing: set[str]
    """Entries that are not loaded."""


class Loading:
    """The nodes that are not told of yet, in the order they came."""

    def __init__(self) -> None:
        self._arrivals: dict[str, _Arrival] = {}

    def begin(self, event: NodeAdded, entries: Iterable[str]) -> None:
        self._arrivals[event.node.id] = _Arrival(event, set(entries))

    def loaded(self, node: str, entry: str) -> None:
        """Or it cannot be loaded, which is as good as it gets."""
        if node in self._arrivals:
            self._arrivals[node].missing.discard(entry)

    def over(self, t_s: float) -> list[NodeAdded]:
        """Those that are of use by now, and those that take too long."""
        ready = [
            node
            for node, one in self._arrivals.items()
            if not one.missing or t_s - one.event.t_s >= LOADING_S
        ]
        return [event for node in ready for event in self.cut_short(node, t_s)]

    def cut_short(self, node: str, t_s: float) -> list[NodeAdded]:
        """What was to be told of a node, now that something else is."""
        one = self._arrivals.pop(node, None)
        if one is None:
            return []
        came = one.event
        if came.queue_s == came.init_s == 0.0:  # nobody saw how long it took
            return [replace(came, t_s=t_s)]
        return [replace(came, t_s=t_s, init_s=came.init_s + t_s - came.t_s)]

    def cut_all_short(self, t_s: float) -> list[NodeAdded]:
        return [event for node in list(self._arrivals) for event in self.cut_short(node, t_s)]


_WARM = 4
"""Of so many pieces of training code every node has a nursery before it is asked to train them."""
_LEAVE_S = 60.0
"""For the workers of a node that is to be given back."""
_REST_S = 10.0
"""For what a node has still to carry when the run ends."""
_STEADY_S = 60.0
"""An agent that lived so long is not the last of a row of failures."""
_RETRY_S = 1.0
_TRIES = 3
"""Agents of one node that may be lost, one after the other, before the node is given up."""


class RayLand:
    """What an elastic substrate stands on. It is also the provisioner: a node is there when it has an agent.

    Called in one thread only, which `post` leads to.
    """

    changes = True

    def __init__(
        self,
        fleet: RayFleet,
        *,
        slots: int,
        resource: Resource,
        host: str,
        charge_of: Callable[[RayNode], Charge],
        scratch_of: Callable[[RayNode], Path] | None,
        run: str,
        run_dir: Path,
        idle_s: float,
    ) -> None:
        """`slots` is how many there may be at most; `host` where workers find the controller.

        A place that nobody took for `idle_s` is given back to Ray.
        `scratch_of` says where jobs have their files on nodes that do not see `run_dir`.
        """
        self.slots = slots
        self.host = host
        self._fleet = fleet
        self._charge_of = charge_of
        self._run_dir = run_dir
        self._carries = scratch_of is not None
        self._post: Post
        self._on_lost_seat: Callable[[str, str], None]
        self._awake_s: Callable[[], float]
        self._seats = Seats(
            run=run,
            keeper=GpuKeeper() if resource == "GPU" else CpuKeeper(lambda node: self._lines[node].sitter),
            scratch_of=scratch_of,
            where=self._where,
            now_s=time.monotonic,
            post=self._do,
            on_lost=lambda worker_id: self._on_lost_seat(worker_id, "Ray took its place away"),
            idle_s=idle_s,
        )
        self._lines: dict[str, AgentLine] = {}
        self._nurseries: dict[tuple[str, str], RemoteNursery] = {}
        self._nodes: dict[str, Node] = {}
        """All that were told to be there."""
        self._absent: dict[str, Node] = {}
        """Those whose agent was lost, and which were told to be lost therefore."""
        self._retries: dict[str, float] = {}
        """When they are tried again."""
        self._wished: Wish | None = None
        """The last wish since a node was told to be lost because of its agent."""
        self._leaving: dict[str, float] = {}
        """Nodes that are to be given back, and when at the latest."""
        self._farewells: dict[str, threading.Thread] = {}
        """Of those that nobody is on any more: what is left there is fetched and cleared away."""
        self.hurries = False
        """Closing leaves files on the nodes: workers were killed, and may not have copied them elsewhere."""
        self._entries: list[str] = []
        self._loading = Loading()
        self._tries: Counter[str] = Counter()
        self._since_s: dict[str, float] = {}
        """When agents began, those of nodes that are gone included."""
        self._began: list[AgentLine] = []
        self._lost: list[tuple[str, BaseException]] = []

    def settle(
        self, post: Post, on_lost_seat: Callable[[str, str], None], awake_s: Callable[[], float]
    ) -> None:
        """Begin, with the nodes that are there; `awake_s` is time in which somebody listened."""
        self._post = post
        self._on_lost_seat = on_lost_seat
        self._awake_s = awake_s
        for node in self._fleet.nodes():
            self._nodes[node.id] = node
            self._staff(node.id)

    # The ground

    @property
    def provisioner(self) -> RayLand:
        return self

    def places_of(self, allocation: Allocation) -> Counter[str]:
        return Counter(dict(allocation.workers))

    def expect(self, entry: str) -> None:
        if entry not in self._entries and len(self._entries) < _WARM:
            self._entries.append(entry)
            for line in self._lines.values():
                line.order(entry, Do.WARM)

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        self._seats.ask(worker_id, job_id, node)

    def withdraw(self, worker_id: str) -> bool:
        return self._seats.withdraw(worker_id)

    def grants(self) -> list[tuple[str, Place]]:
        return self._seats.grants()

    def give_back(self, worker_id: str) -> None:
        self._seats.give_back(worker_id)

    def abandoned(self) -> list[str]:
        return self._seats.abandoned()

    def nursery(
        self, home: str, entry: str, on_saying: Callable[[Saying], None], on_end: Callable[[], None]
    ) -> RemoteNursery:
        if home not in self._lines:
            raise OSError(f"node {home} is gone")
        nursery = RemoteNursery(self._lines[home], entry, on_saying, on_end)
        self._nurseries[home, entry] = nursery
        return nursery

    # The provisioner

    def provision(self, wish: Wish, t_s: float) -> Sequence[Event]:
        """Nodes are given back when the last worker has left them: it may still be saving, or moving."""
        self._wished = Wish(wish.nodes)
        come = self._loading.cut_all_short(t_s)  # who wishes again must know what has come
        self._leaving.update((node, t_s + _LEAVE_S) for node in wish.release)
        return [*come, *self._follow(self._fleet.provision(wish, t_s)), *self._release(t_s)]

    def look(self, t_s: float) -> Sequence[Event]:
        self._seats.tidy()
        # Who is seen off is not listened to.
        heard = [name for name in self._lines if name not in self._farewells]
        silent = [name for name in heard if self._lines[name].is_silent]
        self._lost += [(name, TimeoutError("its agent does not answer")) for name in silent]
        seen = self._follow(self._fleet.look(t_s))
        return [
            *seen,
            *self._mourn(t_s),
            *self._loading.over(t_s),
            *self._welcome(t_s),
            *self._release(t_s),
            *(JobNoted(t_s=t_s, job_id=job_id, text=_full(node)) for job_id, node in self._seats.overdue()),
        ]

    def recall(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        events = list(history)
        told = list(self._follow(self._fleet.recall(events, t_s)))
        for node in Record.of(events).here.values():  # of those that are still here there is nothing to tell
            if self._fleet.where(node.id) is not None:
                self._nodes[node.id] = node
                self._staff(node.id)
        return told

    def close(self) -> None:
        with ExitStack() as last:  # Ray may be what is wrong, and nodes cost
            last.callback(self._fleet.close)
            last.callback(self._seats.close)
            for line in self._lines.values():
                last.callback(line.hang_up)
            for line in self._lines.values():
                self._see_off(line)

    def _release(self, t_s: float) -> Iterator[Event]:
        over = [node for node, at_s in self._leaving.items() if at_s <= t_s or self._is_left(node)]
        if over:
            for node in over:
                del self._leaving[node]
                self._farewells.pop(node, None)
            yield from self._follow(self._fleet.release(over, t_s))

    def _is_left(self, node: str) -> bool:
        """Whether nobody is on a node any more, nor anything; a thread sees to that, as it has to wait."""
        if self._seats.taken(node):
            return False
        if node in self._lines and node not in self._farewells:
            farewell = threading.Thread(target=self._see_off, args=(self._lines[node],), daemon=True)
            self._farewells[node] = farewell
            farewell.start()
        return node not in self._farewells or not self._farewells[node].is_alive()

    def _see_off(self, line: AgentLine) -> None:
        for pieces in line.rest(_REST_S) if self._carries else ():
            lay_down(pieces, self._run_dir)
        if not self.hurries:
            line.depart(_REST_S)

    def _follow(self, events: Iterable[Event]) -> Iterator[Event]:
        """Nodes get an agent as they come; what is told twice is told once."""
        for event in events:
            if isinstance(event, NodeAdded):
                self._nodes[event.node.id] = event.node
                self._staff(event.node.id)
                if event.node.instance and event.node.id in self._lines:
                    self._loading.begin(event, self._entries)
                    continue
            elif isinstance(event, NodeLost | NodeReleased | NodeDraining):
                yield from self._loading.cut_short(event.node_id, event.t_s)
            if isinstance(event, NodeLost | NodeReleased):
                absent = self._absent.pop(event.node_id, None) is not None
                self._nodes.pop(event.node_id, None)
                self._retries.pop(event.node_id, None)
                self._tries.pop(event.node_id, None)
                self._forget(event.node_id)
                if absent and isinstance(event, NodeLost):
                    # It was told before; wishes since then were compared with a node that seemed to live.
                    if self._wished is not None:
                        yield from self._follow(self._fleet.provision(self._wished, event.t_s))
                    continue
            yield event

    def _staff(self, name: str) -> None:
        found = self._fleet.where(name)
        if found is not None and name not in self._lines:
            self._lines[name] = AgentLine(found, self._charge_of(found), self, self._awake_s)
            for entry in self._entries:
                self._lines[name].order(entry, Do.WARM)

    def _mourn(self, t_s: float) -> Iterator[Event]:
        """A node without its agent is lost; another one is tried, and with it the node is there again."""
        lost, self._lost = self._lost, []
        for name, error in lost:
            if isinstance(error, InputError) and not self._since_s:
                raise error  # it would be the same on every node
            self._forget(name)
            if t_s - self._since_s.get(name, t_s) > _STEADY_S:
                self._tries[name] = 0
            if name in self._nodes:
                yield from self._loading.cut_short(name, t_s)
                self._absent[name] = self._nodes.pop(name)
                self._wished = None
                yield NodeLost(t_s=t_s, node_id=name)
            self._tries[name] += 1
            if self._tries[name] < _TRIES:
                self._retries[name] = t_s + _RETRY_S
            elif self._absent.pop(name, None) is not None:
                logging.getLogger(__name__).warning("node %s is given up: %s", name, error)
                yield from self._fleet.give_up(name, t_s)
                if not self._nodes and not self._retries:
                    remedy = "Mend one, and give the same command: the run goes on."
                    raise InputError(f"no node is of use any more: {error}.", remedy=remedy)

    def _welcome(self, t_s: float) -> Iterator[Event]:
        for name in [name for name, at_s in self._retries.items() if at_s <= t_s]:
            del self._retries[name]
            self._staff(name)
        began, self._began = self._began, []
        for name in [line.node.name for line in began if self._lines.get(line.node.name) is line]:
            self._since_s[name] = t_s
            node = self._absent.pop(name, None)
            if node is not None:
                self._nodes[name] = node
                yield NodeAdded(t_s=t_s, node=node)

    def _forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            line.hang_up()
        for key in [key for key in self._nurseries if key[0] == name]:
            self._nurseries.pop(key).lose()
        self._seats.lose(name)

    def _do(self, step: Callable[[], None]) -> None:
        self._post(step)

    # From threads of Ray's

    def began(self, line: AgentLine) -> None:
        self._post(lambda: self._began.append(line))

    def told(self, line: AgentLine, news: News) -> None:
        lay_down(news.pieces, self._run_dir)  # at once: the next question says that they have arrived
        self._post(lambda: self._hear(line, news.said))

    def lost(self, line: AgentLine, error: BaseException) -> None:
        def lose() -> None:
            if self._lines.get(line.node.name) is line:
                self._lost.append((line.node.name, error))

        self._post(lose)

    def _hear(self, line: AgentLine, news: tuple[Said, ...]) -> None:
        for said in news:
            if said.saying is None or said.saying.kind == "ready":
                self._loading.loaded(line.node.name, said.entry)
            nursery = self._nurseries.get((line.node.name, said.entry))
            if nursery is not None and nursery.line is line:
                nursery.hear(said.saying)

    def _where(self, name: str) -> RayNode | None:
        """Where a node is, as long as it has an agent."""
        line = self._lines.get(name)
        return None if line is None else line.node


def _full(node: str) -> str:
    return (
        f"it waits for a slot on {node}: Ray has none free there, so another program of the cluster holds it"
    )
