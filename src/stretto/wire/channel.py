"""An authenticated stream socket, and the thread that listens for workers.

The secret is handed to workers by their parent process, never over a socket. Each end sends a random
number and gets back its HMAC-SHA256 under the secret, bound to the role that answers:

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
"""A longer line is not a message, so that a peer gone mad costs no memory."""


class Channel:
    """One end of an authenticated connection. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket, worker: str) -> None:
        self.worker = worker
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """Whether it could be sent; False once the other end is gone."""
        with self._sending:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                return False
            return True

    def messages(self) -> Iterator[Message]:
        """What the other end says, until it is gone. WireError if that makes no sense."""
        with self._socket.makefile("rb") as lines:
            while line := _read_line(lines):
                yield decode(line)

    def hang_up(self) -> None:
        """Both ends notice; whoever reads in another thread wakes up, and closes."""
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
    """A worker's end. WireError if the other side is not the controller of this run."""
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
    """What a line of the handshake says; WireError or ValueError if it makes no sense."""
    fields = parse_json(line)
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise WireError("the handshake makes no sense")
    return fields


def _read_greeting(connection: socket.socket) -> dict[str, str]:
    """One short line, byte by byte: what follows it belongs to the channel."""
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
_LOOK_S = 1.0
"""How often it is seen whether somebody takes too long to greet."""
_SCARCE_S = 0.1
"""How long nobody is let in after the machine had no room for another connection."""


class Receiver(Protocol):
    """Who is told about connections, in the one thread that listens: nothing here may take long."""

    def connected(self, channel: Channel) -> None:
        """Somebody who knows the secret."""

    def heard(self, channel: Channel, message: Message) -> None: ...

    def hung_up(self, channel: Channel, why: str) -> None:
        """The connection is over; `why` says what made no sense on it, or nothing."""


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that proves itself, and then speaks."""

    connection: socket.socket
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    late_s: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)
    unread: bytes = b""
    channel: Channel | None = None


class Listener:
    """Every connection that knows the secret is handed to the receiver, and then what it says.

    The receiver may hang up; only the listener closes, which it does when there is nothing more to hear.
    """

    def __init__(self, secret: str, receiver: Receiver, host: str = "127.0.0.1") -> None:
        self._secret = secret
        self._receiver = receiver
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._strangers: set[_Guest] = set()
        self._over = False
        threading.Thread(target=self._listen, name="listen to workers", daemon=True).start()

    def close(self) -> None:
        """Nobody else can connect, and nothing more is heard."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._server.close()

    def _listen(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._turn_away([guest for guest in self._strangers if guest.late_s < time.monotonic()])
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.connection.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(True)  # whoever writes to it waits until it is written
                guest = _Guest(connection)
                self._strangers.add(guest)
                self._selector.register(connection, selectors.EVENT_READ, guest)
                no_delay(connection)
                write_greeting(connection, nonce=guest.nonce)
        except BlockingIOError:
            pass  # nobody else knocks
        except OSError as error:
            if scarce_number(error) is not None:  # they go on knocking until there is room for them
                time.sleep(_SCARCE_S)

    def _turn_away(self, guests: list[_Guest]) -> None:
        for guest in guests:
            self._strangers.discard(guest)
            self._selector.unregister(guest.connection)
            guest.connection.close()

    def _read(self, guest: _Guest) -> None:
        try:
            chunk = guest.connection.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._lose(guest, "")
            return
        *lines, guest.unread = (guest.unread + chunk).split(b"\n")
        try:
            for line in lines:
                self._take(guest, line)
            _check_length(guest)
        except (WireError, OSError, ValueError, KeyError, RecursionError) as error:
            self._lose(guest, str(error))

    def _take(self, guest: _Guest, line: bytes) -> None:
        if guest.channel is not None:
            self._receiver.heard(guest.channel, decode(line))
            return
        said = parse_greeting(line)
        if not same(said["proof"], proof_of(self._secret, "worker", said["worker"], guest.nonce)):
            raise WireError("wrong secret")
        write_greeting(guest.connection, proof=proof_of(self._secret, "controller", said["nonce"]))
        self._strangers.discard(guest)
        guest.channel = Channel(guest.connection, said["worker"])
        self._receiver.connected(guest.channel)

    def _lose(self, guest: _Guest, why: str) -> None:
        """A stranger is not told about."""
        if guest.channel is None:
            self._turn_away([guest])
            return
        self._selector.unregister(guest.connection)
        self._receiver.hung_up(guest.channel, why)
        guest.channel.close()


def _check_length(guest: _Guest) -> None:
    longest = LONGEST_GREETING if guest.channel is None else LONGEST_LINE
    if len(guest.unread) > longest:
        raise WireError(f"a line of more than {longest} bytes")
