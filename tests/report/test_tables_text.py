"""The table of runs: what it shows, what it marks, what it never hides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

from stretto.report.tables import metrics_table, metrics_text
from stretto.simulation.jobs import Metrics

BASE = Metrics(
    policy="pollux",
    workload="demo",
    jobs=40,
    completed=40,
    mean_jct_s=2580.0,
    median_jct_s=900.0,
    p90_jct_s=5400.0,
    p99_jct_s=9000.0,
    makespan_s=13130.0,
    gpu_hours=152.6,
    gpu_utilisation=0.654,
    cpu_utilisation=None,
    resize_share=0.078,
    restarts_per_job=3.8,
    worst_ftf=1.71,
    decisions=297,
    decision_ms_mean=22.2,
    decision_ms_p95=36.3,
    wall_s=6.7,
)
SLOWER = dataclasses.replace(BASE, policy="tiresias", mean_jct_s=4440.0, worst_ftf=1.2, gpu_hours=152.4)


def printed(runs: Sequence[Metrics], *, colour: bool = False, width: int = 100) -> str:
    console = Console(width=width, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(metrics_table(runs))
    return capture.get()


def row_of(text: str, policy: str) -> str:
    return next(line for line in text.splitlines() if line.strip(" |").startswith(policy))


def test_best_values_are_marked_where_they_differ() -> None:
    text = metrics_text([BASE, SLOWER])
    pollux, tiresias = row_of(text, "pollux"), row_of(text, "tiresias")
    assert "*43m 00s" in pollux
    assert "1h 14m" in tiresias
    assert "*1h 14m" not in tiresias
    assert "*1.20" in tiresias
    assert "*1.71" not in pollux
    # Both medians are 15m 00s, and 152.4 hours is more than shown of a difference to 152.6.
    assert "*15m 00s" not in text
    assert "*152" in tiresias


def test_the_sentence_says_who_is_sooner_and_by_how_much() -> None:
    sentence = "pollux finishes jobs 1.72x sooner on average than tiresias (mean JCT 43m 00s vs 1h 14m)."
    assert sentence in metrics_text([SLOWER, BASE])
    assert sentence in " ".join(printed([SLOWER, BASE]).split())


def test_policies_that_are_alike_are_called_so() -> None:
    same = dataclasses.replace(BASE, policy="optimus", mean_jct_s=BASE.mean_jct_s)
    assert "pollux and optimus finish jobs equally soon (mean JCT 43m 00s)." in metrics_text([BASE, same])
    third = dataclasses.replace(BASE, policy="srtf")
    behind = dataclasses.replace(BASE, policy="fifo", completed=BASE.completed - 1)
    told = metrics_text([BASE, same, third, behind])
    assert "pollux, optimus and srtf finish jobs equally soon" in told, "of fifo that is not known"
    sentence = metrics_text([BASE, SLOWER, same])
    assert "1.72x sooner on average than tiresias (mean JCT 43m 00s vs 1h 14m), as optimus does." in sentence
    assert "1.00x" not in sentence


@pytest.mark.parametrize(("hours", "shown"), [(0.0166, "0.017"), (12.34, "12.3"), (1234.5, "1,234")])
def test_hours_of_short_runs_have_digits_enough(hours: float, shown: str) -> None:
    assert f" {shown} |" in metrics_text([dataclasses.replace(BASE, gpu_hours=hours)])


def test_of_many_policies_the_sentence_names_the_next_and_the_last() -> None:
    others = [dataclasses.replace(SLOWER, policy=f"p{i}", mean_jct_s=5000.0 + i) for i in range(5)]
    text = metrics_text([BASE, SLOWER, *others])
    sentence = next(line for line in text.splitlines() if "sooner" in line)
    assert "tiresias" in sentence
    assert "p4" in sentence
    assert "p2" not in sentence


def test_unfinished_jobs_are_shown_and_do_not_win() -> None:
    quitter = dataclasses.replace(BASE, policy="fifo", completed=38, mean_jct_s=10.0, makespan_s=None)
    text = metrics_text([BASE, quitter])
    assert "38/40" in row_of(text, "fifo")
    assert "*10s" not in text
    assert "fifo left 2 of 40 jobs unfinished" in text
    assert "finishes 40 of 40 jobs" in text
    assert "38/40" in printed([BASE, quitter])


def test_what_is_unknown_is_a_dash() -> None:
    unknown = dataclasses.replace(
        BASE, mean_jct_s=None, median_jct_s=math.nan, p90_jct_s=None, worst_ftf=math.inf, completed=0
    )
    row = row_of(metrics_text([unknown]), "pollux")
    assert [cell.strip() for cell in row.split("|")][3:6] == ["-", "-", "-"]
    assert "nan" not in row.lower()
    assert "inf" not in row.lower()


def test_several_workloads_have_a_block_each_and_one_of_means() -> None:
    other = dataclasses.replace(BASE, workload="philly", mean_jct_s=3600.0 * 2 - 2580.0)
    slower = dataclasses.replace(SLOWER, workload="philly")
    text = metrics_text([BASE, SLOWER, other, slower])
    assert text.index("demo\n") < text.index("philly\n") < text.index("mean of 2 workloads\n")
    mean = row_of(text[text.index("mean of 2") :], "pollux")
    assert "*1h 00m" in mean
    assert "80/80" in mean


def test_a_policy_that_missed_a_workload_is_not_compared_on_means() -> None:
    other = dataclasses.replace(BASE, workload="philly")
    text = metrics_text([BASE, SLOWER, other])
    assert "tiresias (1 of 2)" in text
    assert "sooner" not in text


def test_a_mean_is_unknown_if_a_part_of_it_is() -> None:
    other = dataclasses.replace(BASE, workload="philly", makespan_s=None, completed=39)
    text = metrics_text([BASE, other])
    mean = [cell.strip() for cell in row_of(text[text.index("mean of 2") :], "pollux").split("|")]
    assert mean[7] == "-"
    assert mean[2] == "79/80"


def test_plain_text_has_no_escape_codes_even_in_names() -> None:
    hostile = dataclasses.replace(BASE, policy="po\x1b[31mllux|x", workload="de\nmo")
    text = metrics_text([hostile, SLOWER])
    assert "\x1b" not in text
    assert "\x1b" not in printed([hostile, SLOWER])
    assert all(line.count("|") == 14 for line in text.replace("\\|", "").splitlines() if line.startswith("|"))


def test_names_are_not_read_as_markup() -> None:
    assert "[bold]x[/bold]" in printed([dataclasses.replace(BASE, policy="[bold]x[/bold]")])


def test_the_table_fits_a_hundred_columns() -> None:
    runs = [
        dataclasses.replace(
            BASE,
            policy=policy,
            workload=workload,
            jobs=1000,
            completed=completed,
            mean_jct_s=3.6e5,
            gpu_hours=1e5,
            cpu_utilisation=0.5,
        )
        for workload in ("philly", "synthetic")
        for policy, completed in (("optimus-oracle", 1000), ("tiresias", 999))
    ]
    text = printed(runs)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert "1000/1000" in text
    assert "\x1b" in printed(runs, colour=True)
    assert "CPU" in text
    assert "CPU" not in printed([BASE])


def test_no_runs_make_an_empty_table() -> None:
    assert metrics_text([]).strip() == ""
    assert "policy" in printed([])
