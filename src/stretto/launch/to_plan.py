"""The study that `plan` plans: for the cluster of its file, or for the target where `tune` would train it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.units import counted
from stretto.driving.local_target import check_slots
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.target import LOCAL, OpenTarget
from stretto.inputs.profile import read_profile
from stretto.inputs.study import (
    BUILT_IN_CURVES,
    StudyFile,
    StudyOutline,
    WorldSpec,
    read_outline,
    study_of,
    tuning_on,
)
from stretto.launch.expect import with_own
from stretto.planning.planner import LimitRule, Planner
from stretto.planning.tuning import Tuning
from stretto.profiling.launched_node import ELSEWHERE
from stretto.profiling.origin import is_of, node_to_launch
from stretto.profiling.probe_data import OnProgress
from stretto.profiling.speeds import speeds_of
from stretto.simulation.plan import Planned, plan, plan_to_begin
from stretto.simulation.studies import with_limits

ONE_SLOT_EACH = (
    "Nothing says that the command keeps checkpoints, so each trial has one slot. If it saves on SIGTERM and "
    "resumes, write checkpoints = true in [study]."
)


@dataclass(frozen=True, slots=True)
class PlannableStudy:
    """A study that can be planned, with notes on its speeds."""

    file: StudyFile
    """With the limits that were asked for."""
    notes: tuple[str, ...] = ()
    held: tuple[Node, ...] | None = None
    """The nodes that a run would have from its start; None: the plan is for the file's [cluster]."""

    def plan(self, *, deadline_s: float | None, planner: Planner, rule: LimitRule, seed: int) -> Planned:
        """The plan, as `tune` would make it if there is a target. `deadline_s` None keeps the deadline."""
        file = with_limits(self.file, deadline_s=deadline_s)
        if self.held is None:
            return plan(file, planner=planner, rule=rule, seed=seed)
        return plan_to_begin(file.tuning, self.held, planner=planner, rule=rule, seed=seed, instead=True)


def study_to_plan(
    request: TuneRequest,
    on_progress: OnProgress = lambda _: None,
) -> PlannableStudy:
    """The study to plan. Without a profile its training is probed; `tune` finds that profile later.

    It is planned for the target of the request if there is no [cluster], or if the target launches that.
    """
    outline = read_outline(request.study)
    if outline.profile is not None:
        return _known(request, outline)
    if request.work is None and outline.entry is None and not outline.command:
        raise InputError(
            "profile is missing, and nothing says what to measure.",
            where=f"{outline.path}: profile",
            remedy="Add train.py:train after the file and it is measured; or give a [profile].",
        )
    checked = check_request(request)
    with checked.target.opened() as target:
        _check_needs_no_node(checked, target)
        speeds = speeds_of(checked, target, target.offer, on_progress)
        _check_same(checked, target)
    notes = (speeds.source, _planned_for(outline, target))
    if _is_elsewhere(outline, target):
        tables = {**outline.tables, "profile": {"file": str(checked.folder.profile.absolute())}}
        file = study_of(tables, outline.path)
        return PlannableStudy(_within(file, request), notes)
    tuning = checked.tuning(speeds.profile, target.offer, checked.limits.deadline_s)
    return _on_target(outline, tuning, target, notes, elastic=checked.elastic)


def _known(request: TuneRequest, outline: StudyOutline) -> PlannableStudy:
    """A study with a profile: for a Ray cluster, or as its file says."""
    _check_nothing_is_measured(request, outline)
    if request.on == LOCAL:
        return PlannableStudy(_within(study_of(_with_slots(outline, request.slots), outline.path), request))
    wanted = request.target(outline.machine, outline.rented, rents=True)
    elastic = outline.checkpoints or not outline.command
    with wanted.opened() as target:
        assert outline.profile is not None
        tuning = tuning_on(target.offer, outline, outline.profile, outline.limits, elastic=elastic)
    notes = (_planned_for(outline, target),)
    found = _on_target(outline, tuning, target, notes, elastic=elastic)
    return dataclasses.replace(found, file=_within(found.file, request))


