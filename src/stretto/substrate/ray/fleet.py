"""The nodes of a Ray cluster: watched, launched and released, or taken from a pool that is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, NodeReleased
from stretto.journal.folds.nodes import NodeRecord
from stretto.substrate.fleet.commands import START_S, Resource
from stretto.substrate.fleet.fleet import Fleet
from stretto.substrate.fleet.nodes import FleetStep, LaunchFailure, LaunchNode, NodeKind, NodeOrder, SeenNode
from stretto.substrate.ray.launch import LaunchBegan, Launcher, LaunchFailed, LaunchNews
from stretto.substrate.ray.nodes import RayNode, is_connected, read_nodes, slot_resource

_LOOK_S = 0.5
_LATE_S = 15.0
"""How long a stopping run waits for nodes whose launch it has cancelled."""


class RayFleet:
    """The nodes of the connected cluster, and how they come and go.

    Without a launcher none is launched, but nodes may still join and leave by themselves. Called in one
    thread only; another one polls Ray.
    """

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        nodes: Iterable[Node] | None = None,
        resource: Resource | None = None,
        start_s: float = START_S,
        look_s: float = _LOOK_S,
        late_s: float = _LATE_S,
        prefix: str = "",
        read: Callable[[Resource | None], Sequence[RayNode]] = read_nodes,
        connected: Callable[[], bool] = is_connected,
    ) -> None:
        """`nodes` are those that the run begins with; None: the nodes that are there now.

        `resource` is what counts as a slot; needed if no node with a GPU has come yet. `start_s` is how long
        a node may take to come, `late_s` how long `close` waits for nodes on the way; `prefix` begins the
        names of the run's nodes.
        """
        self.resource: Resource = resource or slot_resource()
        self._launcher = launcher
        self._read = read
        self._connected = connected
        self._look_s = look_s
        self._late_s = late_s
        self._start_s = start_s
        self._now_s = 0.0
        self._asked_s: dict[str, float] = {}
        """When nodes were requested, except those whose launch failed."""
        self._seen: Sequence[RayNode] = read(self.resource)
        self._fleet = Fleet(
            launcher.kinds if launcher else (),
            start_s=start_s,
            adopts=launcher is not None and launcher.adopts,
            prefix=prefix,
        )
        self._first = tuple(self._fleet.begin(self._nodes_seen(), nodes))
        self._cut_off = False
        self._settled = False
        """Whether nodes that an earlier process left behind were dealt with."""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch the nodes", daemon=True)
        self._watcher.start()

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that the run begins with; they cause no events here."""
        return self._first

    def where(self, name: str) -> RayNode | None:
        """The node of this name, as last seen; None if it is gone."""
        key = self._fleet.key_of(name)
        found = next((node for node in self._seen if node.ray_id == key), None)
        return None if found is None else replace(found, name=name)

    def provision(self, wish: Wish, t_s: float) -> list[Event]:
        self._end_leftovers()
        return [*self._carry_out(self._fleet.wish(wish, t_s), t_s), *self._launch_news(t_s)]

    def release(self, nodes: Sequence[str], t_s: float) -> list[Event]:
        """Give back nodes; the wish for others stays as it is."""
        return [*self._carry_out(self._fleet.release(nodes, t_s), t_s), *self._launch_news(t_s)]

    def give_up(self, node_id: str, t_s: float) -> list[Event]:
        """Give up a node that Ray lists but that is unusable; the caller reports it lost."""
        return [*self._carry_out(self._fleet.give_up(node_id), t_s), *self._launch_news(t_s)]

    def look(self, t_s: float) -> list[Event]:
        if self._cut_off:
            raise InputError(
                "the Ray node that this process belongs to is gone.",
                remedy="Re-run the same command on another node of the cluster to resume.",
            )
        vain = self._fleet.hopeless  # as of the last look, so that all refusals were reported
        if vain is not None:
            raise InputError(
                f"no {vain.instance} came: refused {vain.times} times in a row: {vain.why}.",
                remedy="Repair what launches nodes ([ray] in the study may be changed), then re-run the same "
                "command to resume.",
            )
        return [*self._launch_news(t_s), *self._carry_out(self._fleet.see(self._nodes_seen(), t_s), t_s)]

    def recall(self, history: Iterable[Event], t_s: float) -> list[Event]:
        launched = self._launcher.launched() if self._launcher else ()
        self._settled = True
        past = list(history)
        step = self._fleet.recall(past, self._nodes_seen(), t_s, launched=launched)
        if self._launcher is not None:
            self._launcher.recall(self._fleet.rented)
        self._asked_s |= dict.fromkeys(self._fleet.rented, t_s)
        called_off = [NodeReleased(t_s=t_s, node_id=name) for name in NodeRecord.of(past).called_off]
        return [*called_off, *self._carry_out(step, t_s), *self._launch_news(t_s)]

    def release_all(self, history: Iterable[Event], t_s: float) -> list[Event]:
        """Release every node of a run that is not resumed; `close` waits for it."""
        launched = self._launcher.launched() if self._launcher else ()
        return self._carry_out(
            self._fleet.release_all(history, self._nodes_seen(), t_s, launched=launched), t_s
        )

    def close(self) -> None:
        """Release every launched node and wait until that is done.

        Launches under way are cancelled. If such a node comes anyway, it is released at once during the next
        `late_s`, and later by the process that resumes the run.
        """
        self._order(self._fleet.close())
        under_way = self._under_way()
        try:
            if self._launcher is not None:
                self._release_late(self._launcher.settle() & under_way, self._launcher)
        finally:
            self._over.set()
            if self._launcher is not None:
                self._launcher.close(under_way)
            self._watcher.join(self._look_s)

    def _under_way(self) -> frozenset[str]:
        """Nodes requested so recently that they may still come."""
        since_s = self._now_s - self._start_s
        return frozenset(name for name, asked_s in self._asked_s.items() if asked_s > since_s)

    def _release_late(self, late: frozenset[str], launcher: Launcher) -> None:
        """Release nodes that come although their launch was cancelled."""
        if not late or self._cut_off:
            return
        logging.getLogger(__name__).warning(
            "Cancelled on the way: %s. Waiting up to %g s to release those that still come; Ctrl-C skips it.",
            ", ".join(sorted(late)),
            self._late_s,
        )
        until_s, ended = time.monotonic() + self._late_s, set[str]()
        while late & {*launcher.launched()} and time.monotonic() < until_s:
            for node in self._seen:
                if node.name in late and node.ray_id not in ended:
                    ended.add(node.ray_id)
                    launcher.release(node.name, node.ray_id)
            time.sleep(min(self._look_s, self._late_s))
            launcher.news()  # updates `launched`

    def _end_leftovers(self) -> None:
        """Release nodes of a probe that was killed before the run began: no journal has them."""
        if self._launcher is not None and not self._settled:
            ids = {node.name: node.ray_id for node in self._seen}
            for name in self._launcher.launched():
                self._launcher.release(name, ids.get(name, ""))
        self._settled = True

    def _launch_news(self, t_s: float) -> list[Event]:
        """Process the outcomes of launches."""
        events: list[Event] = []
        failures: dict[str, LaunchFailure] = {}
        for news in self._launcher.news() if self._launcher else ():
            if isinstance(news, LaunchBegan):
                events += self._carry_out(self._fleet.began(news.name, t_s), t_s)
            else:
                self._asked_s.pop(news.name, None)
                failures[news.name] = LaunchFailure(news.why, news.log)
        return [*events, *self._carry_out(self._fleet.failed(failures, t_s), t_s)]

    def _carry_out(self, step: FleetStep, t_s: float) -> list[Event]:
        self._now_s = t_s
        self._order(step.orders)
        return step.events

    def _order(self, orders: Sequence[NodeOrder]) -> None:
        if self._launcher is None:
            return
        for order in orders:
            if isinstance(order, LaunchNode):
                self._asked_s[order.name] = self._now_s
                self._launcher.launch(order.name, order.instance)
            else:
                self._launcher.release(order.name, order.key)

    def _nodes_seen(self) -> list[SeenNode]:
        return [
            SeenNode(
                key=node.ray_id,
                name=node.name,
                slots=node.slots,
                instance=node.instance,
                draining=node.draining,
            )
            for node in self._seen
        ]

    def _watch(self) -> None:
        answers = True
        while not self._over.wait(self._look_s):
            try:
                self._seen = self._read(self.resource)
                self._cut_off = not self._connected()
                answers = True
            except Exception as error:  # noqa: BLE001 - a failed poll does not mean that nodes are gone
                if answers:
                    logging.getLogger(__name__).warning("Ray does not list its nodes: %s", error)
                answers = False


