"""Tables of runs and studies, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from stretto.core.decision import Reason, ReasonCode
from stretto.core.units import format_duration, format_usd
from stretto.policies.gangs import NEVER_FITS
from stretto.report.text import markdown_table, one_line
from stretto.search.study import Direction, Study
from stretto.simulation.jobs import Metrics, SimulationResult
from stretto.simulation.studies import StudyResult

NOTHING = "-"
"""Shown where there is no number."""
MOST_NAMED = 3
"""How many unfinished jobs are named."""
ALIKE = 0.005
"""Mean completion times that differ by less than this share are called equal."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: one number per run."""

    title: str
    """The title, with the unit except for durations."""
    value: Callable[[Metrics], float | None]
    text: Callable[[float], str]
    meaning: str
    lower_is_better: bool = False
    """Then the lowest value is marked as the best; otherwise none is marked."""
    detail: bool = False
    """Whether narrow tables leave it out."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class PolicyRow:
    policy: str
    completed: str
    unfinished: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The policies of one workload, or the means over all of them."""

    title: str
    rows: tuple[PolicyRow, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]
    sentences: tuple[str, ...]


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def _hours(value: float) -> str:
    """Hours, with more digits for short runs, so that they can be told apart."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 3}f}"


def _percent(value: float) -> str:
    return f"{100.0 * value:.0f}"


COLUMNS = (
    Column(
        "mean JCT",
        lambda run: run.mean_jct_s,
        format_duration,
        "mean job completion time, from submission to end, over the jobs that ended",
        lower_is_better=True,
    ),
    Column("median JCT", lambda run: run.median_jct_s, format_duration, "half take longer", True),
    Column("p90 JCT", lambda run: run.p90_jct_s, format_duration, "one job in ten takes longer", True),
    Column(
        "p99 JCT",
        lambda run: run.p99_jct_s,
        format_duration,
        "one job in a hundred takes longer",
        lower_is_better=True,
        detail=True,
    ),
    Column(
        "makespan",
        lambda run: run.makespan_s,
        format_duration,
        "from the first submission to the last completion; none while jobs are unfinished",
        lower_is_better=True,
    ),
    Column("GPU hours", lambda run: run.gpu_hours, _hours, "held, starting and resizing included", True),
    Column("GPU held %", lambda run: run.gpu_utilisation, _percent, "share of the GPU time that jobs held"),
    Column("CPU held %", lambda run: run.cpu_utilisation, _percent, "the same for CPUs"),
    Column(
        "resize %",
        lambda run: run.resize_share,
        lambda value: f"{100.0 * value:.1f}",
        "share of the held GPU time that went into starting and resizing",
        lower_is_better=True,
        detail=True,
    ),
    Column(
        "restarts per job",
        lambda run: run.restarts_per_job,
        _fixed(1),
        "starts and resizes after the first start",
        lower_is_better=True,
    ),
    Column(
        "worst FTF",
        lambda run: run.worst_ftf,
        _fixed(2),
        "largest completion time relative to running alone on a fair share of the GPUs",
        lower_is_better=True,
    ),
    Column(
        "decide ms",
        lambda run: run.decision_ms_mean,
        _fixed(1),
        "mean computing time of a decision",
        detail=True,
    ),
)


def summarise(runs: Sequence[Metrics], *, details: bool = True) -> Summary:
    """One block per workload in the order given and, if there are several, one of means per policy."""
    columns = tuple(
        column
        for column in COLUMNS
        if (details or not column.detail)
        and (column.title != "CPU held %" or any(run.cpu_utilisation is not None for run in runs))
    )
    groups = {name: [run for run in runs if run.workload == name] for name in _unique(runs, "workload")}
    blocks = [_block(name, [_Line.of([run]) for run in group], columns) for name, group in groups.items()]
    lines = [_Line.of([run for run in runs if run.policy == name]) for name in _unique(runs, "policy")]
    if len(groups) == 1:
        return Summary(columns, tuple(blocks), _sentences([_Line.of([run]) for run in runs]))
    if groups:
        blocks.append(_block(f"mean of {len(groups)} workloads", lines, columns, workloads=len(groups)))
    return Summary(columns, tuple(blocks), _sentences(lines))


def value_text(value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None or not math.isfinite(value) else text(value)


def unfinished_note(run: SimulationResult) -> str:
    """Which jobs did not finish, and why one of them still waits; empty if all finished."""
    finished = {job_id for job_id, job in run.history.jobs.items() if job.finished_s is not None}
    left = [job.id for job in run.workload.jobs if job.id not in finished]
    if not left:
        return ""
    more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    latest = {
        job_id: reason for decision in run.history.decisions for job_id, reason in decision.reasons.items()
    }
    waits = [(job_id, latest[job_id].text) for job_id in left if job_id in latest and _waits(latest[job_id])]
    waits.sort(key=lambda wait: NEVER_FITS not in wait[1])
    why = f" {waits[0][0]} still waits: {waits[0][1]}" if waits else ""
    where = f"{run.metrics.policy} on {run.metrics.workload}"
    return one_line(f"{where}: {', '.join(left[:MOST_NAMED])}{more} did not finish.{why}")


def _waits(reason: Reason) -> bool:
    return reason.code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}


@dataclass(frozen=True, slots=True)
class _Line:
    """The runs of one policy that make one row."""

    policy: str
    runs: tuple[Metrics, ...]

    @staticmethod
    def of(runs: Iterable[Metrics]) -> _Line:
        kept = tuple(runs)
        return _Line(one_line(kept[0].policy), kept)

    @property
    def jobs(self) -> int:
        return sum(run.jobs for run in self.runs)

    @property
    def completed(self) -> int:
        return sum(run.completed for run in self.runs)

    @property
    def workloads(self) -> frozenset[str]:
        return frozenset(run.workload for run in self.runs)

    def coverage(self, workloads: int) -> str:
        """How many workloads the policy ran, if not all."""
        run = len(self.workloads)
        return "" if run == workloads else f" ({run} of {workloads})"

    def value(self, column: Column) -> float | None:
        """The mean over the runs; None if one has no value, as leaving it out would flatter the policy."""
        values = [column.value(run) for run in self.runs]
        known = [value for value in values if value is not None and math.isfinite(value)]
        return sum(known) / len(known) if known and len(known) == len(values) else None


def _block(title: str, lines: Sequence[_Line], columns: Sequence[Column], workloads: int = 1) -> Block:
    rivals = _comparable(lines)
    best = {column: _best(column, rivals) for column in columns if column.lower_is_better}
    return Block(
        one_line(title),
        tuple(
            PolicyRow(
                line.policy + line.coverage(workloads),
                f"{line.completed}/{line.jobs}",
                line.completed < line.jobs,
                tuple(
                    Cell(text, best=line in rivals and text == best.get(column))
                    for column in columns
                    for text in [value_text(line.value(column), column.text)]
                ),
            )
            for line in lines
        ),
    )


def _best(column: Column, rivals: Sequence[_Line]) -> str | None:
    """The best value as shown; None if all look equal."""
    values = [value for line in rivals if (value := line.value(column)) is not None]
    texts = {column.text(value) for value in values}
    return column.text(min(values)) if len(texts) > 1 else None


def _comparable(lines: Sequence[_Line]) -> list[_Line]:
    """The policies that can be compared: they ran all workloads and left the fewest jobs unfinished."""
    most = max((len(line.workloads) for line in lines), default=0)
    full = [line for line in lines if len(line.workloads) == most]
    left = min((line.jobs - line.completed for line in full), default=0)
    return [line for line in full if line.jobs - line.completed == left]


def _sentences(lines: Sequence[_Line]) -> tuple[str, ...]:
    """Which policy finishes jobs soonest, by how much, and which left jobs unfinished."""
    known = [(value, line) for line in _comparable(lines) if (value := line.value(COLUMNS[0])) is not None]
    ranked = sorted(known, key=lambda pair: pair[0])
    unfinished = (
        f"{line.policy} left {line.jobs - line.completed} of {line.jobs} jobs unfinished; "
        "its completion times count finished jobs only."
        for line in lines
        if line.completed < line.jobs
    )
    return (*_comparison(ranked), *unfinished)


def _comparison(ranked: Sequence[tuple[float, _Line]]) -> list[str]:
    """The best policy against the others; of many, against the next and the last."""
    if not ranked:
        return []
    (best_s, best), *others = ranked
    if not others:
        done = f"{best.completed} of {best.jobs} jobs"
        return [f"{best.policy} finishes {done}, mean JCT {format_duration(best_s)}."]
    slower = [(value_s, line) for value_s, line in others if value_s > best_s * (1.0 + ALIKE)]
    level = [line.policy for _, line in others[: len(others) - len(slower)]]
    if not slower:
        first = ", ".join([best.policy, *level[:-1]])
        return [f"{first} and {level[-1]} finish jobs equally soon (mean JCT {format_duration(best_s)})."]
    shown = slower if len(slower) <= 3 else [slower[0], slower[-1]]
    (next_s, following), *rest = shown
    said = [
        (
            f"{_times(next_s, best_s)} on average than {following.policy} "
            f"(mean JCT {format_duration(best_s)} vs {format_duration(next_s)})"
        ),
        *(
            f"{_times(value_s, best_s)} than {line.policy} ({format_duration(value_s)})"
            for value_s, line in rest
        ),
    ]
    tied = f", as {' and '.join(level)} {'does' if len(level) == 1 else 'do'}" if level else ""
    return [f"{best.policy} finishes jobs {' and '.join(said)}{tied}."]


def _times(value_s: float, best_s: float) -> str:
    return f"{value_s / best_s:.2f}x sooner" if best_s > 0 else "sooner"


def _unique(runs: Sequence[Metrics], name: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(run, name)) for run in runs))


BEST_MARK = "*"
LEGEND = f"{BEST_MARK} best of its block"


def metrics_table(runs: Sequence[Metrics]) -> Table:
    """The runs as a table for a terminal of 100 columns, a block per workload; the text has more columns."""
    summary = summarise(runs, details=False)
    table = Table(
        box=box.SIMPLE,
        padding=(0, 0),
        pad_edge=False,
        caption=Text("\n".join(_closing(summary))),
        caption_justify="left",
    )
    table.add_column("policy", overflow="fold", min_width=10)
    for title in ("jobs done", *(column.title for column in summary.columns)):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for block in summary.blocks:
        table.add_row(Text(block.title, style="bold"))
        for row in block.rows:
            done = Text(row.completed, style="bold red" if row.unfinished else "")
            table.add_row(Text(row.policy), done, *(_styled(cell) for cell in row.cells))
        table.add_section()
    return table


def metrics_text(runs: Sequence[Metrics]) -> str:
    """The runs as a Markdown table with all columns."""
    summary = summarise(runs)
    heading = ["policy", "jobs done", *(column.title for column in summary.columns)]
    parts = [
        f"{block.title}\n\n{markdown_table(heading, [_texts(row) for row in block.rows])}"
        for block in summary.blocks
    ]
    return "\n\n".join([*parts, "\n".join(_closing(summary))]) + "\n"


def _styled(cell: Cell) -> Text:
    return Text(_marked(cell), style="bold green" if cell.best else "")


def _marked(cell: Cell) -> str:
    # The mark comes first, so that digits stay aligned.
    return BEST_MARK + cell.text if cell.best else cell.text


def _closing(summary: Summary) -> list[str]:
    marked = any(cell.best for block in summary.blocks for row in block.rows for cell in row.cells)
    return [*summary.sentences, *([LEGEND] if marked else [])]


def _texts(row: PolicyRow) -> list[str]:
    return [row.policy, row.completed, *(_marked(cell) for cell in row.cells)]


HEADING = ("policy", "best", "worst seed", "trials", "GPU hours", "cost", "finished", "ended by")


def study_text(study: Study, results: Sequence[StudyResult]) -> str:
    """A row for each policy: means over its seeds."""
    by_policy: dict[str, list[StudyResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    seeds = len(next(iter(by_policy.values())))
    deadline_s = results[0].deadline_s
    until = "without a deadline" if deadline_s is None else f"until {format_duration(deadline_s)}"
    over = "one simulation" if seeds == 1 else f"means of {seeds} simulations"
    title = f"{study.name}: best {study.metric} ({study.direction}) {until}, {over}"
    rows = [policy_row(study, policy, runs) for policy, runs in by_policy.items()]
    return f"{title}\n\n{markdown_table(HEADING, rows)}\n"


def policy_row(study: Study, policy: str, results: Sequence[StudyResult]) -> list[str]:
    values = [result.best_metric for result in results if result.best_metric is not None]
    worst = min if study.direction is Direction.MAX else max
    silent = len(results) - len(values)
    best = f"{np.mean(values):.4f}" if values else "none"
    return [
        policy,
        best + (f" ({silent} without)" if silent and values else ""),
        f"{worst(values):.4f}" if values else "none",
        f"{np.mean([result.trials_started for result in results]):.4g}",
        hours_text(float(np.mean([result.gpu_hours for result in results]))),
        format_usd(float(np.mean([result.cost_usd for result in results]))),
        format_duration(float(np.mean([result.finished_s for result in results]))),
        _endings(results),
    ]


def hours_text(hours: float) -> str:
    """Hours, with more digits for short runs."""
    return f"{hours:.1f}" if hours >= 1.0 else f"{hours:.3f}"


def _endings(results: Sequence[StudyResult]) -> str:
    """What ended the simulations, with counts if they differ."""
    counts = Counter(result.ended_by for result in results)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
