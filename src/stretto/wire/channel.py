"""An authenticated connection between controller and worker, and the thread that accepts workers.

Workers get the secret from their parent process, never over a socket. Each end proves that it knows the
secret: it answers a random number with an HMAC-SHA256 that also covers its role.

    controller -> worker   nonce
    worker -> controller   name, nonce, HMAC(secret, "worker" name nonce)
    controller -> worker   HMAC(secret, "controller" nonce)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from stretto.system.limits import scarce_number
from stretto.system.plain_json import parse_json
from stretto.wire.codec import WireError, decode, encode
from stretto.wire.messages import Message

HANDSHAKE_S = 10.0
LONGEST_GREETING = 1024
LONGEST_LINE = 1 << 22
"""A longer line is refused, so that a faulty peer cannot fill the memory."""


class Channel:
    """One end of an authenticated connection. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket, worker: str) -> None:
        self.worker = worker
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """Send a message; False if the other end is gone."""
        with self._sending:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                return False
            return True

    def messages(self) -> Iterator[Message]:
        """The messages of the other end, until it is gone. WireError if one is invalid."""
        with self._socket.makefile("rb") as lines:
            while line := _read_line(lines):
                yield decode(line)

    def hang_up(self) -> None:
        """End the connection; a thread that reads from it wakes up and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()


def _read_line(lines: BinaryIO) -> bytes:
    try:
        line = lines.readline(LONGEST_LINE)
    except (OSError, ValueError):
        return b""
    if len(line) == LONGEST_LINE:
        raise WireError(f"a line of more than {LONGEST_LINE} bytes")
    return line if line.endswith(b"\n") else b""


def connect(address: str, secret: str, worker: str) -> Channel:
    """The worker's end. WireError if the other end is not this run's controller."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
    try:
        _check_controller(connection, secret, worker)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return Channel(connection, worker)


def _check_controller(connection: socket.socket, secret: str, worker: str) -> None:
    no_delay(connection)
    nonce = _read_greeting(connection)["nonce"]
    own = secrets.token_hex(16)
    write_greeting(connection, worker=worker, nonce=own, proof=proof_of(secret, "worker", worker, nonce))
    answer = _read_greeting(connection)["proof"]
    if not same(answer, proof_of(secret, "controller", own)):
        raise WireError("the other end does not know the secret of this run")


def proof_of(secret: str, *parts: str) -> str:
    return hmac.new(secret.encode(), "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def same(said: str, proof: str) -> bool:
    return hmac.compare_digest(said.encode(errors="replace"), proof.encode())


def write_greeting(connection: socket.socket, **fields: str) -> None:
    """One line of the handshake."""
    connection.sendall(json.dumps(fields).encode() + b"\n")


def parse_greeting(line: bytes) -> dict[str, str]:
    """The fields of a line of the handshake; WireError or ValueError if it is invalid."""
    fields = parse_json(line)
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise WireError("the handshake is invalid")
    return fields


def _read_greeting(connection: socket.socket) -> dict[str, str]:
    """Read one short line byte by byte: the bytes after it belong to the channel."""
    line = bytearray()
    end_s = time.monotonic() + HANDSHAKE_S
    while not line.endswith(b"\n"):
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        piece = connection.recv(1)
        if not piece or len(line) > LONGEST_GREETING:
            raise WireError("the connection ended during the handshake")
        line += piece
    return parse_greeting(bytes(line))


def no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_CHUNK = 1 << 16
_CHECK_S = 1.0
"""How often we close connections whose handshake takes too long."""
_SCARCE_S = 0.1
"""Pause after a connection failed because the machine ran out of file descriptors or memory."""


class Receiver(Protocol):
    """Callbacks of a `Listener`, called in its single thread, so they must be quick."""

    def connected(self, channel: Channel) -> None:
        """A worker has connected and proved that it knows the secret."""

    def heard(self, channel: Channel, message: Message) -> None:
        """A message has arrived."""

    def hung_up(self, channel: Channel, why: str) -> None:
        """The connection is over; `why` names what was invalid, or is empty."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection, first in its handshake, then with a channel."""

    connection: socket.socket
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    late_s: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)
    unread: bytes = b""
    channel: Channel | None = None


class Listener:
    """Accepts authenticated connections and passes their messages to the receiver.

    The receiver may hang up, but only the listener closes a connection, after its last message.
    """

    def __init__(self, secret: str, receiver: Receiver, host: str = "127.0.0.1") -> None:
        self._secret = secret
        self._receiver = receiver
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._unproved: set[_Peer] = set()
        self._over = False
        threading.Thread(target=self._listen, name="listen to workers", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections and messages."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._server.close()

    def _listen(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(_CHECK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._reject([peer for peer in self._unproved if peer.late_s < time.monotonic()])
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.connection.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(True)  # writes wait until all is written
                peer = _Peer(connection)
                self._unproved.add(peer)
                self._selector.register(connection, selectors.EVENT_READ, peer)
                no_delay(connection)
                write_greeting(connection, nonce=peer.nonce)
        except BlockingIOError:
            pass  # no further connection
        except OSError as error:
            if scarce_number(error) is not None:  # connections wait in the backlog meanwhile
                time.sleep(_SCARCE_S)

    def _reject(self, peers: list[_Peer]) -> None:
        for peer in peers:
            self._unproved.discard(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _read(self, peer: _Peer) -> None:
        try:
            chunk = peer.connection.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._lose(peer, "")
            return
        *lines, peer.unread = (peer.unread + chunk).split(b"\n")
        try:
            for line in lines:
                self._take(peer, line)
            _check_length(peer)
        except (WireError, OSError, ValueError, KeyError, RecursionError) as error:
            self._lose(peer, str(error))

    def _take(self, peer: _Peer, line: bytes) -> None:
        if peer.channel is not None:
            self._receiver.heard(peer.channel, decode(line))
            return
        said = parse_greeting(line)
        if not same(said["proof"], proof_of(self._secret, "worker", said["worker"], peer.nonce)):
            raise WireError("wrong secret")
        write_greeting(peer.connection, proof=proof_of(self._secret, "controller", said["nonce"]))
        self._unproved.discard(peer)
        peer.channel = Channel(peer.connection, said["worker"])
        self._receiver.connected(peer.channel)

    def _lose(self, peer: _Peer, why: str) -> None:
        """Close a connection; tell the receiver if it had passed the handshake."""
        if peer.channel is None:
            self._reject([peer])
            return
        self._selector.unregister(peer.connection)
        self._receiver.hung_up(peer.channel, why)
        peer.channel.close()


def _check_length(peer: _Peer) -> None:
    longest = LONGEST_GREETING if peer.channel is None else LONGEST_LINE
    if len(peer.unread) > longest:
        raise WireError(f"a line of more than {longest} bytes")
