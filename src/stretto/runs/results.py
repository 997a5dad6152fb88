"""The result of a study that was trained for real, read from the files of its run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import InputError, with_log
from stretto.core.events import Event, JobNoted, NodeRefused, NoteKind, RunResumed
from stretto.core.job import Value
from stretto.core.units import HOUR_S
from stretto.inputs.profile import read_profile, spent_usd
from stretto.inputs.study import UNKNOWN_PROFILE, StudyOutline, belief_of, outline_of, tuning_on
from stretto.journal.folds.cost import CostMeter
from stretto.journal.folds.history import Gap, fed_to, history_of
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Limits, Tuning
from stretto.runs.deadline import Deadline, EndedBy, deadline_of, is_at_deadline
from stretto.runs.folder import PastLimits, RunFolder, RunSpec, Tables, unreadable
from stretto.runs.live_state import ENDED, NOT_STARTED, JobPhase, LiveJob, LiveState
from stretto.runs.metrics_files import never_numeric, reported_metrics
from stretto.runs.status import read_ending, shown_state, status_of
from stretto.wire.checkpoints import usable_checkpoints

NOTABLE_S = 2.0
"""The shortest time after the deadline that is reported as an overrun."""
AT_ONCE_S = 1.0
"""Two times no further apart than this are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of one trial."""

    id: str
    config: dict[str, Value]
    state: str
    epochs: int
    best_metric: float | None
    """None if it reported no number or diverged."""
    retries: int
    error: str
    """The traceback of a trial that failed."""
    log: Path
    checkpoint: Path | str | None
    """The checkpoint of its best epoch, in a store a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a study."""

    run: Path
    policy: str
    metric: str
    ended_by: str
    """jobs, deadline, budget, stalled or request. If the run is not over: "unfinished" while it is live,
    "stopped" or "interrupted" (killed)."""
    best_trial: str | None
    best_config: dict[str, Value] | None
    best_metric: float | None
    checkpoint: Path | str | None
    """The checkpoint of the best trial's best epoch."""
    files: Path | None = None
    """The folder that the best trial's command keeps files in, if there are any."""
    file_names: tuple[str, ...] = ()
    """The names of those files."""
    cost_usd: float
    finished_s: float
    """Seconds from the first start to the last event, or to the deadline that ended it if that is later."""
    gpu_hours: float
    predicted_finish_s: Estimate | None
    predicted_cost_usd: Estimate | None
    predicted_epochs: Estimate | None = None
    """Epochs of all trials together."""
    deadline: Deadline | None = None
    trials: tuple[TrialResult, ...]
    """The trials that were drawn, in order."""
    not_drawn: int = 0
    """The number of trials that were not drawn."""
    gaps: tuple[Gap, ...] = ()
    """Periods without a running controller."""
    past_limits: tuple[PastLimits, ...] = ()
    """Limits that were raised later; predictions made with them are not compared."""
    problem: str = ""
    """Why there is no best trial; empty if that is not known."""
    damaged: tuple[str, ...] = ()
    """A sentence for each damaged checkpoint or file."""
    known_until_s: float | None = None
    """The time of the last event before the damage, if the journal is damaged."""

    @property
    def succeeded(self) -> bool:
        """Whether the run is over and there is a model."""
        return self.best_metric is not None and self.is_over

    @property
    def failed(self) -> int:
        """The number of trials that failed, after all retries."""
        return sum(trial.state == JobPhase.FAILED for trial in self.trials)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to resume."""
        return self.ended_by in {str(ending) for ending in EndedBy if ending.is_final}

    @property
    def epochs(self) -> int:
        """Epochs of all trials together."""
        return sum(trial.epochs for trial in self.trials)

    @property
    def is_cut_as_foreseen(self) -> bool:
        """If the deadline was certain to cut the run short, epochs are compared instead of the finish."""
        expected, deadline = self.predicted_finish_s, self.deadline
        if self.ended_by != EndedBy.DEADLINE or expected is None or deadline is None:
            return False
        return expected.p10 >= deadline.after_s - AT_ONCE_S

    @property
    def overrun_s(self) -> float:
        """How long after the deadline the last trial ended; 0 if that took hardly any time."""
        if self.ended_by != EndedBy.DEADLINE or self.deadline is None:
            return 0.0
        late_s = self.finished_s - self.deadline.after_s
        return late_s if late_s >= NOTABLE_S else 0.0

    @property
    def trials_by_state(self) -> dict[str, int]:
        counts = Counter(trial.state for trial in self.trials)
        counts[NOT_STARTED] += self.not_drawn
        return dict(+counts)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON-serialisable dict."""
        plain = dataclasses.asdict(self)
        plain["trials_by_state"] = self.trials_by_state
        plain["epochs"] = self.epochs
        return json.loads(json.dumps(plain, default=str, allow_nan=False))  # type: ignore[no-any-return]


