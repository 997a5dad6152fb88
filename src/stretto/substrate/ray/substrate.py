"""Trains jobs on the nodes of a Ray cluster, each worker on the node that was decided on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import ray

from stretto.core.job import Job
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import COMMANDS, Trainer
from stretto.substrate.elastic.identity import RunLock, identity
from stretto.substrate.elastic.substrate import PATIENCE_S, ElasticSubstrate, Files
from stretto.substrate.ray.agent import Charge
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.ground import RayLand
from stretto.substrate.ray.leases import IDLE_S
from stretto.substrate.ray.nodes import RayNode

_CARRIED = ("STRETTO_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")
"""Of the controller's environment, what begins so holds for its workers too, on whatever node."""


class RaySubstrate(ElasticSubstrate):
    """Elastic workers on a Ray cluster that this process is connected to.

    The run's folder must be one that all nodes see; with `files.store` it need not be: checkpoints then
    go to the store, and what jobs print and measure is carried here.
    """

    runs_commands: ClassVar[bool] = False

    def __init__(
        self,
        *,
        fleet: RayFleet,
        slots: int,
        spec_of: Callable[[Job], TrainingJob],
        run_dir: Path,
        clock: Callable[[], float],
        rules: Rules | None = None,
        files: Files | None = None,
        trainer: Trainer | None = None,
        idle_s: float = IDLE_S,
        tried: bool = False,
    ) -> None:
        """`slots` is how many there may be at most; `clock` gives the seconds since the run's first start.

        `tried`: nothing of it is to be kept.
        """
        rules, files, run_dir = rules or Rules(), files or Files(), run_dir.absolute()
        lock = RunLock(run_dir / "lock", patience_s=rules.grace_s + PATIENCE_S)
        proof = identity(run_dir)
        run = f"{run_dir.name}-{proof[:8]}"
        charged = trainer or Trainer()

        def scratch_of(node: RayNode) -> Path:
            """Its name cannot be guessed, and agents check its owner."""
            return Path("/tmp") / f"stretto-{run}-{node.ray_id[:8]}"  # noqa: S108

        def charge_of(node: RayNode) -> Charge:
            return Charge(
                run=run,
                scratch=scratch_of(node),
                folder=None if files.store else run_dir,
                proof=proof,
                host=node.host,
                trainer=charged,
                grace_s=rules.grace_s,
                slots=node.slots,
                cwd=Path.cwd(),
                env={name: value for name, value in os.environ.items() if name.startswith(_CARRIED)},
                runs_commands=self.runs_commands,
            )

        land = RayLand(
            fleet,
            slots=slots,
            resource=fleet.resource,
            host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            charge_of=charge_of,
            scratch_of=scratch_of if files.store else None,
            run=run,
            run_dir=run_dir,
            idle_s=idle_s,
        )
        super().__init__(
            land, spec_of=spec_of, run_dir=run_dir, lock=lock, clock=clock, rules=rules, files=files
        )
        self._ray_land, self._tried = land, tried
        engine = self._engine
        engine.post(lambda: land.settle(engine.post, engine.confused, lambda: engine.awake_s))

    def stop_now(self) -> None:
        """As `close`, without waiting for checkpoints; what nodes have of them stays there."""
        self._ray_land.hurries = not self._tried
        super().stop_now()


class RayCommandSubstrate(RaySubstrate):
    """Commands on a Ray cluster, a process for every worker, where that was decided. A resize is a restart.

    The run's folder, and the one that this process is in, must be such as all nodes see.
    """

    changes_batch_in_place = False
    runs_commands = True

    def __init__(
        self,
        *,
        fleet: RayFleet,
        slots: int,
        spec_of: Callable[[Job], TrainingJob],
        run_dir: Path,
        clock: Callable[[], float],
        rules: Rules | None = None,
    ) -> None:
        """As of RaySubstrate; workers get the time that their commands have, and a little more."""
        rules = rules or Rules()
        super().__init__(
            fleet=fleet,
            slots=slots,
            spec_of=spec_of,
            run_dir=run_dir,
            clock=clock,
            rules=replace(rules, grace_s=max(rules.grace_s, rules.command_s + PATIENCE_S)),
            trainer=COMMANDS,
        )

    def stop_now(self) -> None:
        """A command cannot be ended sooner than by SIGTERM and, after the grace, SIGKILL."""
        self.close()
