"""The folder of a real run: `runs/<name>/` with its specification, its journal and its jobs' files.

spec.json        what was asked for, and the wall clock time of the first start
profile.json     what a probe measured, where there was one
plan.json        what was predicted before the start
journal.sqlite   every event; journal.sqlite.end says which was the last
journal.sqlite.lock  names the process that works on the run, which holds it
stop.asked       the run is stopping, as `stretto stop` asked
result.json      the result, once the run is over
failed.log       output of the training code that failed while it was tried, before the run began
id               tells the run from others of its name, in a store or on other machines
nodes/           a file for each launched node that is up, and logs of failed launches
jobs/<id>/       stdout.log, metrics.jsonl, checkpoints/
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.core.cluster import Node
from stretto.core.errors import InputError, did_you_mean
from stretto.core.events import Event, RunStarted
from stretto.core.units import format_duration, several
from stretto.inputs.fields import NAME_RULE, Fields, is_folder_name
from stretto.inputs.study_section import SECTIONS, study_in
from stretto.journal.rows import Damage, find_damage, read_events
from stretto.pricing.instances import Offer
from stretto.search.study import Study
from stretto.system.plain_json import UnreadableError, checksum, read_json
from stretto.system.private_files import write_private

RUNS = Path("runs")
"""The default folder of runs."""

FORMAT = 2
"""The version of the JSON files; those of version 0.1 have neither this nor a checksum."""
_FORMAT_KEY, _CHECK_KEY = "/format", "/check"
"""No job can have these names."""

Tables = dict[str, Any]
"""Plain JSON data."""

Kind = Literal["tune", "run"]
"""The command that began a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLimits:
    """Limits that a run had until they were raised."""

    until_s: float
    """Seconds from the first start."""
    deadline_s: float | None
    budget_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The settings that a run began with."""

    kind: Kind
    """A study (tune) or jobs (run)."""
    started_at_s: float
    """The first start, in wall clock time."""
    asked: Tables
    """The settings that must be the same when the run is resumed."""
    slots: int
    """The number of slots; the most there may be if nodes are rented."""
    offer: Offer | None = None
    """Of a study: the nodes that its policy could use."""
    deadline_s: float | None = None
    """Of a study, in seconds from the first start."""
    budget_usd: float | None = None
    past_limits: tuple[PastLimits, ...] = ()
    """Earlier limits, in order of time."""
    file: str = ""
    """Of a study: the path of its file."""
    usd_per_slot_hour: float = 0.0
    """Of jobs; a study's price is in its file."""
    command: str = ""
    """The command line that began it; empty before version 0.2."""

    def __post_init__(self) -> None:
        needed = {"policy": str, "seed": int} | ({"study": dict} if self.is_study else {})
        for name, kind in needed.items():
            if not isinstance(self.asked.get(name), kind):
                raise TypeError(f"asked.{name} is {self.asked.get(name)!r}")
        if self.is_study and self.offer is None:
            raise TypeError("offer is not there")

    @property
    def is_study(self) -> bool:
        return self.kind == "tune"

    @property
    def study(self) -> Study | None:
        """The study, without its space and limits; None for jobs."""
        if not self.is_study:
            return None
        return study_in(Fields(self.asked["study"], SECTIONS, file=self.file, name=""))

    @property
    def policy(self) -> str:
        return str(self.asked["policy"])

    @property
    def seed(self) -> int:
        return int(self.asked["seed"])

    @property
    def elastic(self) -> bool:
        """Whether trials continue from a checkpoint after a pause or a resize."""
        return self.asked.get("checkpoints") is not False


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the process that works on the run."""
        return self.path / "journal.sqlite.lock"

    @property
    def stop_asked(self) -> Path:
        """Exists while a request to stop is being served."""
        return self.path / "stop.asked"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def failed_log(self) -> Path:
        """The output of training code that failed before the run began."""
        return self.path / "failed.log"

    @property
    def nodes(self) -> Path:
        """The nodes that were launched for the run and may still be up."""
        return self.path / "nodes"

    def log(self, job_id: str) -> Path:
        return self.path / "jobs" / job_id / "stdout.log"

    def metrics(self, job_id: str) -> Path:
        return self.path / "jobs" / job_id / "metrics.jsonl"

    def checkpoints(self, job_id: str) -> Path:
        return self.path / "jobs" / job_id / "checkpoints"

    def files(self, job_id: str) -> Path:
        """What the job's command keeps for its next start."""
        return self.path / "jobs" / job_id / "files"

    @property
    def is_begun(self) -> bool:
        try:
            return (self.path / "spec.json").is_file()
        except OSError:  # the name is too long
            return False

    def spec(self) -> RunSpec | None:
        """The settings of the run; None if it has not begun."""
        tables = self.read("spec")
        if tables is None:
            return None
        try:
            return msgspec.convert(tables, RunSpec)
        except msgspec.ValidationError as error:
            raise InputError(
                f"does not say how a run was begun: {error}.",
                where=str(self.path / "spec.json"),
                remedy="Start the run anew under another name.",
            ) from error

    def begun_spec(self) -> RunSpec:
        """The settings of the run; InputError if it has not begun."""
        spec = self.spec()
        if spec is None:
            raise InputError(
                "is not the folder of a run.", where=str(self.path), remedy="It has no spec.json."
            )
        return spec

    def read(self, name: str) -> Tables | None:
        """The content of a JSON file of the folder; None if there is no such file."""
        path = self.path / f"{name}.json"
        try:
            found = read_json(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, f"cannot be read ({error.strerror}).") from error
        except UnreadableError as error:
            raise unreadable(path, f"cannot be read as JSON ({error}).") from error
        if not isinstance(found, dict):
            raise unreadable(path, "is not a JSON object.")
        if _FORMAT_KEY in found or _CHECK_KEY in found:
            check = found.pop(_CHECK_KEY, None)
            if check != checksum(found) or found.pop(_FORMAT_KEY, None) != FORMAT:
                raise unreadable(path, "is not as it was written: its checksum does not match.")
        return found

    def write(self, name: str, tables: Tables) -> None:
        """Write a JSON file of the folder, completely or not at all."""
        checked = {_FORMAT_KEY: FORMAT, **tables}
        text = json.dumps({**checked, _CHECK_KEY: checksum(checked)}, indent=1, allow_nan=False) + "\n"
        write_private(self.path / f"{name}.json", text.encode())

    def events(self) -> Iterator[Event]:
        """All events so far, also of a live run; if the journal is damaged, those before the damage.

        Decisions come without the policy's memory.
        """
        return read_events(self.journal)

    def known_until_s(self) -> float | None:
        """The time of the last event before the damage; None if the journal is whole."""
        damage = find_damage(self.journal)
        return None if damage is None else damage.until_s

    def damage(self) -> str:
        """What is wrong with the journal, in a sentence; empty if it is whole."""
        damage = find_damage(self.journal)
        return "" if damage is None else damage_text(self, damage)


