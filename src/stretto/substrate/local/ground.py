"""Runs jobs on the slots of this machine."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.job import Job
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import (
    NO_ENTRY,
    ForkServerProcess,
    Trainer,
    WorkerNews,
    trainer_of,
    training_env,
)
from stretto.substrate.elastic.substrate import PATIENCE_S, ElasticSubstrate, JobFiles
from stretto.substrate.elastic.workers import Place
from stretto.substrate.local.slots import RentedSlots, SlotPool, Slots, whole_machine
from stretto.system.identity import RunLock

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Workers of one machine need no other network, and the machine's name may not resolve."""


class LocalGround:
    """The slots of this machine. All are equal, so the node of a worker makes no difference."""

    host = "127.0.0.1"
    changes = False

    def __init__(self, slots: Slots, trainer: Trainer, *, run_dir: Path, lock_fd: int, rules: Rules) -> None:
        self.provisioner = RentedSlots(len(slots))
        self._slots = slots
        self._pool = SlotPool(slots)
        self._trainer = trainer
        self._log = run_dir / "nursery.log"
        self._lock_fd = lock_fd
        self._rules = rules
        self._command_env = {"OMP_NUM_THREADS": str(slots.threads_each), **os.environ}
        self._env = {
            **training_env(threads=slots.threads_each, grace_s=rules.grace_s),
            **_LOOPBACK,
            **({"STRETTO_BACKEND": "gloo"} if slots.share_gpus else {}),  # NCCL wants a GPU for each worker
            **os.environ,  # the user's settings win
            "STRETTO_GRACE_S": str(rules.grace_s),
        }

    @property
    def slots(self) -> int:
        return len(self._slots)

    def places_of(self, allocation: Allocation) -> Counter[str]:
        return Counter({"": allocation.worker_count})

    def expect(self, entry: str) -> None:
        """Nothing to prepare: the fork server starts with the first worker, which needs it at once."""

    def ask(self, worker_id: str, job_id: str, node: str) -> None:
        del job_id, node
        self._pool.ask(worker_id)

    def withdraw(self, worker_id: str) -> bool:
        return self._pool.withdraw(worker_id)

    def grants(self) -> list[tuple[str, Place]]:
        return [(worker_id, self._place(slot)) for worker_id, slot in self._pool.grants()]

    def give_back(self, worker_id: str) -> None:
        self._pool.give_back(worker_id)

    def abandoned(self) -> list[str]:
        return []

    def fork_server(
        self, home: str, entry: str, on_news: Callable[[WorkerNews], None], on_end: Callable[[], None]
    ) -> ForkServerProcess:
        del home
        runs_commands = entry == NO_ENTRY
        return ForkServerProcess(
            entry,
            trainer_of(entry, self._trainer),
            grace_s=(self._rules.of_commands if runs_commands else self._rules).grace_s,
            env=self._command_env if runs_commands else self._env,
            log=self._log,
            lock_fd=self._lock_fd,
            on_news=on_news,
            on_end=on_end,
        )

    def _place(self, slot: int) -> Place:
        """GPU memory is given back only when a process ends, so no process stays on a GPU.

        Commands see all GPUs if slots share them: the ranks of one job would otherwise have too few.
        """
        slots = self._slots
        devices = {"CUDA_VISIBLE_DEVICES": slots.devices[slot]}
        return Place(
            name=str(slot),
            home="",
            env={**devices, "STRETTO_SLOT": str(slot)},
            stays=not slots.has_gpus,
            command_env=devices if slots.has_gpus and not slots.share_gpus else {},
        )


class LocalSubstrate(ElasticSubstrate):
    """Elastic workers on the slots of this machine. A wish for nodes is granted up to the number of slots."""

    def __init__(
        self,
        *,
        spec_of: Callable[[Job], TrainingJob],
        run_dir: Path,
        slots: Slots,
        clock: Callable[[], float],
        rules: Rules | None = None,
        files: JobFiles | None = None,
        trainer: Trainer | None = None,
        runs_commands: bool = False,
    ) -> None:
        """`clock` gives the seconds since the run's first start. `runs_commands`: some jobs are commands."""
        rules = rules or Rules()
        lock = RunLock(run_dir.absolute() / "lock", patience_s=rules.of_commands.grace_s + PATIENCE_S)
        machine = LocalGround(
            slots,
            trainer or Trainer(),
            run_dir=run_dir.absolute(),
            lock_fd=lock.fd,
            rules=rules,
        )
        super().__init__(
            machine,
            spec_of=spec_of,
            run_dir=run_dir,
            lock=lock,
            clock=clock,
            rules=rules,
            files=files or JobFiles(),
            runs_commands=runs_commands,
        )
        self.node: Node = whole_machine(len(slots))
        """The whole machine, for policies that do not rent nodes."""
