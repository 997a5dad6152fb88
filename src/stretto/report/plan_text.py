"""The planner's answer in words: the plan, its alternatives, and how certain it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.core.units import HOUR_S, counted, format_duration, format_usd
from stretto.inputs.profile import MachineProfile
from stretto.planning.forecast import Alternative, Forecast, Nearest, Outcome
from stretto.planning.plan import Plan
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.instances import SLOT
from stretto.report.text import PlotPoint, markdown_table, tiny_plot

SIGNS = {"cheapest": "$", "chosen": "C", "earliest": "E", "fastest": "F", "best fixed cluster": "S"}
"""The characters that plans are drawn with."""
COMPARED = ("finish: mean (P10-P90)", "cost: mean (P10-P90)", "on time")

LEFT_OUT = (
    "Plans assume that slots are always busy and leave out loading the training code; `stretto tune` shows "
    "what to expect with both."
)
"""Said of plans for the machine where the training was measured."""


def plan_text(
    tuning: Tuning,
    outcome: Outcome,
    unit: str = "",
    *,
    expected: str = "",
    nearest: Nearest | None = None,
) -> str:
    """The whole answer; `unit` names what trials get, if known.

    `expected` describes a run that begins at once, `nearest` the limits that could be kept instead.
    """
    beyond = expected or (LEFT_OUT if isinstance(tuning.profile, MachineProfile) else "")
    one = (unit or unit_name(outcome.cheapest.plan)).removesuffix("s")
    answer = (*answer_lines(tuning, outcome, nearest), assumptions_text(tuning, one), beyond)
    parts = ["\n".join(filter(None, answer)), _trade_off(outcome, unit)]
    shown = outcome.followed(tuning.limits)
    instead = "cheapest" if tuning.limits.deadline_s is None else "earliest"
    name = "chosen" if outcome.chosen else instead
    parts.append(f"Stages of the {name} plan:\n\n{stage_table(shown.plan, unit)}")
    if is_priced(tuning):
        parts.append(f"Mean cost against mean finish:\n\n{frontier_plot(outcome)}")
    parts.append("\n".join(closing_sentences(tuning, outcome)))
    return "\n\n".join(parts) + "\n"


def is_priced(tuning: Tuning) -> bool:
    """Whether instances have a price; without one there is no trade-off to show."""
    return any(instance.usd_per_hour for instance in (*tuning.instances, *tuning.own))


def answer_lines(tuning: Tuning, outcome: Outcome, nearest: Nearest | None = None) -> list[str]:
    """The answer; if no plan keeps the limits, also a line for each alternative."""
    if outcome.chosen is not None:
        return [verdict(tuning, outcome)]
    return [verdict(tuning, outcome), *_instead(tuning, outcome, nearest)]


def verdict(tuning: Tuning, outcome: Outcome) -> str:
    """The answer in a sentence."""
    limits, chosen = tuning.limits, outcome.chosen
    if chosen is None:
        return f"No plan keeps {limits_text(limits)}{_how_surely(limits, outcome)}."
    spent = f"{format_usd(chosen.cost_usd.mean)} in {format_duration(chosen.finish_s.mean)}"
    if limits.deadline_s is None and limits.budget_usd is None:
        return f"Without a limit there is a trade-off; a balanced plan takes {spent} (least cost x time)."
    odds = [
        f"{_percent(probability)} likely {what}"
        for probability, what in ((chosen.p_on_time, "on time"), (chosen.p_in_budget, "within budget"))
        if probability is not None
    ]
    return f"To keep {limits_text(limits)}: {spent}, {' and '.join(odds)}."


def _how_surely(limits: Limits, outcome: Outcome) -> str:
    """The required likelihood; empty if the plan is judged by means."""
    earliest = outcome.earliest
    return "" if earliest.due_s == earliest.finish_s.mean else f" with {_percent(limits.q)} likelihood"


def _instead(tuning: Tuning, outcome: Outcome, nearest: Nearest | None) -> list[str]:
    """The limits that could be kept, or, if these were not computed, what plans take on average."""
    if nearest is None:
        earliest, cheapest = outcome.earliest, outcome.cheapest
        first = f"{format_duration(earliest.finish_s.mean)} and {format_usd(earliest.cost_usd.mean)}"
        least = f"{format_duration(cheapest.finish_s.mean)} and {format_usd(cheapest.cost_usd.mean)}"
        return [f"The plan that ends first takes {first} on average, the cheapest {least}."]
    return [*_with_more(tuning.limits, nearest), *_with_fewer(tuning, nearest)]


def _with_more(limits: Limits, nearest: Nearest) -> Iterator[str]:
    """Larger limits for the same study."""
    at_budget = "" if limits.budget_usd is None else f" at a budget of {format_usd(limits.budget_usd)}"
    by_deadline = "" if limits.deadline_s is None else f" by {format_duration(limits.deadline_s)}"
    if offer := nearest.more_time:
        later = f"a deadline of {format_duration(offer.limits.deadline_s or 0.0)}"
        yield f"More time: {later} can be kept{at_budget} ({_takes(offer)})."
    elif at_budget and by_deadline:
        yield f"More time alone does not help: no plan was found{at_budget}."
    if offer := nearest.more_money:
        larger = f"a budget of {format_usd(offer.limits.budget_usd or 0.0)}"
        yield f"More money: {larger} can be kept{by_deadline} ({_takes(offer)})."
    elif at_budget and by_deadline:
        yield f"More money alone does not help: no plan was found{by_deadline}."
    if offer := nearest.more_of_both:
        yield f"More of both: {limits_text(offer.limits)} can be kept ({_takes(offer)})."


def _with_fewer(tuning: Tuning, nearest: Nearest) -> Iterator[str]:
    """Less to train within the same limits."""
    limits, study = tuning.limits, tuning.study
    one_limit = limits.deadline_s is None or limits.budget_usd is None
    within = "within the limit" if one_limit else "within both limits"
    if offer := nearest.fewer_trials:
        trials = f"{offer.trials} instead of {study.trials}"
        yield f"Fewer trials: {trials} fit {within} ({_takes(offer)}): write trials = {offer.trials}."
    if offer := nearest.fewer_epochs:
        epochs = f"at most {offer.max_epochs} instead of {study.max_epochs}"
        yield f"Fewer epochs: {epochs} fit {within} ({_takes(offer)}): write {_halving(offer)}."
    if offer := nearest.fewer_of_both:
        trials = f"{counted(offer.trials, 'trial')} of one epoch"
        written = f"trials = {offer.trials}, {_halving(offer)}"
        yield f"Fewer trials and epochs: {trials} fit {within} ({_takes(offer)}): write {written}."
    if not (nearest.fewer_trials or nearest.fewer_epochs or nearest.fewer_of_both):
        yield f"Not even one epoch of one trial fits {within}."


def _halving(offer: Alternative) -> str:
    """The lines of a study file for an alternative's epochs."""
    rungs = ", ".join(map(str, offer.rungs))
    return f"max_epochs = {offer.max_epochs}, rungs = [{rungs}] and no min_epochs"


