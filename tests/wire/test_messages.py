"""What workers and controller say to each other, and to strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import socket
import string
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.observations import NoiseSample, SpeedSample
from stretto.wire.channel import LONGEST_LINE, Channel, Listener, connect
from stretto.wire.codec import WireError, decode, encode
from stretto.wire.messages import (
    Ack,
    BatchOrder,
    EpochEnd,
    Form,
    Left,
    Message,
    Park,
    Report,
    Task,
)

VALUES = st.one_of(st.text(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False))
TASKS = st.builds(
    Task,
    job_id=st.text(),
    entry=st.text(),
    config=st.dictionaries(st.text(string.ascii_letters), VALUES),
    folder=st.text(),
    epochs=st.none() | st.integers(1, 100),
    seed=st.integers(0, 2**31),
    metric=st.none() | st.text(),
)
REPORT = Report(
    progress=1.5,
    epoch=1,
    steps=10,
    speeds=(SpeedSample(1, 2, 0, 64, 0.1, 0.02),),
    noise=NoiseSample(1.0, 2.0),
    ends=(EpochEnd(epoch=1, values={"accuracy": 0.5}, epoch_s=None),),
)
FORM = Form(generation=1, rank=0, world=2, nodes=1, store="a:1", share_state=True, batch=BatchOrder(8, 1))


@given(TASKS)
def test_a_task_comes_back_as_it_was(task: Task) -> None:
    assert decode(encode(task)) == task


@pytest.mark.parametrize("message", [REPORT, FORM, Park(), Ack(3), Left("parked", saved=True)])
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_value_that_is_not_a_number_travels() -> None:
    end = EpochEnd(epoch=1, values={"loss": math.nan}, epoch_s=1.0)
    back = decode(encode(dataclasses.replace(REPORT, ends=(end,))))
    assert isinstance(back, Report)
    assert math.isnan(back.ends[0].values["loss"])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"kind":"Ack"}',
        b'{"kind":"Ack","epoch":"3"}',
        b'{"kind":"Ack","epoch":3,"more":1}',
        b'{"kind":"Nothing"}',
        b'{"kind":"Form","generation":1}',
        b"[" * 100_000,
        b'{"kind":[]}',
        b'{"kind":{}}',
        b'{"kind":"Report","progress":1' + b"0" * 400 + b',"epoch":0,"steps":0}',
    ],
)
def test_nonsense_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode(line)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(line: bytes) -> None:
    try:
        decode(line)
    except WireError:
        return


class Heard:
    """Keeps all that a listener tells."""

    def __init__(self) -> None:
        self.channels: queue.Queue[Channel] = queue.Queue()
        self.messages: queue.Queue[Message] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()

    def connected(self, channel: Channel) -> None:
        self.channels.put(channel)

    def heard(self, channel: Channel, message: Message) -> None:
        assert channel.worker == "w0"
        self.messages.put(message)

    def hung_up(self, channel: Channel, why: str) -> None:
        assert channel.worker == "w0"
        self.ends.put(why)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listener(heard: Heard) -> Iterator[Listener]:
    listener = Listener("secret", heard)
    yield listener
    listener.close()


def test_both_ends_hear_each_other(listener: Listener, heard: Heard) -> None:
    worker = connect(listener.address, "secret", "w0")
    controller = heard.channels.get(timeout=5)
    assert controller.worker == "w0"
    controller.send(Ack(7))
    assert next(worker.messages()) == Ack(7)
    worker.send(REPORT)
    worker.send(Ack(8))
    assert heard.messages.get(timeout=5) == REPORT
    assert heard.messages.get(timeout=5) == Ack(8)
    worker.close()
    assert not heard.ends.get(timeout=5)


def test_either_end_may_hang_up(listener: Listener, heard: Heard) -> None:
    worker = connect(listener.address, "secret", "w0")
    heard.channels.get(timeout=5).hang_up()
    assert list(worker.messages()) == []
    assert not heard.ends.get(timeout=5)
    worker.close()


def test_a_closed_listener_hangs_up_on_everybody(listener: Listener, heard: Heard) -> None:
    worker = connect(listener.address, "secret", "w0")
    heard.channels.get(timeout=5)
    listener.close()
    assert list(worker.messages()) == []
    worker.close()


@pytest.mark.parametrize("nonsense", [b"nonsense\n", b'{"kind": "Ack"}\n', b"x" * (LONGEST_LINE + 1)])
def test_who_makes_no_sense_is_not_heard_any_more(listener: Listener, heard: Heard, nonsense: bytes) -> None:
    worker = connect(listener.address, "secret", "w0")
    with contextlib.suppress(OSError):  # it may not be read to its end
        worker._socket.sendall(nonsense)
    assert heard.ends.get(timeout=10)
    assert list(worker.messages()) == []
    worker.close()


def test_who_does_not_know_the_secret_is_not_heard(listener: Listener, heard: Heard) -> None:
    with pytest.raises((WireError, OSError)):
        connect(listener.address, "guess", "w0")
    with pytest.raises(queue.Empty):
        heard.channels.get(timeout=0.1)


def test_hundreds_connect_at_once_and_half_of_them_say_nothing(listener: Listener, heard: Heard) -> None:
    host, _, port = listener.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(200)]
    workers = [connect(listener.address, "secret", "w0") for _ in range(200)]
    for worker in workers:
        worker.send(Ack(1))
    for _ in workers:
        assert heard.messages.get(timeout=10) == Ack(1)
    for stranger in silent:
        stranger.close()
    for worker in workers:
        worker.close()


def test_a_worker_does_not_trust_a_stranger() -> None:
    """A server that takes any proof cannot prove that it knows the secret itself."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"

    def stranger() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"nonce": "00"}\n')
            connection.recv(4096)
            connection.sendall(b'{"proof": "00"}\n')

    threading.Thread(target=stranger, daemon=True).start()
    with pytest.raises(WireError, match="does not know the secret"):
        connect(address, "secret", "w0")
    server.close()
