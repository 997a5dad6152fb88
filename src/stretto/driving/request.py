"""What `tune` was asked for, read and checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.units import counted, format_duration, format_usd
from stretto.driving.target import LOCAL, OpenTarget, Target, TargetRequest, find_target
from stretto.inputs.cluster import slots_offer
from stretto.inputs.study import UNKNOWN_PROFILE, StudyOutline, read_outline, tuning_on
from stretto.inputs.work import (
    CommandLine,
    Entry,
    RealWork,
    check_command,
    find_entry,
    folder_note,
    in_own_folder,
)
from stretto.planning.profile import Profile
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.registry import make_policy, rents_nodes
from stretto.pricing.instances import Offer
from stretto.runs.deadline import AtDeadline
from stretto.runs.folder import RUNS, RunFolder, Tables, run_folder
from stretto.runs.results import left_usd, measuring_usd
from stretto.search.samplers import make_sampler


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
    on: str = LOCAL
    """`local`, `ray` or `ray:ADDRESS`."""
    store: str = ""
    """Where checkpoints go besides the run's folder: a path or URL that fsspec knows."""
    slots: int | None = None
    name: str | None = None
    runs: Path = RUNS
    seed: int = 0
    at_deadline: AtDeadline = AtDeadline.STOP
    retries: int = 2
    tensorboard: bool = False
    checkpoints: bool = False
    """The command keeps them, whatever the file says."""
    in_folder: bool = False
    """Each trial's command runs in a folder of its own."""
    asked_s: float = field(default_factory=time.monotonic, compare=False)
    """When it was asked for, by the monotonic clock: the deadline counts from then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request in which everything that can be wrong beforehand is right."""

    request: TuneRequest
    outline: StudyOutline
    work: RealWork
    target: Target
    rents: bool
    """The policy wishes for the nodes it needs."""
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
            **self.target.asked,
            "seed": request.seed,
            "checkpoints": None if isinstance(work, Entry) else self.elastic,
            **({"in_folder": True} if isinstance(work, CommandLine) and work.in_folder else {}),
        }

    @property
    def measuring_usd(self) -> float:
        """What it has cost to measure its speed."""
        return measuring_usd(self.folder, self.outline.tables)

    def left_s(self, now_s: float, spent: str = "") -> float | None:
        """Until the deadline of a run that is not begun; None without one.

        InputError if it has passed; `spent` says on what.
        """
        deadline_s, gone_s = self.limits.deadline_s, now_s - self.request.asked_s
        if deadline_s is None:
            return None
        if gone_s >= deadline_s:
            raise InputError(
                f"the deadline of {format_duration(deadline_s)} passed before a trial was started{spent}.",
                remedy="Give a later one; with a [profile] nothing need be measured.",
            )
        return deadline_s - gone_s

    def tuning(self, profile: Profile, offer: Offer, deadline_s: float | None) -> Tuning:
        """The study on what there is, with what measuring its speed has left of the budget."""
        budget_usd = left_usd(self.limits.budget_usd, self.measuring_usd)
        if budget_usd is not None and budget_usd <= 0:
            raise InputError(
                f"the budget of ${self.limits.budget_usd:g} is spent: "
                f"measuring the training has cost {format_usd(self.measuring_usd)}.",
                remedy="Give a larger --budget; what was measured is kept.",
            )
        limits = dataclasses.replace(self.limits, deadline_s=deadline_s, budget_usd=budget_usd)
        return tuning_on(offer, self.outline, profile, limits, elastic=self.elastic)

    def notes(self, target: OpenTarget) -> Iterator[str]:
        """What a user should know of the target, and what of the file plays no part there."""
        yield from target.notes
        rented = self.outline.rented
        if self.outline.has_cluster and (rented is None or target.offer != rented.offer):
            slots = counted(target.offer.slots, "slot")
            yield f"[cluster] is for plans and simulations; the run has {slots}, of {target.words}."
        if not isinstance(self.work, Entry):
            yield from _unused(self.work, self.outline)
        if note := folder_note(self.work, self.folder.path):
            yield note
        if not self.elastic:
            yield (
                "Nothing says that the command keeps checkpoints: each trial has one slot, and one that is "
                "paused begins anew. If it saves on SIGTERM and goes on from there, add --checkpoints. "
                "Policies random and asha with --set asha.variant=stop never pause a trial."
            )


def _unused(command: CommandLine, outline: StudyOutline) -> Iterator[str]:
    """A command is told of hyperparameters by its words alone."""
    written = " ".join(command.argv).replace("{{", "").replace("}}", "")
    names = [dimension.name for dimension in outline.space.dimensions]
    unused = [name for name in names if f"{{{name}}}" not in written]
    if unused:
        missing = ", ".join(f"{{{name}}}" for name in unused)
        yield f"The command does not have {missing}: trials do not differ in that."


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
        raise InputError(f"{request.retries} retries are less than none.", remedy="Give 0 or more.")
    work = chosen_work(request.work, outline, [dimension.name for dimension in outline.space.dimensions])
    if request.checkpoints and isinstance(work, Entry):
        raise InputError(
            "--checkpoints is about a command; a training function always has them.", remedy="Leave it out."
        )
    of_file = outline.in_folder and isinstance(work, CommandLine)
    work = in_own_folder(work, asked=request.in_folder or of_file)
    limits = _limits(request, outline.limits)
    folder = run_folder(outline.study.name if request.name is None else request.name, request.runs)
    some = tuning_on(slots_offer(1, outline.machine), outline, UNKNOWN_PROFILE, limits, elastic=True)
    rents = rents_nodes(make_policy(request.policy, options=request.options, tuning=some))
    target = find_target(
        TargetRequest(
            on=request.on,
            slots=request.slots,
            store=request.store,
            runs=request.runs,
            machine=outline.machine,
            rents=rents,
            rented=outline.rented,
        )
    )
    target.check(work)
    checked = Checked(
        request=request, outline=outline, work=work, target=target, rents=rents, limits=limits, folder=folder
    )
    make_sampler(outline.sampler, outline.space, outline.study, request.seed)
    return checked


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
        where, folder = f"{outline.path}: study.command", outline.path.parent
        return check_command(outline.command, names, where=where, folder=folder)
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
