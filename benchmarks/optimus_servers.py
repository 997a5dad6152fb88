"""Optimus against DRF and Tetris on parameter-server jobs, and how much accuracy it needs.

60 jobs of nine types arrive over 20 slots of 600 s on 13 nodes (worlds/servers.py). Every policy decides at
multiples of 600 s; Optimus also when a sample run ends. Every start and resize costs 30 s, the simulator's
default. This is 5 % of a slot, so a policy that changes every job in every slot would show it. Reported times
have an error of 3 %.

    .venv/bin/python benchmarks/optimus_servers.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from common import verdict

from stretto.allocate.even_spread import JobToPlace, Placer, place_all, spread_or_pack
from stretto.allocate.free import FreeCapacity
from stretto.control.controller import Controller, Settings
from stretto.core.allocation import Allocation
from stretto.core.decision import Decision
from stretto.core.events import Decided, Event, JobFinished
from stretto.core.instructions import Action
from stretto.core.job import Convergence, Job
from stretto.core.seeds import child_rng
from stretto.core.source import Arrivals
from stretto.journal.base import MemoryJournal
from stretto.models.belief import Belief, StatedBelief
from stretto.models.convergence import ConvergenceFit, EpochInterval
from stretto.models.parameter_server import ServerSpeed, ServerSpeedFit
from stretto.models.resize import learn_resize_cost
from stretto.models.speed import Floats
from stretto.policies.base import ClusterView, Memory, Policy
from stretto.policies.common import fixed_size_decision
from stretto.policies.drf import Drf
from stretto.policies.gangs import held_gang, smallest_gang
from stretto.policies.optimus.policy import Optimus
from stretto.policies.tetris import Tetris
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.servers import LOCAL, ServerTruth, server_nodes, server_workload
from stretto.worlds.truth import Workload

JOBS = 60
LOADS = (12, 30, 60)
SLOT_S = 600.0
SEEDS = 20
SWEEP_SEEDS = 10
PHYSICS = Physics(restart_s=30.0, report_s=30.0, noise=0.03)
ERRORS = (0.0, 0.15, 0.30, 0.45)
SAMPLES = (0, 3, 5, 8, 10)
TYPICAL_CROSSING = LOCAL + (1 - LOCAL) / 2
"""The exchange cost of a job spread evenly over two nodes: a model of counts must assume a placement."""


class Outcome(NamedTuple):
    """The result of one simulated run."""

    jct_s: float
    makespan_s: float
    restarts: float
    """Restarts per job, without the first start."""
    overhead: float
    """Share of the time jobs held something that went into restarts, first starts excluded."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy under a name, with its modifications."""

    name: str
    policy: Policy
    place: Placer | None = None
    """Places the policy's counts in another way."""
    told: tuple[float, float] | None = None
    """Relative errors of (speed, convergence) of beliefs made from the truth; None: as fitted."""
    priors: bool = True
    rounds: bool = False
    jobs: int = JOBS
    as_asked: bool = False
    """Jobs may not grow beyond the counts their owners ask for."""


@dataclass(frozen=True)
class AtSlots:
    """Decides at its interval and at the times it asks for, never on events."""

    wakes_on: ClassVar[frozenset[str]] = frozenset()
    case: Case
    told: dict[str, Belief]

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def interval_s(self) -> float:
        return self.case.policy.interval_s

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        jobs = tuple(replace(job, belief=self.told.get(job.id, job.belief)) for job in view.jobs)
        if self.case.as_asked:
            jobs = tuple(replace(job, job=as_asked(job.job)) for job in jobs)
        decision, memory = self.case.policy.decide(replace(view, jobs=jobs), memory, rng)
        if self.case.place is not None:
            decision = placed_anew(view, decision, self.case.place)
        return decision, memory


def as_asked(job: Job) -> Job:
    """The job, content with what its owner asked for."""
    worker = replace(job.worker, max=job.worker.requested)
    server = None if job.server is None else replace(job.server, max=job.server.requested)
    return replace(job, worker=worker, server=server)


