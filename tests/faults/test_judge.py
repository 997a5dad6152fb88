"""The judge of faults catches, for every kind, an outcome that is not as it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fault_judge
from fault_command import value_after
from fault_commands import EPOCHS, JOBS, Ending, JobSeen, Outcome, Span
from fault_commands import Kind as CommandKind
from fault_inject import Kind
from fault_seen import End, Step
from fault_study import job_seed
from fault_train import EXAMPLES, POISON, SEEN, STEPS
from fault_verdict import problems_of
from stretto.runs.results import TrialResult

# Commands


def _job(number: int) -> JobSeen:
    told = tuple((epoch, value_after(epoch, number)) for epoch in range(1, EPOCHS + 1))
    spans = (Span(10 + number, 0.0, 1.0), Span(20 + number, 1.2, 5.0))
    return JobSeen(id=f"j{number}", seed=number, state="finished", told=told, spans=spans)


def _outcome(*faults: CommandKind) -> Outcome:
    refused = Ending(code=2, said="error: another process is working on this run.")
    return Outcome(
        way="run",
        faults=faults,
        ending=Ending(code=0, said="every job ended"),
        second_starts=(refused,),
        jobs=tuple(_job(number) for number in range(JOBS)),
    )


def _with_job(**changes: object) -> Outcome:
    whole = _outcome()
    return replace(whole, jobs=(replace(whole.jobs[0], **changes), *whole.jobs[1:]))  # type: ignore[arg-type]


_TOLD = _job(0).told
_GONE = Ending(code=1, said="error: runs/faults was moved or removed.")
COMMAND_MUTANTS = {
    CommandKind.WORKER: _with_job(told=(*_TOLD, _TOLD[-1])),
    CommandKind.STOP: _with_job(state="failed: given up"),
    CommandKind.RAISE: _with_job(told=_TOLD[:-1]),
    CommandKind.FLOOD: _with_job(told=((1, 0.5), *_TOLD[1:])),
    CommandKind.GUARD: _with_job(spans=(Span(1, 0.0, 3.0), Span(2, 1.0, 5.0))),
    CommandKind.STOP_GUARD: replace(_outcome(), left=(77,)),
    CommandKind.CONTROLLER: replace(_outcome(), unasked=("it ended with 1",)),
    CommandKind.STOP_CONTROLLER: replace(_outcome(), jobs=_outcome().jobs[1:]),
    CommandKind.JOURNAL_BYTES: replace(
        _outcome(CommandKind.JOURNAL_BYTES), jobs=_with_job(told=((2, 0.9),)).jobs
    ),
    CommandKind.TWO_STARTS: replace(_outcome(), second_starts=(Ending(code=0, said="finished"),)),
    CommandKind.EMFILE: replace(_outcome(), ending=Ending(code=1, said="j0 failed: Too many open files")),
    CommandKind.CLOCK: replace(_outcome(), ending=Ending(code=0, said="Traceback (most recent call last)")),
    CommandKind.FOLDER: replace(_outcome(CommandKind.FOLDER), ending=Ending(code=0, said="finished")),
}


def test_commands_that_came_to_their_end_are_no_problem() -> None:
    assert list(problems_of(_outcome())) == []
    assert list(problems_of(replace(_outcome(CommandKind.FOLDER), ending=_GONE))) == []
    lost = replace(_outcome(CommandKind.JOURNAL_BYTES), jobs=_with_job(told=_TOLD[2:]).jobs)
    assert list(problems_of(lost)) == []


@pytest.mark.parametrize("kind", CommandKind)
def test_the_judge_of_commands_catches(kind: CommandKind) -> None:
    assert list(problems_of(COMMAND_MUTANTS[kind])) != []


# Studies

LR, TRIAL, TRAINED = 0.01, "trial-000", 3
WRITTEN = ("t_s", "pid", "mark", "step", "epoch", "saw")
"""Of a step, by the training script."""


class Trial:
    """A trial of three epochs, by one worker, as its files have it."""

    def __init__(self, folder: Path) -> None:
        self.truth = fault_judge.undisturbed(LR, job_seed(TRIAL), TRAINED)
        self.steps = [
            Step(TRIAL, float(number), 7, "mark", number, number // STEPS, self._examples(number % STEPS))
            for number in range(TRAINED * STEPS)
        ]
        self.ends = [
            End(epoch, epoch * STEPS, self.truth[epoch - 1], (("mark", 0),))
            for epoch in range(1, TRAINED + 1)
        ]
        self.told: list[tuple[int, float | None]] = list(enumerate(self.truth, 1))
        self.state, self.checkpoint = "finished", "checkpoint"
        self.poison: int | None = None
        self._job = folder / "jobs" / TRIAL
        self._job.mkdir(parents=True)

    @staticmethod
    def _examples(step: int) -> tuple[int, ...]:
        return tuple(range(EXAMPLES))[step * 12 : (step + 1) * 12]

    def problems(self, *, lost: bool = False) -> list[str]:
        lines = [
            {
                "t_s": one.t_s,
                "pid": one.pid,
                "mark": one.mark,
                "step": one.step,
                "epoch": one.epoch,
                "saw": one.saw,
            }
            for one in self.steps
        ]
        ends = [
            {"ended": one.epoch, "step": one.step, "loss": one.loss, "stretches": one.stretches}
            for one in self.ends
        ]
        (self._job / SEEN).write_text("".join(json.dumps(line) + "\n" for line in (*lines, *ends)))
        log = self._job / "stdout.log"
        log.touch()
        if self.poison is not None:
            (self._job / POISON).write_text(str(self.poison))
        if self.checkpoint == "checkpoint":
            (self._job / "state.pt").touch()
        trial = TrialResult(
            id=TRIAL,
            config={"lr": LR},
            state=self.state,
            epochs=TRAINED,
            best_metric=self.truth[-1],
            retries=0,
            error="",
            log=log,
            checkpoint=self._job / "state.pt" if self.checkpoint else None,
        )
        return list(fault_judge.problems_of_trial(self._job, trial, self.told, TRAINED, lost=lost))


def _lose_an_example(trial: Trial) -> None:
    trial.steps[1] = replace(trial.steps[1], saw=trial.steps[1].saw[1:])


def _see_one_twice(trial: Trial) -> None:
    trial.steps[1] = replace(trial.steps[1], saw=(*trial.steps[1].saw, trial.steps[2].saw[0]))


def _take_a_step_twice(trial: Trial) -> None:
    trial.steps.append(replace(trial.steps[4], pid=8))


def _fail(trial: Trial) -> None:
    trial.state = "failed"


def _stay_unfinished(trial: Trial) -> None:
    trial.state = "interrupted"


def _end_elsewhere(trial: Trial) -> None:
    trial.ends[2] = replace(trial.ends[2], loss=trial.ends[2].loss * 1.001)


def _skip_an_epoch(trial: Trial) -> None:
    del trial.steps[STEPS : 2 * STEPS]


def _tell_wrongly(trial: Trial) -> None:
    trial.told[1] = (2, 0.5)


def _tell_twice(trial: Trial) -> None:
    trial.told.append(trial.told[-1])


def _tell_too_little(trial: Trial) -> None:
    del trial.told[1]


def _tell_nothing_of_nan(trial: Trial) -> None:
    trial.poison = STEPS


def _lose_the_checkpoint(trial: Trial) -> None:
    trial.checkpoint = ""


def _name_another_checkpoint(trial: Trial) -> None:
    trial.checkpoint = "not there"


STUDY_MUTANTS = {
    Kind.WORKER: _lose_an_example,
    Kind.NURSERY: _skip_an_epoch,
    Kind.CONTROLLER: _tell_twice,
    Kind.STOP: _take_a_step_twice,
    Kind.CHECKPOINT: _end_elsewhere,
    Kind.DISK: _lose_the_checkpoint,
    Kind.JOURNAL: _tell_too_little,
    Kind.RAISE: _fail,
    Kind.NAN: _tell_nothing_of_nan,
    Kind.META: _name_another_checkpoint,
    Kind.FLOOD: _tell_wrongly,
    Kind.STOP_CONTROLLER: _stay_unfinished,
    Kind.STOP_NURSERY: _see_one_twice,
    Kind.JOURNAL_BYTES: _tell_wrongly,
    Kind.TWO_STARTS: _take_a_step_twice,
    Kind.EMFILE: _fail,
    Kind.CLOCK: _tell_too_little,
}


def test_a_trial_that_came_to_its_end_is_no_problem(tmp_path: Path) -> None:
    assert Trial(tmp_path).problems() == []


def test_a_damaged_journal_may_lose_epochs_it_had(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    _tell_too_little(trial)
    assert trial.problems(lost=True) == []


@pytest.mark.parametrize("kind", Kind)
def test_the_judge_of_studies_catches(kind: Kind, tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    STUDY_MUTANTS[kind](trial)
    assert trial.problems(lost=kind is Kind.JOURNAL_BYTES) != []
