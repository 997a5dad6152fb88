"""The fleet: which nodes a run wishes for, which are on the way, and which are present.

A state machine without I/O. Its inputs are wishes, the nodes seen in the cluster, and the outcomes of
launches; its outputs are orders for a launcher, and events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stretto.core.cluster import Node, Wish, node_name
from stretto.core.events import (
    Event,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
)
from stretto.core.resources import Resources
from stretto.core.units import format_duration
from stretto.journal.folds.nodes import NodeRecord, Refusals
from stretto.substrate.fleet.commands import START_S
from stretto.substrate.fleet.nodes import (
    FleetStep,
    LaunchFailure,
    LaunchNode,
    NodeKind,
    NodeOrder,
    PendingNode,
    PresentNode,
    ReleaseNode,
    SeenNode,
)


class Fleet:
    """Launchable nodes exist on request; the others are permanent.

    A node that is lost, drains or does not come is replaced only after another wish.
    """

    def __init__(
        self,
        kinds: Iterable[NodeKind] = (),
        *,
        start_s: float = START_S,
        adopts: bool = False,
        prefix: str = "",
    ) -> None:
        """`adopts`: nodes come in any order, without the names they were requested under.

        `prefix` begins the names of this fleet's nodes, as other fleets may share the cluster.
        """
        self._kinds = {kind.instance: kind for kind in kinds}
        self._start_s = start_s
        self._adopts = adopts
        self._prefix = prefix
        self._wish = Wish(())
        """The last wish for known kinds, minus nodes refused or lost since then."""
        self._pending: dict[str, PendingNode] = {}
        """In the order of the requests."""
        self._present: dict[str, PresentNode] = {}
        self._released: set[str] = set()
        """Keys of nodes that were given back or given up and are still visible."""
        self._seen: dict[str, SeenNode] = {}
        self._number = 0
        self._refusals = Refusals()
        self._settled = False
        """Whether we know which nodes the run has; before that, no node counts as left over."""

    def begin(self, seen: Sequence[SeenNode], nodes: Iterable[Node] | None = None) -> list[Node]:
        """The nodes that a run begins with, without events; `nodes` None: the permanent ones that are seen.

        `nodes` may have been found earlier; the next `see` reports the changes since then.
        """
        self._seen = {one.key: one for one in seen}
        if nodes is None:
            for one in seen:
                if one.instance not in self._kinds and not one.draining:
                    self._take_in(one, FleetStep(), 0.0)
        else:
            self._present = {node.id: PresentNode(node, "") for node in nodes}
            self._recognise()
        return [here.node for here in self._present.values()]

    def key_of(self, node_id: str) -> str | None:
        """The key of a present node among those seen."""
        here = self._present.get(node_id)
        return None if here is None else here.key

    @property
    def rented(self) -> dict[str, str]:
        """The instance of every requested node, present or on the way, by name."""
        nodes = [here.node for here in self._present.values()] + [one.node for one in self._pending.values()]
        return {node.id: node.instance for node in nodes if node.instance}

    @property
    def hopeless(self) -> Refusals | None:
        """The refusals, if requests failed again and again, no node is usable and none is on the way."""
        sizes = {kind.slots for kind in self._kinds.values()}
        of_use = any(here.node.gpus in sizes for here in self._present.values())
        vain = self._refusals.hopeless and bool(self._kinds) and not of_use and not self._pending
        return self._refusals if vain else None

    def wish(self, wish: Wish, t_s: float) -> FleetStep:
        """Request missing nodes, and cancel those on the way that are not wanted any more.

        Nodes to be given back stay until `release`, and are replaced only then.
        """
        step = FleetStep()
        self._settled = True
        for node_id in wish.release:
            if node_id in self._present:
                self._present[node_id] = replace(self._present[node_id], leaving=True)
        self._wish = self._known(wish)
        self._balance(step, t_s)
        unknown = [(instance, n) for instance, n in wish.nodes if n and instance not in self._kinds]
        why = self._why_unknown()
        self._report([NodeRefused(t_s=t_s, instance=kind, count=n, why=why) for kind, n in unknown], step)
        return step

    def release(self, nodes: Iterable[str], t_s: float) -> FleetStep:
        """Give back launched nodes; the wish for others stays as it is."""
        step = FleetStep()
        for node_id in nodes:
            if node_id in self._present and self._present[node_id].node.instance:
                self._give_back(node_id, step, t_s)
        self._balance(step, t_s)
        return step

    def give_up(self, node_id: str) -> FleetStep:
        """Give up a node that is visible but unusable; it is never offered again."""
        step = FleetStep()
        here = self._present.pop(node_id, None)
        if here is not None:
            self._released.add(here.key)
            self._expect_less(here)
            if here.node.instance:
                step.orders.append(ReleaseNode(node_id, here.key))
        return step

    def began(self, name: str, t_s: float) -> FleetStep:
        """A launch has begun: the node costs from now on."""
        step = FleetStep()
        coming = self._pending.get(name)
        if coming is not None and coming.launched_s is None:
            self._pending[name] = replace(coming, launched_s=t_s)
            step.events.append(NodeLaunched(t_s=t_s, node=coming.node))
        return step

    def failed(self, failures: Mapping[str, LaunchFailure], t_s: float) -> FleetStep:
        """Process failed launches, except for nodes that came anyway."""
        step = FleetStep()
        fresh = {name: failure for name, failure in failures.items() if name in self._pending}
        self._refuse(fresh, step, t_s)
        return step

    def see(self, seen: Sequence[SeenNode], t_s: float) -> FleetStep:
        """Compare with the nodes alive now: which came, which went, which are overdue."""
        step = FleetStep()
        self._seen = {one.key: one for one in seen}
        self._released &= self._seen.keys()
        self._recognise()
        self._find_lost(step, t_s)
        known = {here.key for here in self._present.values()} | self._released
        for one in seen:
            if one.key not in known and not one.draining:
                self._meet(one, step, t_s)
        self._adopt(step, t_s)
        late = LaunchFailure(f"not there {format_duration(self._start_s)} after the request")
        overdue = {name: late for name, one in self._pending.items() if t_s >= one.due_s}
        self._refuse(overdue, step, t_s)
        return step

    def recall(
        self,
        history: Iterable[Event],
        seen: Sequence[SeenNode],
        t_s: float,
        *,
        launched: Iterable[str] = (),
    ) -> FleetStep:
        """Resume from a run's events: nodes on the way may still come, and the last wish holds.

        Nodes in `launched` (names) that the events do not have are released.
        """
        record = NodeRecord.of(history)
        self._settled = True
        due_s = t_s + self._start_s
        self._present = {
            node.id: PresentNode(node, "", node.id in record.draining) for node in record.here.values()
        }
        self._pending = {
            node.id: PendingNode(node, since_s, due_s, since_s) for node, since_s in record.coming.values()
        }
        self._wish = self._known(record.wish)
        self._refusals = record.refusals.with_one_more_try()
        # Requests for this many nodes may be missing in the record.
        self._number = record.names + sum(count for _, count in self._wish.nodes)
        step = self.see(seen, t_s)
        # It is not known how long these nodes took to come.
        step.events = [
            replace(event, queue_s=0.0, init_s=0.0) if isinstance(event, NodeAdded) else event
            for event in step.events
        ]
        for node_id in record.wish.release:
            if node_id in self._present:
                self._give_back(node_id, step, t_s)
        settled = {*self.rented, *(order.name for order in step.orders)}
        step.orders += [ReleaseNode(name) for name in launched if name not in settled]
        self._balance(step, t_s)
        return step

    def release_all(
        self,
        history: Iterable[Event],
        seen: Sequence[SeenNode],
        t_s: float,
        *,
        launched: Iterable[str] = (),
    ) -> FleetStep:
        """Release every node of a run that is not resumed.

        `launched` names nodes that can be ended, whether or not the run's events have them.
        """
        record = NodeRecord.of(history)
        step = FleetStep()
        self._seen = {one.key: one for one in seen}
        self._present = {node.id: PresentNode(node, "") for node in record.here.values() if node.instance}
        self._recognise()
        for node_id in list(self._present):
            self._give_back(node_id, step, t_s)
        for name in record.coming:
            step.orders.append(ReleaseNode(name))
            step.events.append(NodeReleased(t_s=t_s, node_id=name))
        keys = {one.name: one.key for one in seen}
        known = set(record.rented)
        step.orders += [ReleaseNode(name, keys.get(name, "")) for name in launched if name not in known]
        return step

    def close(self) -> list[NodeOrder]:
        """Release every launched node."""
        rented = [(node_id, here.key) for node_id, here in self._present.items() if here.node.instance]
        orders: list[NodeOrder] = [ReleaseNode(name) for name in self._pending]
        orders += [ReleaseNode(node_id, key) for node_id, key in rented]
        self._pending.clear()
        for node_id, _ in rented:
            del self._present[node_id]
        return orders

    def _balance(self, step: FleetStep, t_s: float) -> None:
        awaited = {one.node.instance for one in self._pending.values()}
        for instance in sorted({*dict(self._wish.nodes), *awaited}):
            on_the_way = self._on_the_way(instance)
            here = [one for one in self._present.values() if one.node.instance == instance]
            counted = sum(one.is_counted_on for one in here) + len(on_the_way)
            missing = self._wish.count(instance) - counted
            for name in on_the_way[missing:] if missing < 0 else ():
                self._take_back(name, step, t_s)
            for _ in range(missing - sum(one.leaving for one in here)):
                self._ask(self._kinds[instance], step, t_s)
        self._adopt(step, t_s)

    def _ask(self, kind: NodeKind, step: FleetStep, t_s: float) -> None:
        self._number += 1
        name = f"{self._prefix}{node_name(kind.instance, self._number)}"
        node = Node(name, Resources(gpu=kind.slots), kind.instance)
        self._pending[name] = PendingNode(node, t_s, t_s + self._start_s)
        step.orders.append(LaunchNode(name, kind.instance))

    def _take_back(self, name: str, step: FleetStep, t_s: float, *, never_came: bool = False) -> None:
        coming = self._pending.pop(name)
        step.orders.append(ReleaseNode(name))
        if coming.launched_s is not None:
            step.events.append(NodeReleased(t_s=t_s, node_id=name, never_came=never_came))

    def _give_back(self, node_id: str, step: FleetStep, t_s: float) -> None:
        here = self._present.pop(node_id)
        if not self._adopts:  # an adopted node is free now, and may be adopted again
            self._released.add(here.key)
        step.orders.append(ReleaseNode(node_id, here.key))
        step.events.append(NodeReleased(t_s=t_s, node_id=node_id))

    def _refuse(self, failures: Mapping[str, LaunchFailure], step: FleetStep, t_s: float) -> None:
        """Report failures, one event per kind and reason, with the log of the first."""
        alike: dict[tuple[str, str], list[LaunchFailure]] = {}
        for name, failure in failures.items():
            instance = self._pending[name].node.instance
            alike.setdefault((instance, failure.why), []).append(failure)
            self._take_back(name, step, t_s, never_came=True)
            self._wish = self._wish.less(instance, 1)
        told = [
            NodeRefused(t_s=t_s, instance=instance, count=len(those), why=those[0].words)
            for (instance, _), those in alike.items()
        ]
        self._report(told, step)

    def _report(self, refused: Sequence[NodeRefused], step: FleetStep) -> None:
        if refused:
            self._refusals = self._refusals.after(refused[-1], awaits=bool(self._pending))
        step.events += refused

    def _recognise(self) -> None:
        """Match nodes of the record with nodes that are alive: by name, or any of the same kind."""
        taken = {here.key for here in self._present.values()}
        for node_id, here in self._present.items():
            if here.key:
                continue
            same = [one for one in self._seen.values() if one.key not in taken and self._may_be(one, here)]
            if same:
                self._present[node_id] = replace(here, key=same[0].key)
                taken.add(same[0].key)

    def _may_be(self, one: SeenNode, here: PresentNode) -> bool:
        any_will_do = self._adopts and bool(here.node.instance)
        return one.instance == here.node.instance if any_will_do else one.name == here.node.id

    def _find_lost(self, step: FleetStep, t_s: float) -> None:
        """Report nodes that are gone or draining."""
        for node_id, here in list(self._present.items()):
            one = self._seen.get(here.key)
            if one is None:
                del self._present[node_id]
                step.events.append(NodeLost(t_s=t_s, node_id=node_id))
                if here.node.instance:
                    step.orders.append(ReleaseNode(node_id, here.key))
            elif one.draining and not here.draining:
                self._present[node_id] = replace(here, draining=True)
                step.events.append(NodeDraining(t_s=t_s, node_id=node_id))
            else:
                continue
            self._expect_less(here)

    def _meet(self, one: SeenNode, step: FleetStep, t_s: float) -> None:
        if one.instance not in self._kinds:
            self._take_in(one, step, t_s)
        elif one.name in self._pending:
            self._arrive(one.name, one, step, t_s)
        elif self._settled and not self._adopts and self._is_ours(one) and one.name not in self._present:
            # A controller requested it and was killed before it could record that.
            self._released.add(one.key)
            step.orders.append(ReleaseNode(one.name, one.key))

    def _take_in(self, one: SeenNode, step: FleetStep, t_s: float) -> None:
        name = one.name if one.name not in self._present else f"{one.name}-{one.key[:6]}"
        node = Node(name, Resources(gpu=one.slots))
        self._present[name] = PresentNode(node, one.key)
        step.events.append(NodeAdded(t_s=t_s, node=node))

    def _adopt(self, step: FleetStep, t_s: float) -> None:
        """Match nodes without names with the oldest requests."""
        if not self._adopts:
            return
        taken = {here.key for here in self._present.values()} | self._released
        for one in self._seen.values():
            on_the_way = self._on_the_way(one.instance)
            if on_the_way and one.key not in taken and not one.draining:
                self._arrive(on_the_way[0], one, step, t_s)

    def _arrive(self, name: str, one: SeenNode, step: FleetStep, t_s: float) -> None:
        coming = self._pending.pop(name)
        node = replace(coming.node, capacity=Resources(gpu=one.slots))
        self._present[name] = PresentNode(node, one.key)
        self._refusals = self._refusals.arrived()
        launched_s = coming.launched_s
        if launched_s is None:
            launched_s = t_s
            step.events.append(NodeLaunched(t_s=t_s, node=node))
        queue_s, init_s = launched_s - coming.asked_s, t_s - launched_s
        step.events.append(NodeAdded(t_s=t_s, node=node, queue_s=queue_s, init_s=init_s))

    def _expect_less(self, gone: PresentNode) -> None:
        """Reduce the wish by a node that is gone: it is replaced only after another wish."""
        if gone.is_counted_on:
            self._wish = self._wish.less(gone.node.instance, 1)

    def _known(self, wish: Wish) -> Wish:
        return Wish(tuple((instance, count) for instance, count in wish.nodes if instance in self._kinds))

    def _on_the_way(self, instance: str) -> list[str]:
        return [name for name, one in self._pending.items() if one.node.instance == instance]

    def _is_ours(self, one: SeenNode) -> bool:
        begin, _, number = one.name.rpartition("-")
        return begin == f"{self._prefix}{one.instance}" and number.isdigit()

    def _why_unknown(self) -> str:
        if not self._kinds:
            return "this cluster has fixed nodes"
        return f"there are nodes of {', '.join(self._kinds)} only"
