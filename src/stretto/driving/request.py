"""What a user asks of a real run, read and checked before anything is started."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.units import counted, format_duration, format_usd
from stretto.driving.local_target import this_machine
from stretto.driving.target import LOCAL, RAY, OpenTarget, Target, TargetRequest, check_slot_count
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.inputs.study import UNKNOWN_PROFILE, Rented, StudyOutline, read_outline, tuning_on
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
from stretto.policies.base import Policy
from stretto.policies.registry import make_policy, rents_nodes, with_tuning
from stretto.pricing.instances import Offer
from stretto.runs.deadline import AtDeadline
from stretto.runs.folder import RUNS, RunFolder, Tables, run_folder
from stretto.runs.mend import mend
from stretto.runs.results import left_usd, measuring_usd
from stretto.runs.status import holding
from stretto.search.samplers import make_sampler
from stretto.wire.checkpoints import check_store


def find_target(request: TargetRequest) -> Target:
    """The target that was asked for; nothing is started or connected to."""
    if request.store:
        check_store(request.store)
    kind, _, address = request.on.partition(":")
    if request.on == LOCAL:
        return this_machine(request)
    if kind == RAY and (address or request.on == RAY):
        if request.slots is not None:
            check_slot_count(request.slots)
        from stretto.driving.ray_target import RayCluster  # noqa: PLC0415 - only needed with --on ray

        return RayCluster(request, address or None)
    raise InputError(f"{request.on!r} is no place to train.", remedy="Give local, ray or ray:ADDRESS.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRequest:
    """What `tune` and `run` have in common."""

    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    on: str = LOCAL
    """`local`, `ray` or `ray:ADDRESS`."""
    store: str = ""
    """A second place for checkpoints: a path or URL that fsspec knows."""
    slots: int | None = None
    name: str | None = None
    """None: the name of the study, or of the file of jobs."""
    runs: Path = RUNS
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False
    in_folder: bool = False
    """Each command runs in a folder of its own."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise InputError(f"{self.retries} retries are less than none.", remedy="Give 0 or more.")

    def target(self, machine: MachineSpec, rented: Rented | None = None, *, rents: bool = False) -> Target:
        """Where it trains."""
        return find_target(
            TargetRequest(
                on=self.on,
                slots=self.slots,
                store=self.store,
                runs=self.runs,
                machine=machine,
                rents=rents,
                rented=rented,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request whose errors were all found before anything is started."""

    target: Target
    folder: RunFolder

    @contextmanager
    def opened(
        self,
        *,
        yes: bool = False,
        confirm: Callable[[str], bool] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Iterator[OpenTarget]:
        """Mends a damaged journal, then holds the run's folder and the target while the block runs.

        Mending needs `yes`, or that `confirm` agrees; `tell` gets a line about it.
        """
        if mended := mend(self.folder, yes=yes, ask=confirm):
            tell(mended)
        with holding(self.folder, self.target.devices), self.target.opened() as target:
            yield target


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(RealRequest):
    """What `tune` is asked for; None: as the study's file says."""

    study: Path
    work: str | tuple[str, ...] | None = None
    """`train.py:train`, or the words of a command."""
    deadline_s: float | None = None
    """From now; infinity removes the deadline of the file."""
    deadline_as: str | None = None
    """As it was typed: the same text resumes a run, though it may mean another time by now."""
    budget_usd: float | None = None
    """Infinity removes the budget of the file."""
    policy: str = "hypersched"
    at_deadline: AtDeadline = AtDeadline.STOP
    checkpoints: bool = False
    """The command keeps checkpoints, whatever the file says."""
    asked_s: float = field(default_factory=time.monotonic, compare=False)
    """When it was asked for, by the monotonic clock; the deadline counts from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStudy(CheckedRequest):
    """A study to tune."""

    request: TuneRequest
    outline: StudyOutline
    work: RealWork
    policy: Policy
    """It does not know the measured speeds yet, see `with_tuning`."""
    limits: Limits
    """With the deadline from now."""

    @property
    def rents(self) -> bool:
        """Whether the policy requests the nodes that it needs."""
        return rents_nodes(self.policy)

    @property
    def elastic(self) -> bool:
        """Whether a paused or resized trial resumes where it was, rather than from its first epoch."""
        return isinstance(self.work, Entry) or self.outline.checkpoints or self.request.checkpoints

    @property
    def asked(self) -> Tables:
        """The settings that must be equal for the run to be resumed."""
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
        """What measuring its speed has cost."""
        return measuring_usd(self.folder, self.outline.tables)

    def left_s(self, now_s: float, spent: str = "") -> float | None:
        """Time until the deadline of a run that has not begun; None without a deadline.

        InputError if it has passed; `spent` says what used it up.
        """
        deadline_s, gone_s = self.limits.deadline_s, now_s - self.request.asked_s
        if deadline_s is None:
            return None
        if gone_s >= deadline_s:
            raise InputError(
                f"the deadline of {format_duration(deadline_s)} passed before a trial was started{spent}.",
                remedy="Give a later one; with a [profile] nothing has to be measured.",
            )
        return deadline_s - gone_s

    def policy_for(self, tuning: Tuning) -> Policy:
        """The policy, once the speeds are known."""
        return with_tuning(self.policy, tuning)

    def tuning(self, profile: Profile, offer: Offer, deadline_s: float | None) -> Tuning:
        """The study with these resources, and the budget that measuring has left."""
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
        """What a user should know of the target, and which parts of the file do not apply there."""
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
                "Nothing says that the command keeps checkpoints: each trial has one slot, and a paused one "
                "starts again at epoch 1. If the command saves on SIGTERM and resumes, add --checkpoints. "
                "Policies random and asha with --set asha.variant=stop never pause a trial."
            )


def _unused(command: CommandLine, outline: StudyOutline) -> Iterator[str]:
    """A command sees only the hyperparameters in its words."""
    written = " ".join(command.argv).replace("{{", "").replace("}}", "")
    names = [dimension.name for dimension in outline.space.dimensions]
    unused = [name for name in names if f"{{{name}}}" not in written]
    if unused:
        missing = ", ".join(f"{{{name}}}" for name in unused)
        yield f"The command does not have {missing}: trials do not differ in it."


def check_request(request: TuneRequest) -> CheckedStudy:
    """Reads the study and checks all that was asked for; InputError for anything wrong."""
    outline = read_outline(request.study)
    if not outline.space:
        raise InputError(
            "names no hyperparameters.",
            where=f"{request.study}: space",
            remedy="Add a section [space] with a line such as lr = { log = [1e-4, 1.0] }.",
        )
    work = _work_of(request, outline)
    limits = _limits(request, outline.limits)
    offer = slots_offer(1, outline.machine)
    unmeasured = tuning_on(offer, outline, UNKNOWN_PROFILE, limits, elastic=True)
    policy = make_policy(request.policy, options=request.options, tuning=unmeasured)
    target = request.target(outline.machine, outline.rented, rents=rents_nodes(policy))
    target.check(work)
    make_sampler(outline.sampler, outline.space, outline.study, request.seed)
    return CheckedStudy(
        request=request,
        outline=outline,
        work=work,
        target=target,
        policy=policy,
        limits=limits,
        folder=run_folder(outline.study.name if request.name is None else request.name, request.runs),
    )


def _work_of(request: TuneRequest, outline: StudyOutline) -> RealWork:
    work = chosen_work(request.work, outline, [dimension.name for dimension in outline.space.dimensions])
    if request.checkpoints and isinstance(work, Entry):
        raise InputError(
            "--checkpoints is about a command; a training function always has them.", remedy="Leave it out."
        )
    of_file = outline.in_folder and isinstance(work, CommandLine)
    return in_own_folder(work, asked=request.in_folder or of_file)


def chosen_work(
    asked: str | tuple[str, ...] | None, outline: StudyOutline | None, names: Sequence[str]
) -> RealWork:
    """What to train: as asked, else as the study's file says. `names` are the hyperparameters."""
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
