"""Where workers connect: one thread for all of them, however many there are."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from stretto.core.scarce import scarce_number
from stretto.wire.channel import (
    HANDSHAKE_S,
    LONGEST_GREETING,
    LONGEST_LINE,
    Channel,
    no_delay,
    parse_greeting,
    proof_of,
    same,
    write_greeting,
)
from stretto.wire.codec import WireError, decode
from stretto.wire.messages import Message

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
