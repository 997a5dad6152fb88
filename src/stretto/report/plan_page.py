"""The report on a plan: one HTML file with the trade-off to explore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stretto
from stretto.app.plan import Planned
from stretto.core.units import HOUR_S, format_duration
from stretto.planning.forecast import Forecast, Outcome
from stretto.planning.plan import Plan
from stretto.planning.planner import kept_how
from stretto.planning.tuning import Limits, Tuning
from stretto.report.page import Page, facts_html, table_html, write_page
from stretto.report.palette import line_style
from stretto.report.plan_text import (
    closing,
    comparison_rows,
    duration_interval,
    limits_text,
    money,
    money_interval,
    side_by_side,
    stage_rows,
    steps,
    units,
    verdict,
)
from stretto.report.plotting import graph_objects, safe, styled

HOVER = "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>"


def write_plan_page(path: Path | str, planned: Planned) -> None:
    """Write one HTML file that needs no network."""
    write_page(path, plan_html(planned))


def plan_html(planned: Planned) -> str:
    """The page as text."""
    tuning, outcome = planned.tuning, planned.outcome
    page = Page(
        title=f"Plan of {tuning.study.name}",
        lead=f"By Stretto {stretto.__version__}: predicted from the study's profile, not measured.",
    )
    page.heading(2, "Answer")
    page.text(verdict(tuning, outcome), "lead")
    for sentence in closing(tuning, outcome):
        page.text(sentence)
    page.html(table_html(*comparison_rows(outcome)))
    page.heading(2, "Trade-off")
    page.text(
        "Every point is a plan that no other beats in both time and money; rest the pointer on one for its "
        "GPUs per stage and its intervals. Axes show means over simulated executions."
    )
    page.figure(frontier_figure(outcome, tuning.limits), "mean cost against mean finish of plans")
    page.heading(2, "Stages")
    page.text("Nodes held in each stage by the plans above.")
    page.figure(nodes_figure(outcome), "nodes held by stage")
    for name, forecast in side_by_side(outcome):
        page.heading(3, name)
        page.html(table_html(*stage_rows(forecast.plan)))
    page.heading(2, "About these numbers")
    page.html(facts_html(_facts(planned)))
    return page.render()


def frontier_figure(outcome: Outcome, limits: Limits) -> Any:
    """Cost against finish: the frontier, the plans with a name, the limits."""
    go = graph_objects()
    figure = go.Figure()
    style = line_style(0)
    figure.add_trace(
        _points(go, "frontier", outcome.frontier, colour=style.colour, mode="lines+markers", size=6)
    )
    for index, (name, forecast) in enumerate(side_by_side(outcome), start=1):
        figure.add_trace(
            _points(go, name, [forecast], colour=line_style(index).colour, mode="markers", size=13)
        )
    if limits.deadline_s is not None:
        figure.add_vline(x=limits.deadline_s / HOUR_S, line={"dash": "dash", "color": "#59636e"})
    if limits.budget_usd is not None:
        figure.add_hline(y=limits.budget_usd, line={"dash": "dash", "color": "#59636e"})
    figure.update_xaxes(title_text="finish (hours, mean)", rangemode="tozero")
    figure.update_yaxes(title_text="cost (USD, mean)", rangemode="tozero")
    return styled(figure, 460, hovermode="closest")


def _points(go: Any, name: str, plans: Sequence[Forecast], *, colour: str, mode: str, size: int) -> Any:
    return go.Scatter(
        x=[plan.finish_s.mean / HOUR_S for plan in plans],
        y=[plan.cost_usd.mean for plan in plans],
        name=safe(name),
        mode=mode,
        line={"color": colour, "width": 1.6, "shape": "hv"},
        marker={"color": colour, "size": size},
        customdata=[
            [
                f"{safe(name)}: {_per_trial(plan.plan)}",
                f"{steps([stage.nodes for stage in plan.plan.stages])} nodes",
                f"finish {duration_interval(plan.finish_s)}",
                f"cost {money_interval(plan.cost_usd)}",
            ]
            for plan in plans
        ],
        hovertemplate=HOVER,
    )


def _per_trial(plan: Plan) -> str:
    return f"{steps([stage.gpus_per_trial for stage in plan.stages])} {units(plan)} per trial"


def nodes_figure(outcome: Outcome) -> Any:
    """Nodes by stage, plan beside plan."""
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
                    f"{stage.nodes} x {safe(stage.instance)}, {units(forecast.plan)} per trial: "
                    f"{stage.gpus_per_trial}, {stage.at_once} at once"
                    for stage in stages
                ],
                hovertemplate="%{customdata}",
            )
        )
    figure.update_yaxes(title_text="nodes")
    return styled(figure, 340, barmode="group")


def _facts(planned: Planned) -> list[tuple[str, str]]:
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
        ("instances", ", ".join(f"{one.name} {money(one.usd_per_hour)}/h" for one in tuning.instances)),
        ("billing", _billing_text(tuning)),
        ("profile", _profile_text(tuning)),
        ("planning took", f"{planned.planning_s:.2f} s"),
    ]


def _billing_text(tuning: Tuning) -> str:
    billing = tuning.billing
    data = (
        f", {money(billing.usd_per_new_node)} of data for each new node" if billing.usd_per_new_node else ""
    )
    least = f"at least {billing.minimum_s:g} s a node"
    return f"per {billing.per}, in steps of {billing.granularity_s:g} s, {least}{data}"


def _profile_text(tuning: Tuning) -> str:
    profile = tuning.profile
    speeds = ", ".join(f"{gpus}: {speed:g}x" for gpus, speed in profile.scaling.points)
    return (
        f"an epoch takes {format_duration(profile.latency.epoch_s)} on one GPU; speed by GPUs {speeds}; "
        f"a start takes {profile.start_s:g} s"
    )
