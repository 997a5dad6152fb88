"""What HyperSched is shown and asked in tests, and the curves of its published studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from builders import UNKNOWN
from stretto.control.instruct import check
from stretto.core.allocation import NOTHING, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision
from stretto.core.observations import Result
from stretto.core.seeds import child_rng
from stretto.planning.tuning import Tuning
from stretto.policies.asha import Asha
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import requested_batch
from stretto.policies.hypersched.policy import HyperSched
from tuning_world import RESNET_50, Curve, Outcome, make_trial, run, tuning

STUDY = tuning(trials=8, rungs=(2, 8, 32, 128), eta=4, max_epochs=200, epoch_s=35.0, deadline_s=10_000.0)


def shown(
    conditions: Tuning,
    number: int,
    values: Sequence[float | None] = (),
    *,
    gpus: int = 0,
    held_s: float = 0.0,
    start_s: float = 20.0,
    epoch_s: float = 35.0,
) -> JobView:
    """A trial that has shown these values and holds so many GPUs."""
    job = make_trial(conditions, number)
    return JobView(
        job=job,
        allocation=on_nodes({"0": gpus}) if gpus else NOTHING,
        batch=requested_batch(job, gpus) if gpus else None,
        age_s=0.0,
        attained_gpu_s=0.0,
        held_s=held_s,
        restarts=0,
        work_done=float(len(values)),
        epoch=len(values),
        results=tuple(Result(e, value, epoch_s, max(gpus, 1), 1) for e, value in enumerate(values, 1)),
        start_times_s=(start_s,) if values else (),
        belief=UNKNOWN,
    )


def ask(
    policy: HyperSched, *jobs: JobView, now_s: float = 0.0, memory: Memory = None, gpus: int = 8
) -> tuple[Decision, Memory]:
    view = ClusterView(now_s=now_s, nodes=gpu_nodes(1, gpus), jobs=jobs)
    decision, memory = policy.decide(view, memory, np.random.default_rng(0))
    check(view, decision)
    return decision, memory


def begun(policy: HyperSched, count: int, gpus: int = 8) -> Memory:
    """The memory of a study in which the first `count` trials were started."""
    return ask(policy, *(shown(policy.tuning, number) for number in range(count)), gpus=gpus)[1]


def counts(decision: Decision) -> dict[str, int]:
    return {trial: one.worker_count for trial, one in decision.allocations.items()}


def toy_curves(seed: int, trials: int, epochs: int) -> list[Curve]:
    """The family of the published ablation."""
    rng, k = child_rng(seed, "toy"), np.arange(1, epochs + 1)
    curves: list[Curve] = []
    for _ in range(trials):
        b0, b1, b2 = rng.exponential(0.1), rng.random(), rng.random()
        loss = 1 / (b0 * k / 100 + 0.1 * b1 + 0.5) + 0.01 * b2 + np.abs(rng.normal(0, 0.005, epochs))
        curves.append(((2 - loss) / 2).tolist())
    return curves


def cifar_curves(seed: int, trials: int) -> list[Curve]:
    """200 epochs of something like a classifier: many that learn nothing, few that learn well."""
    rng, k = child_rng(seed, "cifar"), np.arange(1, 201)
    curves: list[Curve] = []
    for _ in range(trials):
        top, tau = 0.1 + 0.85 * rng.beta(4, 1), 2.0 * 10 ** rng.uniform(0, 1)
        curves.append((0.1 + (top - 0.1) * (1 - (1 + k / tau) ** -0.8) + rng.normal(0, 0.003, 200)).tolist())
    return curves


def cifar_study(deadline_s: float) -> Tuning:
    return tuning(
        trials=100,
        rungs=(2, 8, 32, 128),
        eta=4,
        max_epochs=200,
        epoch_s=35.0,
        start_s=60.0,
        scaling=RESNET_50,
        deadline_s=deadline_s,
    )


def cifar_run(deadline_s: float, seed: int, *, until_s: float | None = None, **options: object) -> Outcome:
    """HyperSched as published, but for these options."""
    study = cifar_study(deadline_s)
    policy = replace(HyperSched(tuning=study, published=True), **options)  # type: ignore[arg-type]
    return run(policy, study, cifar_curves(seed, 100), gpus=8, until_s=until_s)


def cifar_asha(deadline_s: float, seed: int) -> Outcome:
    study = cifar_study(deadline_s)
    return run(Asha(tuning=study), study, cifar_curves(seed, 100), gpus=8)
