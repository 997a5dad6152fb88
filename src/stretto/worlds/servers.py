"""A world of parameter-server jobs, in the setting Optimus was published in.

Truth about the speed of w workers and p servers, m examples per worker, on given nodes (seconds a step):

    synchronous     example m + constant + exchange (w/p) cross + worker w + server p
    asynchronous    (example m0 + constant + exchange (w/p) cross + worker w + server p) / w

An asynchronous worker always takes m0 examples; stale gradients cost nothing here. Every task has its own
link, and traffic within a node costs LOCAL times as much as traffic between nodes:

    cross = LOCAL + (1 - LOCAL) (most that crosses for any one task) / max(1, w/p)

    in model sizes: 1 - p_n / p for a worker, (w - w_n) / p for a server, beside p_n servers and w_n workers

So spreading costs time, and an even spread of workers and servers is best for a given number of nodes.

Losses follow 1 / (b0 k + b1) + b2. A job ends when that curve meets its convergence criterion; it reports the
curve with noise and spikes. The time constants and sizes below are synthetic. They were chosen before any
result was seen, so that ResNet-50 is fastest with 8 workers and 12 servers of 20, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits, Communication, Convergence, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.models.convergence import LossCurve, converged_at
from stretto.worlds.truth import StepTime, Workload, by_epoch, even_units, make_workload

LOCAL = 0.2
"""Cost of exchanging gradients within a node, relative to across nodes."""
MAX_TASKS = 16
"""Most workers, and most servers, of one job."""
MAX_EPOCHS = 500
TYPICAL_EPOCHS = 30
"""Epochs of a job of typical length."""
CRITERION = Convergence(threshold=0.005, patience=5)
LOSS_NOISE = 0.02
"""Relative standard deviation of a reported loss."""
SPIKES = 0.02
"""Share of epochs whose loss is reported up to half as high again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerJobType:
    """One kind of model: time constants in seconds, and the resources of its tasks."""

    name: str
    batch: int
    """Total examples a step, if synchronous."""
    example_s: float
    constant_s: float
    exchange_s: float
    """Pushing and pulling the whole model over one link."""
    worker_s: float
    """Time that each worker adds to a step."""
    server_s: float
    minutes: float
    """Typical length with four workers and four servers on different nodes."""
    worker: Resources
    server: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTruth:
    """The truth about one job with parameter servers."""

    kind: ServerJobType
    synchronous: bool
    worker_batch: int
    """m0: examples a worker takes at once, if asynchronous."""
    units_per_epoch: float
    losses: tuple[float, ...]
    """The loss that the job reports at the end of each epoch."""

    @property
    def epochs(self) -> int:
        return len(self.losses)

    def units_at(self, epoch: int) -> float:
        return even_units(epoch, self.epochs, self.units_per_epoch)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        kind, workers, servers = self.kind, allocation.worker_count, allocation.server_count
        exchange_s = kind.exchange_s * workers / servers * crossing(allocation)
        sync_s = exchange_s + kind.worker_s * workers + kind.server_s * servers
        if self.synchronous:
            return StepTime(kind.example_s * atomic + kind.constant_s + sync_s, sync_s)
        alone_s = kind.example_s * self.worker_batch + kind.constant_s
        return StepTime((alone_s + sync_s) / workers, sync_s / workers)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        """None: the batch is fixed, and progress is counted in its steps."""
        del total_batch, epoch
        return None

    def loss_at(self, epoch: int) -> float:
        return by_epoch(self.losses, epoch, first=1)


def crossing(allocation: Allocation) -> float:
    """Cost of the exchange for this placement, relative to all traffic crossing nodes: LOCAL to 1."""
    workers, servers = allocation.worker_count, allocation.server_count
    beside_worker, beside_server = dict(allocation.servers), dict(allocation.workers)
    of_workers = max(1 - beside_worker.get(node, 0) / servers for node, _ in allocation.workers)
    of_servers = max((workers - beside_server.get(node, 0)) / servers for node, _ in allocation.servers)
    return LOCAL + (1 - LOCAL) * max(of_workers, of_servers) / max(1.0, workers / servers)


def server_nodes(count: int = 13) -> tuple[Node, ...]:
    """Nodes of 16 CPU, 48 GiB and 2 GPU; the published testbed had 13."""
    return tuple(Node(str(i), Resources(gpu=2, cpu=16, memory_gib=48)) for i in range(count))


