"""The hardware of a study, as its file describes it: this machine, rented nodes, nodes of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import InputError
from stretto.inputs.fields import Fields
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import SLOT, Instance, Offer, find_instance, node_type
from stretto.pricing.price_list import make_instance, read_price_list
from stretto.substrate.fleet.commands import START_S, Resource, check_labels, check_launch, check_release

MACHINE_KEYS = ("slots", "usd_per_slot_hour")
RENT_KEYS = ("instances", "instance", "prices", "max_nodes", "nodes", "queue_s", "init_s")
BILLING_KEYS = ("billing", "minimum_s", "granularity_s", "usd_per_gb", "dataset_gb")
CLUSTER_KEYS = (*RENT_KEYS, *BILLING_KEYS)

MOST_NODES = 10**4
MOST_SLOTS = 1024

MACHINE = "machine"
"""Instance type of a whole machine, for policies that hold all its slots from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """The section [machine]. The price holds for every slot that you own, here or on a cluster."""

    slots: int | None = None
    """Workers at the same time; None: one per GPU, or one per core on a machine without GPUs."""
    usd_per_slot_hour: float = 0.0


def slots_offer(slots: int, machine: MachineSpec) -> Offer:
    """The slots of your own machine; a policy that rents sees each slot as a node."""
    one = Instance(name=SLOT, gpus=1, usd_per_hour=machine.usd_per_slot_hour, own=True)
    return Offer(instances=(one,), max_nodes=slots)


def nodes_offer(count: int, slots_each: int, machine: MachineSpec) -> Offer:
    """Equal nodes that you own."""
    return Offer(instances=(node_type(slots_each, machine.usd_per_slot_hour),), max_nodes=count)


def machine_instance(tuning: Tuning) -> Instance:
    """All slots of the study's machine as one node type."""
    slot = tuning.instances[0]
    return Instance(name=MACHINE, gpus=tuning.max_nodes, usd_per_hour=slot.usd_per_hour * tuning.max_nodes)


def machine_of(fields: Fields) -> MachineSpec:
    """Reads the section [machine]."""
    return MachineSpec(
        slots=fields.whole("slots", at_most=MOST_SLOTS) if "slots" in fields else None,
        usd_per_slot_hour=fields.number("usd_per_slot_hour", 0.0),
    )


def cluster_of(fields: Fields, path: Path) -> Offer:
    """Reads the section [cluster]. The path of a price list is relative to the study file."""
    return Offer(
        instances=_instances(fields, path),
        max_nodes=fields.whole("max_nodes", at_most=MOST_NODES),
        billing=_billing(fields),
    )


def _instances(cluster: Fields, path: Path) -> tuple[Instance, ...]:
    """Types written in the file, and those picked by name: from the file, the price list or the catalogue."""
    listed = read_price_list(path.parent / cluster.text("prices")) if "prices" in cluster else ()
    names = cluster.list("instances", [], of=str, rule='a list of names, such as ["p3.8xlarge"]')
    written = cluster.list("instance", [], of=dict, rule="written as [[cluster.instance]]")
    own = [make_instance(one, where=f"{cluster.where('instance')}[{i}]") for i, one in enumerate(written)]
    where = cluster.where("instances")
    found = [find_instance(name, own=(*listed, *own), where=where) for name in names]
    found += listed if "instances" not in cluster else ()
    found += [instance for instance in own if instance.name not in names]
    if not found:
        raise InputError(
            "there is nothing to train on.",
            where=cluster.where("instances"),
            remedy='Give instances = ["p3.8xlarge"], a price list, or [[cluster.instance]] of your own.',
        )
    for position, instance in enumerate(found):
        if instance.name in {other.name for other in found[:position]}:
            raise InputError(
                f"{instance.name!r} is there twice.", where=cluster.where("instances"), remedy="Keep one."
            )
    return tuple(found)


def _billing(cluster: Fields) -> Billing:
    usual = Billing()
    return Billing(
        per=Per(cluster.choice("billing", tuple(Per), usual.per)),
        granularity_s=cluster.number("granularity_s", usual.granularity_s, above=0.0),
        minimum_s=cluster.number("minimum_s", usual.minimum_s),
        usd_per_gb=cluster.number("usd_per_gb", usual.usd_per_gb),
        dataset_gb=cluster.number("dataset_gb", usual.dataset_gb),
    )


RAY_KEYS = ("launch", "release", "autoscaler", "start_timeout", "slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodes:
    """How the nodes of [cluster] are launched: by commands, or by Ray's autoscaler."""

    launch: str = ""
    """Command that launches one node; empty: the autoscaler launches nodes."""
    release: str = ""
    """Command that releases one node; not needed if the node ends with its `launch` command."""
    start_s: float = START_S
    """A launch that takes longer than this has failed."""
    slot: Resource = "GPU"
    """The resource of a node that counts as a slot."""


def ray_of(fields: Fields) -> RayNodes:
    """Reads the section [ray]."""
    autoscaler = fields.flag("autoscaler", default=False)
    if autoscaler == ("launch" in fields):
        raise InputError(
            "it takes launch or autoscaler = true, one of the two.",
            where=fields.where("launch"),
            remedy='Write launch = "ssh box-{number} ray start --address {address} ..", or autoscaler = true '
            "where the cluster has Ray's.",
        )
    if autoscaler and "release" in fields:
        raise InputError(
            "release is given with autoscaler, which releases nodes itself.",
            where=fields.where("release"),
            remedy="Leave it out.",
        )
    return RayNodes(
        launch="" if autoscaler else _launch(fields),
        release=_release(fields) if "release" in fields else "",
        start_s=fields.duration_s("start_timeout") if "start_timeout" in fields else START_S,
        slot="CPU" if fields.choice("slot", ("gpu", "cpu"), "gpu") == "cpu" else "GPU",
    )


def _launch(fields: Fields) -> str:
    launch = fields.text("launch")
    check_launch(launch, where=fields.where("launch"))
    check_labels(launch, where=fields.where("launch"))
    return launch


def _release(fields: Fields) -> str:
    release = fields.text("release")
    check_release(release, where=fields.where("release"))
    return release
