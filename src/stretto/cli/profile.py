"""`stretto profile`: probes a training script and writes the file that plans read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.flags import AsJson, On, Seed, Slots, Store, check_place, work_of
from stretto.cli.live import measuring
from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.core.seeds import child_rng
from stretto.core.units import counted, format_duration, parse_duration_s
from stretto.driving.request import chosen_work, find_target
from stretto.driving.target import LOCAL, TargetRequest
from stretto.inputs.cluster import MachineSpec
from stretto.inputs.profile import FitError, MeasuredProfile, believe, fit_errors, profile_json, write_profile
from stretto.inputs.study import StudyOutline, read_outline
from stretto.inputs.work import Entry, RealWork
from stretto.profiling.probe import ANY_STUDY, probe, slots_of
from stretto.profiling.probe_data import LOADING_S, ProbeTime, probe_time
from stretto.report.text import markdown_table
from stretto.runs.folder import RUNS
from stretto.search.space import Config
from stretto.system.plain_json import UnreadableError, parse_json

MOST_CONFIGS = 8
"""The most configurations of a study to try: enough to see how much they differ."""
BEGINS_S = 60.0
"""The least wait for a first sign of training, however short the time to measure is."""
FAILED = ".failed.log"
"""The suffix of the log of a failed training, beside the profile."""


def profile(
    work: Annotated[
        list[str] | None,
        typer.Argument(help="FILE:FUNCTION, or -- and a command.", show_default=False),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A hyperparameter; repeat for more.", show_default=False),
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Draw hyperparameters from this study.", show_default=False)
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Most time to measure, and to wait until it trains (at least a minute).",
            show_default="90s, but up to 10m until a first epoch has ended",
        ),
    ] = None,
    on: On = LOCAL,
    slots: Slots = None,
    store: Store = "",
    output: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    r"""Measure how fast a training script is: epochs and steps by workers, starts, resizes.

    Name the file in a study, [bold]\[profile] file = "profile.json"[/bold], and plans use it.
    One worker is timed alone first; then all slots are kept busy, as a study keeps them.

    Example: [bold]stretto profile train.py:train --config lr=0.1 --time 60s[/bold]
    Example: [bold]stretto profile --study study.toml[/bold]
    """
    limit = _limit(time)
    check_place(output, option="--output", example="profile.json")
    outline = None if study is None else read_outline(study)
    chosen = _configs(config, outline, seed)
    machine = MachineSpec() if outline is None else outline.machine
    if store and on == LOCAL:
        raise InputError(
            f"--store {store}: a probe on this machine keeps no checkpoints.",
            remedy="Leave it out; it is for the nodes of a Ray cluster that share no folder.",
        )
    asked = find_target(TargetRequest(on=on, slots=slots, store=store, runs=RUNS, machine=machine))
    trained = chosen_work(work_of(work or []), outline, [name for name, _ in chosen[0]])
    asked.check(trained)
    with measuring() as show, asked.opened() as target:
        measured = probe(
            trained,
            chosen,
            slots=slots_of(target.nodes),
            target=target,
            time_s=limit.usual_s,
            first_epoch_s=limit.first_epoch_s,
            loading_s=limit.loading_s,
            max_workers=_max_workers(trained, outline),
            study=ANY_STUDY if outline is None else outline.study,
            seed=seed,
            on_progress=show,
            log=output.with_suffix(FAILED),
        )
    write_profile(output, measured)
    if as_json:
        print(json.dumps(profile_json(measured), indent=2, allow_nan=False))
    else:
        print(profile_text(measured), end="")
    print(f"profile: {output}", file=sys.stderr)


def profile_text(measured: MeasuredProfile) -> str:
    """The measurements, how well the model fits them, and what was not measured."""
    slots = counted(measured.slots, "slot")
    lines = [f"{measured.what}: {slots}, probed for {format_duration(measured.measured_s)}", ""]
    lines += [_epochs_table(measured), ""]
    errors = fit_errors(measured.speeds)
    if errors:
        lines += [_steps_table(errors), ""]
    if errors and not _is_judged(errors):
        lines.append("Error of the step-time model: too few points to judge.")
    lines += _sentences(measured)
    return "\n".join(lines) + "\n"


def _epochs_table(measured: MeasuredProfile) -> str:
    rows = []
    for workers in measured.worker_counts:
        times_s = measured.epoch_times_s(workers)
        speedup = measured.speedup(workers)
        rows.append(
            [
                str(workers),
                str(len(times_s)),
                f"{sum(times_s) / len(times_s):.3g} s" if times_s else "not measured",
                f"{min(times_s):.3g}-{max(times_s):.3g} s" if times_s else "",
                "not measured" if speedup is None else f"{speedup:.2f}x",
            ]
        )
    return markdown_table(("workers", "epochs timed", "epoch", "from-to", "speed"), rows)


def _is_judged(errors: Sequence[FitError]) -> bool:
    """Whether the model was tested on left-out points: any model fits few points."""
    return any(one.left_out is not None for one in errors)


def _steps_table(errors: Sequence[FitError]) -> str:
    heading = ["workers", "batch", "step ms", "examples/s", "model ms"]
    if _is_judged(errors):
        heading += ["error", "error if left out"]
    rows = []
    for one in sorted(errors, key=lambda error: (error.sample.workers, error.sample.atomic)):
        sample = one.sample
        batch = sample.workers * sample.atomic
        rows.append(
            [
                str(sample.workers),
                str(batch),
                f"{1e3 * sample.step_s:.2f}",
                f"{batch / sample.step_s:,.0f}",
                f"{1e3 * one.fitted_s:.2f}",
                f"{one.residual:+.1%}",
                "too few points" if one.left_out is None else f"{one.left_out:+.1%}",
            ][: len(heading)]
        )
    return markdown_table(heading, rows)


def _epoch_sentence(measured: MeasuredProfile) -> str:
    """The length of an epoch, with the spread between configurations and between epochs."""
    latency, configs = believe(measured).latency, {one.config for one in measured.epochs}
    parts = [f"An epoch with one worker: {latency.epoch_s:.3g} s"]
    if len(configs) > 1:
        parts.append(f"{latency.trial_sd:.0%} between configurations")
    if len(measured.epochs) > len(configs):
        parts.append(f"{latency.epoch_sd:.0%} from epoch to epoch")
    return f"{', '.join(parts)}."


def _sentences(measured: MeasuredProfile) -> list[str]:
    lines = [_epoch_sentence(measured)] if measured.epochs else []
    starts = [f"A start costs {measured.start_s:.3g} s"]
    if measured.warm_up_s is not None:
        starts.append(f"the first of all, {measured.warm_up_s:.3g} s")
    if measured.resizes_s:
        starts.append(f"a resize, {max(measured.resizes_s):.3g} s at most")
    lines.append("; ".join(starts) + ".")
    if measured.only_lone:
        lines.append("Measured while the other slots were idle; if they are busy, an epoch may take longer.")
    elif measured.lone_starts_s and (alone := measured.epoch_times_s(1, lone=True)):
        lines.append(
            f"While the other slots are idle, an epoch takes {measured.lone_epoch:.2f} times as long "
            f"({sum(alone) / len(alone):.3g} s), and a start costs {measured.lone_start_s:.3g} s."
        )
    for workers, speed in measured.scaling.points[1:]:
        if speed <= 1.0:
            lines.append(f"{workers} workers are {speed:.2f}x as fast as one: more workers do not pay here.")
    if measured.failure:
        lines.append(measured.failure)
    if measured.not_measured:
        lines.append(f"Not measured, so plans leave room for it: {'; '.join(measured.not_measured)}.")
    return lines


def _limit(time: str | None) -> ProbeTime:
    if time is None:
        return probe_time(None)
    time_s = parse_duration_s(time, where="--time")
    return ProbeTime(usual_s=time_s, first_epoch_s=time_s, loading_s=min(max(time_s, BEGINS_S), LOADING_S))


def _max_workers(work: RealWork, outline: StudyOutline | None) -> int | None:
    """1 for a command whose trials have one slot each; None: all slots."""
    rigid = outline is not None and not isinstance(work, Entry) and not outline.checkpoints
    return 1 if rigid else None


def _configs(texts: Sequence[str] | None, outline: StudyOutline | None, seed: int) -> list[Config]:
    if texts and outline is not None:
        raise InputError(
            "--config cannot be combined with --study, which defines it.", remedy="Keep one of them."
        )
    if outline is None:
        return [tuple(_assigned(text) for text in texts or ())]
    rng = child_rng(seed, "probe")
    return [outline.space.sample(rng) for _ in range(min(MOST_CONFIGS, outline.study.trials))]


def _assigned(text: str) -> tuple[str, Value]:
    """The name and value of `lr=0.1`; a value that is not JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"--config {text!r} assigns nothing.", remedy="Write NAME=VALUE, such as lr=0.1.")
    try:
        parsed = parse_json(value, finite=False)
    except UnreadableError:
        return name.strip(), value
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise InputError(f"--config {text!r} is not finite.", remedy="Give a number such as 0.1.")
    return name.strip(), parsed if isinstance(parsed, bool | int | float | str) else value
