"""Logs and metrics that are carried from a node: all of them, in order, whoever carries them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.substrate.ray.log_shipping import LogShipper, append_pieces


class Node:
    """A node's folder, and the run's, to which an agent carries what is written here."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.run = tmp_path / "node", tmp_path / "run"
        self.shipper = LogShipper(self.here)

    def write(self, content: bytes, *, job: str = "a", name: str = "stdout.log") -> None:
        path = self.here / "jobs" / job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)

    def carry(self) -> int:
        pieces = self.shipper.pieces()
        append_pieces(pieces, self.run)
        return len(pieces)

    def carry_all(self) -> None:
        while self.carry():
            pass

    def come(self, *, job: str = "a", name: str = "stdout.log") -> bytes:
        return (self.run / "jobs" / job / name).read_bytes()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_more_than_goes_at_once_comes_in_the_end(node: Node) -> None:
    content = os.urandom(5 << 19)
    node.write(content)
    node.write(b"{}\n", job="b", name="metrics.jsonl")
    node.carry()
    assert len(node.come()) < len(content)
    node.carry_all()
    assert node.come() == content
    assert node.come(job="b", name="metrics.jsonl") == b"{}\n"
    assert node.carry() == 0


def test_another_agent_goes_on_where_the_last_one_was(node: Node) -> None:
    node.write(b"one ")
    node.carry_all()
    node.write(b"two ")
    node.shipper = LogShipper(node.here)
    node.write(b"three")
    node.carry_all()
    assert node.come() == b"one two three"
    assert LogShipper(node.here).pieces() == ()


def test_what_nobody_has_is_given_again(node: Node) -> None:
    node.write(b"lost with its agent")
    assert node.shipper.pieces()
    node.shipper = LogShipper(node.here)
    node.carry_all()
    assert node.come() == b"lost with its agent"


def test_a_file_that_became_shorter_is_begun_anew(node: Node) -> None:
    node.write(b"the first, a long one. ")
    node.carry_all()
    for again in (node.shipper, LogShipper(node.here)):
        node.shipper = again
        (node.here / "jobs" / "a" / "stdout.log").unlink()
        node.write(b"new. ")
        node.carry_all()
        node.write(b"more.")
        node.carry_all()
    assert node.come() == b"the first, a long one. new. more.new. more."


def test_what_is_written_down_of_it_is_not_carried(node: Node) -> None:
    node.write(b"x")
    node.carry_all()
    assert [path.name for path in node.run.rglob("*") if path.is_file()] == ["stdout.log"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(["carry", "agent"])), max_size=20)
)
def test_every_byte_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str]
) -> None:
    node = Node(tmp_path_factory.mktemp("shipper"))
    written = b""
    for step in steps:
        if isinstance(step, bytes):
            node.write(step)
            written += step
        elif step == "carry":
            node.carry()
        else:
            node.carry_all()
            node.shipper = LogShipper(node.here)
    node.carry_all()
    assert not written or node.come() == written
