"""What a run was: what was simulated, under which assumptions, and what the numbers mean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from stretto.app.simulate import Run, Setup
from stretto.core.cluster import Node
from stretto.core.units import counted, format_duration
from stretto.report.summary import COLUMNS

Facts = list[tuple[str, str]]


def facts_of(run: Run) -> Facts:
    """Workload, cluster and clock of a run."""
    setup = run.setup
    applications = Counter(job.application for job in run.workload.jobs)
    mix = ", ".join(f"{count} {name}" for name, count in sorted(applications.items()))
    last_s = max((job.submit_s for job in run.workload.jobs), default=0.0)
    notes = [("Note", note) for note in run.workload.notes]
    return [
        ("Workload", f"{run.workload.name}: {len(run.workload.jobs)} jobs ({mix})"),
        ("Submitted", f"over the first {format_duration(last_s)}"),
        *notes,
        ("Cluster", cluster_text(setup.nodes)),
        ("Clock", _clock_text(setup)),
        ("Restart cost", f"{setup.restart_s:g} s without progress at every start and resize"),
        ("Interference", _interference_text(setup)),
        ("Measurements", _noise_text(setup)),
        ("Prior knowledge", _priors_text(setup)),
        ("Seed", str(setup.seed)),
        (
            "Simulated until",
            "all jobs are over" if math.isinf(setup.until_s) else format_duration(setup.until_s),
        ),
    ]


def policy_facts(labelled: Sequence[tuple[str, Run]]) -> Facts:
    """What each policy was asked, and what that cost."""
    return [
        (
            f"Policy {label}",
            f"{run.metrics.decisions:,} decisions; {_options_text(run)}took {run.metrics.wall_s:.1f} s",
        )
        for label, run in labelled
    ]


def _options_text(run: Run) -> str:
    set_ones = ", ".join(f"{option} = {value}" for option, value in run.options.items())
    return f"with {set_ones}; " if set_ones else ""


def definitions() -> Facts:
    """The columns of the table."""
    return [(column.title, column.meaning) for column in COLUMNS]


def cluster_text(nodes: Sequence[Node]) -> str:
    """`16 nodes of 4 GPUs`, equal nodes counted together."""
    kinds = [
        f"{counted(len(list(same)), 'node')} of {_capacity_text(node)}"
        for node, same in (
            (next(group), [None, *group]) for _, group in groupby(nodes, key=lambda one: one.capacity)
        )
    ]
    return " and ".join(kinds) or "no nodes"


def _capacity_text(node: Node) -> str:
    amounts = (
        (node.capacity.gpu, "GPU" if node.capacity.gpu == 1 else "GPUs"),
        (node.capacity.cpu, "CPU" if node.capacity.cpu == 1 else "CPUs"),
        (node.capacity.memory_gib, "GiB"),
        (node.capacity.bandwidth_gbps, "Gbit/s"),
    )
    return ", ".join(f"{amount:g} {unit}" for amount, unit in amounts if amount) or "nothing"


def _clock_text(setup: Setup) -> str:
    if setup.rounds:
        epochs = "end at whole seconds" if setup.rounds_epochs else "are exact"
        return f"rounds: decisions only every {setup.interval_s:g} s; epochs {epochs}"
    return f"events: decisions when something happens, and at least every {setup.interval_s:g} s"


def _interference_text(setup: Setup) -> str:
    if setup.interference == 0.0:
        return "none: jobs that share a node do not disturb each other"
    return f"jobs that span nodes and share one are {setup.interference:.0%} slower"


def _noise_text(setup: Setup) -> str:
    if setup.noise == 0.0:
        return "exact: jobs report their true step times and gradient statistics"
    return f"step times, gradient statistics and losses are reported with {setup.noise:.0%} relative error"


def _priors_text(setup: Setup) -> str:
    if setup.shares_priors:
        return "new jobs start from what finished jobs of their application showed"
    return "none: every job is new to the policy"
