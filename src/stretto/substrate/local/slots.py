"""The slots of this machine (GPUs or CPU cores), and slots as nodes for policies that rent."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.core.cluster import Node, Wish, node_name
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import Decided, Event, NodeAdded, NodeLaunched, NodeReleased
from stretto.core.resources import Resources
from stretto.pricing.instances import SLOT

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots for workers."""

    devices: tuple[str, ...]
    """For each slot its CUDA_VISIBLE_DEVICES; empty for a slot without a GPU."""
    threads_each: int = 1
    """CPU threads a worker may use."""

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def has_gpus(self) -> bool:
        return any(self.devices)

    @property
    def share_gpus(self) -> bool:
        """Whether two slots are the same GPU."""
        gpus = [device for device in self.devices if device]
        return len(set(gpus)) < len(gpus)


def find_slots(
    number: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    count_gpus: Callable[[], int] | None = None,
    cores: int | None = None,
) -> Slots:
    """One slot for each visible GPU; without GPUs, one for each core that this process may use.

    With a `number` there are that many slots: fewer use the first GPUs only, more share GPUs in turn.
    """
    if number is not None and number < 1:
        raise InputError(f"{number} slots cannot hold a worker.", where="slots", remedy="Give 1 or more.")
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    devices = _visible((count_gpus or _count_gpus)(), environ.get("CUDA_VISIBLE_DEVICES"))
    if not devices:
        devices = ("",) * cores
    count = len(devices) if number is None else number
    return Slots(tuple(devices[i % len(devices)] for i in range(count)), max(cores // count, 1))


def _visible(gpus: int, setting: str | None) -> tuple[str, ...]:
    """The devices that CUDA would show: those listed, up to the first invalid one."""
    if setting is None or gpus == 0:
        return tuple(str(i) for i in range(gpus))
    shown: list[str] = []
    for name in (part.strip() for part in setting.split(",")):
        is_index = name.isdigit() and int(name) < gpus
        if not (is_index or name.startswith(("GPU-", "MIG-"))) or name in shown:
            break
        shown.append(name)
    return tuple(shown)


def _count_gpus() -> int:
    if _NVIDIA_GPUS.is_dir():
        return sum(1 for _ in _NVIDIA_GPUS.iterdir())
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 - a fixed command
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


class SlotPool:
    """Assigns slots to workers: first come, first served."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._free = deque(range(len(slots)))
        self._held: dict[str, int] = {}
        self._waiting: deque[str] = deque()

    def ask(self, worker_id: str) -> None:
        self._waiting.append(worker_id)

    def withdraw(self, worker_id: str) -> bool:
        """Take back a request. Returns whether the worker was still waiting."""
        if worker_id not in self._waiting:
            return False
        self._waiting.remove(worker_id)
        return True

    def grants(self) -> list[tuple[str, int]]:
        """Workers that can be placed now, and their slots."""
        placed = []
        while self._waiting and self._free:
            worker_id, slot = self._waiting.popleft(), self._free.popleft()
            self._held[worker_id] = slot
            placed.append((worker_id, slot))
        return placed

    def give_back(self, worker_id: str) -> None:
        slot = self._held.pop(worker_id, None)
        if slot is not None:
            self._free.append(slot)

    @property
    def held(self) -> int:
        return len(self._held)


def whole_machine(slots: int) -> Node:
    """The only node, for a policy that does not rent."""
    return Node("local", Resources(gpu=slots))


class RentedSlots:
    """Slots as nodes that come and go. A wish is granted up to the number of slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._here: list[str] = []
        self._launched = 0

    def provision(self, wish: Wish, t_s: float) -> list[Event]:
        strange = [kind for kind, count in wish.nodes if kind != SLOT and count]
        if strange:
            raise PolicyError(f"nodes of {strange[0]} are wished for; this machine has nodes of {SLOT} only")
        events: list[Event] = []
        for node_id in wish.release:
            if node_id in self._here:
                self._here.remove(node_id)
                events.append(NodeReleased(t_s=t_s, node_id=node_id))
        wanted = min(dict(wish.nodes).get(SLOT, 0), self._slots)
        while len(self._here) < wanted:
            self._launched += 1
            node = Node(node_name(SLOT, self._launched), Resources(gpu=1), SLOT)
            self._here.append(node.id)
            events += [NodeLaunched(t_s=t_s, node=node), NodeAdded(t_s=t_s, node=node)]
        return events

    def look(self, t_s: float) -> list[Event]:
        """Slots neither come nor go by themselves."""
        del t_s
        return []

    def close(self) -> None:
        """There is nothing to give back."""

    def recall(self, history: Iterable[Event], t_s: float) -> list[Event]:
        """Continue after a run's record: grant the rest of its last wish."""
        coming: dict[str, Node] = {}
        wish: Wish | None = None
        for event in history:
            if isinstance(event, NodeLaunched):
                self._launched += 1
                self._here.append(event.node.id)
                coming[event.node.id] = event.node
            elif isinstance(event, NodeAdded):
                del coming[event.node.id]
            elif isinstance(event, NodeReleased):
                self._here.remove(event.node_id)
            elif isinstance(event, Decided) and event.wish is not None:
                wish = event.wish
        added = [NodeAdded(t_s=t_s, node=node) for node in coming.values()]
        return [*added, *(self.provision(wish, t_s) if wish is not None else [])]
