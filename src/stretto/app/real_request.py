"""What `tune` was asked for, read and checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.app.real_drive import AtDeadline
from stretto.app.real_substrate import count_slots
from stretto.app.real_work import Entry, RealWork, check_command, find_entry
from stretto.app.run_folder import RUNS, RunFolder, Tables, run_folder
from stretto.app.study_file import MOST_SLOTS, OWN_MACHINE, StudyOutline, read_outline
from stretto.core.errors import InputError
from stretto.planning.profile import Latency, Profile, Scaling
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.registry import make_policy
from stretto.search.samplers import make_sampler

UNKNOWN = Profile(latency=Latency(epoch_s=1.0), scaling=Scaling(((1, 1.0),)))
"""Stands for a profile that is still to be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What was asked for; None is what the study's file says."""

    study: Path
    work: str | tuple[str, ...] | None = None
    """`train.py:train`, or the words of a command."""
    deadline_s: float | None = None
    """From now; infinite lifts the deadline of the file."""
    deadline_as: str | None = None
    """As it was written: the same words resume a run, though they may mean another time by now."""
    budget_usd: float | None = None
    """Infinite lifts the budget of the file."""
    policy: str = "hypersched"
    options: Mapping[str, str] = field(default_factory=dict)
    slots: int | None = None
    name: str | None = None
    runs: Path = RUNS
    seed: int = 0
    at_deadline: AtDeadline = AtDeadline.STOP
    retries: int = 2
    tensorboard: bool = False
    checkpoints: bool = False
    """The command keeps them, whatever the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request in which everything that can be wrong beforehand is right."""

    request: TuneRequest
    outline: StudyOutline
    work: RealWork
    slots: int
    limits: Limits
    """With the deadline from now."""
    folder: RunFolder

    @property
    def elastic(self) -> bool:
        """Whether a trial that was paused or resized goes on from where it was."""
        return isinstance(self.work, Entry) or self.outline.checkpoints or self.request.checkpoints

    @property
    def asked(self) -> Tables:
        """What must be the same for the run to be resumed."""
        request, work = self.request, self.work
        return {
            "study": self.outline.tables,
            "entry": str(work) if isinstance(work, Entry) else None,
            "command": None if isinstance(work, Entry) else list(work.argv),
            "policy": request.policy,
            "options": dict(request.options),
            "deadline": request.deadline_as,
            "budget_usd": "none" if request.budget_usd == math.inf else request.budget_usd,
            "slots": self.slots,
            "seed": request.seed,
            "checkpoints": None if isinstance(work, Entry) else self.elastic,
        }

    def tuning(self, profile: Profile, deadline_s: float | None) -> Tuning:
        """The study on this machine."""
        limits = dataclasses.replace(self.limits, deadline_s=deadline_s)
        return machine_tuning(self.outline, profile, self.slots, limits, elastic=self.elastic)

    def notes(self) -> Iterator[str]:
        """What of the file plays no part here."""
        if self.outline.has_cluster:
            yield f"[cluster] is for plans and simulations; here are the {self.slots} slots of this machine."
        if not self.elastic:
            yield (
                "Nothing says that the command keeps checkpoints: each trial has one slot, and one that is "
                "paused begins anew. If it saves on SIGTERM and goes on from there, add --checkpoints. "
                "Policies random and asha with --set asha.variant=stop never pause a trial."
            )


def check_request(request: TuneRequest) -> Checked:
    """Read the study and check everything that was asked; InputError for anything wrong."""
    outline = read_outline(request.study)
    if not outline.space:
        raise InputError(
            "names no hyperparameters.",
            where=f"{request.study}: space",
            remedy="Add a section [space] with a line such as lr = { log = [1e-4, 1.0] }.",
        )
    if request.retries < 0:
        raise InputError(f"--retries {request.retries} is negative.", remedy="Give 0 or more.")
    work = chosen_work(request.work, outline, [dimension.name for dimension in outline.space.dimensions])
    if request.checkpoints and isinstance(work, Entry):
        raise InputError(
            "--checkpoints is about a command; a training function always has them.", remedy="Leave it out."
        )
    checked = Checked(
        request=request,
        outline=outline,
        work=work,
        slots=check_slots(request.slots if request.slots is not None else outline.machine.slots),
        limits=_limits(request, outline.limits),
        folder=run_folder(outline.study.name if request.name is None else request.name, request.runs),
    )
    make_policy(request.policy, options=request.options, tuning=checked.tuning(UNKNOWN, None))
    make_sampler(outline.sampler, outline.space, outline.study, request.seed)
    return checked


def check_slots(slots: int | None) -> int:
    """So many slots, or as many as the machine has."""
    if slots is None:
        return count_slots()
    if not 1 <= slots <= MOST_SLOTS:
        raise InputError(f"{slots} slots are out of range.", remedy=f"Give --slots from 1 to {MOST_SLOTS}.")
    return slots


def machine_tuning(
    outline: StudyOutline, profile: Profile, slots: int, limits: Limits, *, elastic: bool
) -> Tuning:
    """A study on so many slots of this machine, each of them a node to whoever rents.

    To trials that are not `elastic` more slots are of no use, as they would begin anew with them.
    """
    return Tuning(
        study=outline.study,
        profile=profile if elastic else dataclasses.replace(profile, scaling=UNKNOWN.scaling),
        instances=(outline.machine.instance,),
        max_nodes=slots,
        billing=OWN_MACHINE,
        limits=limits,
    )


def chosen_work(
    asked: str | tuple[str, ...] | None, outline: StudyOutline | None, names: Sequence[str]
) -> RealWork:
    """What to train: as asked, else as the study's file says; `names` are hyperparameters."""
    if isinstance(asked, str):
        return find_entry(asked, Path())
    if asked:
        return check_command(asked, names)
    if outline is not None and outline.entry is not None:
        return find_entry(outline.entry, outline.path.parent, where=f"{outline.path}: study.entry")
    if outline is not None and outline.command:
        return check_command(outline.command, names, where=f"{outline.path}: study.command")
    raise InputError(
        "nothing says what to train.",
        where="" if outline is None else str(outline.path),
        remedy="Add train.py:train, or -- and a command; or write entry in a study's [study].",
    )


def _limits(request: TuneRequest, limits: Limits) -> Limits:
    for name, value in (("deadline", request.deadline_s), ("budget", request.budget_usd)):
        if value is not None and not value > 0:
            raise InputError(f"a {name} of {value:g} is not above 0.", remedy="Give a larger one.")
    return dataclasses.replace(
        limits,
        deadline_s=_other(limits.deadline_s, request.deadline_s),
        budget_usd=_other(limits.budget_usd, request.budget_usd),
    )


def _other(of_file: float | None, asked: float | None) -> float | None:
    if asked is None:
        return of_file
    return asked if asked < math.inf else None
