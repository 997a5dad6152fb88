"""Reads the state of a cluster from a JSON file, for one decision.

A snapshot is a JSON object:

    nodes   {id: GPUs}, or {id: {"gpu": .., "cpu": .., "memory_gib": .., "bandwidth_gbps": ..}}
    jobs    a list; a job needs a `key`, the rest has the defaults of `SnapshotJob`
    time    seconds since some start (optional)

docs/snapshot.md describes every field with an example.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.core.units import counted
from stretto.inputs.arguments import given_path
from stretto.models.belief import StatedBelief
from stretto.models.noise import PERFECTLY_SCALABLE
from stretto.models.resize import ResizeCost
from stretto.models.speed import MAX_OVERLAP, AllReduceSpeed
from stretto.policies.base import ClusterView, JobView

RESTART_S = 30.0
"""Restart cost in Pollux' objective."""

LARGEST = 10**9
"""Larger counts are mistakes; up to here arithmetic is exact."""

MOST_SECONDS = 1e15
"""Longer times (thirty million years) are mistakes, usually of the unit."""
LEAST_UNITS, MOST_UNITS = 1e-6, 1e18
MOST_AMOUNT = 1e12
"""Most cores, GiB or Gbit/s of a node."""
LEAST_AMOUNT = 1e-6
"""Least amount that is not 0."""
LEAST_TIME_S, MOST_TIME_S = 1e-12, 1e9
"""Range of times in which a speed model is numerically sound."""
MOST_NOISE = 1e100

UNSAID = BatchLimits(initial=1, requested=1, max=LARGEST, per_gpu_min=1, per_gpu_max=1)
"""Limits of a job whose batch sizes the snapshot does not mention."""

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
GpuCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Moment = Annotated[float, msgspec.Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
Units = Annotated[float, msgspec.Meta(ge=0, le=MOST_UNITS)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST_AMOUNT)]


class NodeSize(msgspec.Struct, forbid_unknown_fields=True):
    gpu: GpuCount = 0
    cpu: Amount = 0.0
    memory_gib: Amount = 0.0
    bandwidth_gbps: Amount = 0.0


class SnapshotJob(msgspec.Struct, forbid_unknown_fields=True):
    """One job of a snapshot. Without `perf_params` it counts as never profiled."""

    key: str
    application: str = ""
    base: list[str | int] | dict[str, Count] = msgspec.field(default_factory=list)
    """What it holds: one node id per GPU, or {node: GPUs}."""
    perf_params: Annotated[list[float], msgspec.Meta(min_length=7, max_length=7)] | None = None
    grad_params: Annotated[list[float], msgspec.Meta(min_length=2, max_length=2)] | None = None
    init_batch_size: Count | None = None
    max_batch_size: Count | None = None
    batch_size: Count | None = None
    """Total batch of a job that is not adaptive; None: the initial batch."""
    atomic_bsz_range: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)] | None = None
    accumulation: bool = True
    min_replicas: CountOrNone = 0
    max_replicas: Count | None = None
    """None: the largest of three numbers: what it holds, what it requested and what it needs at least."""
    num_replicas: Count | None = None
    """What its owner requested; None: what it holds, within the limits."""
    tier: Tier = Tier.ADAPTIVE
    attained_service: Seconds = 0.0
    age: Seconds = 0.0
    num_restarts: CountOrNone = 0
    creation_timestamp: Moment | None = None
    preemptible: bool = True
    work_total: Units | None = None
    """Total statistical units (steps at the initial batch size); `work_done` of them are done."""
    work_done: Units = 0.0


class SnapshotFile(msgspec.Struct, forbid_unknown_fields=True):
    nodes: dict[str, GpuCount | NodeSize]
    jobs: list[SnapshotJob]
    time: Moment = 0.0
    note: str = ""
    """A comment; it is ignored."""


