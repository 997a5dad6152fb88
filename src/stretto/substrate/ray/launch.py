"""Who brings up the nodes of a Ray cluster: its autoscaler, or commands of the user's (`launch_commands`)."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.substrate.fleet.nodes import NodeKind, Resource
from stretto.substrate.ray.nodes import INSTANCE_LABEL


@dataclass(frozen=True, slots=True)
class LaunchBegan:
    """A node begins to start up, and to cost."""

    name: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """A node will not come."""

    name: str
    why: str
    log: str = ""
    """Where all that its launch said is, if that is kept."""


LaunchNews = LaunchBegan | LaunchFailed

_CLOSE_S = 15.0
"""How long a last word to the autoscaler may take."""
_ASK_FOR_NOTHING = (
    'python -c \'import ray; ray.init("auto"); '
    "from ray.autoscaler.sdk import request_resources; request_resources(bundles=[])'"
)


class Launcher(Protocol):
    """Brings up nodes and lets go of them. Called in one thread only; `settle` and `close` alone block."""

    @property
    def kinds(self) -> Sequence[NodeKind]:
        """What it can launch."""

    @property
    def adopts(self) -> bool:
        """Whether nodes come without the names they were asked for under."""

    def launched(self) -> Collection[str]:
        """The names of nodes that it can still end, also those that an earlier controller had launched."""

    def recall(self, rented: Mapping[str, str]) -> None:
        """Go on where an earlier controller ended: these are here or on the way, instance by name."""

    def launch(self, name: str, instance: str) -> None: ...

    def release(self, name: str, ray_id: str) -> None:
        """Let go of a node, or of one on the way; `ray_id` is empty unless it is or was here."""

    def news(self) -> list[LaunchNews]:
        """What became of launches since the last time."""

    def settle(self) -> frozenset[str]:
        """Wait until what was released is gone, or cannot be ended; the names of what may come even so."""

    def close(self, awaited: Collection[str] = ()) -> None:
        """It is over; those `awaited` were released while they were on the way, and may still come."""


class Mailbox:
    """News from other threads."""

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
"""Tells the autoscaler which bundles, with which label selectors, there must be room for."""


class AutoscalerLauncher:
    """Asks Ray's autoscaler for room: one bundle of the size of a node for every node.

    A request replaces the one before, so one run at a time can use a cluster in this way. Node types must
    carry the label, with the instance's name as its value, for the autoscaler to know which to launch. A
    node that is let go of is stopped by the autoscaler when it has been idle for its `idle_timeout_minutes`,
    also one that comes only then; what it costs till then is not counted.
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
        """Instance by name."""
        self._unasked: set[str] = set()
        """Those that the autoscaler was not told of yet."""
        self._unheard = ""
        """Why the last request did not reach it; empty if it did."""
        self._lock = threading.Lock()
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True: something changed; False: it is over."""
        self._thread = threading.Thread(target=self._work, name="ask the autoscaler", daemon=True)
        self._thread.start()

    def launched(self) -> Collection[str]:
        return ()  # by name it can end none

    def recall(self, rented: Mapping[str, str]) -> None:
        """What is asked from now on replaces what was, and so must be for these, too."""
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
        """What is on the way comes to nobody: it is idle, and the autoscaler stops it."""
        return frozenset()

    def close(self, awaited: Collection[str] = ()) -> None:
        del awaited
        self._changes.put(False)
        self._thread.join(_CLOSE_S)
        why = f"no answer in {_CLOSE_S:g} s" if self._thread.is_alive() else self._unheard
        if why:
            logging.getLogger(__name__).warning(
                "Ray's autoscaler may still bring up nodes, and keep them, which cost: it could not be told "
                "that none is wanted (%s). To tell it now, on a machine of the cluster: %s",
                why,
                _ASK_FOR_NOTHING,
            )

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._changes.get()
            with contextlib.suppress(queue.Empty):
                while goes_on:  # only the last word counts
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
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, these nodes do not come
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
