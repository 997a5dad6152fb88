"""A Ray cluster as a target. Ray is imported when the cluster is connected to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stretto.core.errors import InputError
from stretto.driving.target import OpenTarget, TargetRequest, check_storable
from stretto.inputs.work import RealWork
from stretto.runs.folder import Tables
from stretto.substrate.fleet.commands import check_program
from stretto.substrate.ray.cluster import connected, is_our_own

ANSWER_S = 10.0
"""A reachable port answers within this time."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The cluster at an address; without one, the cluster that this machine is part of, or a new one."""

    request: TargetRequest
    address: str | None

    @property
    def asked(self) -> Tables:
        """Without the address: a run may be resumed on a cluster that was started anew."""
        request = self.request
        return {"on": "ray", "slots": request.slots, "store": request.store or None}

    @property
    def devices(self) -> tuple[str, ...]:
        return ()

    def check(self, work: RealWork) -> None:
        check_storable(work, self.request.store)

    @contextmanager
    def opened(self) -> Iterator[OpenTarget]:
        request = self.request
        self._check_programs()
        if self.address is not None:
            _check_answers(self.address)
        with connected(self.address, slots=request.wanted_slots) as address:
            own = is_our_own()
            if request.slots is not None and not own:
                raise InputError(
                    f"--slots {request.slots}: the nodes of the Ray cluster at {address} have the slots "
                    "that Ray knows of.",
                    remedy="Leave it out; `ray start --num-gpus` or `--num-cpus` says how many a node has.",
                )
            from stretto.driving.ray_open import look_around  # noqa: PLC0415 - it imports Ray

            yield look_around(request, address, own=own)

    def _check_programs(self) -> None:
        """InputError if a program that launches or releases nodes is not on this machine."""
        rented = self.request.rented if self.request.rents else None
        if rented is None:
            return
        for name, command in (("launch", rented.nodes.launch), ("release", rented.nodes.release)):
            if command:
                check_program(command, where=f"[ray] {name}")


def _check_answers(address: str) -> None:
    """InputError at once if nothing answers; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(
            f"{address!r} is no address of a Ray cluster.",
            remedy="Give HOST:PORT, such as ray:10.0.0.1:6379.",
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"nothing answers at {address} ({error}).",
            remedy="Give the address that `ray start --head` printed, and see that its port can be reached.",
        ) from error
