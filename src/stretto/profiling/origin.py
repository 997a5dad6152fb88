"""Finds a profile for a study that has none in its file: of its own run, or of another run of it."""

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
"""Sections of a study's file that do not change its speed."""
MUCH_LONGER = 2.0
"""A probe that was cut short is repeated if it now has this many times the time."""
LARGE = 2**20
"""Files larger than this many bytes are compared by size and time of change."""


@dataclass(frozen=True, slots=True)
class Known:
    """A profile that was measured before."""

    folder: RunFolder
    """The run that it was measured for."""
    measured: MeasuredProfile

    def taken_over(self) -> MeasuredProfile:
        """The profile for another run, without the cost of a node to measure on: the first run paid that."""
        node = self.measured.node
        return dataclasses.replace(
            self.measured, node=None if node is None else dataclasses.replace(node, cost_usd=0.0)
        )


def known_profile(checked: CheckedStudy, target: OpenTarget) -> Known | None:
    """The profile of the run itself; else the newest one of another run of the same study.

    The run's own profile is used even if the study was changed or the cluster started anew. Another run's is
    used only if its whole `Origin` is equal.
    """
    folder, origin = checked.folder, origin_of(checked, target)
    if folder.profile.is_file():
        own = _read_own(folder.profile)
        if is_of(own, checked, target) and _same_place(own.origin, origin) and suffices(own, checked):
            return Known(folder, own)
    for other in _other_runs(folder):
        with contextlib.suppress(InputError):  # a damaged profile of another run does not matter here
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
    """Whether a profile is of this training, on the same number of slots."""
    slots = slots_of(target.to_measure_on) or instance_to_probe(target.offer).gpus
    return (measured.what, measured.slots) == (probed_as(checked.work, target), slots)


def suffices(measured: MeasuredProfile, checked: CheckedStudy) -> bool:
    """Whether another probe would not see much more.

    A profile that was put there by hand, or was measured on a launched node, always suffices.
    """
    if not measured.tells_epochs or (checked.elastic and measured.most_workers is not None):
        return False
    if not measured.cut_short or measured.given_s is None or measured.origin is None:
        return True
    now_s = probe_time(checked.limits.deadline_s).usual_s
    return measured.node is not None or now_s < MUCH_LONGER * measured.given_s


def node_to_launch(checked: CheckedStudy, target: OpenTarget) -> Instance | None:
    """The instance that must be launched to measure on; None: none."""
    known = checked.outline.profile is not None or checked.folder.is_begun
    if target.to_measure_on or known or known_profile(checked, target) is not None:
        return None
    return instance_to_probe(target.offer)


def origin_of(checked: CheckedStudy, target: OpenTarget) -> Origin:
    """The code, machine, nodes and study that a profile measured now belongs to."""
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
    """The script, or all files that a command names, and the Python files beside them."""
    named = [work.path] if isinstance(work, Entry) else list(_named_files(work))
    beside = (other for path in named if path.suffix == ".py" for other in path.parent.glob("*.py"))
    return sorted({path.absolute() for path in (*named, *beside)})


def _named_files(command: CommandLine) -> Iterator[Path]:
    folder = command.folder or Path()
    for word in command.argv:
        with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a zero byte
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
    """The runs in the same folder that have a profile, the last measured first."""
    measured_s: dict[Path, float] = {}
    for path in folder.path.parent.glob("*/profile.json"):
        with contextlib.suppress(OSError):  # gone meanwhile
            measured_s[path.parent] = path.stat().st_mtime
    measured_s.pop(folder.path, None)
    return [RunFolder(path) for path in sorted(measured_s, key=lambda path: (-measured_s[path], path))]