def damage_text(folder: RunFolder, damage: Damage) -> str:
    """What is wrong with a run's journal, and which part of it can be read."""
    left = f"the events until {format_duration(damage.until_s)}, before the damage, can be read"
    if not damage.events:
        left = "no event can be read"
    why = ", as the machine went down" if damage.machine_went_down else ""
    return f"{folder.journal} is damaged: {damage.problem}{why}; {left}."


def unreadable(path: Path, problem: str = "is not as it was written.") -> InputError:
    """The error for a damaged file of a run's folder."""
    remedies = {
        "plan.json": "Remove it: the run can continue, but its result is not compared with the forecast.",
        "result.json": "Remove it: the command of the run writes it again.",
        "described.json": "Remove it: the training code is asked again.",
    }
    remedy = remedies.get(path.name, "Put it back, or start the run anew under another name.")
    return InputError(problem, where=str(path), remedy=remedy)


def first_nodes(folder: RunFolder) -> tuple[Node, ...] | None:
    """The nodes that a run began with; None if it has not begun."""
    first = next(folder.events(), None)
    return first.nodes if isinstance(first, RunStarted) else None


def run_folder(name: str, runs: Path = RUNS) -> RunFolder:
    """The folder for a run of this name."""
    if not is_folder_name(name):
        raise InputError(
            f"{reprlib.repr(name)} cannot be the name of a run: {NAME_RULE}.",
            remedy="Give a --name that is.",
        )
    return RunFolder(runs / name)


def find_run(run: str, runs: Path = RUNS) -> RunFolder:
    """The folder of an existing run: a name under `runs`, or a path."""
    for path in (runs / run, Path(run)):
        if RunFolder(path).is_begun:
            return RunFolder(path)
    there = sorted(path.parent.name for path in runs.glob("*/spec.json"))
    if (found := next((path for path in (runs / run, Path(run)) if _exists(path)), None)) and run.strip("./"):
        raise InputError(
            "is not the folder of a run that was begun.", where=str(found), remedy="It has no spec.json."
        )
    raise no_such_run(run, there, runs)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # it cannot be a path
        return False


def no_such_run(run: str, there: list[str], runs: Path) -> InputError:
    """The error for an unknown run, with similar names."""
    hint = f"There are {several(there)}; or give a path." if there else f"{runs}/ has none; or give a path."
    return InputError(
        f"there is no run {reprlib.repr(run)}.", remedy=f"{did_you_mean(run, there, most=3)}{hint}"
    )
