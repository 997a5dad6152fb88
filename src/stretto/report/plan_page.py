"""The report on a plan: one HTML file with the trade-off to explore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stretto
from stretto.core.units import HOUR_S, format_usd
from stretto.planning.forecast import Forecast, Outcome
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.planner import kept_how
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.instances import SLOT
from stretto.report.page import Page, facts_html, table_html, write_page
from stretto.report.plan_text import (
    answer_lines,
    assumptions_text,
    closing_sentences,
    comparison_rows,
    counts_text,
    duration_interval,
    is_priced,
    limits_text,
    money_interval,
    names_nodes,
    side_by_side,
    stage_rows,
    unit_name,
)
from stretto.report.plotting import graph_objects, line_style, safe, styled
from stretto.simulation.plan import Planned

NODES = "nodes"
HOVER = "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>"


@dataclass(frozen=True, slots=True)
class UnitNames:
    """The units that plans are shown in."""

    unit: str
    """The unit that trials get: GPUs or slots."""
    held: str
    """The unit that stages hold: nodes, or slots of one machine."""

    @staticmethod
    def of(outcome: Outcome, unit: str) -> UnitNames:
        unit = unit or unit_name(outcome.cheapest.plan)
        return UnitNames(unit, NODES if names_nodes(outcome) else unit)


def write_plan_page(path: Path | str, planned: Planned, unit: str = "") -> None:
    """Write one HTML file that needs no network; `unit` names what trials get, if known."""
    write_page(path, plan_html(planned, unit))


def plan_html(planned: Planned, unit: str = "") -> str:
    """The page as text."""
    tuning, outcome = planned.tuning, planned.outcome
    words = UnitNames.of(outcome, unit)
    page = Page(
        title=f"Plan of {tuning.study.name}",
        lead=f"By Stretto {stretto.__version__}: predicted from the study's profile, not measured.",
    )
    page.heading(2, "Answer")
    answer, *instead = answer_lines(tuning, outcome, planned.nearest)
    page.text(answer, "lead")
    for sentence in (*instead, assumptions_text(tuning, words.unit.removesuffix("s"))):
        page.text(sentence)
    for sentence in closing_sentences(tuning, outcome):
        page.text(sentence)
    page.html(table_html(*comparison_rows(outcome, words.unit)))
    if is_priced(tuning):
        page.heading(2, "Trade-off")
        page.text(
            "Every point is a plan that no other beats in both time and money; rest the pointer on one for "
            f"its {words.unit} per stage and its intervals. Axes show means over simulated executions."
        )
        figure = frontier_figure(outcome, tuning.limits, words)
        page.figure(figure, "mean cost against mean finish of plans")
    page.heading(2, "Stages")
    page.text(f"{words.held[0].upper()}{words.held[1:]} held in each stage by the plans above.")
    page.figure(held_figure(outcome, words), f"{words.held} held by stage")
    for name, forecast in side_by_side(outcome):
        page.heading(3, name)
        page.html(table_html(*stage_rows(forecast.plan, words.unit)))
    page.heading(2, "About these numbers")
    page.html(facts_html(_facts(planned, words.unit)))
    return page.render()


def frontier_figure(outcome: Outcome, limits: Limits, words: UnitNames) -> Any:
    """Cost against finish: the frontier, the plans with a name, the limits."""
    go = graph_objects()
    figure = go.Figure()
    figure.add_trace(_points(go, "frontier", outcome.frontier, words, index=0, mode="lines+markers", size=6))
    for index, (name, forecast) in enumerate(side_by_side(outcome), start=1):
        figure.add_trace(_points(go, name, [forecast], words, index=index, mode="markers", size=13))
    if limits.deadline_s is not None:
        figure.add_vline(x=limits.deadline_s / HOUR_S, line={"dash": "dash", "color": "#59636e"})
    if limits.budget_usd is not None:
        figure.add_hline(y=limits.budget_usd, line={"dash": "dash", "color": "#59636e"})
    figure.update_xaxes(title_text="finish (hours, mean)", rangemode="tozero")
    figure.update_yaxes(title_text="cost (USD, mean)", rangemode="tozero")
    return styled(figure, 460, hovermode="closest")


def _points(
    go: Any, name: str, plans: Sequence[Forecast], words: UnitNames, *, index: int, mode: str, size: int
) -> Any:
    colour = line_style(index).colour
    return go.Scatter(
        x=[plan.finish_s.mean / HOUR_S for plan in plans],
        y=[plan.cost_usd.mean for plan in plans],
        name=safe(name),
        mode=mode,
        line={"color": colour, "width": 1.6, "shape": "hv"},
        marker={"color": colour, "size": size},
        customdata=[
            [
                f"{safe(name)}: {_per_trial(plan.plan, words)}",
                f"{counts_text([stage.nodes for stage in plan.plan.stages])} {words.held}",
                f"finish {duration_interval(plan.finish_s)}",
                f"cost {money_interval(plan.cost_usd)}",
            ]
            for plan in plans
        ],
        hovertemplate=HOVER,
    )


def _per_trial(plan: Plan, words: UnitNames) -> str:
    return f"{counts_text([stage.gpus_per_trial for stage in plan.stages])} {words.unit} per trial"


def held_figure(outcome: Outcome, words: UnitNames) -> Any:
    """Nodes, or slots of one machine, by stage, plan beside plan."""
    go = graph_objects()
    figure = go.Figure()
    for index, (name, forecast) in enumerate(side_by_side(outcome), start=1):
        stages = forecast.plan.stages
        figure.add_trace(
            go.Bar(
                x=[
                    f"{stage.trials} trials<br>epochs {stage.first_epoch}-{stage.last_epoch}"
                    for stage in stages
                ],
                y=[stage.nodes for stage in stages],
                name=safe(name),
                marker={"color": line_style(index).colour},
                customdata=[
                    f"{_held_text(stage, words)}, {words.unit} per trial: {stage.gpus_per_trial}, "
                    f"{stage.at_once} at once"
                    for stage in stages
                ],
                hovertemplate="%{customdata}",
            )
        )
    figure.update_yaxes(title_text=words.held)
    return styled(figure, 340, barmode="group")


def _held_text(stage: StagePlan, words: UnitNames) -> str:
    what = f"x {safe(stage.instance)}" if words.held == NODES else words.held
    return f"{stage.nodes} {what}"


def _facts(planned: Planned, unit: str) -> list[tuple[str, str]]:
    tuning = planned.tuning
    return [
        (
            "study",
            f"{tuning.study.trials} trials to {tuning.study.max_epochs} epochs, one in {tuning.study.eta}",
        ),
        (
            "limits",
            f"{limits_text(tuning.limits) or 'none'}, to be kept {kept_how(tuning.limits, planned.rule)}",
        ),
        _offered(tuning),
        ("billing", _billing_text(tuning)),
        ("profile", _profile_text(tuning, unit)),
        ("planning took", f"{planned.planning_s:.2f} s"),
    ]


def _offered(tuning: Tuning) -> tuple[str, str]:
    if [one.name for one in tuning.instances] == [SLOT]:
        return "slots", f"{tuning.max_nodes}, {format_usd(tuning.instances[0].usd_per_hour)}/h each"
    return "instances", ", ".join(f"{one.name} {format_usd(one.usd_per_hour)}/h" for one in tuning.instances)


def _billing_text(tuning: Tuning) -> str:
    billing = tuning.billing
    data = (
        f", {format_usd(billing.usd_per_new_node)} of data for each new node"
        if billing.usd_per_new_node
        else ""
    )
    least = f", at least {billing.minimum_s:g} s a node" if billing.minimum_s else ""
    return f"per {billing.per}, in steps of {billing.granularity_s:g} s{least}{data}"


def _profile_text(tuning: Tuning, unit: str) -> str:
    profile = tuning.profile
    speeds = ", ".join(f"{gpus}: {speed:.3g}x" for gpus, speed in profile.scaling.points)
    return (
        f"an epoch takes {profile.latency.epoch_s:.3g} s on one of the {unit}; speed by {unit} {speeds}; "
        f"a start takes {profile.start_s:.3g} s"
    )