class NodePool:
    """A launcher that launches nothing: all nodes of the cluster with the size of one node type.

    The fleet adopts the nodes it sees; requests beyond those are refused.
    """

    adopts = True

    def __init__(self, kind: NodeKind) -> None:
        self.kinds: Sequence[NodeKind] = (kind,)
        self._kind = kind
        self._asked: list[str] = []
        self._overdue: list[str] = []

    def read(self, resource: Resource | None) -> tuple[RayNode, ...]:
        """The nodes of the pool."""
        return tuple(
            replace(node, instance=self._kind.instance)
            for node in read_nodes(resource)
            if node.slots == self._kind.slots
        )

    def launched(self) -> Collection[str]:
        return ()  # there are none to end

    def recall(self, rented: Mapping[str, str]) -> None:
        """Treat nodes that had not come yet as requested now: they are found or refused."""
        self._asked += rented

    def launch(self, name: str, instance: str) -> None:
        del instance
        self._asked.append(name)

    def release(self, name: str, ray_id: str) -> None:
        """Nothing to do: the node stays in the cluster."""

    def news(self) -> list[LaunchNews]:
        """Refuse requests from before the last call; the fleet had time to adopt nodes for them."""
        refused, self._overdue, self._asked = self._overdue, self._asked, []
        return [LaunchFailed(name, f"no other node has {self._kind.slots} slots") for name in refused]

    def settle(self) -> frozenset[str]:
        return frozenset()  # nothing is on the way

    def close(self, awaited: Collection[str] = ()) -> None:
        """There is nothing to wait for."""
