"""Whether a disturbed study came to what an undisturbed one comes to."""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fault_inject import Disturbed, Kind
from fault_seen import End, Step, ends_of, steps_of
from fault_study import asked, job_seed
from fault_train import EXAMPLES, POISON, STEPS, Place, follow
from launching import finished
from live_processes import pids_with
from stretto.core.events import JobReported
from stretto.runs.folder import RunFolder
from stretto.runs.results import TrialResult
from stretto.torch import Run
from stretto.torch.checkpoint import CheckpointStore
from stretto.wire.checkpoints import whole_checkpoints

TOLERANCE = 1e-9
"""Of losses computed with 64 bits in another order; a lost step or momentum shows at 1e-3."""
NO_CHECKPOINT = ("A checkpoint could not be saved", "cannot be used: ")
"""Said when the disk is full, and of one that is damaged; a trial that lives no longer than that has none."""

Steps = dict[tuple[str, int], list[Step]]
"""What the workers did, by mark and number."""


@functools.cache
def undisturbed(lr: float, seed: int, epochs: int) -> tuple[float, ...]:
    """The loss after each epoch of a trial that runs alone from beginning to end."""
    with contextlib.redirect_stdout(io.StringIO()):
        return tuple(follow({"lr": lr}, Run(seed=seed), Place(None), epochs))


def log_of(trial: TrialResult) -> str:
    return trial.log.read_text(encoding="utf-8")


def problems(study: Disturbed, *, trials: int, epochs: int) -> Iterator[str]:
    """Everything that is not as it should be after a study's end."""
    left = pids_with(str(study.folder))
    if left:
        yield f"processes are left behind: {left}"
    result = finished(asked(study.folder, study.policy, study.seed))
    if result is None:
        yield "it is not over"
        return
    if result.ended_by != "jobs" or result.best_metric is None:
        yield f"the study ended by {result.ended_by} with {result.best_metric}: {result.problem}"
    if len(result.trials) != trials:
        yield f"{len(result.trials)} trials instead of {trials}"
    run = RunFolder(study.run)
    told: dict[str, list[tuple[int, float | None]]] = {trial.id: [] for trial in result.trials}
    for event in run.events():
        if isinstance(event, JobReported):
            told[event.job_id] += [(one.epoch, one.value) for one in event.results]
    lost = any(fault.kind is Kind.JOURNAL_BYTES for fault in study.faults)
    for trial in result.trials:
        job = run.path / "jobs" / trial.id
        for problem in problems_of_trial(job, trial, told[trial.id], epochs, lost=lost):
            yield f"{trial.id}: {problem}"


def problems_of_trial(
    job: Path, trial: TrialResult, told: list[tuple[int, float | None]], epochs: int, *, lost: bool = False
) -> Iterator[str]:
    """Where the journal was damaged, some epochs that it had may be `lost`."""
    if trial.state not in {"finished", "stopped"}:
        yield f"it is {trial.state}: {trial.error}"
    numbers = [epoch for epoch, _ in told]
    if numbers != sorted(set(numbers)) or (not lost and numbers != list(range(1, len(told) + 1))):
        yield f"its epochs were told as {numbers}"
    lr = trial.config["lr"]
    assert isinstance(lr, float)
    truth = undisturbed(lr, job_seed(trial.id), epochs)
    poisoned = int((job / POISON).read_text()) // STEPS if (job / POISON).exists() else epochs
    steps: Steps = {}
    for step in steps_of(job.parents[1], trial.id):
        steps.setdefault((step.mark, step.step), []).append(step)
    for end in ends_of(job):
        yield from problems_of_lineage(end, steps)
        if not _equal(end.loss, truth, end.epoch, poisoned):
            yield f"loss {end.loss} after epoch {end.epoch}, undisturbed {truth[end.epoch - 1]}"
    for epoch, value in told:
        if not _equal(math.nan if value is None else value, truth, epoch, poisoned):
            yield f"loss {value} was told of epoch {epoch}, undisturbed {truth[epoch - 1]}"
    if trial.checkpoint is not None and not Path(trial.checkpoint).is_file():
        yield f"its best checkpoint is not there: {trial.checkpoint}"
    diverged_at_once = bool(told) and all(value is None for _, value in told)
    excused = diverged_at_once or any(said in log_of(trial) for said in NO_CHECKPOINT)
    if trial.checkpoint is None and (whole_checkpoints(job / "checkpoints") or not excused):
        yield "no checkpoint was told of, though one is there or nothing kept it from being saved"
    yield from _problems_of_checkpoint(job, steps)


def _equal(loss: float, truth: tuple[float, ...], epoch: int, poisoned: int) -> bool:
    if epoch > poisoned:
        return math.isnan(loss)
    return math.isclose(loss, truth[epoch - 1], rel_tol=TOLERANCE)


def problems_of_lineage(end: End, steps: Steps) -> Iterator[str]:
    """The steps that led to a state must have seen every example of every epoch once."""
    seen = _seen(end.stretches, end.step, steps)
    for epoch in range(end.epoch):
        if seen.get(epoch) != Counter(range(EXAMPLES)):
            yield f"at the end of epoch {end.epoch} it has seen of epoch {epoch + 1}: {_odd(seen.get(epoch))}"


def _problems_of_checkpoint(job: Path, steps: Steps) -> Iterator[str]:
    """The state it would go on with fits what it saw."""
    noted: list[str] = []
    loaded = CheckpointStore(job / "checkpoints", keep=2, note=noted.append).load()
    if loaded is None:
        return
    (ledger,) = [thing for thing in loaded.state["things"] if "stretches" in thing]
    stretches = tuple((mark, step) for mark, step in ledger["stretches"])
    seen = _seen(stretches, ledger["step"], steps)
    doubled = {epoch: _odd(saw) for epoch, saw in seen.items() if max(saw.values()) > 1}
    done = sum(saw.total() for saw in seen.values())
    if doubled or round(loaded.progress * EXAMPLES) != done:
        yield f"its checkpoint stands for {loaded.progress * EXAMPLES:g} examples and saw {done}: {doubled}"


def _seen(stretches: tuple[tuple[str, int], ...], until: int, steps: Steps) -> dict[int, Counter[int]]:
    """What the steps of these stretches saw, by epoch."""
    seen: dict[int, Counter[int]] = {}
    ends = [first for _, first in stretches[1:]] + [until]
    for (mark, first), end in zip(stretches, ends, strict=True):
        for number in range(first, end):
            for step in steps.get((mark, number), []):
                seen.setdefault(step.epoch, Counter()).update(step.saw)
    return seen


def _odd(saw: Counter[int] | None) -> str:
    saw = saw or Counter()
    missing = sorted(set(range(EXAMPLES)) - set(saw))
    twice = sorted(example for example, times in saw.items() if times > 1)
    return f"{len(missing)} examples not, {missing[:5]}; {len(twice)} more than once, {twice[:5]}"