def placed_anew(view: ClusterView, decision: Decision, place: Placer) -> Decision:
    """The same counts elsewhere, as far as they fit."""
    seats = [
        JobToPlace(
            job=job.job,
            wanted=held_gang(decision.allocations[job.id]),
            least=smallest_gang(job.job),
            held=job.allocation,
        )
        for job in view.jobs
        if job.id in decision.allocations
    ]
    allocations = place_all(seats, FreeCapacity(view.nodes), place)
    return fixed_size_decision(view, allocations, lambda *_: "The same counts, placed anew.")


def spread_thin(job: Job, workers: int, servers: int, free: FreeCapacity) -> Allocation | None:
    """Every task on the emptiest node, as cluster managers do by default to balance load."""
    left = free.copy()
    placed = Allocation()
    server = Allocation((), (("", 1),))
    for task in (server,) * servers + (Allocation((("", 1),)),) * workers:
        emptiest = np.argsort(-(left.rows / np.maximum(left.capacity, 1.0)).sum(axis=1), kind="stable")
        on = ((left.ids[node], 1) for node in emptiest)
        tries = (Allocation((), (tasks,)) if task is server else Allocation((tasks,)) for tasks in on)
        found = next((one for one in tries if left.holds(job, one)), None)
        if found is None:
            return None
        left.take(job, found)
        placed = left.joined(placed, found)
    return placed


class ToldEpochs(ConvergenceFit):
    """The number of epochs is given: `scale`."""

    def epochs_to_converge(self, convergence: Convergence, max_epochs: int) -> EpochInterval:
        del convergence
        epochs = min(round(self.scale), max_epochs)
        return EpochInterval(epochs, epochs, epochs)


def told_beliefs(workload: Workload, errors: tuple[float, float], seed: int) -> dict[str, Belief]:
    """The truth, with every parameter and the epochs off by the given share, up or down at random."""
    beliefs: dict[str, Belief] = {}
    resize = learn_resize_cost([PHYSICS.restart_s])
    for job in workload.jobs:
        truth = workload.truths[job.id]
        assert isinstance(truth, ServerTruth)
        signs = child_rng(seed, "told", job.id).choice([-1.0, 1.0], 6)
        thetas = np.array(_thetas(truth))
        thetas *= 1 + errors[0] * signs[: thetas.size]
        speed = ServerSpeed(
            thetas=tuple(thetas.tolist()), synchronous=truth.synchronous, total_batch=job.batch.requested
        )
        epochs = truth.epochs * (1 + errors[1] * float(signs[5]))
        beliefs[job.id] = StatedBelief(
            server_speed=ServerSpeedFit(model=speed, identified=True),
            convergence=ToldEpochs(b0=0.0, b1=1.0, b2=0.0, scale=epochs),
            resize=resize,
        )
    return beliefs


def _thetas(truth: ServerTruth) -> tuple[float, ...]:
    kind = truth.kind
    others = (kind.exchange_s * TYPICAL_CROSSING, kind.worker_s, kind.server_s)
    if truth.synchronous:
        return (kind.example_s, kind.constant_s, *others)
    return (kind.example_s * truth.worker_batch + kind.constant_s, *others)


def simulate(case: Case, seed: int) -> Outcome:
    workload = server_workload(child_rng(seed, "optimus_servers"), jobs=case.jobs)
    told = {} if case.told is None else told_beliefs(workload, case.told, seed)
    journal = MemoryJournal()
    Controller(
        policy=AtSlots(case, told),
        substrate=SimSubstrate(workload.truth_of, physics=PHYSICS, seed=seed),
        journal=journal,
        nodes=server_nodes(),
        arrivals=Arrivals(workload.jobs),
        settings=Settings(seed=seed, share_priors=case.priors, rounds=case.rounds),
    ).run()
    return outcome(workload, list(journal.events()))


