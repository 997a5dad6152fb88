"""Launchers bring up the nodes of a Ray cluster: its autoscaler here, own commands in `launch_commands`."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.substrate.fleet.commands import Resource
from stretto.substrate.fleet.nodes import NodeKind
from stretto.substrate.ray.nodes import INSTANCE_LABEL


@dataclass(frozen=True, slots=True)
class LaunchBegan:
    """A node starts up, and costs from now on."""

    name: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """A node will not come."""

    name: str
    why: str
    log: str = ""
    """The file with the launch's output, if it is kept."""


LaunchNews = LaunchBegan | LaunchFailed

_CLOSE_S = 15.0
"""How long the last request to the autoscaler may take."""
_ASK_FOR_NOTHING = (
    'python -c \'import ray; ray.init("auto"); '
    "from ray.autoscaler.sdk import request_resources; request_resources(bundles=[])'"
)


class Launcher(Protocol):
    """Brings up nodes and releases them. Called in one thread only; only `settle` and `close` block."""

    @property
    def kinds(self) -> Sequence[NodeKind]:
        """The node types that it can launch."""

    @property
    def adopts(self) -> bool:
        """Whether nodes come without the names that they were requested under."""

    def launched(self) -> Collection[str]:
        """The names of nodes that it can still end, including those of an earlier controller."""

    def recall(self, rented: Mapping[str, str]) -> None:
        """Take over the nodes of an earlier controller, present or on the way: instance by name."""

    def launch(self, name: str, instance: str) -> None: ...

    def release(self, name: str, ray_id: str) -> None:
        """Release a node, present or on the way; `ray_id` is empty if it has never come."""

    def news(self) -> list[LaunchNews]:
        """The outcomes of launches since the last call."""

    def settle(self) -> frozenset[str]:
        """Wait until released nodes have ended or cannot be ended; names those that may still come."""

    def close(self, awaited: Collection[str] = ()) -> None:
        """The run ends; nodes in `awaited` were released on the way and may still come."""


class Mailbox:
    """Passes news from other threads to the fleet's."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[LaunchNews] = queue.SimpleQueue()

    def post(self, news: LaunchNews) -> None:
        self._letters.put(news)

    def collect(self) -> list[LaunchNews]:
        found: list[LaunchNews] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._letters.get_nowait())
        return found


Request = Callable[[list[dict[str, float]], list[dict[str, str]]], None]
"""Asks the autoscaler for room for bundles, each with a label selector."""


class AutoscalerLauncher:
    """Asks Ray's autoscaler for room: one bundle of a node's size per node.

    A request replaces the one before, so only one run at a time can use a cluster in this way. Node types
    need the label, with the instance's name as value, so that the autoscaler knows which to launch. It stops
    a released node after `idle_timeout_minutes`; the cost of that idle time is not counted.
    """

    adopts = True

    def __init__(
        self,
        kinds: Iterable[NodeKind],
        resource: Resource,
        *,
        label: str = INSTANCE_LABEL,
        request: Request | None = None,
    ) -> None:
        self.kinds = tuple(kinds)
        self._slots = {kind.instance: kind.slots for kind in self.kinds}
        self._resource = resource
        self._label = label
        self._request = request or _request_resources
        self._mailbox = Mailbox()
        self._wanted: dict[str, str] = {}
        """The instance of each wanted node, by name."""
        self._unasked: set[str] = set()
        """Nodes that are not part of a request yet."""
        self._unheard = ""
        """Why the last request failed; empty if it did not."""
        self._lock = threading.Lock()
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True: something changed; False: the run is over."""
        self._thread = threading.Thread(target=self._work, name="ask the autoscaler", daemon=True)
        self._thread.start()

    def launched(self) -> Collection[str]:
        return ()  # it cannot end nodes by name

    def recall(self, rented: Mapping[str, str]) -> None:
        """Include the earlier nodes, because a new request replaces the old one."""
        with self._lock:
            self._wanted.update(rented)
        self._changes.put(True)

    def launch(self, name: str, instance: str) -> None:
        with self._lock:
            self._wanted[name] = instance
            self._unasked.add(name)
        self._changes.put(True)

    def release(self, name: str, ray_id: str) -> None:
        del ray_id
        with self._lock:
            self._wanted.pop(name, None)
            self._unasked.discard(name)
        self._changes.put(True)

    def news(self) -> list[LaunchNews]:
        return self._mailbox.collect()

    def settle(self) -> frozenset[str]:
        """Nothing to wait for: the autoscaler stops a node that comes late, as it is idle."""
        return frozenset()

    def close(self, awaited: Collection[str] = ()) -> None:
        del awaited
        self._changes.put(False)
        self._thread.join(_CLOSE_S)
        why = f"no answer in {_CLOSE_S:g} s" if self._thread.is_alive() else self._unheard
        if why:
            logging.getLogger(__name__).warning(
                "Ray's autoscaler may keep launching nodes, which cost money: the request for none failed "
                "(%s). To repeat it, run on a machine of the cluster: %s",
                why,
                _ASK_FOR_NOTHING,
            )

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._changes.get()
            with contextlib.suppress(queue.Empty):
                while goes_on:  # only the latest state counts
                    goes_on = self._changes.get_nowait()
            self._ask()

    def _ask(self) -> None:
        with self._lock:
            wanted, fresh = list(self._wanted.values()), sorted(self._unasked)
            self._unasked.clear()
        bundles: list[dict[str, float]] = [
            {self._resource: float(self._slots[instance])} for instance in wanted
        ]
        try:
            self._request(bundles, [{self._label: instance} for instance in wanted])
        except Exception as error:  # noqa: BLE001 - after any error of Ray's, these nodes do not come
            self._unheard = str(error) or type(error).__name__
            for name in fresh:
                self._mailbox.post(LaunchFailed(name, f"the autoscaler could not be asked: {error}"))
        else:
            self._unheard = ""
            for name in fresh:
                self._mailbox.post(LaunchBegan(name))


def _request_resources(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> None:
    from ray.autoscaler.sdk import request_resources  # noqa: PLC0415

    request_resources(bundles=bundles, bundle_label_selectors=selectors)
