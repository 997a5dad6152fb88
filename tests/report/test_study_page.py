"""Simulated studies as a table and as a page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from report_pages import STUDY, figures, without_plotly
from stretto.report.study_page import best_over_time, by_rung, curves_figure, study_html, write_study_page
from stretto.report.tables import HEADING, policy_row, study_text
from stretto.search.study import Direction
from stretto.simulation.studies import StudyResult, StudyRun
from study_inputs import NO_LIMITS, SMALL_STUDY, cached_run, curve_table, edited, run, with_table

EVIL = "<img src=http://x onerror=alert(1)>"


def result(best: float | None, *, policy: str = "asha", seed: int = 0, **changes: Any) -> StudyResult:
    plain = StudyResult(
        policy=policy,
        deadline_s=1800.0,
        seed=seed,
        best_metric=best,
        trials_started=10 + seed,
        gpu_hours=3.0,
        cost_usd=1234.5,
        finished_s=1800.0,
        ended_by="deadline",
    )
    return dataclasses.replace(plain, **changes)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_has_means_over_seeds_and_the_worst_of_them() -> None:
    text = study_text(
        STUDY, [result(0.8), result(0.9, seed=1), result(0.7, policy="sha"), result(0.6, policy="sha")]
    )
    lines = text.splitlines()
    assert lines[0] == "resnet-cifar: best accuracy (max) until 30m 00s, means of 2 simulations"
    assert cells(lines[2]) == list(HEADING)
    assert cells(lines[4]) == ["asha", "0.8500", "0.8000", "10.5", "3.0", "$1,234.50", "30m 00s", "deadline"]
    assert cells(lines[5])[:3] == ["sha", "0.6500", "0.6000"]


def test_where_less_is_better_the_worst_is_the_largest() -> None:
    study = dataclasses.replace(STUDY, direction=Direction.MIN)
    assert policy_row(study, "asha", [result(0.8), result(0.9)])[2] == "0.9000"


def test_simulations_that_showed_nothing_are_counted_not_averaged() -> None:
    assert policy_row(STUDY, "asha", [result(0.8), result(None)])[1:3] == ["0.8000 (1 without)", "0.8000"]
    assert policy_row(STUDY, "asha", [result(None), result(None)])[1:3] == ["none", "none"]


def test_the_title_says_one_simulation_and_no_deadline() -> None:
    text = study_text(STUDY, [result(0.8, deadline_s=None)])
    assert text.startswith("resnet-cifar: best accuracy (max) without a deadline, one simulation\n")


@pytest.fixture(scope="module")
def runs() -> list[StudyRun]:
    return [cached_run(policy, seed=seed) for policy in ("hypersched", "rubberband") for seed in (0, 1)]


@pytest.fixture(scope="module")
def page(runs: list[StudyRun]) -> str:
    return without_plotly(study_html(runs))


def test_every_section_of_the_page_is_there(page: str) -> None:
    heads = re.findall(r'<h[23] id="s\d+">(.*?)</h[23]>', page)
    assert heads == [
        "Summary",
        "Best accuracy over time",
        "One simulation of each policy",
        "hypersched, seed 0",
        "rubberband, seed 0",
        "About these numbers",
    ]
    assert len(figures(page)) == 1 + 2 * 2
    assert all(figure["data"] for figure in figures(page))
    assert "simulated, not measured" in page
    assert "<td>2 seeds for each policy</td>" in page
    assert "<td>p3.8xlarge at $12.24 an hour</td>" in page


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r'(src|href)\s*=\s*["\']?\s*(https?:)?//', page)
    assert "<link" not in page
    assert "default-src 'none'" in page


def test_the_best_so_far_never_falls_and_ends_at_the_mean_of_results(runs: list[StudyRun]) -> None:
    end_s = max(one.result.finished_s for one in runs)
    figure = best_over_time({"hypersched": runs[:2]}, STUDY, end_s)
    shown = [value for value in figure.data[0].y if value is not None]
    assert figure.data[0].y[0] is None, "nothing is shown before the first results"
    assert shown == sorted(shown)
    best = [one.result.best_metric for one in runs[:2]]
    assert None not in best
    assert shown[-1] == pytest.approx(math.fsum(value for value in best if value is not None) / 2)


def test_where_less_is_better_the_best_so_far_never_rises(tmp_path: Path) -> None:
    table = {str(i): [f"{(1 + i) / epoch:.4f}" for epoch in range(1, 29)] for i in range(8)}
    (tmp_path / "curves.csv").write_text(curve_table(table))
    done = run("asha", with_table(SMALL_STUDY, "curves.csv"), folder=tmp_path)
    figure = best_over_time({"asha": [done]}, done.file.tuning.study, done.result.finished_s)
    shown = [value for value in figure.data[0].y if value is not None]
    assert shown == sorted(shown, reverse=True)
    assert shown[-1] == done.result.best_metric


def test_learning_curves_are_those_of_the_trials(runs: list[StudyRun]) -> None:
    figure = curves_figure(runs[0], STUDY, 2400.0)
    trials = runs[0].history.jobs
    assert {trace.name for trace in figure.data} == set(trials)
    for trace in figure.data:
        values = [one.value for one in trials[trace.name].results]
        assert list(trace.y) == [value for value in values if value is not None]
        assert "lr = " in trace.hovertemplate


def test_trials_are_grouped_by_the_comparison_they_came_to(runs: list[StudyRun]) -> None:
    history = runs[0].history
    groups = by_rung(history, STUDY)
    assert groups.names == ["to epoch 4", "to epoch 12", "past the last comparison"]
    for trial in history.jobs.values():
        epochs = len(trial.results)
        assert groups.of(trial.job) == groups.names[(epochs > 4) + (epochs > 12)]


def test_a_study_that_showed_nothing_has_a_page() -> None:
    done = run("asha", edited(SMALL_STUDY, ('deadline = "40m"', "deadline = 1")))
    assert "<td>none</td>" in without_plotly(study_html([done]))


def test_a_study_without_a_deadline_has_a_page() -> None:
    assert "<td>deadline</td><td>none</td>" in without_plotly(study_html([run("asha", NO_LIMITS)]))


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    text = edited(
        SMALL_STUDY,
        ('"resnet-cifar"', f'"{EVIL}"'),
        ('"accuracy"', f'"{EVIL}"'),
        ("choice = [0.9, 0.95, 0.99]", f'choice = ["{EVIL}"]'),
        ('instances = ["p3.8xlarge"]', f'instance = [{{ name = "{EVIL}", gpus = 4, usd_per_hour = 3 }}]'),
    )
    write_study_page(tmp_path / "page.html", [run("asha", text), run("rubberband", text)])
    page = without_plotly((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "<img" not in page
    assert "&lt;img src=http://x onerror=alert(1)&gt;" in page
    assert "<img" not in json.dumps(figures(page))