def _takes(offer: Alternative) -> str:
    plan = offer.plan
    return f"{format_duration(plan.finish_s.mean)} and {format_usd(plan.cost_usd.mean)} on average"


def assumptions_text(tuning: Tuning, unit: str = "GPU") -> str:
    """The prices and times that plans are computed with."""
    prices = [
        f"{one.name} {format_usd(one.usd_per_hour)}/h"
        + (f" ({counted(one.gpus, unit)})" if one.name != SLOT else "")
        for one in dict.fromkeys((*tuning.instances, *tuning.own))
    ]
    profile = tuning.profile
    return (
        f"Counted with: {', '.join(prices)}; an epoch takes {profile.latency.epoch_s:.3g} s on one {unit}, a "
        f"start {profile.start_s:.3g} s."
    )


def closing_sentences(tuning: Tuning, outcome: Outcome) -> list[str]:
    """What another hour would save, what a fixed cluster would cost, and the largest uncertainty."""
    sentences = []
    chosen, deadline_s = outcome.chosen, tuning.limits.deadline_s
    if not is_priced(tuning):
        sentences.append("Slots have no price here, so plans differ in time only.")
        chosen = None
    if chosen is not None and deadline_s is not None:
        later = outcome.cheapest_by(deadline_s + HOUR_S)
        saved = chosen.cost_usd.mean - later.cost_usd.mean if later is not None else 0.0
        sentences.append(
            f"An hour more would save {format_usd(saved)}."
            if saved >= 0.005
            else "An hour more would save nothing."
        )
    if chosen is not None and limits_text(tuning.limits):
        sentences.append(_against_static(chosen, outcome.static))
    if outcome.doubts:
        first = outcome.doubts[0]
        sentences.append(
            f"Largest uncertainty: {first.name} ({_percent(first.share)} of the variance of the finish)."
        )
    return sentences


def _against_static(chosen: Forecast, static: Forecast | None) -> str:
    if static is None:
        return "No fixed cluster keeps the limits."
    extra_usd = static.cost_usd.mean - chosen.cost_usd.mean
    if extra_usd < 0.005 * max(chosen.cost_usd.mean, 1.0):
        return "The best fixed cluster costs no more."
    times = (
        f", {static.cost_usd.mean / chosen.cost_usd.mean:.2f} times as much" if chosen.cost_usd.mean else ""
    )
    return f"The best fixed cluster costs {format_usd(extra_usd)} more{times}."


