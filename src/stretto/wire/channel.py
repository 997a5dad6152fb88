"""A stream socket on which both ends have proved that they know the run's secret.

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
import socket
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

from stretto.core.plain_json import parse_json
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
