"""Extending a study: later limits for a run that was begun, and the release of nodes that it left behind."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from stretto.core.errors import InputError, JournalError
from stretto.core.events import Event, RunPaused, RunResumed
from stretto.core.units import format_duration
from stretto.driving.drive import wall_clock
from stretto.driving.request import CheckedStudy
from stretto.driving.target import Target
from stretto.inputs.study import Rented
from stretto.journal.folds.history import fed_to
from stretto.journal.folds.nodes import NodeRecord
from stretto.journal.sqlite import SqliteJournal
from stretto.planning.tuning import Limits
from stretto.runs.deadline import EndedBy, deadline_of, enough_after, given_duration_s
from stretto.runs.folder import PastLimits, RunFolder, RunSpec, Tables
from stretto.runs.live_state import LiveState
from stretto.runs.mend import mend_after_restart
from stretto.runs.results import forget_plan
from stretto.runs.status import holding, read_ending
from stretto.substrate.fleet.provision import NodeFleet, noting_nodes

SAME_S = 1.0
"""Deadlines that differ by less than this are equal, only written differently."""
_RAISED = ("deadline", "budget_usd")


def extend(checked: CheckedStudy) -> str:
    """Gives a begun run the later deadline or larger budget that is asked for now.

    Returns a sentence; an empty one if nothing is to be done, or if other settings differ or a limit is
    omitted, which `check_same` refuses. A duration counts from the first start. InputError if the run
    cannot use the new limit.
    """
    folder, spec = checked.folder, checked.folder.spec()
    if spec is None or spec.asked == checked.asked or _besides(spec.asked) != _besides(checked.asked):
        return ""
    if any(checked.asked[name] is None and spec.asked[name] is not None for name in _RAISED):
        return ""
    if _is_gone_from_file(checked, spec):
        return ""
    now_s = time.time() - spec.started_at_s
    limits = Limits(deadline_s=_deadline_s(checked, spec, now_s), budget_usd=checked.limits.budget_usd)
    if _is_less(limits.deadline_s, spec.deadline_s) or _is_less(limits.budget_usd, spec.budget_usd):
        return ""
    told = "; ".join(_told(spec, limits, now_s))
    if told:
        _check_of_use(folder, spec, limits, now_s)
        if mended := mend_after_restart(folder):
            told = f"{told}; {mended.rstrip('.')}"
        _move(folder, dataclasses.replace(spec, asked=checked.asked), limits, now_s)
    else:  # the same in other words
        with holding(folder):
            folder.write("spec", dataclasses.asdict(dataclasses.replace(spec, asked=checked.asked)))
    return told


def _is_gone_from_file(checked: CheckedStudy, spec: RunSpec) -> bool:
    """Whether a limit of the run is now given nowhere, not even as `none`."""
    request, limits = checked.request, checked.limits
    pairs = (
        (request.deadline_s, limits.deadline_s, spec.deadline_s),
        (request.budget_usd, limits.budget_usd, spec.budget_usd),
    )
    return any(flag is None and now is None and begun is not None for flag, now, begun in pairs)


def _move(folder: RunFolder, spec: RunSpec, limits: Limits, now_s: float) -> None:
    """Writes the new limits. After a kill in between, the run is as it was, or can be extended again."""
    ending = read_ending(folder)
    past = PastLimits(until_s=now_s, deadline_s=spec.deadline_s, budget_usd=spec.budget_usd)
    moved = dataclasses.replace(
        spec,
        deadline_s=limits.deadline_s,
        budget_usd=limits.budget_usd,
        past_limits=(*spec.past_limits, past),
    )
    with (
        holding(folder) as lock,
        closing(SqliteJournal(folder.journal, run=folder.name, lock=lock)) as journal,
    ):
        if ending is not None:
            journal.append(list(_rest(journal, spec, ending)))
            (folder.path / "result.json").unlink(missing_ok=True)
        forget_plan(folder)
        folder.write("spec", dataclasses.asdict(moved))


def _rest(journal: SqliteJournal, spec: RunSpec, ending: EndedBy) -> Iterator[RunPaused]:
    """The pause from the run's end until now: nothing ran and nothing was rented."""
    end_s, last = 0.0, None
    for last in journal.events():
        end_s = max(end_s, last.t_s)
    if not isinstance(last, RunPaused):
        yield RunPaused(t_s=max(end_s, spec.deadline_s or 0.0) if ending is EndedBy.DEADLINE else end_s)


def _besides(asked: Tables) -> Tables:
    """The settings without the limits that may be raised."""
    study = asked.get("study")
    if not isinstance(study, dict):
        return asked
    kept = {name: value for name, value in study.get("limits", {}).items() if name not in _RAISED}
    return {**asked, "study": {**study, "limits": kept}, **dict.fromkeys(_RAISED)}


