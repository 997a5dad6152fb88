"""A Ray cluster that is connected to, as what a run is put on. Importing this imports Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stretto.core.cluster import Node
from stretto.core.units import counted
from stretto.driving.drive import RealSubstrate
from stretto.driving.substrate import TrainingSpec, check_tensorboard, training_job
from stretto.driving.target import TargetRequest, node_of, scratch
from stretto.inputs.cluster import nodes_offer, slots_offer
from stretto.inputs.study import Rented
from stretto.pricing.instances import Offer
from stretto.runs.folder import RunFolder
from stretto.runs.store import empty_store, store_of
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.elastic.substrate import Files
from stretto.substrate.fleet.commands import Commands, Resource
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.fleet import NodePool, RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher, Launcher
from stretto.substrate.ray.launch_commands import CommandLauncher
from stretto.substrate.ray.nodes import RayNode, read_nodes, slot_resource
from stretto.substrate.ray.substrate import RaySubstrate
from stretto.system.private_files import make_private_folder

LABEL_LETTERS = 40
"""Of a run's name in those of its nodes; Ray's labels have 63 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRay:
    """A Ray cluster that this process is connected to."""

    request: TargetRequest
    address: str
    own: bool
    """It was started for this."""
    resource: Resource
    nodes: tuple[Node, ...]
    launched: frozenset[str]
    """Those of the nodes that some run has brought up."""

    mark: ClassVar[str] = " on Ray"

    @property
    def words(self) -> str:
        return f"the Ray cluster at {self.address}"

    @property
    def launches(self) -> Rented | None:
        """What is brought up when it is wished for."""
        return self.request.rented if self.request.rents else None

    @property
    def held(self) -> tuple[Node, ...]:
        if not self.request.rents:
            return self.nodes
        return tuple(node for node in self.nodes if node.id not in self.launched) if self.launches else ()

    @property
    def to_measure_on(self) -> tuple[Node, ...]:
        return self.held if self.launches else self.nodes

    @property
    def offer(self) -> Offer:
        machine = self.request.machine
        if self.launches is not None:
            return self.launches.offer
        if self.request.rents:
            return nodes_offer(*self._pool, machine)
        return slots_offer(sum(node.gpus for node in self.nodes), machine)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes())

    def make(self, training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        store = self.request.store and store_of(self.request.store, folder.name)
        rules = Rules(retries=training.retries)
        check_tensorboard(training)
        fleet = self._fleet(training, folder)
        try:
            return RaySubstrate(
                fleet=fleet,
                slots=training.slots,
                spec_of=lambda job: training_job(training, job),
                run_dir=folder.path,
                clock=clock,
                rules=rules,
                files=Files(tensorboard=training.tensorboard, store=store),
                temporary=training.temporary,
                runs_commands=training.runs_commands,
            )
        except BaseException:
            fleet.close()
            raise

    @contextmanager
    def scratch(self, purpose: str, log: Path | None) -> Iterator[RunFolder]:
        """Beside the runs, as that is where all nodes see it."""
        runs, store = self.request.runs.absolute(), self.request.store
        make_private_folder(runs)
        with scratch(purpose, log=log, parent=runs) as folder:
            try:
                yield folder
            finally:
                if store:
                    empty_store(store_of(store, folder.name))

    def fleet(self, folder: RunFolder, purpose: str = "") -> RayFleet | None:
        return None if self.launches is None else self._launching(self.launches, folder, (), purpose)

    @property
    def _pool(self) -> tuple[int, int]:
        """Of the equal nodes that have most slots together: how many, and the slots of each."""
        sizes = Counter(node.gpus for node in self.nodes)
        slots = max(sizes, key=lambda size: (size * sizes[size], size))
        return sizes[slots], slots

    def _notes(self) -> Iterator[str]:
        request = self.request
        slots = counted(sum(node.gpus for node in self.nodes), "slot")
        if self.own:
            yield f"There is no Ray cluster here: one of {slots} is started on this machine meanwhile."
        elif request.machine.slots is not None:
            yield f"[machine] slots is about one machine; the run has {slots}, of {self.words}."
        if request.rented is not None and not request.rents:
            yield "[ray] is for a policy that rents, such as rubberband; this one takes the nodes there are."
        if self.launches is not None and self.held:
            yield _there_already(self.held, self.launches.offer)
        if request.rents and not self.launches and len({node.gpus for node in self.nodes}) > 1:
            count, each = self._pool
            yield (
                f"Nodes that are rented are equal: {count} of {each} slots are used, and "
                f"{len(self.nodes) - count} of another size are not."
            )

    def _fleet(self, training: TrainingSpec, folder: RunFolder) -> RayFleet:
        if training.temporary or not self.request.rents:
            return RayFleet(nodes=training.nodes, resource=self.resource)
        if self.launches is None:
            pool = NodePool(NodeKind(self.offer.instances[0].name, self.offer.instances[0].gpus))
            return RayFleet(pool, nodes=training.nodes, resource=self.resource, read=pool.read)
        return self._launching(self.launches, folder, training.nodes)

    def _launching(
        self, rented: Rented, folder: RunFolder, nodes: Iterable[Node], purpose: str = ""
    ) -> RayFleet:
        return RayFleet(
            self._launcher(rented, folder),
            nodes=nodes,
            resource=self.resource,
            start_s=rented.nodes.start_s,
            prefix=node_prefix(folder.name) + (f"{purpose}-" if purpose else ""),
        )

    def _launcher(self, rented: Rented, folder: RunFolder) -> Launcher:
        kinds = [NodeKind(one.name, one.gpus) for one in rented.offer.instances]
        if not rented.nodes.launch:
            return AutoscalerLauncher(kinds, self.resource)
        commands = Commands(launch=rented.nodes.launch, release=rented.nodes.release)
        return CommandLauncher(commands, kinds, address=self.address, folder=folder.nodes)


def _there_already(nodes: Sequence[Node], offer: Offer) -> str:
    """Of nodes that need not be launched: those of a size that is offered can stand for launched ones."""
    sizes = {instance.gpus for instance in offer.instances}
    fit = [node for node in nodes if node.gpus in sizes]
    if not fit:
        return "The nodes that are there are of another size than [cluster] has, and are not used."
    slots = counted(sum(node.gpus for node in fit), "slot")
    others = " Those of another size than [cluster] has are not used." if len(fit) < len(nodes) else ""
    return (
        f"There already: {counted(len(fit), 'node')} with {slots}, used before others are launched.{others}"
    )


def look_around(request: TargetRequest, address: str, *, own: bool) -> OpenRay:
    """What there is in the cluster that is connected to."""
    rented = request.rented if request.rents else None
    resource = slot_resource() if rented is None else rented.nodes.slot
    seen = [node for node in read_nodes(resource) if not node.draining]
    kinds = () if rented is None else tuple(one.name for one in rented.offer.instances)
    named: dict[str, RayNode] = {}
    for one in seen:  # others of the same name the fleet takes for nodes that join later, and tells apart
        named.setdefault(one.name, one)
    return OpenRay(
        request=request,
        address=address,
        own=own,
        resource=resource,
        nodes=tuple(node_of(name, one.slots) for name, one in named.items()),
        launched=frozenset(name for name, one in named.items() if one.instance in kinds),
    )


def node_prefix(run: str) -> str:
    """What the names of nodes begin with that a run brings up: letters that Ray's labels may have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run)[:LABEL_LETTERS].lstrip("-_.") + "-"
