"""Assigns parameters to parameter servers so that none becomes the bottleneck.

A server is slow if it holds much or answers many requests. Every block of parameters, or slice of a block,
means one request per worker and step. So blocks are assigned whole if possible, largest first:

- tiny blocks go where requests are fewest,
- other blocks go by best fit within an equal share,
- only blocks larger than an equal share are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.errors import InputError

TINY_SHARE = 0.01
"""A block below this part of an equal share is tiny: its request matters more than its size."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A block or part of a block on a server."""

    block: int
    """Its index in the list of blocks."""
    server: int
    size: int


@dataclass(frozen=True, slots=True)
class ServerLoads:
    """What each server holds, and how even that is."""

    slices: tuple[Slice, ...]
    sizes: tuple[int, ...]
    """By server: the total size of its slices, in the unit of the blocks (parameters or bytes)."""
    requests: tuple[int, ...]
    """By server: the number of its slices, which is the requests of one worker in a step."""

    @property
    def total_requests(self) -> int:
        return sum(self.requests)

    @property
    def size_spread(self) -> int:
        """The size of the fullest server minus that of the emptiest one."""
        return max(self.sizes) - min(self.sizes)

    @property
    def request_spread(self) -> int:
        return max(self.requests) - min(self.requests)


def balance(blocks: Sequence[int], servers: int) -> ServerLoads:
    """Assign parameter blocks, given by their sizes, to servers; ties go to the first server."""
    if servers < 1:
        raise InputError(f"{servers} parameter servers cannot hold parameters.", remedy="Use at least 1.")
    if min(blocks, default=1) < 1:
        raise InputError(f"A parameter block of size {min(blocks)} is empty.", remedy="Leave it out.")
    share = sum(blocks) / servers
    sizes, requests = [0] * servers, [0] * servers
    slices: list[Slice] = []

    def put(block: int, server: int, size: int) -> None:
        sizes[server] += size
        requests[server] += 1
        slices.append(Slice(block, server, size))

    for block in sorted(range(len(blocks)), key=lambda i: (-blocks[i], i)):
        size = blocks[block]
        if size < TINY_SHARE * share:
            put(block, requests.index(min(requests)), size)
        elif size <= share:
            put(block, _best_fit(sizes, size, share), size)
        else:
            for part in _cut(size, math.ceil(share)):
                put(block, sizes.index(min(sizes)), part)
    return ServerLoads(tuple(slices), tuple(sizes), tuple(requests))


def _best_fit(sizes: list[int], size: int, share: float) -> int:
    """The fullest server that still has room within its share; if none has, the emptiest."""
    room = [held for held in sizes if held + size <= share]
    return sizes.index(max(room) if room else min(sizes))


def _cut(size: int, part: int) -> list[int]:
    """Parts of one size, and the rest."""
    whole, rest = divmod(size, part)
    return [part] * whole + ([rest] if rest else [])
