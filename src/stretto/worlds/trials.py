"""The truth about a study's trials: a learning curve, and a speed that varies by trial, node and epoch."""

from __future__ import annotations

from stretto.core.allocation import Allocation, Tasks
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.core.observations import NoiseSample
from stretto.core.seeds import child_rng
from stretto.planning.profile import Profile
from stretto.pricing.instances import Instance
from stretto.worlds.cloud import RentalCloud, instance_of, lognormal
from stretto.worlds.curves import Curves
from stretto.worlds.truth import StepTime, by_epoch


class NodeSpeeds:
    """The speed of the nodes of one world: their GPUs, and a constant factor of each node."""

    def __init__(
        self, profile: Profile, instances: tuple[Instance, ...], nodes: tuple[Node, ...], seed: int
    ) -> None:
        self._profile = profile
        self._instances = {instance.name: instance for instance in instances}
        self._fixed = {node.id: node for node in nodes}
        self._seed = seed
        self._epoch_s: dict[Tasks, float] = {}
        self._slowness: dict[Tasks, float] = {}
        self._factors: dict[str, float] = {}

    def epoch_s(self, tasks: Tasks) -> float:
        """Usual epoch time on these nodes: epoch_s / (speedup(GPUs, spans) x speed of the slowest GPU)."""
        known = self._epoch_s.get(tasks)
        if known is None:
            known = self._epoch_s[tasks] = self._work_out(tasks)
        return known

    def slowness(self, tasks: Tasks) -> float:
        """The factor of the slowest node."""
        known = self._slowness.get(tasks)
        if known is None:
            known = self._slowness[tasks] = max(self._factor(node_id) for node_id, _ in tasks)
        return known

    def _work_out(self, tasks: Tasks) -> float:
        gpus = sum(count for _, count in tasks)
        kinds = [self._kind(node_id) for node_id, _ in tasks]
        largest = max(size for size, _ in kinds)
        speedup = self._profile.scaling.speedup(gpus, spans=len(tasks) > -(-gpus // largest))
        return self._profile.latency.epoch_s / (speedup * min(speed for _, speed in kinds))

    def _kind(self, node_id: str) -> tuple[int, float]:
        """GPUs of the node, and the speed of one of them."""
        node = self._fixed.get(node_id)
        instance = self._instances.get(instance_of(node_id) if node is None else node.instance)
        if node is not None:
            return node.gpus, 1.0 if instance is None else instance.speed
        if instance is None:
            raise LookupError(f"node {node_id} is neither fixed nor of a type that can be rented")
        return instance.gpus, instance.speed

    def _factor(self, node_id: str) -> float:
        known = self._factors.get(node_id)
        if known is None:
            rng = child_rng(self._seed, "node", node_id)
            known = float(lognormal(1.0, self._profile.latency.node_sd, 1, rng)[0])
            self._factors[node_id] = known
        return known


class CurveTruth:
    """The truth about one trial: its curve, and the factors of its epoch times."""

    def __init__(
        self,
        *,
        curve: tuple[float, ...],
        ground: NodeSpeeds,
        trial_factor: float,
        epoch_factors: tuple[float, ...],
    ) -> None:
        self._curve = curve
        self._ground = ground
        self._trial_factor = trial_factor
        self._epoch_factors = epoch_factors

    @property
    def epochs(self) -> int:
        return len(self._curve)

    def units_at(self, epoch: int) -> float:
        return float(epoch)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:  # noqa: ARG002
        """A step is one epoch, whatever the batch size."""
        return StepTime(self._ground.epoch_s(allocation.workers) * self._trial_factor, 0.0)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:  # noqa: ARG002
        return None

    def loss_at(self, epoch: int) -> float | None:  # noqa: ARG002
        return None

    def result_at(self, epoch: int) -> float | None:
        value = by_epoch(self._curve, epoch, first=1)
        return value if value == value else None  # noqa: PLR0124  (NaN)

    def slowness_at(self, epoch: int, allocation: Allocation) -> float:
        return by_epoch(self._epoch_factors, epoch) * self._ground.slowness(allocation.workers)


class StudyWorld:
    """The truth of one simulated study; another seed is another world of the same kind.

    Every random draw is keyed by the seed and the id of its trial or node, so it does not depend on the order
    of a policy's decisions.
    """

    def __init__(
        self,
        curves: Curves,
        profile: Profile,
        *,
        instances: tuple[Instance, ...] = (),
        nodes: tuple[Node, ...] = (),
        seed: int = 0,
    ) -> None:
        self.curves = curves
        self.profile = profile
        self._instances = instances
        self._seed = seed
        self._ground = NodeSpeeds(profile, instances, nodes, seed)

    @property
    def cloud(self) -> RentalCloud:
        """The cloud that launches nodes."""
        return RentalCloud(
            instances=self._instances,
            queue_s=self.profile.queue_s,
            init_s=self.profile.init_s,
            seed=self._seed,
        )

    def truth_of(self, job: Job) -> CurveTruth:
        """The truth about a trial, from its configuration and its id.

        Its speed factor is that of its row if measured, else drawn.
        """
        epochs = self.check_epochs(job.work.epochs)
        latency = self.profile.latency
        factor = self.curves.relative_time(job.config)
        if factor is None:
            rng = child_rng(self._seed, "trial", job.id)
            factor = float(lognormal(1.0, latency.trial_sd, 1, rng)[0])
        epoch_rng = child_rng(self._seed, "epochs", job.id)
        return CurveTruth(
            curve=self.curves.curve(job.config, epochs, child_rng(self._seed, "curve", job.id)),
            ground=self._ground,
            trial_factor=factor,
            epoch_factors=tuple(lognormal(1.0, latency.epoch_sd, epochs, epoch_rng).tolist()),
        )

    def check_epochs(self, epochs: int | None) -> int:
        """The epochs of a trial; InputError if the curves are shorter."""
        most = self.curves.most_epochs
        if epochs is None or (most is not None and epochs > most):
            raise InputError(
                f"a study of {epochs} epochs on {self.curves.name}, whose curves have {most}.",
                remedy=f"Set max_epochs to {most} or fewer, or take other curves.",
            )
        return epochs
