"""A run whose journal is damaged: it goes on from before the damage, if somebody agrees to that."""

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
"""Whether somebody agrees to what is said."""


def mend(folder: RunFolder, *, yes: bool, ask: Ask | None = None) -> str:
    """Put a damaged journal aside and keep what is before the damage; what was done, empty if nothing was.

    InputError unless that is agreed to: by `yes`, or by who is asked. Nobody is asked where the machine went
    down before the last events were on its disk.
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
    return f"{folder.journal} was damaged: {why}. It is kept as {aside.name}; {_goes_on(damage)}."


def mend_after_restart(folder: RunFolder) -> str:
    """The same, but only of what nobody is asked about: the machine went down."""
    damage = find_damage(folder.journal)
    return mend(folder, yes=False) if damage is not None and damage.machine_went_down else ""


def _finished(folder: RunFolder, aside: Path) -> str:
    return (
        f"{folder.journal} was damaged, and a kill came while it was put aside. It is kept as "
        f"{aside.name}; the run goes on with what is before the damage."
    )


def _be_sure(folder: RunFolder, damage: Damage, ask: Ask | None) -> None:
    if ask is not None and ask(f"{damage_text(folder, damage)} If it is put aside, {_goes_on(damage)}."):
        return
    raise InputError(
        f"is damaged: {damage.problem}.",
        where=str(folder.journal),
        remedy="Restore a copy. Or add --yes (in Python yes=True): then the damaged file is put aside, and "
        f"{_goes_on(damage)}.",
    )


def _goes_on(damage: Damage) -> str:
    """From where, in words."""
    if not damage.events:
        return "the run begins anew, with the checkpoints that its jobs have saved"
    after = f"event {damage.events}, at {format_duration(damage.until_s)}"
    return f"the run goes on after {after}, with the checkpoints that its jobs have saved"
