"""Parameters dealt out to parameter servers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.allocate.server_balance import balance
from stretto.core.errors import InputError

MILLION = 1_000_000


def resnet50_blocks() -> list[int]:
    """Parameter blocks of ResNet-50 with normalisation before each convolution, in the order of the net."""
    blocks = [3, 3, 64 * 3 * 7 * 7, 64, 64]
    width_in = 64
    for width, units in ((256, 3), (512, 4), (1024, 6), (2048, 3)):
        inner = width // 4
        for unit in range(units):
            blocks += [width_in, width_in, width_in * inner]
            blocks += [inner, inner, inner * inner * 3 * 3]
            blocks += [inner, inner, inner * width]
            if unit == 0:
                blocks.append(width_in * width)
            width_in = width
    return [*blocks, 2048, 2048, 2048 * 1000, 1000]


def mxnet_requests(blocks: list[int], servers: int) -> list[int]:
    """Requests per server by MXNet's default rule: big blocks over all servers, others by their key."""
    requests = [0] * servers
    for key, size in enumerate(blocks):
        holders = range(servers) if size >= MILLION else [key * 9973 % servers]
        for server in holders:
            requests[server] += 1
    return requests


def test_resnet50_has_the_published_blocks() -> None:
    blocks = resnet50_blocks()
    assert len(blocks) == 157
    assert sum(blocks) == pytest.approx(25.55 * MILLION, abs=0.005 * MILLION)


def test_o9_resnet50_on_ten_servers() -> None:
    loads = balance(resnet50_blocks(), 10)
    assert loads.total_requests == 157
    assert loads.request_spread == 1
    assert loads.size_spread == 104_576
    assert loads.size_spread <= 0.11 * MILLION


def test_o9_the_default_rule_needs_247_requests() -> None:
    requests = mxnet_requests(resnet50_blocks(), 10)
    assert sum(requests) == 247
    assert sum(requests) > balance(resnet50_blocks(), 10).total_requests


def test_a_block_larger_than_a_share_is_cut_into_shares() -> None:
    loads = balance([100, 10, 10], 4)
    assert sorted(piece.size for piece in loads.slices if piece.block == 0) == [10, 30, 30, 30]
    assert loads.sizes == (30, 30, 30, 30)
    assert loads.total_requests == 6


def test_tiny_blocks_go_where_requests_are_fewest() -> None:
    loads = balance([1000, 500, 500, 1, 1], 2)
    assert loads.requests == (3, 2)
    assert {piece.server for piece in loads.slices if piece.size == 1} == {0}


@given(blocks=st.lists(st.integers(1, 10**7), max_size=60), servers=st.integers(1, 12))
def test_every_parameter_is_on_one_server(blocks: list[int], servers: int) -> None:
    loads = balance(blocks, servers)
    held = [0] * len(blocks)
    for piece in loads.slices:
        held[piece.block] += piece.size
    assert held == blocks
    for server in range(servers):
        here = [piece for piece in loads.slices if piece.server == server]
        assert loads.sizes[server] == sum(piece.size for piece in here)
        assert loads.requests[server] == len(here)
    share = sum(blocks) / servers
    whole = sum(size <= share for size in blocks)
    cuts = sum(math.ceil(size / math.ceil(share)) for size in blocks if size > share)
    assert loads.total_requests == whole + cuts


def test_no_server_and_empty_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="0 parameter servers"):
        balance([1], 0)
    with pytest.raises(InputError, match="size 0"):
        balance([3, 0], 2)