def server_workload(
    rng: np.random.Generator,
    *,
    jobs: int = 60,
    slots: int = 20,
    slot_s: float = 600.0,
    name: str = "servers",
) -> Workload:
    """Jobs of nine types, synchronous or not, submitted at uniform times over `slots` slots.

    Owners request 2 to 6 workers and as many servers; a job ends at its convergence criterion.
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}.", remedy="Ask for 1 job or more.")
    if not 0 < slots * slot_s < float("inf"):
        raise InputError(
            f"the jobs are to arrive within {slots} slots of {slot_s} s.",
            remedy="Ask for more than 0 seconds.",
        )
    submits_s = np.sort(rng.random(jobs)) * slots * slot_s
    known = []
    for index, submit_s in enumerate(submits_s.round(3).tolist()):
        kind = TYPES[rng.integers(len(TYPES))]
        truth = _draw_truth(kind, rng)
        known.append((_job(f"{kind.name}-{index}", submit_s, truth, int(rng.integers(2, 7))), truth))
    return make_workload(name, known)


def _draw_truth(kind: ServerJobType, rng: np.random.Generator) -> ServerTruth:
    synchronous = bool(rng.random() < 0.5)
    worker_batch = max(kind.batch // 4, 1)
    epochs, losses = _draw_losses(rng)
    sketch = ServerTruth(
        kind=kind,
        synchronous=synchronous,
        worker_batch=worker_batch,
        units_per_epoch=1.0,
        losses=losses[:epochs],
    )
    apart = Allocation((("0", 4),), (("1", 4),))
    epoch_s = kind.minutes * 60.0 / TYPICAL_EPOCHS * float(rng.uniform(0.5, 1.5))
    units = epoch_s / sketch.step_time(apart, worker_batch).step_s
    return ServerTruth(
        kind=kind,
        synchronous=synchronous,
        worker_batch=worker_batch,
        units_per_epoch=float(max(round(units), 1)),
        losses=sketch.losses,
    )


def _draw_losses(rng: np.random.Generator) -> tuple[int, tuple[float, ...]]:
    """Epochs to true convergence (some 20 to 40), and the losses reported until then and after."""
    curve = LossCurve(
        b0=float(np.exp(rng.uniform(np.log(0.1), np.log(0.6)))),
        b1=float(rng.uniform(0.5, 1.0)),
        b2=float(rng.uniform(0.0, 0.3)),
    )
    smooth = curve.loss(np.arange(1, MAX_EPOCHS + 1)) * float(rng.uniform(1.0, 8.0))
    epochs = converged_at(smooth, CRITERION, MAX_EPOCHS)
    assert epochs is not None, "the slowest curve drawn converges long before"
    noisy = smooth * np.exp(rng.normal(0.0, LOSS_NOISE, MAX_EPOCHS))
    spikes = np.where(rng.random(MAX_EPOCHS) < SPIKES, rng.uniform(1.1, 1.5, MAX_EPOCHS), 1.0)
    return epochs, tuple((noisy * spikes).tolist())


def _job(job_id: str, submit_s: float, truth: ServerTruth, tasks: int) -> Job:
    kind = truth.kind
    batch = kind.batch if truth.synchronous else truth.worker_batch
    return Job(
        id=job_id,
        application=f"{kind.name} {'sync' if truth.synchronous else 'async'}",
        submit_s=submit_s,
        worker=Role(demand=kind.worker, requested=tasks, min=1, max=MAX_TASKS),
        server=Role(demand=kind.server, requested=tasks, min=1, max=MAX_TASKS),
        communication=Communication.PS_SYNC if truth.synchronous else Communication.PS_ASYNC,
        tier=Tier.ELASTIC,
        batch=BatchLimits(initial=batch, requested=batch, max=batch, per_gpu_min=1, per_gpu_max=batch),
        work=Work(units_per_epoch=truth.units_per_epoch, convergence=CRITERION),
    )


_ON_GPU = Resources(gpu=1, cpu=2, memory_gib=8)
_ON_CPU = Resources(cpu=5, memory_gib=10)
_SERVER = Resources(cpu=3, memory_gib=9)


def _kind(
    name: str,
    *,
    batch: int,
    times_s: tuple[float, ...],
    minutes: float,
    worker: Resources = _ON_GPU,
    server: Resources = _SERVER,
) -> ServerJobType:
    """`times_s`: a whole batch on one worker, the constant, the exchange, per worker, per server."""
    batch_s, constant_s, exchange_s, worker_s, server_s = times_s
    return ServerJobType(
        name=name,
        batch=batch,
        example_s=batch_s / batch,
        constant_s=constant_s,
        exchange_s=exchange_s,
        worker_s=worker_s,
        server_s=server_s,
        minutes=minutes,
        worker=worker,
        server=server,
    )


TYPES: tuple[ServerJobType, ...] = (
    _kind(
        "resnext-110",
        batch=128,
        times_s=(1.5, 0.10, 0.06, 0.010, 0.008),
        minutes=45,
        server=Resources(cpu=3, memory_gib=10),
    ),
    _kind("resnet-50", batch=128, times_s=(2.2, 0.20, 0.25, 0.010, 0.010), minutes=60),
    _kind("inception-bn", batch=128, times_s=(1.6, 0.15, 0.14, 0.010, 0.010), minutes=50),
    _kind("kaggle-ndsb", batch=128, times_s=(0.64, 0.08, 0.05, 0.008, 0.006), minutes=20),
    _kind(
        "cnn-rand",
        batch=64,
        times_s=(0.80, 0.05, 0.08, 0.006, 0.006),
        minutes=10,
        worker=_ON_CPU,
        server=_ON_CPU,
    ),
    _kind(
        "dssm",
        batch=256,
        times_s=(1.5, 0.10, 0.20, 0.010, 0.010),
        minutes=20,
        worker=_ON_CPU,
        server=_ON_CPU,
    ),
    _kind(
        "rnn-lstm",
        batch=64,
        times_s=(1.9, 0.10, 0.30, 0.012, 0.012),
        minutes=30,
        worker=_ON_CPU,
        server=_ON_CPU,
    ),
    _kind("seq2seq", batch=64, times_s=(2.6, 0.20, 0.35, 0.012, 0.012), minutes=40),
    _kind(
        "ds2",
        batch=64,
        times_s=(3.2, 0.30, 0.40, 0.015, 0.015),
        minutes=60,
        server=Resources(cpu=4, memory_gib=10),
    ),
)