def unit_name(plan: Plan) -> str:
    """What trials get: GPUs of rented nodes, or slots of one's own machines, which may be cores."""
    return "slots" if all(stage.instance.startswith(SLOT) for stage in plan.stages) else "GPUs"


def has_nodes(plan: Plan) -> bool:
    """Whether a plan names nodes; the slots of one machine are not shown as nodes."""
    return any(stage.instance != SLOT for stage in plan.stages)


def names_nodes(outcome: Outcome) -> bool:
    """Whether a shown plan names nodes; plans for one machine count its slots instead."""
    return any(has_nodes(forecast.plan) for _, forecast in side_by_side(outcome))


def stage_table(plan: Plan, unit: str = "") -> str:
    return markdown_table(*stage_rows(plan, unit))


def stage_rows(plan: Plan, unit: str = "") -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a plan's stages."""
    heading = ["stage", "epochs", "trials", "at once", f"{unit or unit_name(plan)} each"]
    rows = [
        [
            str(index),
            f"{stage.first_epoch}-{stage.last_epoch}",
            str(stage.trials),
            str(stage.at_once),
            str(stage.gpus_per_trial),
            *([str(stage.nodes), stage.instance] if has_nodes(plan) else []),
        ]
        for index, stage in enumerate(plan.stages, start=1)
    ]
    return [*heading, *(["nodes", "instance"] if has_nodes(plan) else [])], rows


def side_by_side(outcome: Outcome) -> list[tuple[str, Forecast]]:
    """The named plans to compare."""
    named = [
        ("cheapest", outcome.cheapest),
        ("chosen", outcome.chosen) if outcome.chosen else ("earliest", outcome.earliest),
        ("fastest", outcome.fastest),
        ("best fixed cluster", outcome.static),
    ]
    return [(name, forecast) for name, forecast in named if forecast is not None]


def comparison_rows(outcome: Outcome, unit: str = "") -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the comparison of plans."""
    per_trial = f"{unit or unit_name(outcome.cheapest.plan)} per trial"
    nodes = names_nodes(outcome)
    heading = ["plan", per_trial, *(["nodes"] if nodes else []), *COMPARED]
    rows = [
        [
            name,
            counts_text([stage.gpus_per_trial for stage in forecast.plan.stages]),
            *([counts_text([stage.nodes for stage in forecast.plan.stages])] if nodes else []),
            duration_interval(forecast.finish_s),
            money_interval(forecast.cost_usd),
            "-" if forecast.p_on_time is None else _percent(forecast.p_on_time),
        ]
        for name, forecast in side_by_side(outcome)
    ]
    return heading, rows


def _trade_off(outcome: Outcome, unit: str) -> str:
    heading, rows = comparison_rows(outcome, unit)
    return markdown_table(heading, rows, left=len(heading) - len(COMPARED))


def frontier_plot(outcome: Outcome) -> str:
    """The Pareto frontier and the named plans, drawn with characters."""
    named = side_by_side(outcome)
    marks = [_mark(forecast, "o") for forecast in outcome.frontier]
    marks += [_mark(forecast, SIGNS[name]) for name, forecast in named]
    legend = "   ".join(["o frontier", *(f"{SIGNS[name]} {name}" for name, _ in named)])
    return f"{tiny_plot(marks, x_text=format_duration, y_text=format_usd)}\n{legend}"


def _mark(forecast: Forecast, sign: str) -> PlotPoint:
    return PlotPoint(forecast.finish_s.mean, forecast.cost_usd.mean, sign)


def limits_text(limits: Limits) -> str:
    parts = []
    if limits.deadline_s is not None:
        parts.append(f"a deadline of {format_duration(limits.deadline_s)}")
    if limits.budget_usd is not None:
        parts.append(f"a budget of {format_usd(limits.budget_usd)}")
    return " and ".join(parts)


def money_interval(estimate: Estimate) -> str:
    low, high = (format_usd(end).removeprefix("$") for end in (estimate.p10, estimate.p90))
    return f"{format_usd(estimate.mean)} ({low}-{high})"


def duration_interval(estimate: Estimate) -> str:
    low, high = format_duration(estimate.p10), format_duration(estimate.p90)
    return f"{format_duration(estimate.mean)} ({low} - {high})"


def counts_text(counts: Sequence[int]) -> str:
    """The counts of successive stages: 4>4>2."""
    return ">".join(str(count) for count in counts)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
