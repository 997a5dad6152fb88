"""Which profile serves a study without one in its file: its own run's, or that of another run of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import InputError
from stretto.driving.request import CheckedStudy
from stretto.driving.target import OpenTarget
from stretto.inputs.profile import MeasuredProfile, Origin, read_profile
from stretto.inputs.work import CommandLine, Entry, RealWork
from stretto.pricing.instances import Instance
from stretto.profiling.launched_node import instance_to_probe
from stretto.profiling.probe import probed_as, slots_of
from stretto.profiling.probe_data import probe_time
from stretto.runs.folder import RunFolder
from stretto.substrate.local.slots import find_slots

NOT_ABOUT_SPEED = ("limits", "world")
"""Sections of a study's file that may change without its being measured anew."""
MUCH_LONGER = 2.0
"""A probe that was cut short is made again where it may take so many times as long."""
LARGE = 2**20
"""Files of more bytes are told apart by their size and when they were changed."""


@dataclass(frozen=True, slots=True)
class Known:
    """A profile that was measured before."""

    folder: RunFolder
    """Of the run it was measured for."""
    measured: MeasuredProfile

    def taken_over(self) -> MeasuredProfile:
        """For another run: what a node to measure on has cost is the first one's."""
        node = self.measured.node
        return dataclasses.replace(
            self.measured, node=None if node is None else dataclasses.replace(node, cost_usd=0.0)
        )


def known_profile(checked: CheckedStudy, target: OpenTarget) -> Known | None:
    """The profile of the run itself; else the newest that another run of the same study left beside it.

    Its own may be of a study that was changed since, or of a cluster that was started anew; another run's
    is taken only if everything that can be seen is the same.
    """
    folder, origin = checked.folder, origin_of(checked, target)
    if folder.profile.is_file():
        own = _read_own(folder.profile)
        if is_of(own, checked, target) and _same_place(own.origin, origin) and suffices(own, checked):
            return Known(folder, own)
    for other in _other_runs(folder):
        with contextlib.suppress(InputError):  # what is wrong with it is no concern of this run
            measured = read_profile(other.profile)
            if is_of(measured, checked, target) and measured.origin == origin and suffices(measured, checked):
                return Known(other, measured)
    return None


def _read_own(path: Path) -> MeasuredProfile:
    try:
        return read_profile(path)
    except InputError as error:
        remedy = "Remove it, and the training is measured anew."
        raise InputError(error.problem, where=error.where, remedy=remedy) from error


def is_of(measured: MeasuredProfile, checked: CheckedStudy, target: OpenTarget) -> bool:
    """Whether a profile is of the same training on as many slots there."""
    slots = slots_of(target.to_measure_on) or instance_to_probe(target.offer).gpus
    return (measured.what, measured.slots) == (probed_as(checked.work, target), slots)


def suffices(measured: MeasuredProfile, checked: CheckedStudy) -> bool:
    """Whether another probe, now, would not see much more.

    What was put there by hand, and what it took a node of its own to measure, is taken as it is.
    """
    if not measured.tells_epochs or (checked.elastic and measured.most_workers is not None):
        return False
    if not measured.cut_short or measured.given_s is None or measured.origin is None:
        return True
    now_s = probe_time(checked.limits.deadline_s).usual_s
    return measured.node is not None or now_s < MUCH_LONGER * measured.given_s


def node_to_launch(checked: CheckedStudy, target: OpenTarget) -> Instance | None:
    """What must be launched to measure on; None if nothing need be."""
    known = checked.outline.profile is not None or checked.folder.is_begun
    if target.to_measure_on or known or known_profile(checked, target) is not None:
        return None
    return instance_to_probe(target.offer)


def origin_of(checked: CheckedStudy, target: OpenTarget) -> Origin:
    """What a profile that is measured now is of."""
    tables = {name: table for name, table in checked.outline.tables.items() if name not in NOT_ABOUT_SPEED}
    machine = platform.node()
    if not target.mark:
        machine = " ".join((machine, *filter(None, find_slots(slots_of(target.nodes)).devices)))
    return Origin(
        code=_digest(*(part for path in code_files(checked.work) for part in (str(path), _content(path)))),
        machine=machine,
        nodes=tuple(sorted(node.id for node in target.to_measure_on)) if target.mark else (),
        study=_digest(json.dumps(tables, sort_keys=True, default=str)),
    )


def code_files(work: RealWork) -> list[Path]:
    """The script, or all files that a command names, and what lies beside it to be imported."""
    named = [work.path] if isinstance(work, Entry) else list(_named_files(work))
    beside = (other for path in named if path.suffix == ".py" for other in path.parent.glob("*.py"))
    return sorted({path.absolute() for path in (*named, *beside)})


def _named_files(command: CommandLine) -> Iterator[Path]:
    folder = command.folder or Path()
    for word in command.argv:
        with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a zero in it
            if (folder / word).is_file():
                yield folder / word


def _content(path: Path) -> str:
    try:
        seen = path.stat()
        if seen.st_size > LARGE:
            return f"{seen.st_size} {seen.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return str(error.strerror)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _same_place(origin: Origin | None, now: Origin) -> bool:
    return origin is None or (origin.code, origin.machine) == (now.code, now.machine)


def _other_runs(folder: RunFolder) -> list[RunFolder]:
    """Those beside it that have a profile, the last measured first."""
    measured_s: dict[Path, float] = {}
    for path in folder.path.parent.glob("*/profile.json"):
        with contextlib.suppress(OSError):  # gone meanwhile
            measured_s[path.parent] = path.stat().st_mtime
    measured_s.pop(folder.path, None)
    return [RunFolder(path) for path in sorted(measured_s, key=lambda path: (-measured_s[path], path))]
