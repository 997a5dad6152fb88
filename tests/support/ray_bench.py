"""A small Ray cluster on this machine, with GPUs that do not exist, and jobs of stub workers on it."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster

from live_processes import SUPPORT
from local_bench import BATCH, EPOCHS, QUICK, STUB, job_of
from stretto.core.allocation import Allocation
from stretto.core.events import Event
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Value
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.elastic.fork_servers import Trainer
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.leases import IDLE_S
from stretto.substrate.ray.substrate import RaySubstrate

SHORT = "/tmp"  # noqa: S108 - paths of sockets, which lie deep below it, have 107 characters at most
LIGHT = {"object_store_memory": 80 * 1024 * 1024}
SWIFT = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "agent_register_timeout_ms": 180_000,  # a raylet whose own agents start slowly, on a busy machine, ends
}


@dataclass(slots=True)
class SmallCluster:
    """Its nodes can be killed and added."""

    cluster: Any
    raylets: dict[str, Any] = field(default_factory=dict)
    """By the name that Stretto calls a node."""

    def add(self, gpus: int = 2) -> str:
        node = self.cluster.add_node(num_cpus=1, num_gpus=gpus, **LIGHT)
        name = f"n{node.node_id[:10]}"
        self.raylets[name] = node
        return name

    def node_of(self, raylet: int) -> str:
        """The node whose raylet has this process."""
        found = (name for name, node in self.raylets.items() if raylet_of(node) == raylet)
        return next(found, "a node that is gone")

    def kill(self, name: str) -> None:
        """As if somebody had pulled the plug."""
        self.cluster.remove_node(self.raylets.pop(name), allow_graceful=False)


def raylet_of(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


@contextmanager
def small_cluster(gpus: Sequence[int] = (2, 2)) -> Iterator[SmallCluster]:
    """A head without GPUs and nodes with so many each, connected."""
    with ExitStack() as last:
        folder = tempfile.mkdtemp(prefix="ray-", dir=SHORT)
        for at_end in (last.callback, atexit.register):  # as the process ends, Ray makes some of it anew
            at_end(shutil.rmtree, folder, ignore_errors=True)
        env = {
            "PYTHONPATH": os.pathsep.join(str(SUPPORT.parent / helpers) for helpers in ("support", "faults")),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_TMPDIR": folder,  # where Ray notes which cluster is this machine's: ours is nobody else's
        }
        last.enter_context(mock.patch.dict(os.environ, env))
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SWIFT, **LIGHT}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        last.callback(cluster.shutdown)
        last.callback(ray.shutdown)
        small = SmallCluster(cluster)
        for count in gpus:
            small.add(count)
        ray.init(cluster.address, namespace="stretto", log_to_driver=False, logging_level=logging.ERROR)
        yield small


class RayBench:
    """A substrate on the nodes that are there, with jobs of stub workers."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 4,
        config: Callable[[str], dict[str, Value]] = lambda _: {},
        epochs: int = EPOCHS,
        entry: str = "",
        trainer: Trainer = STUB,
        files: JobFiles | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        began_s = time.monotonic()
        self.folder = folder
        self.epochs = epochs
        self.substrate = RaySubstrate(
            fleet=RayFleet(look_s=0.1),
            slots=slots,
            spec_of=lambda job: TrainingJob(
                entry=entry or str(folder / "train.py:train"),
                config=config(job.id),
                epochs=epochs,
                follows_batch=not entry,
            ),
            run_dir=folder,
            clock=lambda: time.monotonic() - began_s,
            rules=QUICK,
            files=files,
            trainer=trainer,
            idle_s=idle_s,
        )
        self.events: list[Event] = []
        self._number = 0

    def admit(self, job_id: str) -> None:
        self.substrate.admit(job_of(job_id, self.epochs))

    def start(self, job_id: str, allocation: Allocation) -> None:
        self.admit(job_id)
        self.tell(Action.START, job_id, allocation)

    def tell(self, action: Action, job_id: str, allocation: Allocation) -> None:
        self._number += 1
        self.substrate.apply([Instruction(self._number, action, job_id, allocation, BATCH)])

    def wait_for(self, wanted: Callable[[Event], bool], within_s: float = 180.0) -> Event:
        until_s = self.substrate.now_s() + within_s
        while (event := self.substrate.next_event(until_s)) is not None:
            self.events.append(event)
            if wanted(event):
                return event
        raise AssertionError(f"it did not happen; there was {self.events}")

    def wait_for_kind(self, kind: type[Event], subject: str) -> Event:
        return self.wait_for(lambda event: isinstance(event, kind) and event.subject == subject)
