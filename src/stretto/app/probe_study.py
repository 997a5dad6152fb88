"""A study whose file does not say how fast its training is: measured, then like any other."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.app.probe import slots_of
from stretto.app.probe_node import ELSEWHERE
from stretto.app.probe_seen import OnProgress
from stretto.app.profile_file import read_profile
from stretto.app.real_request import Checked, TuneRequest, check_request
from stretto.app.real_site import LOCAL, OpenSite
from stretto.app.real_substrate import MakeSubstrate
from stretto.app.study_file import StudyFile, StudyOutline, read_outline, study_of
from stretto.app.tune import is_of, node_to_launch, prepare
from stretto.core.errors import InputError
from stretto.core.units import counted


@dataclass(frozen=True, slots=True)
class PlannableStudy:
    """A study that can be planned, and what its reader should know of its speeds."""

    file: StudyFile
    notes: tuple[str, ...] = ()


def study_to_plan(
    request: TuneRequest,
    *,
    make: MakeSubstrate | None = None,
    on_progress: OnProgress = lambda _: None,
) -> PlannableStudy:
    """The study as its file has it; without a profile its training is probed, and kept where `tune` looks.

    Without a [cluster] it is to run where it was measured.
    """
    outline = read_outline(request.study)
    if outline.profile is not None:
        _check_nothing_is_measured(request, outline)
        return PlannableStudy(study_of(outline.tables, outline.path))
    if request.work is None and outline.entry is None and not outline.command:
        raise InputError(
            "profile is missing, and nothing says what to measure.",
            where=f"{outline.path}: profile",
            remedy="Add train.py:train after the file and it is measured; or give a [profile].",
        )
    checked = check_request(request)
    with checked.site.opened() as site:
        _check_needs_no_node(checked, site)
        prepare(checked, make=make, on_progress=on_progress)
        _check_same(checked, site)
        profile, slots = checked.folder.profile, slots_of(site.nodes)
        note = _note(outline, str(profile), slots, site.words)
    tables = {**outline.tables, "profile": {"file": str(profile.absolute())}}
    if not outline.has_cluster:
        tables["machine"] = {**tables.get("machine", {}), "slots": slots}
    return PlannableStudy(study_of(tables, outline.path), (note,))


def _check_nothing_is_measured(request: TuneRequest, outline: StudyOutline) -> None:
    """What is about measuring says nothing of a study with a profile."""
    given = (
        ("the training", request.work is not None, "it says what to measure"),
        (f"--on {request.on}", request.on != LOCAL, "it says where to measure"),
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


def _check_needs_no_node(checked: Checked, site: OpenSite) -> None:
    """A plan spends nothing."""
    needed = node_to_launch(checked, site)
    if needed is not None:
        raise InputError(
            f"nothing says how fast the training is, and {site.words} has no node to measure on.",
            where=str(checked.outline.path),
            remedy=f"`stretto tune` launches a {needed.name} for that, at ${needed.usd_per_hour:g} an hour, "
            f"and shows the plan. {ELSEWHERE}",
        )


def _check_same(checked: Checked, site: OpenSite) -> None:
    """A run that was begun keeps its profile, though another training may bear its name by now."""
    measured = read_profile(checked.folder.profile)
    if not is_of(checked, site):
        raise InputError(
            f"holds a run of {measured.what} on {counted(measured.slots, 'slot')}.",
            where=str(checked.folder.path),
            remedy="Give the study another name, or move the folder away.",
        )


def _note(outline: StudyOutline, profile: str, slots: int, where: str) -> str:
    if outline.has_cluster:
        return (
            f"Speeds were measured on {where} ({profile}) and are assumed to hold on one slot, "
            "and on several, of [cluster]."
        )
    return f"Planned for {counted(slots, 'slot')}, of {where}, with the speeds measured on it ({profile})."
