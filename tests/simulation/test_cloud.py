"""Nodes of the simulated cloud: the order in which things are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.cluster import Wish
from stretto.core.events import NodeAdded, NodeLaunched
from stretto.core.resources import Resources
from stretto.substrate.sim.substrate import SimCloud
from stretto.worlds.cloud import CloudNode


class AtOnce:
    """A cloud without delays."""

    def launch(self, instance: str, count: int, request: int) -> Sequence[CloudNode]:
        del instance, request
        return [CloudNode(Resources(gpu=1), 0.0, 0.0)] * count


def test_a_node_is_launched_before_it_is_there_even_in_no_time() -> None:
    cloud = SimCloud(AtOnce())
    assert cloud.provision(5.0, Wish((("box", 3),))) == []
    told: list[NodeLaunched | NodeAdded] = []
    while cloud.next_s() == 5.0:
        told.append(cloud.deliver())
    assert len(told) == 6
    for launched, added in zip(told[::2], told[1::2], strict=True):
        assert (launched.kind, added.kind) == (NodeLaunched.kind, NodeAdded.kind)
        assert launched.node == added.node
