"""The folder of a real run: `runs/<name>/` with its specification, its journal and its jobs' files.

spec.json        what was asked for, and when the run first started on the wall clock
profile.json     what a probe measured, where there was one
plan.json        what was expected before anything started
journal.sqlite   everything that happened; journal.sqlite.end says which event was the last
journal.sqlite.lock  held by the process that works on the run, and says which it is
stop.asked       `stretto stop` was called, and the run is stopping
result.json      what it came to, once it is over
failed.log       what training printed that failed before the run was begun, while it was tried
id               what tells it from others of its name, where some of it lies elsewhere
nodes/           what was launched for it: a file for each node that is up, logs of launches that failed
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
"""Where runs are kept unless another folder is named."""

FORMAT = 2
"""Of the folder's JSON files; those of version 0.1 have neither this nor a checksum."""
_FORMAT_KEY, _CHECK_KEY = "/format", "/check"
"""No job has such a name."""

Tables = dict[str, Any]
"""Plain JSON data."""

Kind = Literal["tune", "run"]
"""The command that a run was begun by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLimits:
    """What a run was told to take, until somebody gave it more."""

    until_s: float
    """Seconds from the first start."""
    deadline_s: float | None
    budget_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a run was begun with."""

    kind: Kind
    """A study, or jobs."""
    started_at_s: float
    """The first start, on the wall clock."""
    asked: Tables
    """What must be the same for the run to be resumed."""
    slots: int
    """How many there were, or may be."""
    offer: Offer | None = None
    """Of a study: what its policy was told that there is."""
    deadline_s: float | None = None
    """Of a study; from the first start."""
    budget_usd: float | None = None
    past_limits: tuple[PastLimits, ...] = ()
    """Those it had before, the first ones first."""
    file: str = ""
    """Of a study: where it was read."""
    usd_per_slot_hour: float = 0.0
    """Of jobs; a study's is in its file."""
    command: str = ""
    """The words it was begun by; empty before version 0.2."""

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
        """Whether a trial that was paused or resized goes on from where it was."""
        return self.asked.get("checkpoints") is not False


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of one run lies."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the process that drives the run, or measures for it."""
        return self.path / "journal.sqlite.lock"

    @property
    def stop_asked(self) -> Path:
        """Says that the run's process was asked to stop; whoever drives the run next removes it."""
        return self.path / "stop.asked"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def failed_log(self) -> Path:
        """Of training that failed while it was tried, before the run was begun."""
        return self.path / "failed.log"

    @property
    def nodes(self) -> Path:
        """What commands have brought up for it, and is not let go of."""
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
        except OSError:  # a name that is too long is no folder's
            return False

    def spec(self) -> RunSpec | None:
        """What the run was begun with; None if it was not."""
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
        """What the run was begun with."""
        spec = self.spec()
        if spec is None:
            raise InputError(
                "is not the folder of a run.", where=str(self.path), remedy="It has no spec.json."
            )
        return spec

    def read(self, name: str) -> Tables | None:
        """A JSON file of the folder; None if it is not there."""
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
        """A JSON file of the folder, whole or not at all."""
        checked = {_FORMAT_KEY: FORMAT, **tables}
        text = json.dumps({**checked, _CHECK_KEY: checksum(checked)}, indent=1, allow_nan=False) + "\n"
        write_private(self.path / f"{name}.json", text.encode())

    def events(self) -> Iterator[Event]:
        """Everything journaled so far, also while the run goes on; of a damaged journal what is before that.

        Decisions come without the memory of their policy.
        """
        return read_events(self.journal)

    def known_until_s(self) -> float | None:
        """When the last event before the damage of its journal was; None of a whole journal."""
        damage = find_damage(self.journal)
        return None if damage is None else damage.until_s

    def damage(self) -> str:
        """What is missing of a damaged journal, in a sentence; empty if it is whole."""
        damage = find_damage(self.journal)
        return "" if damage is None else damage_text(self, damage)


def damage_text(folder: RunFolder, damage: Damage) -> str:
    """What is wrong with a run's journal, and what is left of it."""
    left = f"what is known of the run ends at {format_duration(damage.until_s)}, before that"
    if not damage.events:
        left = "nothing is known of the run"
    why = ", as the machine went down" if damage.machine_went_down else ""
    return f"{folder.journal} is damaged: {damage.problem}{why}; {left}."


def unreadable(path: Path, problem: str = "is not as it was written.") -> InputError:
    """The error for a damaged file of a run's folder."""
    remedies = {
        "plan.json": "Remove it: the run goes on, and what was expected of it is not compared.",
        "result.json": "Remove it: the command of the run finds again what it came to.",
        "described.json": "Remove it: the training code is asked again.",
    }
    remedy = remedies.get(path.name, "Put it back, or start the run anew under another name.")
    return InputError(problem, where=str(path), remedy=remedy)


def first_nodes(folder: RunFolder) -> tuple[Node, ...] | None:
    """The nodes a run was begun with; None if it was not. Events tell what has become of them."""
    first = next(folder.events(), None)
    return first.nodes if isinstance(first, RunStarted) else None


def run_folder(name: str, runs: Path = RUNS) -> RunFolder:
    """The folder of a run that is begun or resumed under this name."""
    if not is_folder_name(name):
        raise InputError(
            f"{reprlib.repr(name)} cannot be the name of a run: {NAME_RULE}.",
            remedy="Give a --name that is.",
        )
    return RunFolder(runs / name)


def find_run(run: str, runs: Path = RUNS) -> RunFolder:
    """The folder of a run that was begun: a name under `runs`, or a path."""
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
    except (OSError, ValueError):  # too long for a name, or not one at all
        return False


def no_such_run(run: str, there: list[str], runs: Path) -> InputError:
    """With the names that are like it, or that there are."""
    hint = f"There are {several(there)}; or give a path." if there else f"{runs}/ has none; or give a path."
    return InputError(
        f"there is no run {reprlib.repr(run)}.", remedy=f"{did_you_mean(run, there, most=3)}{hint}"
    )