def outcome(workload: Workload, events: Sequence[Event]) -> Outcome:
    ends_s = {event.job_id: event.t_s for event in events if isinstance(event, JobFinished)}
    submits_s = {job.id: job.submit_s for job in workload.jobs}
    if ends_s.keys() != submits_s.keys():
        raise RuntimeError(f"{len(submits_s) - len(ends_s)} jobs did not finish")
    starts, held_s = _starts_and_held_s(events, ends_s)
    restarts = starts - len(submits_s)
    return Outcome(
        jct_s=float(np.mean([ends_s[job_id] - submit_s for job_id, submit_s in submits_s.items()])),
        makespan_s=max(ends_s.values()) - min(submits_s.values()),
        restarts=restarts / len(submits_s),
        overhead=restarts * PHYSICS.restart_s / held_s,
    )


def _starts_and_held_s(events: Iterable[Event], ends_s: dict[str, float]) -> tuple[int, float]:
    """Starts and resizes of all jobs, and the seconds in which they held something."""
    starts, held_s = 0, 0.0
    since_s: dict[str, float] = {}
    for event in events:
        for one in event.instructions if isinstance(event, Decided) else ():
            if one.action is Action.PARK:
                held_s += event.t_s - since_s.pop(one.job_id)
            else:
                starts += 1
                since_s.setdefault(one.job_id, event.t_s)
    return starts, held_s + sum(ends_s[job_id] - start_s for job_id, start_s in since_s.items())


OPTIMUS = Optimus(interval_s=SLOT_S)
TOLD = Optimus(interval_s=SLOT_S, samples=0)
DRF = Drf(interval_s=SLOT_S)
MAIN = (
    Case(name="optimus", policy=OPTIMUS),
    Case(name=".. packed (its counts only)", policy=replace(OPTIMUS, placement="packed")),
    Case(name=".. without young factor", policy=replace(OPTIMUS, young_factor=1.0)),
    Case(name=".. samples last a slot", policy=OPTIMUS, rounds=True),
    Case(name=".. told the truth", policy=TOLD, told=(0.0, 0.0)),
    Case(name="drf", policy=DRF),
    Case(name=".. placed by theorem", policy=DRF, place=spread_or_pack),
    Case(name=".. tasks spread thin", policy=DRF, place=spread_thin),
    Case(name=".. only what owners ask for", policy=DRF, as_asked=True),
    Case(name=".. that, spread thin", policy=DRF, as_asked=True, place=spread_thin),
    Case(name="tetris", policy=Tetris(interval_s=SLOT_S)),
)
BY_LOAD = {
    jobs: (
        Case(name="optimus", policy=OPTIMUS, jobs=jobs),
        Case(name="optimus, told the truth", policy=TOLD, told=(0.0, 0.0), jobs=jobs),
        Case(name="drf", policy=DRF, jobs=jobs),
        Case(
            name="drf, what owners ask for, spread", policy=DRF, as_asked=True, place=spread_thin, jobs=jobs
        ),
    )
    for jobs in LOADS
}
SPEED_ERRORS = tuple(Case(name=f"{e:.0%}", policy=TOLD, told=(e, 0.0)) for e in ERRORS)
EPOCH_ERRORS = tuple(Case(name=f"{e:.0%}", policy=TOLD, told=(0.0, e)) for e in ERRORS)
SAMPLE_RUNS = tuple(Case(name=str(n), policy=replace(OPTIMUS, samples=n), priors=False) for n in SAMPLES)


