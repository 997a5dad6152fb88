"""The Ray substrate: trains jobs on the nodes of a Ray cluster, each worker on the node the policy chose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import ray

from stretto.core.job import Job
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import Trainer
from stretto.substrate.elastic.substrate import PATIENCE_S, ElasticSubstrate, JobFiles
from stretto.substrate.ray.agent import AgentConfig
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.ground import RayGround
from stretto.substrate.ray.leases import IDLE_S
from stretto.substrate.ray.nodes import RayNode
from stretto.system.identity import RunLock, identity

_CARRIED = ("STRETTO_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables with these prefixes are passed from the controller to workers on all nodes."""


class RaySubstrate(ElasticSubstrate):
    """Elastic workers on a Ray cluster that this process is connected to.

    All nodes must see the run's folder, unless there is a `files.store`: then checkpoints go to the store,
    and logs and metrics are shipped to the controller. Commands need
    the run's folder and the controller's working directory on all nodes.
    """

    def __init__(
        self,
        *,
        fleet: RayFleet,
        slots: int,
        spec_of: Callable[[Job], TrainingJob],
        run_dir: Path,
        clock: Callable[[], float],
        rules: Rules | None = None,
        files: JobFiles | None = None,
        trainer: Trainer | None = None,
        idle_s: float = IDLE_S,
        temporary: bool = False,
        runs_commands: bool = False,
    ) -> None:
        """`slots` is the most there may be; `clock` gives the seconds since the run's first start.

        `temporary`: a trial run for measurements, whose files need not be kept.
        """
        rules, files, run_dir = rules or Rules(), files or JobFiles(), run_dir.absolute()
        lock = RunLock(run_dir / "lock", patience_s=rules.of_commands.grace_s + PATIENCE_S)
        proof = identity(run_dir)
        run = f"{run_dir.name}-{proof[:8]}"
        trainer_ = trainer or Trainer()

        def scratch_of(node: RayNode) -> Path:
            """The run's folder on the node: its name cannot be guessed, and agents check its owner."""
            return Path("/tmp") / f"stretto-{run}-{node.ray_id[:8]}"  # noqa: S108

        def config_of(node: RayNode) -> AgentConfig:
            return AgentConfig(
                run=run,
                scratch=scratch_of(node),
                folder=None if files.store else run_dir,
                proof=proof,
                host=node.host,
                trainer=trainer_,
                grace_s=rules.grace_s,
                slots=node.slots,
                cwd=Path.cwd(),
                env={name: value for name, value in os.environ.items() if name.startswith(_CARRIED)},
                command_grace_s=rules.of_commands.grace_s,
                runs_commands=runs_commands,
            )

        ground = RayGround(
            fleet,
            slots=slots,
            resource=fleet.resource,
            host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            config_of=config_of,
            scratch_of=scratch_of if files.store else None,
            run=run,
            run_dir=run_dir,
            idle_s=idle_s,
        )
        super().__init__(
            ground,
            spec_of=spec_of,
            run_dir=run_dir,
            lock=lock,
            clock=clock,
            rules=rules,
            files=files,
            runs_commands=runs_commands,
        )
        self._ray_ground, self._temporary = ground, temporary
        engine = self._engine
        engine.post(lambda: ground.settle(engine.post, engine.confused, lambda: engine.awake_s))

    def stop_now(self) -> None:
        """Like `close`, without waiting for checkpoints; unfinished ones stay on the nodes."""
        self._ray_ground.keeps_files = not self._temporary
        super().stop_now()
