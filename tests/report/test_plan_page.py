"""A plan in words and as a page: what is said, what is drawn, what is never taken for markup."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_pages import figures, without_plotly
from stretto.core.errors import InputError
from stretto.inputs.study import EXAMPLE_STUDY, read_study
from stretto.planning.forecast import Alternative, Forecast, Nearest, Outcome
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Limits
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance
from stretto.report.plan_page import plan_html, write_plan_page
from stretto.report.plan_text import (
    answer_lines,
    closing_sentences,
    comparison_rows,
    frontier_plot,
    plan_text,
    side_by_side,
    stage_rows,
    verdict,
)
from stretto.report.text import HEIGHT, WIDTH, PlotPoint, markdown_table, tiny_plot
from stretto.simulation.plan import Planned, plan
from stretto.simulation.studies import with_limits
from study_inputs import NO_LIMITS, SMALL_STUDY, edited, study_file

EVIL = "<img src=http://x onerror=alert(1)>"
FINITE = st.floats(-1e15, 1e15, allow_nan=False)


@cache
def answer(text: str = SMALL_STUDY, deadline_s: float | None = None) -> Planned:
    return plan(with_limits(study_file(text), deadline_s=deadline_s))


def forecast(cost_usd: float, finish_s: float, nodes: int = 2) -> Forecast:
    """A plan of one stage that varies by a tenth."""
    stage = StagePlan(
        first_epoch=1, last_epoch=9, trials=4, gpus_per_trial=2, at_once=4, nodes=nodes, instance="box"
    )
    return Forecast(
        plan=Plan((stage,)),
        finish_s=Estimate(finish_s, 0.9 * finish_s, 1.1 * finish_s),
        cost_usd=Estimate(cost_usd, 0.9 * cost_usd, 1.1 * cost_usd),
        due_s=1.1 * finish_s,
        due_usd=1.1 * cost_usd,
        p_on_time=0.95,
        p_in_budget=None,
    )


def outcome(*, chosen_usd: float = 20.0) -> Outcome:
    chosen, slow, fast = forecast(chosen_usd, 7200.0), forecast(12.5, 10800.0), forecast(31.0, 3600.0)
    return Outcome(
        feasible=True,
        chosen=chosen,
        cheapest=slow,
        fastest=fast,
        static=forecast(25.0, 7000.0),
        frontier=(fast, chosen, slow),
        earliest=fast,
        doubts=(),
    )


def limited(limits: Limits) -> Any:
    return dataclasses.replace(study_file(SMALL_STUDY).tuning, limits=limits)


def test_an_hour_more_saves_what_the_next_plan_costs_less() -> None:
    # The cheapest plan keeps 1.1 x 3 h = 3 h 18 m, so that 2 h 20 m and an hour are enough for it.
    sentences = closing_sentences(limited(Limits(deadline_s=2 * 3600 + 20 * 60)), outcome())
    assert sentences == [
        "An hour more would save $7.50.",
        "The best fixed cluster costs $5.00 more, 1.25 times as much.",
    ]
    sentences = closing_sentences(limited(Limits(deadline_s=2 * 3600 + 15 * 60)), outcome())
    assert sentences[0] == "An hour more would save nothing."


def test_nothing_is_said_of_an_hour_without_a_deadline() -> None:
    assert not any(
        "hour" in sentence for sentence in closing_sentences(limited(Limits(budget_usd=9.0)), outcome())
    )


def test_a_plan_that_costs_nothing_is_not_compared() -> None:
    assert closing_sentences(limited(Limits()), outcome(chosen_usd=0.0)) == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(deadline_s=7200), "To keep a deadline of 2h 00m: $20.00 in 2h 00m, 95 % likely on time."),
        (Limits(budget_usd=1500), "To keep a budget of $1,500.00: $20.00 in 2h 00m, 95 % likely on time."),
        (Limits(), "a balanced plan takes $20.00 in 2h 00m"),
    ],
)
def test_the_verdict_says_what_it_takes(limits: Limits, said: str) -> None:
    assert said in verdict(limited(limits), outcome())


def test_plans_stand_side_by_side_with_their_intervals() -> None:
    heading, rows = comparison_rows(outcome())
    assert [row[0] for row in rows] == ["cheapest", "chosen", "fastest", "best fixed cluster"]
    assert all(len(row) == len(heading) for row in rows)
    assert rows[1][1:] == ["2", "2", "2h 00m (1h 48m - 2h 12m)", "$20.00 (18.00-22.00)", "95 %"]


@pytest.mark.parametrize(
    ("instance", "unit"), [("p3.8xlarge", "GPUs each"), ("slot", "slots each"), ("slots-2", "slots each")]
)
def test_what_trials_get_is_called_a_slot_where_it_may_be_a_core(instance: str, unit: str) -> None:
    stage = StagePlan(
        first_epoch=1, last_epoch=2, trials=1, gpus_per_trial=1, at_once=1, nodes=1, instance=instance
    )
    heading, _ = stage_rows(Plan((stage,)))
    assert heading[4] == unit


def test_a_unit_that_is_known_is_taken() -> None:
    tuning = limited(Limits(deadline_s=7200.0))
    assert "GPUs" in plan_text(tuning, outcome())
    told = plan_text(tuning, outcome(), "slots")
    assert "GPU" not in told
    assert "slots each" in told
    assert "slots per trial" in told


def test_of_an_infeasible_study_the_earliest_is_shown() -> None:
    nothing = dataclasses.replace(outcome(), feasible=False, chosen=None, static=None)
    text = plan_text(limited(Limits(deadline_s=60)), nothing)
    assert text.startswith(
        "No plan keeps a deadline of 1m 00s with 90 % likelihood.\nThe plan that ends first takes 1h 00m and "
        "$31.00 on average, the cheapest 3h 00m and $12.50.\n"
    )
    assert "Stages of the earliest plan" in text
    assert "E earliest" in text
    assert "| chosen" not in text


def test_what_could_be_kept_instead_is_told_in_each_direction() -> None:
    asked = Limits(deadline_s=3600, budget_usd=20)
    nothing = dataclasses.replace(outcome(), feasible=False, chosen=None, static=None)
    tuning = limited(asked)

    def offer(trials: int = 8, epochs: int = 28, **limits: float) -> Alternative:
        kept = dataclasses.replace(asked, **limits)
        return Alternative(
            limits=kept,
            trials=trials,
            max_epochs=epochs,
            rungs=(4,) * (epochs > 4),
            plan=forecast(15.0, 1800.0),
        )

    found = Nearest(
        more_time=offer(deadline_s=7260),
        more_money=offer(budget_usd=31.5),
        more_of_both=None,
        fewer_trials=offer(trials=5),
        fewer_epochs=offer(epochs=11),
        fewer_of_both=None,
    )
    lines = answer_lines(tuning, nothing, found)
    takes = "(30m 00s and $15.00 on average)"
    assert lines[1:] == [
        f"More time: a deadline of 2h 01m can be kept at a budget of $20.00 {takes}.",
        f"More money: a budget of $31.50 can be kept by 1h 00m {takes}.",
        f"Fewer trials: 5 instead of 8 fit within both limits {takes}: write trials = 5.",
        (
            f"Fewer epochs: at most 11 instead of 28 fit within both limits {takes}: write max_epochs = 11, "
            "rungs = [4] and no min_epochs."
        ),
    ]
    none = Nearest(
        more_time=None,
        more_money=None,
        more_of_both=offer(deadline_s=7260, budget_usd=31.5),
        fewer_trials=None,
        fewer_epochs=None,
        fewer_of_both=None,
    )
    assert answer_lines(tuning, nothing, none)[1:] == [
        "More time alone does not help: no plan was found at a budget of $20.00.",
        "More money alone does not help: no plan was found by 1h 00m.",
        f"More of both: a deadline of 2h 01m and a budget of $31.50 can be kept {takes}.",
        "Not even one epoch of one trial fits within both limits.",
    ]
    small = dataclasses.replace(none, fewer_of_both=offer(trials=2, epochs=1))
    assert answer_lines(tuning, nothing, small)[-1] == (
        f"Fewer trials and epochs: 2 trials of one epoch fit within both limits {takes}: write "
        "trials = 2, max_epochs = 1, rungs = [] and no min_epochs."
    )


@pytest.mark.parametrize(("trials", "epochs", "rungs"), [(56, 1, ()), (2, 5, (4,)), (1, 13, (4, 12))])
def test_an_offer_says_what_to_write_and_that_is_read(
    trials: int, epochs: int, rungs: tuple[int, ...], tmp_path: Path
) -> None:
    limits = Limits(deadline_s=3600)
    offer = Alternative(
        limits=limits, trials=trials, max_epochs=epochs, rungs=rungs, plan=forecast(15.0, 1800.0)
    )
    nearest = Nearest(
        more_time=None,
        more_money=None,
        more_of_both=None,
        fewer_trials=None,
        fewer_epochs=None,
        fewer_of_both=offer,
    )
    nothing = dataclasses.replace(outcome(), feasible=False, chosen=None, static=None)
    last = answer_lines(limited(limits), nothing, nearest)[-1]
    text = re.sub(r"(?m)^min_epochs = .*$", "", EXAMPLE_STUDY)
    for name, value in re.findall(r"(trials|max_epochs|rungs) = (\d+|\[[\d, ]*\])", last):
        text, count = re.subn(rf"(?m)^{name} = [^#\n]*", f"{name} = {value} ", text)
        assert count == 1
    assert last.endswith(" and no min_epochs.")
    (tmp_path / "study.toml").write_text(text)
    study = read_study(tmp_path / "study.toml").tuning.study
    assert (study.trials, study.max_epochs, study.rungs) == (trials, epochs, rungs)


def test_under_the_rule_of_the_mean_nothing_is_said_of_likelihood() -> None:
    fast = forecast(31.0, 3600.0)
    mean = dataclasses.replace(fast, due_s=fast.finish_s.mean)
    nothing = dataclasses.replace(outcome(), feasible=False, chosen=None, static=None, earliest=mean)
    assert verdict(limited(Limits(deadline_s=60)), nothing) == "No plan keeps a deadline of 1m 00s."


def test_the_slots_of_one_machine_are_not_called_nodes() -> None:
    def on(instance: str, one: Forecast) -> Forecast:
        stages = tuple(dataclasses.replace(stage, instance=instance) for stage in one.plan.stages)
        return dataclasses.replace(one, plan=Plan(stages))

    here = {name: on("slot", one) for name, one in side_by_side(outcome())}
    local = dataclasses.replace(
        outcome(),
        cheapest=here["cheapest"],
        chosen=here["chosen"],
        fastest=here["fastest"],
        static=here["best fixed cluster"],
    )
    for heading, rows in (comparison_rows(local), stage_rows(here["chosen"].plan)):
        assert not {"nodes", "instance"} & set(heading)
        assert all(len(row) == len(heading) for row in rows)
    assert "nodes" in comparison_rows(outcome())[0]
    assert {"nodes", "instance"} <= set(stage_rows(forecast(1.0, 1.0).plan)[0])


def test_named_plans_are_drawn_over_the_frontier() -> None:
    plot = frontier_plot(outcome())
    drawn, legend = plot.rsplit("\n", 1)
    assert legend == "o frontier   $ cheapest   C chosen   F fastest   S best fixed cluster"
    lines = drawn.splitlines()
    assert lines[0].split() == ["$31.00", "|F"]
    assert lines[HEIGHT - 1].startswith("$12.50 |")
    assert lines[HEIGHT - 1].endswith("$")
    assert "1h 00m" in lines[-1]
    assert lines[-1].endswith("3h 00m")


def test_a_real_plan_in_words_is_narrow_enough_to_paste() -> None:
    planned = answer()
    text = plan_text(planned.tuning, planned.outcome)
    assert max(len(line) for line in text.splitlines() if not line.startswith("To keep")) <= 130
    assert text.endswith("\n")
    assert "nan" not in text.lower()
    assert "None" not in text


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=12))
def test_every_point_lies_in_the_frame(points: list[tuple[float, float]]) -> None:
    text = tiny_plot([PlotPoint(x, y, "x") for x, y in points], x_text=lambda _: "", y_text=lambda _: "")
    lines = text.splitlines()
    assert len(lines) == HEIGHT + 2
    assert all(len(line) <= WIDTH + 2 for line in lines)
    assert 1 <= text.count("x") <= len(set(points))


def test_corners_of_a_plot_carry_the_extremes() -> None:
    marks = [PlotPoint(0, 0, "a"), PlotPoint(10, 5, "b")]
    lines = tiny_plot(marks, x_text="{:g}".format, y_text="{:g}".format).splitlines()
    assert lines[0] == "5 |" + " " * (WIDTH - 1) + "b"
    assert lines[HEIGHT - 1] == "0 |a"
    assert lines[-1] == "   0" + "10".rjust(WIDTH - 1)
    assert tiny_plot([], x_text=str, y_text=str) == ""


@pytest.mark.parametrize("value", [0.0, 3.0, 1e300])
def test_points_that_are_all_alike_can_be_drawn(value: float) -> None:
    text = tiny_plot([PlotPoint(value, value, "o")] * 2, x_text="{:g}".format, y_text="{:g}".format)
    assert text.count("o") == 1
    assert f"{value:g} |o" in text


def test_the_last_of_several_points_in_one_place_is_seen() -> None:
    text = tiny_plot(
        [PlotPoint(1, 1, "o"), PlotPoint(2, 2, "o"), PlotPoint(1, 1, "C")], x_text=str, y_text=str
    )
    assert text.count("C") == 1
    assert text.count("o") == 1


def test_a_table_is_aligned_and_cells_stay_cells() -> None:
    table = markdown_table(["plan", "cost"], [["a|b", "$1"], ["c", "$100.00"]])
    assert table.splitlines() == [
        "| plan |    cost |",
        "| ---- | ------: |",
        "| a\\|b |      $1 |",
        "| c    | $100.00 |",
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return without_plotly(plan_html(answer()))


def test_every_section_of_the_page_is_there(page: str) -> None:
    heads = re.findall(r'<h[23] id="s\d+">(.*?)</h[23]>', page)
    plans = ["cheapest", "chosen", "fastest", "best fixed cluster"]
    assert heads == ["Answer", "Trade-off", "Stages", *plans, "About these numbers"]
    assert "predicted from the study&#x27;s profile, not measured" in page
    assert "to be kept with probability 0.9" in page
    assert "p3.8xlarge $12.24/h" in page


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r'(src|href)\s*=\s*["\']?\s*(https?:)?//', page)
    assert "<link" not in page
    assert "default-src 'none'" in page


def test_points_of_the_frontier_tell_their_plan(page: str) -> None:
    frontier, stages = figures(page)
    names = [trace["name"] for trace in frontier["data"]]
    assert names == ["frontier", "cheapest", "chosen", "fastest", "best fixed cluster"]
    chosen = frontier["data"][2]["customdata"][0]
    assert re.fullmatch(r"chosen: \d+>\d+>\d+ GPUs per trial", chosen[0])
    assert "finish" in chosen[2]
    assert "cost $" in chosen[3]
    assert len(frontier["layout"]["shapes"]) == 2, "a line for the deadline and one for the budget"
    assert [trace["name"] for trace in stages["data"]] == names[1:]


def test_without_limits_there_are_no_lines_for_them() -> None:
    page = without_plotly(plan_html(answer(NO_LIMITS)))
    assert not figures(page)[0]["layout"].get("shapes")
    assert "none, to be kept" in page


def test_an_infeasible_study_has_a_page_too() -> None:
    page = without_plotly(plan_html(answer(deadline_s=60.0)))
    assert "No plan keeps a deadline of 1m 00s" in page
    assert re.findall(r'<h3 id="s\d+">(.*?)</h3>', page) == ["cheapest", "earliest", "fastest"]


def test_names_with_markup_stay_text() -> None:
    own = f'instance = [{{ name = "{EVIL}", gpus = 4, usd_per_hour = 3 }}]'
    text = edited(SMALL_STUDY, ('"resnet-cifar"', f'"{EVIL}"'), ('instances = ["p3.8xlarge"]', own))
    page = without_plotly(plan_html(answer(text)))
    assert "<img" not in page
    assert "&lt;img src=http://x onerror=alert(1)&gt;" in page
    assert "<img" not in json.dumps(figures(page))


@pytest.mark.parametrize("usd_per_hour", [0.0, 1.5])
def test_of_one_machine_the_page_speaks_of_slots(usd_per_hour: float) -> None:
    file = study_file(SMALL_STUDY)
    slot = Instance(name="slot", gpus=1, usd_per_hour=usd_per_hour, own=True)
    tuning = dataclasses.replace(file.tuning, instances=(slot,), max_nodes=4, billing=Billing(minimum_s=0.0))
    page = without_plotly(plan_html(plan(dataclasses.replace(file, tuning=tuning))))
    assert "nodes" not in page.lower()
    assert "GPU" not in page
    assert "Slots held in each stage" in page
    assert f"4, ${usd_per_hour:.2f}/h each" in page
    *trade_off, stages = figures(page)
    assert len(trade_off) == (1 if usd_per_hour else 0), "without a price there is none"
    assert stages["layout"]["yaxis"]["title"]["text"] == "slots"
    assert re.fullmatch(r"\d slots, slots per trial: \d, \d at once", stages["data"][0]["customdata"][0])


def test_the_file_is_written_whole_or_refused(tmp_path: Path) -> None:
    write_plan_page(tmp_path / "new" / "plan.html", answer())
    assert (tmp_path / "new" / "plan.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    with pytest.raises(InputError, match="cannot be written"):
        write_plan_page(tmp_path / "new" / "plan.html" / "plan.html", answer())
