"""Reading a cluster's state from a file, for one decision about it.

A snapshot is a JSON object:

    nodes   {id: GPUs}, or {id: {"gpu": .., "cpu": .., "memory_gib": .., "bandwidth_gbps": ..}}
    jobs    a list; of each job `key` is required, the rest has the defaults of `SnapshotJob`
    time    seconds since some start (optional)

docs/snapshot.md describes every field with an example.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stretto.app.given_arguments import given_path
from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.models.belief import StatedBelief
from stretto.models.noise import PERFECTLY_SCALABLE
from stretto.models.resize import ResizeCost
from stretto.models.speed import MAX_OVERLAP, AllReduceSpeed
from stretto.policies.base import ClusterView, JobView

RESTART_S = 30.0
"""Cost of a restart that Pollux' objective assumes."""

LARGEST = 10**9
"""Nobody has more GPUs, or takes larger batches, and arithmetic stays exact."""

UNSAID = BatchLimits(initial=1, requested=1, max=LARGEST, per_gpu_min=1, per_gpu_max=1)
"""Limits of a job whose batch sizes the snapshot does not mention."""

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
GpuCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


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
    """What it holds: node ids, one for each GPU, or {node: GPUs}."""
    perf_params: Annotated[list[float], msgspec.Meta(min_length=7, max_length=7)] | None = None
    grad_params: Annotated[list[float], msgspec.Meta(min_length=2, max_length=2)] | None = None
    init_batch_size: Count | None = None
    max_batch_size: Count | None = None
    batch_size: Count | None = None
    """Total batch of a job whose batch is not adapted; the initial one if not given."""
    atomic_bsz_range: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)] | None = None
    accumulation: bool = True
    min_replicas: CountOrNone = 0
    max_replicas: Count = 1
    num_replicas: Count | None = None
    """What its owner asked for; what it holds, or the least it takes, if not given."""
    tier: Tier = Tier.ADAPTIVE
    attained_service: Amount = 0.0
    age: Amount = 0.0
    num_restarts: CountOrNone = 0
    creation_timestamp: float | None = None
    preemptible: bool = True
    work_total: Amount | None = None
    """Statistical units in all, and done so far: steps at the initial batch size."""
    work_done: Amount = 0.0


class SnapshotFile(msgspec.Struct, forbid_unknown_fields=True):
    nodes: dict[str, GpuCount | NodeSize]
    jobs: list[SnapshotJob]
    time: float = 0.0
    note: str = ""
    """For people; nothing reads it."""


def read_snapshot(path: Path | str) -> ClusterView:
    """The view of a snapshot file; InputError with place, value, rule and remedy for anything wrong in it."""
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
    nodes = tuple(Node(node, _capacity(size)) for node, size in snapshot.nodes.items())
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
    return JobView(
        job=_job(entry, snapshot, allocation, where),
        allocation=allocation,
        batch=None,
        age_s=_finite(entry.age, "age", where),
        attained_gpu_s=entry.attained_service,
        restarts=entry.num_restarts,
        work_done=entry.work_done,
        epoch=0,
        belief=StatedBelief(
            speed=_speed(entry, where),
            noise=_noise(entry, where),
            resize=ResizeCost(RESTART_S, RESTART_S, 0),
            max_workers_seen=entry.max_replicas,
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
    if entry.max_replicas < least:
        raise InputError(
            f"max_replicas {entry.max_replicas} is below min_replicas {entry.min_replicas}.",
            where=where,
            remedy="Raise one or lower the other.",
        )
    requested = entry.num_replicas or max(allocation.worker_count, least)
    submitted = entry.creation_timestamp
    return Job(
        id=entry.key,
        application=entry.application,
        submit_s=snapshot.time - entry.age if submitted is None else submitted,
        tier=entry.tier,
        worker=Role(
            demand=Resources(gpu=1),
            requested=requested,
            min=least,
            max=max(entry.max_replicas, requested, allocation.worker_count),
        ),
        batch=_batch(entry, where),
        work=Work(units_per_epoch=entry.work_total or 1.0, epochs=1 if entry.work_total else None),
        preemptible=entry.preemptible,
    )


def _batch(entry: SnapshotJob, where: str) -> BatchLimits:
    """The limits; a job that was never profiled need not have any, and gets no batch size."""
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
    if largest < initial or largest_atomic < smallest_atomic or largest < smallest_atomic:
        raise InputError(
            f"batch limits run backwards: init {initial}, max {largest}, atomic range {smallest_atomic} to "
            f"{largest_atomic}.",
            where=where,
            remedy="Each upper limit must be at least its lower one.",
        )
    return BatchLimits(
        initial=initial,
        requested=entry.batch_size or initial,
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
    if not all(value > 0 and math.isfinite(value) for value in times) or not 1 <= speed.gamma <= MAX_OVERLAP:
        raise InputError(
            f"perf_params {entry.perf_params} are not a speed model.",
            where=where,
            remedy=f"Six positive times and an overlap between 1 and {MAX_OVERLAP:g}.",
        )
    return speed


def _noise(entry: SnapshotJob, where: str) -> NoiseSample:
    if entry.grad_params is None:
        return PERFECTLY_SCALABLE
    if not all(value >= 0 and math.isfinite(value) for value in entry.grad_params):
        raise InputError(
            f"grad_params {entry.grad_params} are not gradient statistics.",
            where=where,
            remedy="A squared norm and a variance, neither negative.",
        )
    return NoiseSample(*entry.grad_params)


def _capacity(size: int | NodeSize) -> Resources:
    if isinstance(size, int):
        return Resources(gpu=size)
    return Resources(size.gpu, size.cpu, size.memory_gib, size.bandwidth_gbps)


def _finite(value: float, name: str, where: str) -> float:
    if not math.isfinite(value):
        raise InputError(f"{name} {value} is not a number of seconds.", where=where)
    return value


def _line(raw: bytes, message: str) -> int:
    """The line a decoder's message means, which names a byte."""
    digits = "".join(char for char in message.rpartition("byte ")[2] if char.isdigit())
    return raw[: int(digits)].count(b"\n") + 1 if digits else 1


def has_batch_limits(job: Job) -> bool:
    """Whether a snapshot said anything about the job's batch sizes."""
    return job.batch != UNSAID


def as_json(value: Any) -> Any:
    """Plain JSON data; what is not a finite number is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