def _deadline_s(checked: CheckedStudy, spec: RunSpec, now_s: float) -> float | None:
    """The deadline that is asked for, from the first start."""
    deadline_s = checked.limits.deadline_s
    if deadline_s is None:
        return None
    if given_duration_s(checked.asked) is None:
        deadline_s += now_s  # a time of day
    else:
        given_s = given_duration_s(spec.asked)
        if given_s is not None and spec.deadline_s is not None:
            deadline_s -= given_s - spec.deadline_s  # measuring before the first start took time
    same = spec.deadline_s is not None and abs(deadline_s - spec.deadline_s) <= SAME_S
    return spec.deadline_s if same else deadline_s


def _is_less(limit: float | None, than: float | None) -> bool:
    """Whether a limit is lower than another; None: no limit."""
    return (math.inf if limit is None else limit) < (math.inf if than is None else than)


def _check_of_use(folder: RunFolder, spec: RunSpec, limits: Limits, now_s: float) -> None:
    where, ending = str(folder.path), read_ending(folder)
    if limits.deadline_s is not None and limits.deadline_s <= now_s:
        raise _is_past(spec, limits.deadline_s, now_s, where)
    if ending is EndedBy.JOBS:
        raise InputError(
            "every trial has finished or was stopped: more time or money changes nothing.",
            where=where,
            remedy=f"`stretto report {folder.name}` shows the result; take another --name to begin anew.",
        )
    if ending is EndedBy.BUDGET and not _is_less(spec.budget_usd, limits.budget_usd):
        raise InputError(
            f"the budget of ${spec.budget_usd or 0.0:g} is spent, so that more time changes nothing.",
            where=where,
            remedy="Give a larger --budget.",
        )


def _is_past(spec: RunSpec, deadline_s: float, now_s: float, where: str) -> InputError:
    """The error for a deadline that has passed, counted as the user gave it: with the time for measuring."""
    begun = deadline_of(spec)
    measuring_s = 0.0 if begun is None else begun.measuring_s
    since = "the first start" if measuring_s < SAME_S else "when measuring began"
    return InputError(
        f"a deadline of {format_duration(deadline_s + measuring_s)} from {since} passed "
        f"{format_duration(now_s - deadline_s)} ago.",
        where=where,
        remedy=f"Give {enough_after(now_s + measuring_s)} or more, or a time of day such as 18:00.",
    )


def _told(spec: RunSpec, limits: Limits, now_s: float) -> Iterator[str]:
    deadline = deadline_of(spec)
    if deadline is not None and _is_less(spec.deadline_s, limits.deadline_s):
        before = format_duration(deadline.given_s)
        if limits.deadline_s is None:
            yield f"the deadline of {before} is lifted"
        else:
            after = format_duration(limits.deadline_s + deadline.measuring_s)
            left = format_duration(limits.deadline_s - now_s)
            yield f"the deadline was {before} and is {after}, {left} from now"
    if _is_less(spec.budget_usd, limits.budget_usd):
        after = "lifted" if limits.budget_usd is None else f"${limits.budget_usd:g}"
        yield f"the budget was ${spec.budget_usd or 0.0:g} and is {after}"


def release_leftover_nodes(
    folder: RunFolder, target: Target, rented: Rented | None, started_at_s: float
) -> None:
    """Releases the nodes that a dead run had launched; InputError or JournalError if that cannot be tried.

    The release is journaled, because the nodes have cost money until now.
    """
    names = () if rented is None else _launched(folder, rented)
    if not names:
        return
    may_be_up = f"{', '.join(names)} may still be up, and cost: "
    try:
        with (
            holding(folder) as lock,
            closing(SqliteJournal(folder.journal, run=folder.name, lock=lock)) as journal,
            target.opened() as opened,
        ):
            fleet = opened.fleet(folder)
            if fleet is not None:
                _let_go(fleet, journal, wall_clock(started_at_s)())
    except JournalError as error:
        raise JournalError(f"{may_be_up}{error}") from error
    except InputError as error:
        raise InputError(
            f"{may_be_up}{error.problem}",
            where=str(folder.path),
            remedy=f"{error.remedy} `stretto report {folder.path}` shows the result of the run.",
        ) from error


def _launched(folder: RunFolder, rented: Rented) -> Sequence[str]:
    """Nodes that may still be up: commands leave a file per node, the autoscaler only the journal."""
    if rented.nodes.launch:
        return [path.stem for path in sorted(folder.nodes.glob("*.json"))]
    board = LiveState()
    record = NodeRecord.of(fed_to(folder.events(), board))
    return () if board.last is None or isinstance(board.last, RunPaused) else record.rented


def _let_go(fleet: NodeFleet, journal: SqliteJournal, now_s: float) -> None:
    history: list[Event] = []
    last_s = max((event.t_s for event in noting_nodes(journal.events(), history)), default=0.0)
    t_s = max(now_s, last_s)
    with closing(fleet):
        journal.append([RunResumed(t_s=t_s, down_s=t_s - last_s)])
        journal.append(fleet.release_all(history, t_s))
