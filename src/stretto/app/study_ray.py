"""How nodes of a Ray cluster are brought up for a study, as the section [ray] of its file says."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.app.study_fields import Fields
from stretto.core.errors import InputError
from stretto.substrate.fleet_commands import check_labels, check_launch, check_release
from stretto.substrate.fleet_nodes import START_S, Resource

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
