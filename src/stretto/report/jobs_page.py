"""The report on simulated runs: one HTML file with everything in it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import stretto
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.units import counted, format_duration
from stretto.report.figures.gantt import by_application, gpus_over_time, jobs_without_gpus
from stretto.report.figures.jobs import completion_by_application, completion_shares, over_time, timelines
from stretto.report.figures.optimus import convergence_prediction, loss_curves, server_speed
from stretto.report.figures.pollux import (
    efficiency_by_batch,
    goodput_by_gpus_and_batch,
    noise_over_training,
    throughput_by_gpus,
)
from stretto.report.page import Page, facts_html, summary_html, write_page
from stretto.report.plotting import Palette, graph_objects
from stretto.report.tables import COLUMNS, summarise
from stretto.simulation.jobs import Setup, SimulationResult

Facts = list[tuple[str, str]]


def facts_of(run: SimulationResult) -> Facts:
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


def policy_facts(labelled: Sequence[tuple[str, SimulationResult]]) -> Facts:
    """The decisions of each policy and their computing time."""
    return [
        (
            f"Policy {label}",
            f"{run.metrics.decisions:,} decisions; {_options_text(run)}took {run.metrics.wall_s:.1f} s",
        )
        for label, run in labelled
    ]


def _options_text(run: SimulationResult) -> str:
    set_ones = ", ".join(f"{option} = {value}" for option, value in run.options.items())
    return f"with {set_ones}; " if set_ones else ""


def definitions() -> Facts:
    """The columns of the table."""
    return [(column.title, column.meaning) for column in COLUMNS]


def cluster_text(nodes: Sequence[Node]) -> str:
    """`16 nodes of 4 GPUs`, equal nodes counted together."""
    kinds = [list(group) for _, group in groupby(nodes, key=lambda node: node.capacity)]
    texts = [f"{counted(len(same), 'node')} of {_capacity_text(same[0])}" for same in kinds]
    return " and ".join(texts) or "no nodes"


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


Labelled = tuple[str, SimulationResult]
"""A run and its label on the page."""


def write_report(path: Path | str, runs: Sequence[SimulationResult]) -> None:
    """Write one HTML file that needs no network: tables, pictures of the runs, the models behind them."""
    graph_objects()
    if not runs:
        raise InputError("there are no runs to report on.", remedy="Simulate at least one policy.")
    write_page(path, report_html(runs))


def report_html(runs: Sequence[SimulationResult]) -> str:
    """The page as text."""
    labelled = _label(runs)
    workloads = list(dict.fromkeys(run.metrics.workload for run in runs))
    palette = Palette.of(
        [label for label, _ in labelled],
        {job.job.application for run in runs for job in run.history.jobs.values()},
    )
    policies = list(dict.fromkeys(label for label, _ in labelled))
    page = Page(
        title=f"{', '.join(policies)} on {', '.join(workloads)}",
        lead=f"A simulation by Stretto {stretto.__version__}: simulated, not measured.",
    )
    _summary(page, labelled)
    for index, workload in enumerate(workloads):
        group = [(label, run) for label, run in labelled if run.metrics.workload == workload]
        # Further workloads are folded, so that a page of many stays readable.
        _workload(page, workload, group, palette, folded=index > 0)
    _models(page, palette)
    _about(page, workloads, labelled)
    return page.render()


def _label(runs: Sequence[SimulationResult]) -> list[Labelled]:
    """The policy's name; the second run of a policy on a workload is called "pollux (2)"."""
    seen: Counter[tuple[str, str]] = Counter()
    labelled = []
    for run in runs:
        key = (run.metrics.workload, run.metrics.policy)
        seen[key] += 1
        again = f" ({seen[key]})" if seen[key] > 1 else ""
        labelled.append((run.metrics.policy + again, run))
    return labelled


def _summary(page: Page, labelled: Sequence[Labelled]) -> None:
    summary = summarise([dataclasses.replace(run.metrics, policy=label) for label, run in labelled])
    page.heading(2, "Summary")
    for sentence in summary.sentences:
        page.text(sentence, "lead")
    page.html(summary_html(summary))
    page.text(
        "JCT is the completion time of a job, queueing included; FTF compares it with running alone on a "
        "fair share of the GPUs. A star marks the best of the policies that finished the most jobs. "
        "Rest the pointer on a column's head for its meaning.",
        "quiet",
    )


