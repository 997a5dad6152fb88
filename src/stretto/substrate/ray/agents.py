"""The controller's side of the agents: one line to each node, and whether anybody is at its other end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stretto.core.errors import InputError
from stretto.substrate.elastic.fork_servers import Saying
from stretto.substrate.ray.agent import Agent, Birth, Charge, Do, News, Order
from stretto.substrate.ray.log_shipping import Piece
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import HOLDS

_RAY: Any = ray  # parts of it have no types
START_S = 120.0
"""An agent that is not there by then does not come: it imports a little, and Ray installs nothing for it."""
PULSE_S = 15.0
"""An agent that has not answered for so long is gone, whatever Ray says: a node may stop without a word."""

_UNBEGUN_S = 1.0
"""How long an agent is asked to depart that nobody has heard of yet."""


class Listener(Protocol):
    """Who is told what comes over a line, in threads of Ray's."""

    def began(self, line: AgentLine) -> None: ...
    def told(self, line: AgentLine, news: News) -> None: ...
    def lost(self, line: AgentLine, error: BaseException) -> None: ...


class AgentLine:
    """One agent."""

    def __init__(
        self, node: RayNode, charge: Charge, listener: Listener, awake_s: Callable[[], float]
    ) -> None:
        """`awake_s` is time in which somebody listened: an agent is not to blame for what nobody heard."""
        self.node = node
        self._awake_s = awake_s
        self._listener = listener
        self._orders = 0
        self._has_begun = False
        self._over = False
        self._ending = False
        self._quiet = threading.Event()
        """Nothing is on its way any more."""
        self._limit_s = START_S
        self._heard_s = awake_s()
        self._actor: Any = (
            _RAY.remote(concurrency_groups={HOLDS: node.slots})(Agent)
            .options(
                num_cpus=0,
                max_concurrency=2,
                name=f"{charge.run} on {node.name} ({node.ray_id[:8]})",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
            )
            .remote(charge)
        )
        self._ask(self._actor.begin, self._begun)

    @property
    def sitter(self) -> Any:
        """Who shows whose the seats of the node are."""
        return self._actor

    @property
    def is_silent(self) -> bool:
        return self._awake_s() - self._heard_s > self._limit_s

    def order(self, entry: str, do: Do, worker: str = "", birth: Birth | None = None) -> None:
        order = Order(number=self._orders, entry=entry, do=do, worker=worker, birth=birth)
        self._orders += 1
        self._actor.order.remote(order)

    def rest(self, patience_s: float) -> Iterator[tuple[Piece, ...]]:
        """What of the node's files was not carried yet; nothing is listened to any more."""
        self._ending = True
        self._quiet.wait(patience_s)
        with contextlib.suppress(RayError):
            while pieces := ray.get(self._actor.rest.remote(), timeout=patience_s):
                yield pieces

    def depart(self, patience_s: float) -> None:
        """Have the node left as it was found; nobody trains there any more.

        An agent that has not begun has left little there, and may still be far from answering.
        """
        limit_s = patience_s if self._has_begun else _UNBEGUN_S
        with contextlib.suppress(RayError):
            ray.get(self._actor.depart.remote(), timeout=limit_s)

    def hang_up(self) -> None:
        """Nothing more is heard; whatever the agent has started ends."""
        self._over = True
        with contextlib.suppress(Exception):  # its node may be gone
            ray.kill(self._actor)

    def _ask(self, method: Any, on_answer: Callable[[Any], None]) -> None:
        def answered(future: Any) -> None:
            if self._over:
                return
            error = future.exception()
            if error is not None:
                self._listener.lost(self, _own(error))
                return
            self._heard_s = self._awake_s()
            on_answer(future.result())

        method.remote().future().add_done_callback(answered)

    def _begun(self, nothing: None) -> None:
        del nothing
        self._has_begun = True
        self._limit_s = PULSE_S
        self._listener.began(self)
        self._listen()

    def _listen(self) -> None:
        if self._ending:
            self._quiet.set()
            return
        self._ask(self._actor.listen, self._hear)

    def _hear(self, news: News) -> None:
        self._listener.told(self, news)
        self._listen()


def _own(error: BaseException) -> BaseException:
    """What the agent itself had to say, or else what Ray has."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, InputError) else error


@dataclass(slots=True)
class RemoteNursery:
    """The nursery of one entry on one node, as if it were here."""

    line: AgentLine
    entry: str
    on_saying: Callable[[Saying], None]
    on_end: Callable[[], None]
    _ended: threading.Event = field(default_factory=threading.Event)

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None:
        self.line.order(self.entry, Do.SPAWN, worker, Birth(address, secret, log, dict(env)))

    def end(self, worker: str) -> None:
        self.line.order(self.entry, Do.END, worker)

    def kill(self, worker: str) -> None:
        self.line.order(self.entry, Do.KILL, worker)

    def close(self) -> None:
        self.line.order(self.entry, Do.CLOSE)

    def wait(self, patience_s: float) -> None:
        """Its agent ends what does not end by itself."""
        self._ended.wait(patience_s)

    def hear(self, saying: Saying | None) -> None:
        if saying is not None:
            self.on_saying(saying)
        else:
            self.lose()
            self.on_end()

    def lose(self) -> None:
        """Nothing more comes from there."""
        self._ended.set()
