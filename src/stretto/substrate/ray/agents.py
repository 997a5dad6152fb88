"""The controller's side of the agents: one client per node, which notices when its agent is gone."""

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
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.ray.agent import (
    Agent,
    AgentConfig,
    AgentNews,
    AgentOrder,
    ForkServerAction,
    WorkerStart,
)
from stretto.substrate.ray.log_shipping import LogPiece
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import HOLDS

_RAY: Any = ray  # parts of it have no types
START_S = 120.0
"""An agent that has not started by then is given up: it has few imports, and Ray installs nothing for it."""
PULSE_S = 15.0
"""An agent that has not answered for this long is lost, whatever Ray says: a node may stop silently."""

_UNBEGUN_S = 1.0
"""How long to wait for the clean-up of an agent that has not begun."""


class AgentListener(Protocol):
    """Receives what agents report, in Ray's threads."""

    def began(self, agent: AgentClient) -> None: ...
    def heard(self, agent: AgentClient, news: AgentNews) -> None: ...
    def lost(self, agent: AgentClient, error: BaseException) -> None: ...


class AgentClient:
    """The controller's handle of one agent."""

    def __init__(
        self, node: RayNode, config: AgentConfig, listener: AgentListener, awake_s: Callable[[], float]
    ) -> None:
        """`awake_s` counts time in which the controller ran: its own pauses are no silence of the agent."""
        self.node = node
        self._awake_s = awake_s
        self._listener = listener
        self._orders = 0
        self._has_begun = False
        self._over = False
        self._ending = False
        self._quiet = threading.Event()
        """Set when no poll is under way any more."""
        self._limit_s = START_S
        self._heard_s = awake_s()
        self._actor: Any = (
            _RAY.remote(concurrency_groups={HOLDS: node.slots})(Agent)
            .options(
                num_cpus=0,
                max_concurrency=2,
                name=f"{config.run} on {node.name} ({node.ray_id[:8]})",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
            )
            .remote(config)
        )
        self._ask(self._actor.begin, self._begun)

    @property
    def holder(self) -> Any:
        """The handle of the `LeaseHolder` that shows which job has which lease."""
        return self._actor

    @property
    def is_silent(self) -> bool:
        return self._awake_s() - self._heard_s > self._limit_s

    def order(
        self, entry: str, action: ForkServerAction, worker: str = "", start: WorkerStart | None = None
    ) -> None:
        order = AgentOrder(number=self._orders, entry=entry, action=action, worker=worker, start=start)
        self._orders += 1
        self._actor.order.remote(order)

    def remaining_logs(self, patience_s: float) -> Iterator[tuple[LogPiece, ...]]:
        """Stop polling for news and yield the logs that were not shipped yet."""
        self._ending = True
        self._quiet.wait(patience_s)
        with contextlib.suppress(RayError):
            while pieces := ray.get(self._actor.remaining_logs.remote(), timeout=patience_s):
                yield pieces

    def clean_up(self, patience_s: float) -> None:
        """Remove the run's files from the node, when nothing trains there any more.

        An agent that has not begun has written little, and may take long to answer.
        """
        limit_s = patience_s if self._has_begun else _UNBEGUN_S
        with contextlib.suppress(RayError):
            ray.get(self._actor.clean_up.remote(), timeout=limit_s)

    def disconnect(self) -> None:
        """Kill the agent, which ends everything it has started; ignore what it still says."""
        self._over = True
        with contextlib.suppress(Exception):  # its node may be gone
            ray.kill(self._actor)

    def _ask(self, method: Any, on_answer: Callable[[Any], None]) -> None:
        def answered(future: Any) -> None:
            if self._over:
                return
            error = future.exception()
            if error is not None:
                self._listener.lost(self, _agents_error(error))
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

    def _hear(self, news: AgentNews) -> None:
        self._listener.heard(self, news)
        self._listen()


def _agents_error(error: BaseException) -> BaseException:
    """The agent's own error if there is one, else Ray's."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, InputError) else error


@dataclass(slots=True)
class RemoteForkServer:
    """The fork server of one entry point on one node, used like a local one."""

    agent: AgentClient
    entry: str
    on_saying: Callable[[WorkerNews], None]
    on_end: Callable[[], None]
    _ended: threading.Event = field(default_factory=threading.Event)

    def spawn(self, worker: str, *, address: str, secret: str, log: Path, env: Mapping[str, str]) -> None:
        self.agent.order(
            self.entry, ForkServerAction.SPAWN, worker, WorkerStart(address, secret, log, dict(env))
        )

    def end(self, worker: str) -> None:
        self.agent.order(self.entry, ForkServerAction.END, worker)

    def kill(self, worker: str) -> None:
        self.agent.order(self.entry, ForkServerAction.KILL, worker)

    def close(self) -> None:
        self.agent.order(self.entry, ForkServerAction.CLOSE)

    def wait(self, patience_s: float) -> None:
        """Wait for its end; the agent ends workers that do not end by themselves."""
        self._ended.wait(patience_s)

    def hear(self, saying: WorkerNews | None) -> None:
        if saying is not None:
            self.on_saying(saying)
        else:
            self.lose()
            self.on_end()

    def lose(self) -> None:
        """The server is gone."""
        self._ended.set()
