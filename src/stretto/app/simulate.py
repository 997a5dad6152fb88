"""A workload under a policy, in simulated time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.app.given_arguments import given, given_options
from stretto.app.history import History, history_of
from stretto.app.metrics import Metrics, measure
from stretto.app.threads import one_blas_thread
from stretto.control.controller import Controller, Settings
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.source import Arrivals
from stretto.journal.base import Journal, MemoryJournal
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.policies.base import Policy
from stretto.policies.registry import checked_policy, make_policy
from stretto.substrate.sim import Physics, SimSubstrate
from stretto.worlds.alone import Clock
from stretto.worlds.oracle import WorldOracle
from stretto.worlds.truth import Workload

ROUND_S = 60.0
REPORT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a simulation depends on besides the workload and the policy."""

    nodes: tuple[Node, ...] = field(default_factory=lambda: gpu_nodes(16, 4))
    interval_s: float = ROUND_S
    """How often the policy is asked, whatever happens."""
    rounds: bool = False
    """Decide only then, and round epochs to whole seconds, as the published simulators do."""
    whole_seconds: bool | None = None
    """Whether epochs are rounded to whole seconds; None: as `rounds`."""
    restart_s: float = 30.0
    believed_restart_s: float = DEFAULT_RESIZE_S
    """What policies take a restart to be before they have seen one."""
    interference: float = 0.0
    noise: float = 0.0
    priors: bool | None = None
    """Let new jobs start from what finished jobs of their application showed; None: unless `rounds`."""
    seed: int = 0
    until_s: float = math.inf

    @property
    def shares_priors(self) -> bool:
        return not self.rounds if self.priors is None else self.priors

    @property
    def rounds_epochs(self) -> bool:
        """Whether epochs end at whole seconds."""
        return self.rounds if self.whole_seconds is None else self.whole_seconds

    def physics(self) -> Physics:
        return Physics(
            restart_s=self.restart_s,
            interference=self.interference,
            noise=self.noise,
            report_s=self.interval_s if self.rounds else min(REPORT_S, self.interval_s),
            whole_seconds=self.rounds_epochs,
        )

    def clock(self) -> Clock:
        return Clock(self.restart_s, self.interval_s if self.rounds else None)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: its numbers, and everything that happened in it."""

    metrics: Metrics
    history: History
    workload: Workload
    setup: Setup
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the policy that were set."""


@dataclass(frozen=True, slots=True)
class Tick:
    """How far a simulation is, for a progress bar."""

    now_s: float
    finished: int
    jobs: int


def simulate(
    workload: Workload,
    policy: str | Policy,
    setup: Setup | None = None,
    *,
    options: Mapping[str, str] | None = None,
    journal: Journal | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> Run:
    """Run `workload` to its end under a policy: a name, `mine.py:LargestFirst`, or an object.

    An object is asked every `policy.interval_s`, a policy by name every `setup.interval_s`.
    With a journal that already holds part of the run, the rest of it is simulated.
    """
    given(workload, Workload, "workload", "Give demo_workload() of stretto.worlds.synthetic, or a like one.")
    setup = Setup() if setup is None else setup
    given(setup, Setup, "setup", "Give Setup(nodes=gpu_nodes(4, 4)), or None.")
    journal = journal if journal is not None else MemoryJournal()
    chosen = _chosen(policy, workload, setup, options)
    substrate = SimSubstrate(workload.truth_of, physics=setup.physics(), seed=setup.seed)
    started = time.perf_counter()

    def report(controller: Controller) -> None:
        if on_tick is not None:
            left = len(controller.state.jobs) + controller.jobs_to_come
            on_tick(Tick(substrate.now_s(), len(workload.jobs) - left, len(workload.jobs)))

    with one_blas_thread():
        controller = Controller(
            policy=chosen,
            substrate=substrate,
            journal=journal,
            nodes=setup.nodes,
            arrivals=Arrivals(workload.jobs),
            settings=Settings(
                seed=setup.seed,
                rounds=setup.rounds,
                share_priors=setup.shares_priors,
                resize_s=setup.believed_restart_s,
                until_s=setup.until_s,
            ),
            on_turn=report,
        )
        controller.run()
    history = history_of(journal.events())
    metrics = measure(
        history,
        setup.nodes,
        workload.truths,
        policy=chosen.name,
        workload=workload.name,
        clock=setup.clock(),
        decision_s=controller.decision_s,
        wall_s=time.perf_counter() - started,
    )
    return Run(metrics, history, workload, setup, options or {})


def _chosen(
    policy: str | Policy, workload: Workload, setup: Setup, options: Mapping[str, str] | None
) -> Policy:
    if isinstance(policy, str):
        return make_policy(
            policy,
            interval_s=setup.interval_s,
            options=given_options(options),
            oracle=WorldOracle(workload.truths),
        )
    if options:
        raise InputError(
            f"options are given beside the object {policy!r}.",
            where="options",
            remedy="Set them where the object is made.",
        )
    return checked_policy(policy, where="policy")
