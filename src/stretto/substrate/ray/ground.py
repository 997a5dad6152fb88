"""A Ray cluster as the ground of workers: an agent on every node, slot leases, and node warm-up.

A launched node is announced only when it has loaded the training code. So warm-up counts as part of the
node's start-up time, which is learned and planned with, and not as part of the first job's.
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
from stretto.journal.folds.nodes import NodeRecord
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.elastic.workers import Place, Post
from stretto.substrate.fleet.commands import Resource
from stretto.substrate.ray.agent import AgentConfig, AgentNews, ForkServerAction, ForkServerMessage
from stretto.substrate.ray.agents import AgentClient, RemoteForkServer
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.leases import Leases
from stretto.substrate.ray.log_shipping import append_pieces
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import CpuPlacer, GpuPlacer

WARM_UP_S = 120.0
"""A node that has not loaded the code by then is announced anyway: its workers will report the reason."""
_WARM_ENTRIES = 4
"""Every node starts fork servers for this many entry points in advance."""
_DRAIN_S = 60.0
"""How long workers may take to leave a node that is to be given back."""
_CLEAR_S = 10.0
"""How long fetching a node's logs, or removing its files, may take."""
_STEADY_S = 60.0
"""The loss of an agent that lived this long starts a new count of failures."""
_RETRY_S = 1.0
_TRIES = 3
"""A node is given up after the loss of this many agents in a row."""


@dataclass(slots=True)
class _Arrival:
    event: NodeAdded
    missing: set[str]
    """Entry points that are not loaded yet."""


class WarmUp:
    """Nodes that are warming up and not announced yet, in the order they came."""

    def __init__(self) -> None:
        self._arrivals: dict[str, _Arrival] = {}

    def begin(self, event: NodeAdded, entries: Iterable[str]) -> None:
        self._arrivals[event.node.id] = _Arrival(event, set(entries))

    def loaded(self, node: str, entry: str) -> None:
        """The node has loaded an entry point, or has failed to."""
        if node in self._arrivals:
            self._arrivals[node].missing.discard(entry)

    def ready(self, t_s: float) -> list[NodeAdded]:
        """Announce the nodes that have finished, or take too long."""
        ready = [
            node
            for node, one in self._arrivals.items()
            if not one.missing or t_s - one.event.t_s >= WARM_UP_S
        ]
        return [event for node in ready for event in self.announce(node, t_s)]

    def announce(self, node: str, t_s: float) -> list[NodeAdded]:
        """Announce a node, ready or not; empty if it is not warming up."""
        one = self._arrivals.pop(node, None)
        if one is None:
            return []
        came = one.event
        if came.queue_s == came.init_s == 0.0:  # its start-up was not measured
            return [replace(came, t_s=t_s)]
        return [replace(came, t_s=t_s, init_s=came.init_s + t_s - came.t_s)]

    def announce_all(self, t_s: float) -> list[NodeAdded]:
        return [event for node in list(self._arrivals) for event in self.announce(node, t_s)]