def run_outline(folder: RunFolder, spec: RunSpec) -> StudyOutline:
    """The study file of a run as it was when the run began, with the measured profile."""
    outline = outline_of(spec.asked["study"], Path(spec.file))
    if outline.profile is None and folder.profile.is_file():
        assert spec.offer is not None
        profile = belief_of(read_profile(folder.profile), outline, spec.offer)
        return dataclasses.replace(outline, profile=profile)
    return outline


def run_tuning(outline: StudyOutline, spec: RunSpec, measured_usd: float) -> Tuning:
    """What the policy knew at the start; `measured_usd` was spent on measuring before."""
    budget_usd = left_usd(spec.budget_usd, measured_usd)
    limits = Limits(deadline_s=spec.deadline_s, budget_usd=budget_usd, q=outline.limits.q)
    assert spec.offer is not None
    return tuning_on(spec.offer, outline, outline.profile or UNKNOWN_PROFILE, limits, elastic=spec.elastic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run is expected to take; None: not known."""

    finish_s: Estimate | None
    """Seconds from the start."""
    cost_usd: Estimate | None
    epochs: Estimate | None
    """Epochs of all trials together."""


def plan_tables(prediction: Prediction) -> Tables:
    """The content of plan.json, which the summary compares with what happened."""
    kept = (prediction.finish_s, prediction.cost_usd, prediction.epochs)
    finish_s, cost_usd, epochs = (None if one is None else dataclasses.asdict(one) for one in kept)
    return {"finish_s": finish_s, "cost_usd": cost_usd, "epochs": epochs}


def forget_plan(folder: RunFolder) -> None:
    """Set the prediction aside, as it was made for other limits: the summary does not compare it."""
    plan = folder.read("plan")
    if plan is not None:
        nothing = plan_tables(Prediction(finish_s=None, cost_usd=None, epochs=None))
        folder.write("plan", {**nothing, "for_past_limits": plan})


def read_prediction(folder: RunFolder) -> Prediction | None:
    """What was predicted before the run began; None if it has not begun."""
    plan = folder.read("plan")
    if plan is None:
        return None
    try:
        return Prediction(
            finish_s=_estimate(plan["finish_s"]),
            cost_usd=_estimate(plan["cost_usd"]),
            epochs=_estimate(plan["epochs"]),
        )
    except (KeyError, msgspec.ValidationError) as error:
        raise unreadable(folder.path / "plan.json") from error


def tune_result(folder: RunFolder, ended_by: EndedBy | None) -> TuneResult:
    """The result of a run so far."""
    spec = folder.begun_spec()
    outline = outline_of(spec.asked["study"], Path(spec.file))
    measured_usd, plan = 0.0, None
    damaged: list[str] = []
    with _noted(damaged):
        measured_usd = measuring_usd(folder, spec.asked["study"])
    with _noted(damaged):
        plan = read_prediction(folder)
    tuning = run_tuning(outline, spec, measured_usd)
    live, meter = (
        LiveState(tuning.study),
        CostMeter(tuning.instances, tuning.billing, outline.machine.usd_per_slot_hour),
    )
    history = history_of(fed_to(folder.events(), live, meter))
    best = live.best()
    status = status_of(folder, live.last) if ended_by is None else str(ended_by)
    deadline_s = tuning.limits.deadline_s if ended_by is EndedBy.DEADLINE else None
    known_until_s = folder.known_until_s()
    finished_s = live.now_s if deadline_s is None else _ended_s(folder.events(), deadline_s)
    damaged += [text for line in live.jobs.values() for text in damaged_checkpoints(folder, line)]
    return TuneResult(
        run=folder.path,
        policy=spec.policy,
        metric=tuning.study.metric,
        ended_by=str(status),
        best_trial=None if best is None else best.job.id,
        best_config=None if best is None else dict(best.job.config),
        best_metric=None if best is None else live.best_value(best),
        checkpoint=None if best is None else kept_checkpoint(folder, best),
        files=None if best is None else command_files(folder, best.job.id),
        file_names=() if best is None else _file_names(command_files(folder, best.job.id)),
        cost_usd=meter.cost_usd(max(live.now_s, finished_s)) + measured_usd,
        finished_s=finished_s,
        gpu_hours=sum(job.gpu_s for job in history.jobs.values()) / HOUR_S,
        predicted_finish_s=None if plan is None else plan.finish_s,
        predicted_cost_usd=None if plan is None else plan.cost_usd,
        predicted_epochs=None if plan is None else plan.epochs,
        deadline=deadline_of(spec),
        trials=tuple(_trial(folder, live, line, status) for line in live.jobs.values()),
        not_drawn=tuning.study.trials - len(live.jobs),
        gaps=tuple(
            dataclasses.replace(gap, at_deadline=is_at_deadline(gap.start_s, spec.past_limits))
            for gap in history.gaps_until(
                finished_s,
                dead=known_until_s is None and ended_by is not None and read_ending(folder) is None,
            )
        ),
        past_limits=spec.past_limits,
        damaged=tuple(damaged),
        known_until_s=known_until_s,
        problem="" if best is not None else _problem(folder, tuning.study.metric, list(live.jobs.values())),
    )


@contextlib.contextmanager
def _noted(damaged: list[str]) -> Iterator[None]:
    """Note a damaged file instead of failing."""
    try:
        yield
    except InputError as error:
        damaged.append(str(error))


def _ended_s(events: Iterable[Event], deadline_s: float) -> float:
    """When the deadline ended the run. A later resume, which only released its nodes, does not count."""
    driven = takewhile(lambda one: not isinstance(one, RunResumed) or one.t_s <= deadline_s, events)
    return max(deadline_s, max((event.t_s for event in driven), default=0.0))


def _trial(folder: RunFolder, live: LiveState, line: LiveJob, status: str) -> TrialResult:
    return TrialResult(
        id=line.job.id,
        config=dict(line.job.config),
        state=shown_state(line.shown_phase, status),
        epochs=line.epoch,
        best_metric=live.best_value(line),
        retries=line.retries,
        error=line.error if line.phase is JobPhase.FAILED else "",
        log=folder.log(line.job.id),
        checkpoint=kept_checkpoint(folder, line),
    )


def kept_checkpoint(folder: RunFolder, line: LiveJob) -> Path | str | None:
    """A job's best checkpoint; the newest if the best is damaged.

    The folder comes first: a worker may have been killed after it saved, before it reported that.
    """
    if "://" not in (line.best_checkpoint or line.checkpoint):
        usable = usable_checkpoints(folder.checkpoints(line.job.id))
        if place := usable.best or usable.newest:
            return place.absolute()
        if usable.damaged:
            return None
    return checkpoint_at(line.best_checkpoint, line.checkpoint)


def damaged_checkpoints(folder: RunFolder, line: LiveJob) -> Iterator[str]:
    """A sentence for each damaged checkpoint of a job."""
    usable = usable_checkpoints(folder.checkpoints(line.job.id))
    used = usable.best or usable.newest
    instead = f"{used.parent.name} is used instead" if used is not None else "there is no other"
    for text in usable.damaged:
        yield f"checkpoint {text}; {instead}."


def checkpoint_at(*places: str) -> Path | str | None:
    """The first of these places that is a URL or an existing file."""
    for place in filter(None, places):
        if "://" in place:
            return place
        if Path(place).is_file():
            return Path(place)
    return None


def command_files(folder: RunFolder, job_id: str) -> Path | None:
    """The folder that a job's command keeps files in; None if it is empty."""
    files = folder.files(job_id)
    with contextlib.suppress(OSError):
        return files.absolute() if any(files.iterdir()) else None
    return None


def _file_names(files: Path | None) -> tuple[str, ...]:
    if files is None:
        return ()
    with contextlib.suppress(OSError):
        return tuple(sorted(path.name for path in files.iterdir()))
    return ()


def best_tables(result: TuneResult) -> Tables:
    """What result.json says about the best trial."""
    if result.best_trial is None:
        return {}
    best = {
        "trial": result.best_trial,
        "config": result.best_config,
        "metric": result.metric,
        "value": result.best_metric,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "files": None if result.files is None else str(result.files),
        "file_names": list(result.file_names),
    }
    return {"best": best}


def _estimate(table: object) -> Estimate | None:
    return None if table is None else msgspec.convert(table, Estimate)


def _problem(folder: RunFolder, metric: str, lines: Sequence[LiveJob]) -> str:
    """Why no trial has a best value."""
    failed = [line for line in lines if line.phase is JobPhase.FAILED]
    if failed and len(failed) == sum(line.started_s is not None for line in lines):
        text = f"every trial that was started failed; the first: {failed[0].error.strip()}"
        return with_log(text, failed[0].log)
    reported = [line for line in lines if line.epoch]
    if not reported:
        return f"no trial completed an epoch{_without_nodes(folder, lines) or _not_begun(folder)}."
    shown = reported_metrics(folder)
    if metric not in shown.names:
        return f"{_not_reported(metric, shown.names)} {_name_it(folder, metric)}"
    if any(line.phase in ENDED for line in reported):
        return f"every value of {metric!r} is not a number: all trials diverged."
    return f"no trial has shown {metric!r} yet."


def _without_nodes(folder: RunFolder, lines: Sequence[LiveJob]) -> str:
    """Why no trial was started, if no node came; else empty."""
    refused = [event for event in folder.events() if isinstance(event, NodeRefused)]
    if not refused or any(line.started_s is not None for line in lines):
        return ""
    return f": no {refused[-1].instance} came ({refused[-1].why})"


def _not_begun(folder: RunFolder) -> str:
    """What the trials were doing when the run stopped, if none trained yet."""
    notes = [event for event in folder.events() if isinstance(event, JobNoted)]
    if notes and notes[-1].about is NoteKind.NOT_BEGUN:
        return f": {notes[-1].text}"
    return ": the command has printed no epoch" if folder.begun_spec().asked.get("command") else ""


def check_reported(folder: RunFolder, metric: str, *, epochs: int, patience: int) -> bool:
    """Whether the training code has reported the study's metric.

    InputError if it reports only other metrics, values that are not numbers, or nothing for `patience`
    epochs. A command may print its metrics in several lines, so it has time until its next epoch. `epochs` is
    the most epochs that a trial has reported.
    """
    shown = reported_metrics(folder)
    if metric in shown.names:
        if (text := never_numeric(folder, metric)) is not None:
            raise InputError(
                f"{metric} is reported as {text}, which is not a number.",
                where="study.metric",
                remedy=_name_it(folder, metric),
            )
        return True
    ended = max(epochs, shown.epochs - 1)
    if (ended and shown.names) or max(epochs, shown.epochs) >= patience:
        problem, remedy = _not_reported(metric, shown.names), _name_it(folder, metric)
        raise InputError(problem, where="study.metric", remedy=remedy)
    return False


def _not_reported(metric: str, names: Sequence[str]) -> str:
    reported = f"what is reported is {', '.join(names)}" if names else "nothing is"
    return f"{metric!r} is never reported; {reported}."


def _name_it(folder: RunFolder, metric: str) -> str:
    """The remedy. While the code is probed we do not know whether it is a function or a command."""
    spec = folder.spec()
    function, command = f"Call run.report({metric}=...)", f'Print {{"epoch": 1, "{metric}": ...}}'
    if spec is None:
        how = f"{function}, or from a command {command[0].lower()}{command[1:]},"
    else:
        how = function if spec.asked.get("command") is None else command
    return f"{how} once per epoch, or name another metric in [study]."


def measuring_usd(folder: RunFolder, study: Tables) -> float:
    """What measuring the study's speed has cost; nothing if its file has a [profile]."""
    return 0.0 if "profile" in study else spent_usd(folder.profile)


def left_usd(budget_usd: float | None, spent_usd: float) -> float | None:
    """What is left of a budget; None is no limit."""
    return None if budget_usd is None else budget_usd - spent_usd