def read_snapshot(path: Path | str) -> ClusterView:
    """Reads the view in a snapshot file; an InputError names the place, value, rule and remedy."""
    path = given_path(path, "path", "cluster.json")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}).", where=str(path)) from error
    try:
        return view_of(msgspec.json.decode(raw, type=SnapshotFile), where=str(path))
    except msgspec.ValidationError as error:
        raise InputError(
            f"{error}.", where=str(path), remedy="docs/snapshot.md lists every field and what it takes."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"not JSON: {error}.",
            where=f"{path}:{_line(raw, str(error))}",
            remedy="NaN and comments are not JSON.",
        ) from error


def view_of(snapshot: SnapshotFile, *, where: str = "snapshot") -> ClusterView:
    nodes = tuple(
        Node(node, _capacity(size, f"{where}: nodes ({node!r})")) for node, size in snapshot.nodes.items()
    )
    jobs: dict[str, JobView] = {}
    free = {node.id: node.gpus for node in nodes}
    for position, entry in enumerate(snapshot.jobs):
        here = f"{where}: jobs[{position}] ({entry.key!r})"
        if entry.key in jobs:
            raise InputError("the same key twice.", where=here, remedy="Give every job a key of its own.")
        jobs[entry.key] = _job_view(entry, snapshot, free, here)
    ordered = sorted(jobs.values(), key=lambda job: job.job.submit_s)
    return ClusterView(now_s=snapshot.time, nodes=nodes, jobs=tuple(ordered))


def _job_view(entry: SnapshotJob, snapshot: SnapshotFile, free: dict[str, int], where: str) -> JobView:
    allocation = _allocation(entry, free, where)
    job = _job(entry, snapshot, allocation, where)
    return JobView(
        job=job,
        allocation=allocation,
        batch=None,
        age_s=entry.age,
        attained_gpu_s=entry.attained_service,
        restarts=entry.num_restarts,
        work_done=entry.work_done,
        epoch=0,
        belief=StatedBelief(
            speed=_speed(entry, where),
            noise=_noise(entry, where),
            resize=ResizeCost(RESTART_S, RESTART_S, 0),
            max_workers_seen=job.worker.max,
        ),
    )


def _allocation(entry: SnapshotJob, free: dict[str, int], where: str) -> Allocation:
    held: dict[str, int] = {}
    pairs = entry.base.items() if isinstance(entry.base, dict) else ((node, 1) for node in entry.base)
    for node, count in pairs:
        held[str(node)] = held.get(str(node), 0) + count
    for node, count in held.items():
        if node not in free:
            raise InputError(
                f"base names node {node!r}, which nodes does not list.",
                where=where,
                remedy="Add it or free the job.",
            )
        free[node] -= count
        if free[node] < 0:
            raise InputError(
                f"base takes node {node!r} {-free[node]} GPUs above what it has.",
                where=where,
                remedy="The jobs of a snapshot must fit on its nodes.",
            )
    return on_nodes(held) if held else NOTHING


def _job(entry: SnapshotJob, snapshot: SnapshotFile, allocation: Allocation, where: str) -> Job:
    least = max(entry.min_replicas, 1)
    asked = entry.num_replicas or 1
    most = entry.max_replicas or max(least, asked, allocation.worker_count)
    if most < least:
        raise InputError(
            f"max_replicas {most} is below min_replicas {entry.min_replicas}.",
            where=where,
            remedy="Raise one or lower the other.",
        )
    if entry.num_replicas is not None and not least <= asked <= most:
        raise InputError(
            f"num_replicas {asked} is not within min_replicas {entry.min_replicas} and max_replicas {most}.",
            where=where,
            remedy="Its owner can ask only for what it takes.",
        )
    if entry.work_total is not None and 0.0 < entry.work_total < LEAST_UNITS:
        raise InputError(
            f"work_total {entry.work_total:g} is next to nothing.",
            where=where,
            remedy=f"Write {LEAST_UNITS:g} and more, or leave it out.",
        )
    batch = _batch(entry, where)
    for name, workers in (
        ("min_replicas", least),
        ("num_replicas", asked),
        ("base", allocation.worker_count),
    ):
        if workers * batch.per_gpu_min > batch.max:
            raise InputError(
                f"{name} has it on {counted(workers, 'GPU')} with {batch.per_gpu_min} examples each or more, "
                f"and its batch is at most {batch.max}.",
                where=where,
                remedy="Lower its GPUs or atomic_bsz_range, or raise max_batch_size.",
            )
    submitted = entry.creation_timestamp
    return Job(
        id=entry.key,
        application=entry.application,
        submit_s=snapshot.time - entry.age if submitted is None else submitted,
        tier=entry.tier,
        worker=Role(
            demand=Resources(gpu=1),
            requested=entry.num_replicas or min(max(allocation.worker_count, least), most),
            min=least,
            max=most,
        ),
        batch=batch,
        work=Work(units_per_epoch=entry.work_total or 1.0, epochs=1 if entry.work_total else None),
        preemptible=entry.preemptible,
    )


