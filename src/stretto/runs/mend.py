"""Repairs a damaged journal: the run continues from before the damage, if the user agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.units import format_duration
from stretto.journal.rows import Damage, find_damage
from stretto.journal.sqlite import cut, finish_cut
from stretto.runs.folder import RunFolder, damage_text
from stretto.runs.status import holding

Ask = Callable[[str], bool]
"""Asks the user a question; True if the user agrees."""


def mend(folder: RunFolder, *, yes: bool, ask: Ask | None = None) -> str:
    """Set a damaged journal aside and keep the events before the damage; returns what was done.

    InputError if the user does not agree, by `yes` or when asked.
    No agreement is needed if the machine went down before it wrote the last events.
    """
    if not folder.is_begun:
        return ""
    with holding(folder) as lock:
        finished = finish_cut(folder.journal)
        damage = find_damage(folder.journal, thoroughly=True)
        if damage is None:
            return "" if finished is None else _finished(folder, finished)
        if not yes and not damage.machine_went_down:
            _be_sure(folder, damage, ask)
        aside = cut(folder.journal, folder.name, lock=lock)
    why = f"{damage.problem}{', as the machine went down' if damage.machine_went_down else ''}"
    return f"{folder.journal} was damaged: {why}. It is kept as {aside.name}; {_continues(damage)}."


def mend_after_restart(folder: RunFolder) -> str:
    """Repair the journal if its last events are missing because the machine went down."""
    damage = find_damage(folder.journal)
    return mend(folder, yes=False) if damage is not None and damage.machine_went_down else ""


def _finished(folder: RunFolder, aside: Path) -> str:
    return (
        f"{folder.journal} was damaged, and the process was killed while it was set aside. It is kept as "
        f"{aside.name}; the run continues with the events before the damage."
    )


def _be_sure(folder: RunFolder, damage: Damage, ask: Ask | None) -> None:
    if ask is not None and ask(f"{damage_text(folder, damage)} If it is set aside, {_continues(damage)}."):
        return
    raise InputError(
        f"is damaged: {damage.problem}.",
        where=str(folder.journal),
        remedy="Restore a copy. Or add --yes (in Python yes=True): then the damaged file is set aside, and "
        f"{_continues(damage)}.",
    )


def _continues(damage: Damage) -> str:
    """Where the run continues, as a clause."""
    if not damage.events:
        return "the run starts anew, with the checkpoints that its jobs have saved"
    after = f"event {damage.events}, at {format_duration(damage.until_s)}"
    return f"the run continues after {after}, with the checkpoints that its jobs have saved"
