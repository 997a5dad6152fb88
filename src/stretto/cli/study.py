"""`stretto simulate --study`: one study under several policies, over several seeds."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stretto.cli.bars import step_bar
from stretto.cli.flags import parse_budget_usd, parse_deadline_s
from stretto.core.errors import InputError
from stretto.inputs.study import StudyFile, read_study
from stretto.policies.registry import Options, make_policy
from stretto.report.study_page import write_study_page
from stretto.report.tables import study_text
from stretto.simulation.studies import StudyResult, StudyRun, simulate_study, with_limits
from stretto.worlds.curve_files import load_curves
from stretto.worlds.curves import Curves

MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """The arguments of `simulate --study`."""

    study: Path
    policies: Sequence[str]
    deadline: str | None
    budget: str | None
    seeds: int
    seed: int
    options: Options
    as_json: bool
    report: Path | None


def compare(request: StudyRequest) -> None:
    """Simulate the study under every policy and seed, and print the results."""
    if not 1 <= request.seeds <= MOST_SEEDS:
        raise InputError(
            f"--seeds {request.seeds} is out of range.", remedy=f"Give 1 to {MOST_SEEDS} simulations."
        )
    file = with_limits(
        read_study(request.study),
        deadline_s=parse_deadline_s(request.deadline, datetime.now().astimezone()),
        budget_usd=parse_budget_usd(request.budget),
    )
    study = file.tuning.study
    curves = _curves(file)
    for note in (*_notes(file, curves), *curves.notes):
        print(f"{curves.name}: {note}", file=sys.stderr)
    for policy in request.policies:
        make_policy(policy, options=request.options.get(policy), tuning=file.tuning)
    results: list[StudyResult] = []
    runs: list[StudyRun] = []
    with step_bar("simulating", len(request.policies) * request.seeds) as step:
        for policy in request.policies:
            for seed in range(request.seed, request.seed + request.seeds):
                run = simulate_study(file, curves, policy, seed=seed, options=request.options.get(policy))
                results.append(run.result)
                if request.report is not None:  # a run's history takes megabytes
                    runs.append(run)
                step()
    if request.as_json:
        runs_json = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"runs": runs_json}, indent=2, allow_nan=False))
    else:
        print(study_text(study, results), end="")
    if request.report is not None:
        write_study_page(request.report, runs)
        print(f"report: {request.report}", file=sys.stderr)


def _curves(file: StudyFile) -> Curves:
    study = file.tuning.study
    curves = load_curves(
        file.world.curves, folder=file.path.parent, direction=study.direction, where=str(file.path)
    )
    if curves.direction is not study.direction:
        raise InputError(
            f"direction is {study.direction}, and in {curves.name} {curves.direction} is better.",
            where=str(file.path),
            remedy=f'Set direction = "{curves.direction}", or name other curves in [world].',
        )
    return curves


def _notes(file: StudyFile, curves: Curves) -> Iterator[str]:
    """Settings of the file that a table of recorded trials overrides."""
    if curves.configs is None:
        return
    rows, trials = len(curves.configs), file.tuning.study.trials
    if rows < trials:
        yield f"it has {rows} rows, so there are {rows} trials and not {trials}."
    if file.space.dimensions:
        yield "its rows are the configurations; [space] is not used."
