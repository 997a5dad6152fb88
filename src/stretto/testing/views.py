"""Random clusters and jobs for tests of policies, as hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.cluster import Node
from stretto.core.job import BatchLimits, Communication, Convergence, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.core.resources import Resources
from stretto.models.belief import StatedBelief
from stretto.models.parameter_server import fit_server_speed
from stretto.models.resize import ResizeCost
from stretto.models.speed import AllReduceSpeed
from stretto.policies.base import ClusterView, JobView


@st.composite
def views(draw: st.DrawFn, *, servers: bool = False, draining: bool = False) -> ClusterView:
    """Clusters of unequal nodes with waiting and running jobs of every tier, known and unknown.

    With `servers` some jobs have parameter servers, and tasks need CPUs, too. With `draining` one node, on
    which jobs may still run, must not be used any more.
    """
    sizes = draw(st.lists(st.integers(1, 6), min_size=2 if draining else 1, max_size=4))
    nodes = tuple(
        Node(f"n{i}", Resources(gpu=gpus, cpu=float(draw(st.integers(4, 16)))))
        for i, gpus in enumerate(sizes)
    )
    now_s = draw(st.floats(0.0, 1e5))
    free = {node.id: node.capacity for node in nodes}
    jobs = tuple(
        draw(_job_views(f"job-{i}", now_s, free, servers=servers)) for i in range(draw(st.integers(0, 6)))
    )
    return ClusterView(now_s=now_s, nodes=nodes[1:] if draining else nodes, jobs=jobs)


@st.composite
def _job_views(
    draw: st.DrawFn, job_id: str, now_s: float, free: dict[str, Resources], *, servers: bool
) -> JobView:
    job = draw(_jobs(job_id, now_s, servers=servers))
    allocation = draw(_held(job, free)) if draw(st.booleans()) else NOTHING
    age_s = now_s - job.submit_s
    progress = draw(st.floats(0.0, 1.0))
    return JobView(
        job=job,
        allocation=allocation,
        batch=BatchChoice(job.batch.per_gpu_min) if allocation else None,
        age_s=age_s,
        attained_gpu_s=draw(st.floats(0.0, 1e6)),
        restarts=draw(st.integers(0, 20)) if allocation else 0,
        work_done=progress * 10 * job.work.units_per_epoch,
        epoch=int(progress * 10),
        belief=draw(_beliefs(job)),
    )


@st.composite
def _jobs(draw: st.DrawFn, job_id: str, now_s: float, *, servers: bool) -> Job:
    tier = draw(st.sampled_from(list(Tier)))
    cpu = draw(st.sampled_from([0.0, 1.0, 2.5])) if servers else 0.0
    has_servers = servers and draw(st.booleans())
    kinds = [Communication.PS_SYNC, Communication.PS_ASYNC] if has_servers else [Communication.ALL_REDUCE]
    worker = draw(_roles(Resources(gpu=1, cpu=cpu), tier))
    endless = draw(st.booleans())
    return Job(
        id=job_id,
        application=draw(st.sampled_from(["vision", "speech"])),
        submit_s=now_s * draw(st.floats(0.0, 1.0)),
        worker=worker,
        server=draw(_roles(Resources(cpu=1.0), tier)) if has_servers else None,
        communication=draw(st.sampled_from(kinds)),
        tier=tier,
        batch=draw(_batch_limits(worker)),
        work=Work(
            units_per_epoch=draw(st.floats(1.0, 1e4)),
            epochs=None if endless else 10,
            convergence=Convergence(threshold=0.01, patience=3) if endless else None,
        ),
        preemptible=draw(st.booleans()),
    )


@st.composite
def _roles(draw: st.DrawFn, demand: Resources, tier: Tier) -> Role:
    requested = draw(st.integers(1, 8))
    if tier is Tier.RIGID:
        return Role(
            demand=demand, requested=requested, min=draw(st.sampled_from([1, requested])), max=requested
        )
    least = draw(st.integers(1, requested))
    return Role(demand=demand, requested=requested, min=least, max=requested + draw(st.integers(0, 16)))


@st.composite
def _batch_limits(draw: st.DrawFn, worker: Role) -> BatchLimits:
    """Limits that allow a batch size for every worker count of the role."""
    smallest = draw(st.integers(1, 8))
    largest = smallest * draw(st.integers(2, 16))
    initial = draw(st.integers(smallest, largest))
    requested = max(initial, worker.requested * smallest) * draw(st.integers(1, 4))
    return BatchLimits(
        initial=initial,
        requested=requested,
        max=max(requested, 2 * worker.max * smallest) * draw(st.integers(1, 8)),
        per_gpu_min=smallest,
        per_gpu_max=largest,
    )


@st.composite
def _held(draw: st.DrawFn, job: Job, free: dict[str, Resources]) -> Allocation:
    """An allocation that the job may have, within `free`; nothing if there is no room."""
    left = dict(free)
    rigid = job.tier is Tier.RIGID
    placed: list[tuple[tuple[str, int], ...]] = []
    for role in (job.worker, job.server):
        wanted = 0 if role is None else role.requested if rigid else draw(st.integers(role.min, role.max))
        tasks: dict[str, int] = {}
        for node in draw(st.permutations(sorted(left))):
            while role is not None and wanted and role.demand.fits_in(left[node]):
                left[node] -= role.demand
                tasks[node] = tasks.get(node, 0) + 1
                wanted -= 1
        if role is not None and (wanted if rigid else sum(tasks.values()) < role.min):
            return NOTHING
        placed.append(tuple(sorted(tasks.items())))
    free.update(left)
    return Allocation(*placed)


@st.composite
def _beliefs(draw: st.DrawFn, job: Job) -> StatedBelief:
    resize = ResizeCost(draw(st.floats(1.0, 120.0)), 150.0, 0)
    if draw(st.booleans()):
        return StatedBelief(resize=resize)
    times = st.floats(1e-3, 1.0)
    samples = [
        SpeedSample(1, w, p, 8, 1.0 / w + 0.1 * w / p + 0.01 * p, 0.01) for w, p in ((1, 1), (2, 1), (4, 2))
    ]
    return StatedBelief(
        speed=draw(st.builds(AllReduceSpeed, *[times] * 6, st.floats(1.0, 10.0))),
        server_speed=fit_server_speed(
            samples,
            synchronous=job.communication is Communication.PS_SYNC,
            total_batch=job.batch.requested,
        ),
        noise=draw(st.builds(NoiseSample, st.floats(0.0, 1e3), st.floats(1e-3, 1e3))),
        resize=resize,
        max_workers_seen=draw(st.integers(1, 16)),
    )