def _with_slots(outline: StudyOutline, slots: int | None) -> dict[str, Any]:
    """The tables of the file, with this number of slots in [machine] unless None."""
    if slots is None:
        return outline.tables
    machine = outline.tables.get("machine", {})
    return {**outline.tables, "machine": {**machine, "slots": check_slots(slots)}}


def _on_target(
    outline: StudyOutline, tuning: Tuning, target: OpenTarget, notes: tuple[str, ...], *, elastic: bool
) -> PlannableStudy:
    """The study with the resources of the target, as `tune` would plan it."""
    file = StudyFile(
        tuning=with_own(tuning, target.held, outline.machine),
        space=outline.space,
        sampler=outline.sampler,
        fixed_nodes=tuning.max_nodes,
        world=WorldSpec(curves=BUILT_IN_CURVES, profile=tuning.profile),
        path=outline.path,
    )
    warned = () if elastic else (ONE_SLOT_EACH,)
    return PlannableStudy(file, (*notes, *target.notes, *warned), held=target.held)


def _within(file: StudyFile, request: TuneRequest) -> StudyFile:
    return with_limits(file, deadline_s=request.deadline_s, budget_usd=request.budget_usd)


def _is_elsewhere(outline: StudyOutline, target: OpenTarget) -> bool:
    """Whether its [cluster] differs from what `tune` would have there."""
    return outline.has_cluster and (outline.rented is None or target.offer != outline.rented.offer)


def _check_nothing_is_measured(request: TuneRequest, outline: StudyOutline) -> None:
    """InputError for arguments about measuring: a study with a profile is not measured."""
    cluster_is_meant = outline.has_cluster and (request.on == LOCAL or outline.rented is None)
    here = "as the plan is for [cluster]"
    slots_are_given = request.slots is not None and cluster_is_meant
    given = (
        ("the training", request.work is not None, "it says what to measure"),
        (f"--on {request.on}", request.on != LOCAL and cluster_is_meant, f"it says where to measure, {here}"),
        (f"--slots {request.slots}", slots_are_given, f"it says on how many slots to measure, {here}"),
        (f"--store {request.store}", bool(request.store), "it is about measuring"),
        (f"--name {request.name}", request.name is not None, "it says for which run to measure"),
    )
    for what, is_given, why in given:
        if is_given:
            raise InputError(
                f"{what}: {why}, and there is nothing to measure: the file has a [profile].",
                where=str(outline.path),
                remedy="Leave it out, or take the [profile] out of the file.",
            )


def _check_needs_no_node(checked: CheckedStudy, target: OpenTarget) -> None:
    """InputError if a node had to be launched: a plan spends nothing."""
    needed = node_to_launch(checked, target)
    if needed is not None:
        raise InputError(
            f"nothing says how fast the training is, and {target.words} has no node to measure on.",
            where=str(checked.outline.path),
            remedy=f"`stretto tune` launches a {needed.name} for that, at ${needed.usd_per_hour:g} an hour, "
            f"and shows the plan. {ELSEWHERE}",
        )


def _check_same(checked: CheckedStudy, target: OpenTarget) -> None:
    """InputError if the profile of a begun run is of another training that had the same name."""
    measured = read_profile(checked.folder.profile)
    if not is_of(measured, checked, target):
        raise InputError(
            f"holds a run of {measured.what} on {counted(measured.slots, 'slot')}.",
            where=str(checked.folder.path),
            remedy="Give the study another name, or move the folder away.",
        )


def _planned_for(outline: StudyOutline, target: OpenTarget) -> str:
    if not outline.has_cluster:
        return f"Planned for {counted(target.offer.slots, 'slot')}, of {target.words}."
    if _is_elsewhere(outline, target):
        return (
            f"Planned for [cluster]: speeds measured on {target.words} are assumed to hold on one slot, "
            "and on several, there."
        )
    return f"Planned for [cluster], whose nodes join {target.words}."
