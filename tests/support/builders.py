"""Small factories for what policies are given: every argument has a default that is easy to compute with."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.cluster import Node
from stretto.core.job import BatchLimits, Communication, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.models.belief import StatedBelief
from stretto.models.resize import ResizeCost
from stretto.models.speed import AllReduceSpeed
from stretto.policies.base import ClusterView, JobView

ONE_GPU = Resources(gpu=1)
RESIZE = ResizeCost(30.0, 40.0, 0)
UNKNOWN = StatedBelief(resize=RESIZE)
BATCH = BatchLimits(initial=128, requested=128, max=1024, per_gpu_min=1, per_gpu_max=1024)


def make_node(
    node_id: str, gpu: float = 0, cpu: float = 0, memory_gib: float = 0, bandwidth_gbps: float = 0
) -> Node:
    return Node(node_id, Resources(gpu, cpu, memory_gib, bandwidth_gbps))


def make_job(
    job_id: str,
    workers: int = 1,
    *,
    demand: Resources = ONE_GPU,
    least: int | None = None,
    most: int | None = None,
    server: Role | None = None,
    tier: Tier | None = None,
    batch: BatchLimits = BATCH,
    work: Work | None = None,
    preemptible: bool = True,
) -> Job:
    """A job of `workers` requested; rigid unless `least` or `most` is another number."""
    role = Role(
        demand=demand,
        requested=workers,
        min=workers if least is None else least,
        max=workers if most is None else most,
    )
    return Job(
        id=job_id,
        application="app",
        submit_s=0.0,
        worker=role,
        server=server,
        communication=Communication.PS_SYNC if server else Communication.ALL_REDUCE,
        tier=tier or (Tier.RIGID if role.min == role.max else Tier.ELASTIC),
        batch=batch,
        work=work or Work(units_per_epoch=100.0, epochs=10),
        preemptible=preemptible,
    )


def make_view(
    job: Job,
    allocation: Allocation = NOTHING,
    *,
    belief: StatedBelief = UNKNOWN,
    work_done: float = 0.0,
    epoch: int = 0,
    attained_gpu_s: float = 0.0,
    age_s: float = 0.0,
) -> JobView:
    return JobView(
        job=job,
        allocation=allocation,
        batch=BatchChoice(1) if allocation else None,
        age_s=age_s,
        attained_gpu_s=attained_gpu_s,
        restarts=0,
        work_done=work_done,
        epoch=epoch,
        belief=belief,
    )


def make_cluster(nodes: Sequence[Node], jobs: Sequence[JobView]) -> ClusterView:
    return ClusterView(now_s=0.0, nodes=tuple(nodes), jobs=tuple(jobs))


def steady_speed(pass_s: float, sync_s: float = 0.0, network_s: float = 0.0) -> AllReduceSpeed:
    """A step is a pass of fixed length plus a fixed synchronisation within a node, or across nodes."""
    return AllReduceSpeed(pass_s, 0.0, network_s, 0.0, sync_s, 0.0, 1.0)


def believing(speed: AllReduceSpeed) -> StatedBelief:
    return StatedBelief(speed=speed, resize=RESIZE)
