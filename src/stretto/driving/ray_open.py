"""A Ray cluster that this process is connected to. Importing this module imports Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stretto.core.cluster import Node
from stretto.core.errors import InputError
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
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.fleet.commands import Commands, Resource
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.fleet import NodePool, RayFleet
from stretto.substrate.ray.launch import AutoscalerLauncher, Launcher
from stretto.substrate.ray.launch_commands import CommandLauncher
from stretto.substrate.ray.nodes import RayNode, read_nodes, slot_resource
from stretto.substrate.ray.substrate import RaySubstrate
from stretto.system.private_files import make_private_folder

LABEL_LETTERS = 40
"""Characters of a run's name in the names of its nodes; Ray's labels hold at most 63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRay:
    """A Ray cluster that this process is connected to."""

    request: TargetRequest
    address: str
    own: bool
    """The cluster was started for this run."""
    resource: Resource
    nodes: tuple[Node, ...]
    launched: frozenset[str]
    """The names of the nodes that some run has launched."""

    mark: ClassVar[str] = " on Ray"

    @property
    def words(self) -> str:
        return f"the Ray cluster at {self.address}"

    @property
    def launches(self) -> Rented | None:
        """The nodes that are launched on request; None: none are."""
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
                files=JobFiles(tensorboard=training.tensorboard, store=store),
                temporary=training.temporary,
                runs_commands=training.runs_commands,
            )
        except BaseException:
            fleet.close()
            raise

    @contextmanager
    def scratch(self, purpose: str, log: Path | None) -> Iterator[RunFolder]:
        """Made beside the runs, in a folder that all nodes see."""
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

    def look_again(self) -> OpenRay:
        return look_around(self.request, self.address, own=self.own)

    @property
    def _pool(self) -> tuple[int, int]:
        """The largest group of equal nodes, by its slots in all: number of nodes, slots of each."""
        sizes = Counter(node.gpus for node in self.nodes)
        slots = max(sizes, key=lambda size: (size * sizes[size], size))
        return sizes[slots], slots

    def _notes(self) -> Iterator[str]:
        request = self.request
        slots = counted(sum(node.gpus for node in self.nodes), "slot")
        if self.own:
            yield f"There is no Ray cluster here, so one with {slots} is started on this machine for the run."
        elif request.machine.slots is not None:
            yield f"[machine] slots applies to --on local; the run has {slots}, of {self.words}."
        if request.rented is not None and not request.rents:
            yield "[ray] is for a policy that rents, such as rubberband; this one uses the present nodes."
        if self.launches is not None and self.held:
            yield _there_already(self.held, self.launches.offer)
        if request.rents and not self.launches and len({node.gpus for node in self.nodes}) > 1:
            count, each = self._pool
            yield (
                f"A policy that rents uses equal nodes: {count} of {each} slots are used, and "
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
    """A note on the nodes that are there: those of an offered size are used before others are launched."""
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
    """The cluster with its present nodes; InputError if it has no slots and launches none."""
    rented = request.rented if request.rents else None
    resource = slot_resource() if rented is None else rented.nodes.slot
    seen = [node for node in read_nodes(resource) if not node.draining]
    kinds = () if rented is None else tuple(one.name for one in rented.offer.instances)
    named: dict[str, RayNode] = {}
    for one in seen:  # the fleet treats others of the same name as nodes that join later
        named.setdefault(one.name, one)
    found = OpenRay(
        request=request,
        address=address,
        own=own,
        resource=resource,
        nodes=tuple(node_of(name, one.slots) for name, one in named.items()),
        launched=frozenset(name for name, one in named.items() if one.instance in kinds),
    )
    if not found.nodes and not found.launches:
        raise InputError(
            f"{found.words} has no slots: no node with a GPU or CPU.",
            remedy="Let a node join: ray start --address ADDRESS.",
        )
    return found


def node_prefix(run: str) -> str:
    """The start of the names of nodes that a run launches, in characters that Ray's labels allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", run)[:LABEL_LETTERS].lstrip("-_.") + "-"