def _workload(
    page: Page, workload: str, labelled: Sequence[Labelled], palette: Palette, *, folded: bool
) -> None:
    end_s = max(run.history.end_s for _, run in labelled)
    page.heading(2, f"Workload {workload}")
    first = labelled[0][1]
    page.text(f"{len(first.workload.jobs)} jobs on {cluster_text(first.setup.nodes)}.")
    if folded:
        page.html("<details><summary>Show the figures of this workload</summary>")
    page.heading(3, "How long jobs took")
    page.text(
        "Share of all jobs that ended within a time after their submission: further left is sooner. "
        "A curve that stops below 100 % left jobs unfinished."
    )
    page.figure(completion_shares(labelled, palette), "distribution of job completion times by policy")
    page.text("The same by application: the box holds the middle half of its jobs, the line is the median.")
    page.figure(completion_by_application(labelled, palette), "job completion times by application")
    page.heading(3, "Who held which GPUs")
    page.text(
        "Each row is a GPU, each rectangle a job on it; shades tell jobs of one application apart. Rest the "
        "pointer on a rectangle for the job, its batch size and why it was given these GPUs; drag to zoom. "
        "Which GPU of a node a job sits on is drawn, not decided: policies give out numbers of GPUs."
    )
    for label, run in labelled:
        page.text(label, "name")
        groups = by_application(run.history, palette)
        figure = gpus_over_time(run.history, run.setup.nodes, groups, end_s)
        page.figure(figure, f"GPUs held by jobs over time under {label}")
        hidden = jobs_without_gpus(run.history)
        if hidden:
            page.text(f"{hidden} jobs use no GPU and are not drawn.", "quiet")
    _over_time(page, labelled, palette, end_s)
    if folded:
        page.html("</details>")


def _over_time(page: Page, labelled: Sequence[Labelled], palette: Palette, end_s: float) -> None:
    page.heading(3, "Over time")
    page.text(
        "Throughput is the work done per hour if every example counted in full, efficiency how much the "
        "examples do count at the batch sizes chosen, goodput their product; work is measured in whole jobs."
    )
    lines = timelines(labelled, end_s)
    page.figure(over_time(lines, palette), "queue, utilisation, throughput, efficiency, goodput, batch size")
    for label, line in lines:
        if line.uncounted:
            page.text(
                f"{label}: {len(line.uncounted)} jobs ended early, so that their work is unknown; "
                "throughput and goodput leave them out.",
                "quiet",
            )


def _models(page: Page, palette: Palette) -> None:
    page.heading(2, "The models")
    page.text(
        "What the policies compute with, drawn from the built-in applications. These figures do not depend "
        "on the runs above."
    )
    page.heading(3, "Pollux: throughput, efficiency, goodput")
    page.text(
        "Throughput flattens as GPUs are added at a fixed batch size: each GPU computes less while "
        "synchronising takes longer. A larger batch is the way to use more GPUs. Nodes have four GPUs."
    )
    page.figure(throughput_by_gpus(), "throughput against GPUs for several batch sizes")
    page.text(
        "But examples in a larger batch teach less: efficiency is (phi + M0) / (phi + M) for a batch of M "
        "examples, an initial batch of M0 and a gradient noise scale of phi."
    )
    page.figure(efficiency_by_batch(), "statistical efficiency against batch size")
    page.text("The noise scale grows during training, so that batches that were wasteful early pay off late.")
    page.figure(noise_over_training(palette), "gradient noise scale over training")
    page.text(
        "Goodput is throughput times efficiency. The batch size that maximises it grows with the GPUs and as "
        "training goes on; blank cells would leave a GPU with fewer examples than it can take."
    )
    page.figure(goodput_by_gpus_and_batch(), "goodput by GPUs and batch size, and the best batch size")
    page.heading(3, "Optimus: convergence and speed")
    page.text(
        "Training losses that synthetic jobs of nine types report, noise and spikes included; by "
        "construction all follow one kind of curve, the one that Optimus assumes."
    )
    page.figure(loss_curves(), "training loss curves of nine job types")
    page.text(
        "That curve, 1 / (b0 k + b1) + b2, fitted to the losses seen so far, tells when a job will have "
        "converged. The orange band is the 80 % interval of that epoch, the dashed line its estimate; the "
        "last grey point is where training really ended."
    )
    page.figure(convergence_prediction(), "fit of the loss curve and prediction of convergence")
    page.text(
        "Steps per second of synchronous jobs with parameter servers: points are the truth of the simulated "
        "world, lines what six sampled configurations predict. More tasks of the wrong kind slow a job down."
    )
    page.figure(server_speed(), "parameter-server speed against workers and servers")


def _about(page: Page, workloads: Sequence[str], labelled: Sequence[Labelled]) -> None:
    page.heading(2, "About these numbers")
    page.text(
        "Nothing here was measured on GPUs. Jobs, their speed and their gradient noise come from the "
        "workload's models or tables; policies saw only what simulated jobs reported, except those with "
        "oracle in their name, which know the truth. The time a decision takes to compute was measured, "
        "on the machine that simulated, and costs no simulated time."
    )
    for workload in workloads:
        group = [(label, run) for label, run in labelled if run.metrics.workload == workload]
        setups = list(dict.fromkeys(run.setup for _, run in group))
        for setup in setups:
            same = [(label, run) for label, run in group if run.setup == setup]
            page.html(facts_html([*facts_of(same[0][1]), *policy_facts(same)]))
    page.html(facts_html(definitions()))