def run_all(pool: ProcessPoolExecutor, cases: Sequence[Case], seeds: int) -> list[list[Outcome]]:
    """Outcomes by case, then seed."""
    futures = [[pool.submit(partial(simulate, case, seed)) for seed in range(seeds)] for case in cases]
    return [[future.result() for future in row] for row in futures]


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Mean of paired ratios with its 95 % bootstrap interval."""
    ratios = np.array(over) / np.array(under)
    draws = child_rng(0, "bootstrap").integers(ratios.size, size=(2000, ratios.size))
    low, high = np.quantile(ratios[draws].mean(axis=1), [0.025, 0.975])
    return f"{ratios.mean():.2f} [{low:.2f}, {high:.2f}]"


def mean(outcomes: Sequence[Outcome]) -> Floats:
    return np.asarray(np.mean(outcomes, axis=0))


def print_main(results: Sequence[Sequence[Outcome]]) -> None:
    print(f"{SEEDS} workloads; ratios are to optimus (above 1: optimus is better), with 95 % intervals")
    print(f"{'':28} {'JCT min':>7} {'makespan h':>10} {'restarts':>8} {'overhead':>8}  JCT / makespan ratio")
    ours = results[0]
    for case, outcomes in zip(MAIN, results, strict=True):
        jct_s, makespan_s, restarts, overhead = mean(outcomes)
        jct = ratio([one.jct_s for one in outcomes], [one.jct_s for one in ours])
        makespan = ratio([one.makespan_s for one in outcomes], [one.makespan_s for one in ours])
        figures = f"{jct_s / 60:7.1f} {makespan_s / 3600:10.2f} {restarts:8.1f} {overhead:8.1%}"
        print(f"{case.name:28} {figures}  {jct} / {makespan}")


def print_sweep(title: str, cases: Sequence[Case], results: Sequence[Sequence[Outcome]]) -> None:
    first = [one.jct_s for one in results[0]]
    print(f"\n{title} ({SWEEP_SEEDS} workloads; ratio to the first line)")
    for case, outcomes in zip(cases, results, strict=True):
        jct_s = [one.jct_s for one in outcomes]
        print(f"  {case.name:>4}  mean JCT {np.mean(jct_s) / 60:6.1f} min   {ratio(jct_s, first)}")


def print_loads(pool: ProcessPoolExecutor) -> None:
    print(f"\nLoad ({SWEEP_SEEDS} workloads; JCT / makespan ratio to optimus, above 1: optimus is better)")
    for jobs, cases in BY_LOAD.items():
        results = run_all(pool, cases, SWEEP_SEEDS)
        for case, outcomes in zip(cases[1:], results[1:], strict=True):
            jct = ratio([one.jct_s for one in outcomes], [one.jct_s for one in results[0]])
            makespan = ratio([one.makespan_s for one in outcomes], [one.makespan_s for one in results[0]])
            print(f"  {jobs:3d} jobs  {case.name:34} {jct} / {makespan}")


def print_verdict(results: Sequence[Sequence[Outcome]]) -> None:
    by_name = {case.name: outcomes for case, outcomes in zip(MAIN, results, strict=True)}
    pairs = list(zip(by_name["drf"], by_name["optimus"], strict=True))
    jct = float(np.mean([theirs.jct_s / ours.jct_s for theirs, ours in pairs]))
    makespan = float(np.mean([theirs.makespan_s / ours.makespan_s for theirs, ours in pairs]))
    print(f"  drf's mean JCT is {jct:.2f} times optimus' (1.5 wanted): {verdict(jct >= 1.5)}")
    print(f"  drf's makespan is {makespan:.2f} times optimus' (1.2 wanted): {verdict(makespan >= 1.2)}")


def main() -> None:
    print("Figure 5: Optimus on parameter-server jobs")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 2)) as pool:
        results = run_all(pool, MAIN, SEEDS)
        print_main(results)
        print_verdict(results)
        print_loads(pool)
        for title, cases in (
            ("Error of every speed parameter", SPEED_ERRORS),
            ("Error of the epochs to convergence", EPOCH_ERRORS),
            ("Sample runs of each new job, nothing known beforehand", SAMPLE_RUNS),
        ):
            print_sweep(title, cases, run_all(pool, cases, SWEEP_SEEDS))


if __name__ == "__main__":
    main()