class RayGround:
    """Ray's nodes as a `Ground` and as a `Provisioner`. A node counts as present while its agent lives.

    Called in one thread only, the one that `post` leads to.
    """

    changes = True

    def __init__(
        self,
        fleet: RayFleet,
        *,
        slots: int,
        resource: Resource,
        host: str,
        config_of: Callable[[RayNode], AgentConfig],
        scratch_of: Callable[[RayNode], Path] | None,
        run: str,
        run_dir: Path,
        idle_s: float,
    ) -> None:
        """`slots` is the most there may be; `host` is where workers reach the controller.

        A lease that is unused for `idle_s` is given back to Ray. `scratch_of` names the folder for jobs'
        files on nodes that do not see `run_dir`; None if all nodes see it.
        """
        self.slots = slots
        self.host = host
        self._fleet = fleet
        self._config_of = config_of
        self._run_dir = run_dir
        self._ships_logs = scratch_of is not None
        self._post: Post
        self._on_lost_lease: Callable[[str, str], None]
        self._awake_s: Callable[[], float]
        self._leases = Leases(
            run=run,
            placer=GpuPlacer() if resource == "GPU" else CpuPlacer(lambda node: self._agents[node].holder),
            scratch_of=scratch_of,
            where=self._where,
            now_s=time.monotonic,
            post=self._do,
            on_lost=lambda worker_id: self._on_lost_lease(worker_id, "Ray took its place away"),
            idle_s=idle_s,
        )
        self._agents: dict[str, AgentClient] = {}
        self._fork_servers: dict[tuple[str, str], RemoteForkServer] = {}
        self._nodes: dict[str, Node] = {}
        """Nodes that were announced and not reported lost."""
        self._absent: dict[str, Node] = {}
        """Nodes that were reported lost because their agent was."""
        self._retries: dict[str, float] = {}
        """When to start another agent, by node."""
        self._wished: Wish | None = None
        """The last wish since a node lost its agent."""
        self._leaving: dict[str, float] = {}
        """Nodes to be given back, and when at the latest."""
        self._clearing: dict[str, threading.Thread] = {}
        """Threads that fetch the logs of nodes to be given back and remove their files."""
        self.keeps_files = False
        """Whether `close` leaves files on the nodes: killed workers may not have copied them to the store."""
        self._entries: list[str] = []
        self._warm_up = WarmUp()
        self._tries: Counter[str] = Counter()
        self._since_s: dict[str, float] = {}
        """When agents began, including those of nodes that are gone."""
        self._began: list[AgentClient] = []
        self._lost: list[tuple[str, BaseException]] = []

    def settle(
        self, post: Post, on_lost_lease: Callable[[str, str], None], awake_s: Callable[[], float]
    ) -> None:
        """Start with the nodes that are there; `awake_s` counts time in which the controller ran."""
        self._post = post
        self._on_lost_lease = on_lost_lease
        self._awake_s = awake_s
        for node in self._fleet.nodes():
            self._nodes[node.id] = node
            self._start_agent(node.id)

    # The ground

    @property
    def provisioner(self) -> RayGround:
        return self

    def places_of(self, allocation: Allocation) -> Counter[str]:
        return Counter(dict(allocation.workers))

    def expect(self, entry: str) -> None:
        if entry not in self._entries and len(self._entries) < _WARM_ENTRIES:
            self._entries.append(entry)
            for agent in self._agents.values():
                agent.order(entry, ForkServerAction.WARM)

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        self._leases.ask(worker_id, job_id, node)

    def withdraw(self, worker_id: str) -> bool:
        return self._leases.withdraw(worker_id)

    def grants(self) -> list[tuple[str, Place]]:
        return self._leases.grants()

    def give_back(self, worker_id: str) -> None:
        self._leases.give_back(worker_id)

    def abandoned(self) -> list[str]:
        return self._leases.abandoned()

    def fork_server(
        self, home: str, entry: str, on_saying: Callable[[WorkerNews], None], on_end: Callable[[], None]
    ) -> RemoteForkServer:
        if home not in self._agents:
            raise OSError(f"node {home} is gone")
        server = RemoteForkServer(self._agents[home], entry, on_saying, on_end)
        self._fork_servers[home, entry] = server
        return server

    # The provisioner

    def provision(self, wish: Wish, t_s: float) -> Sequence[Event]:
        """Take a wish to the fleet. A node is given back when its last worker has saved and left."""
        self._wished = Wish(wish.nodes)
        come = self._warm_up.announce_all(t_s)  # the policy must know which nodes have come
        self._leaving.update((node, t_s + _DRAIN_S) for node in wish.release)
        return [*come, *self._with_agents(self._fleet.provision(wish, t_s)), *self._release(t_s)]

    def look(self, t_s: float) -> Sequence[Event]:
        self._leases.tidy()
        polled = [name for name in self._agents if name not in self._clearing]
        silent = [name for name in polled if self._agents[name].is_silent]
        self._lost += [(name, TimeoutError("its agent does not answer")) for name in silent]
        seen = self._with_agents(self._fleet.look(t_s))
        return [
            *seen,
            *self._handle_lost(t_s),
            *self._warm_up.ready(t_s),
            *self._handle_begun(t_s),
            *self._release(t_s),
            *(
                JobNoted(t_s=t_s, job_id=job_id, text=_waiting_text(node))
                for job_id, node in self._leases.overdue()
            ),
        ]

    def recall(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        events = list(history)
        news = list(self._with_agents(self._fleet.recall(events, t_s)))
        for node in NodeRecord.of(events).here.values():  # those that are still here cause no event
            if self._fleet.where(node.id) is not None:
                self._nodes[node.id] = node
                self._start_agent(node.id)
        return news

    def close(self) -> None:
        with ExitStack() as last:  # each step runs even if Ray fails another: nodes cost money
            last.callback(self._fleet.close)
            last.callback(self._leases.close)
            for agent in self._agents.values():
                last.callback(agent.disconnect)
            for agent in self._agents.values():
                self._clear(agent)

    def _release(self, t_s: float) -> Iterator[Event]:
        over = [node for node, at_s in self._leaving.items() if at_s <= t_s or self._is_clear(node)]
        if over:
            for node in over:
                del self._leaving[node]
                self._clearing.pop(node, None)
            yield from self._with_agents(self._fleet.release(over, t_s))

    def _is_clear(self, node: str) -> bool:
        """Whether a node has no workers and no files left; a thread removes the files."""
        if self._leases.taken(node):
            return False
        if node in self._agents and node not in self._clearing:
            clearing = threading.Thread(target=self._clear, args=(self._agents[node],), daemon=True)
            self._clearing[node] = clearing
            clearing.start()
        return node not in self._clearing or not self._clearing[node].is_alive()

    def _clear(self, agent: AgentClient) -> None:
        for pieces in agent.remaining_logs(_CLEAR_S) if self._ships_logs else ():
            append_pieces(pieces, self._run_dir)
        if not self.keeps_files:
            agent.clean_up(_CLEAR_S)

    def _with_agents(self, events: Iterable[Event]) -> Iterator[Event]:
        """Start and stop agents as nodes come and go; pass on each event once."""
        for event in events:
            if isinstance(event, NodeAdded):
                self._nodes[event.node.id] = event.node
                self._start_agent(event.node.id)
                if event.node.instance and event.node.id in self._agents:
                    self._warm_up.begin(event, self._entries)
                    continue
            elif isinstance(event, NodeLost | NodeReleased | NodeDraining):
                yield from self._warm_up.announce(event.node_id, event.t_s)
            if isinstance(event, NodeLost | NodeReleased):
                absent = self._absent.pop(event.node_id, None) is not None
                self._nodes.pop(event.node_id, None)
                self._retries.pop(event.node_id, None)
                self._tries.pop(event.node_id, None)
                self._forget(event.node_id)
                if absent and isinstance(event, NodeLost):
                    # Its loss was reported before, but the fleet counted on it for wishes made since then.
                    if self._wished is not None:
                        yield from self._with_agents(self._fleet.provision(self._wished, event.t_s))
                    continue
            yield event

    def _start_agent(self, name: str) -> None:
        found = self._fleet.where(name)
        if found is not None and name not in self._agents:
            self._agents[name] = AgentClient(found, self._config_of(found), self, self._awake_s)
            for entry in self._entries:
                self._agents[name].order(entry, ForkServerAction.WARM)

    def _handle_lost(self, t_s: float) -> Iterator[Event]:
        """Report nodes whose agent is lost, and plan another try; a node that fails too often is given up."""
        lost, self._lost = self._lost, []
        for name, error in lost:
            if isinstance(error, InputError) and not self._since_s:
                raise error  # every node would fail in the same way
            self._forget(name)
            if t_s - self._since_s.get(name, t_s) > _STEADY_S:
                self._tries[name] = 0
            if name in self._nodes:
                yield from self._warm_up.announce(name, t_s)
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
                    raise InputError(
                        f"no usable node is left: {error}.",
                        remedy="Repair one, then re-run the same command to resume.",
                    )

    def _handle_begun(self, t_s: float) -> Iterator[Event]:
        for name in [name for name, at_s in self._retries.items() if at_s <= t_s]:
            del self._retries[name]
            self._start_agent(name)
        began, self._began = self._began, []
        for name in [agent.node.name for agent in began if self._agents.get(agent.node.name) is agent]:
            self._since_s[name] = t_s
            node = self._absent.pop(name, None)
            if node is not None:
                self._nodes[name] = node
                yield NodeAdded(t_s=t_s, node=node)

    def _forget(self, name: str) -> None:
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.disconnect()
        for key in [key for key in self._fork_servers if key[0] == name]:
            self._fork_servers.pop(key).lose()
        self._leases.lose(name)

    def _do(self, step: Callable[[], None]) -> None:
        self._post(step)

    # Called in Ray's threads

    def began(self, agent: AgentClient) -> None:
        self._post(lambda: self._began.append(agent))

    def heard(self, agent: AgentClient, news: AgentNews) -> None:
        append_pieces(news.pieces, self._run_dir)  # at once: the next poll confirms that they have arrived
        self._post(lambda: self._hear(agent, news.messages))

    def lost(self, agent: AgentClient, error: BaseException) -> None:
        def lose() -> None:
            if self._agents.get(agent.node.name) is agent:
                self._lost.append((agent.node.name, error))

        self._post(lose)

    def _hear(self, agent: AgentClient, news: tuple[ForkServerMessage, ...]) -> None:
        for message in news:
            if message.saying is None or message.saying.kind == "ready":
                self._warm_up.loaded(agent.node.name, message.entry)
            server = self._fork_servers.get((agent.node.name, message.entry))
            if server is not None and server.agent is agent:
                server.hear(message.saying)

    def _where(self, name: str) -> RayNode | None:
        """The Ray node of this name, while it has an agent."""
        agent = self._agents.get(name)
        return None if agent is None else agent.node


def _waiting_text(node: str) -> str:
    return f"it waits for a slot on {node}: Ray has none free, so another program of the cluster holds it"