def _batch(entry: SnapshotJob, where: str) -> BatchLimits:
    """The batch limits; a job that was never profiled may leave them out, and then gets no batch size."""
    if entry.init_batch_size is None:
        if entry.perf_params is not None:
            raise InputError(
                "has perf_params and no init_batch_size.",
                where=where,
                remedy="Add the batch size it started with.",
            )
        return UNSAID
    initial, largest = entry.init_batch_size, entry.max_batch_size or entry.init_batch_size
    smallest_atomic, largest_atomic = entry.atomic_bsz_range or (1, largest)
    asked = entry.batch_size or initial
    if largest < max(initial, asked, smallest_atomic) or largest_atomic < smallest_atomic:
        raise InputError(
            f"batch limits run backwards: init {initial}, batch_size {asked}, max {largest}, atomic range "
            f"{smallest_atomic} to {largest_atomic}.",
            where=where,
            remedy="Each upper limit must be at least its lower one.",
        )
    return BatchLimits(
        initial=initial,
        requested=asked,
        max=largest,
        per_gpu_min=smallest_atomic,
        per_gpu_max=largest_atomic,
        accumulation=entry.accumulation,
    )


def _speed(entry: SnapshotJob, where: str) -> AllReduceSpeed | None:
    if entry.perf_params is None:
        return None
    speed = AllReduceSpeed(*entry.perf_params)
    times = entry.perf_params[:-1]
    if (
        not all(LEAST_TIME_S <= value <= MOST_TIME_S for value in times)
        or not 1 <= speed.gamma <= MAX_OVERLAP
    ):
        raise InputError(
            f"perf_params {entry.perf_params} are not a speed model.",
            where=where,
            remedy=f"Six positive times, from {LEAST_TIME_S:g} to {MOST_TIME_S:g} s, and an overlap between "
            f"1 and {MAX_OVERLAP:g}.",
        )
    return speed


def _noise(entry: SnapshotJob, where: str) -> NoiseSample:
    if entry.grad_params is None:
        return PERFECTLY_SCALABLE
    if not all(0 <= value <= MOST_NOISE for value in entry.grad_params):
        raise InputError(
            f"grad_params {entry.grad_params} are not gradient statistics.",
            where=where,
            remedy=f"A squared norm and a variance, neither negative nor above {MOST_NOISE:g}.",
        )
    return NoiseSample(*entry.grad_params)


def _capacity(size: int | NodeSize, where: str) -> Resources:
    if isinstance(size, int):
        return Resources(gpu=size)
    for name in ("cpu", "memory_gib", "bandwidth_gbps"):
        if 0.0 < getattr(size, name) < LEAST_AMOUNT:
            raise InputError(
                f"{name} {getattr(size, name):g} is next to nothing.",
                where=where,
                remedy=f"Write 0, or {LEAST_AMOUNT:g} and more.",
            )
    return Resources(size.gpu, size.cpu, size.memory_gib, size.bandwidth_gbps)


def _line(raw: bytes, message: str) -> int:
    """The line of the byte that a decoder's message names."""
    digits = "".join(char for char in message.rpartition("byte ")[2] if char.isdigit())
    return raw[: int(digits)].count(b"\n") + 1 if digits else 1


def has_batch_limits(job: Job) -> bool:
    """Whether the snapshot has batch sizes for the job."""
    return job.batch != UNSAID
