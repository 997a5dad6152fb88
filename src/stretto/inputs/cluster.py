"""What a study is put on, as its file says: slots of this machine, rented nodes, nodes of a Ray cluster."""

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
"""The instance type of a whole machine, for policies that hold all its slots from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """The machine a study is tuned on; the price holds for a slot of one's own, wherever it is."""

    slots: int | None = None
    """Workers it runs at once; None: one for every GPU, or for every core where there is none."""
    usd_per_slot_hour: float = 0.0


def slots_offer(slots: int, machine: MachineSpec) -> Offer:
    """Slots of one's own, each of them a node to whoever rents."""
    one = Instance(name=SLOT, gpus=1, usd_per_hour=machine.usd_per_slot_hour, own=True)
    return Offer(instances=(one,), max_nodes=slots)


def nodes_offer(count: int, slots_each: int, machine: MachineSpec) -> Offer:
    """Equal nodes of one's own."""
    return Offer(instances=(node_type(slots_each, machine.usd_per_slot_hour),), max_nodes=count)


def machine_instance(tuning: Tuning) -> Instance:
    """All slots of a study's machine as one node."""
    slot = tuning.instances[0]
    return Instance(name=MACHINE, gpus=tuning.max_nodes, usd_per_hour=slot.usd_per_hour * tuning.max_nodes)


def machine_of(fields: Fields) -> MachineSpec:
    """What a section [machine] says."""
    return MachineSpec(
        slots=fields.whole("slots", at_most=MOST_SLOTS) if "slots" in fields else None,
        usd_per_slot_hour=fields.number("usd_per_slot_hour", 0.0),
    )


def cluster_of(fields: Fields, path: Path) -> Offer:
    """What a section [cluster] says can be rented; price lists lie beside the study."""
    return Offer(
        instances=_instances(fields, path),
        max_nodes=fields.whole("max_nodes", at_most=MOST_NODES),
        billing=_billing(fields),
    )


def _instances(cluster: Fields, path: Path) -> tuple[Instance, ...]:
    """Types of one's own, and those picked by name: from these, the price list, or else the catalogue."""
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
    """Who brings up the nodes of [cluster]: commands, or Ray's autoscaler."""

    launch: str = ""
    """Run for every node that is wanted; empty: the autoscaler is asked."""
    release: str = ""
    """Run for every node that is not wanted any more; not needed where ending `launch` ends the node."""
    start_s: float = START_S
    """A node that is not there so long after it was asked for is not waited for."""
    slot: Resource = "GPU"
    """What of a node is a slot."""


def ray_of(fields: Fields) -> RayNodes:
    """What a section [ray] says."""
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
            "release stands beside autoscaler, which lets go of nodes itself.",
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
