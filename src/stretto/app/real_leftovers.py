"""Nodes that a run had launched before it was killed, and that nobody will use any more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from stretto.app.history import seen_by
from stretto.app.real_board import Board
from stretto.app.real_drive import wall_clock
from stretto.app.real_site import Site
from stretto.app.real_standing import holding
from stretto.app.run_folder import RunFolder
from stretto.app.study_file import Rented
from stretto.core.errors import InputError, JournalError
from stretto.core.events import Event, RunPaused, RunResumed
from stretto.journal.sqlite import SqliteJournal
from stretto.substrate.fleet_record import Record
from stretto.substrate.provision import NodeFleet, noting_nodes


def let_go_of_nodes(folder: RunFolder, site: Site, rented: Rented | None, started_at_s: float) -> None:
    """End what a run that nobody drives has launched; InputError or JournalError if that cannot be tried.

    It is journaled: until now the nodes have cost.
    """
    names = () if rented is None else _launched(folder, rented)
    if not names:
        return
    may_be_up = f"{', '.join(names)} may still be up, and cost: "
    try:
        with (
            holding(folder) as lock,
            closing(SqliteJournal(folder.journal, run=folder.name, lock=lock)) as journal,
            site.opened() as opened,
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
            remedy=f"{error.remedy} `stretto report {folder.path}` tells what the run came to.",
        ) from error


def _launched(folder: RunFolder, rented: Rented) -> Sequence[str]:
    """What may be up: there are files of what commands launched; the autoscaler leaves none."""
    if rented.nodes.launch:
        return [path.stem for path in sorted(folder.nodes.glob("*.json"))]
    board = Board()
    record = Record.of(seen_by(folder.events(), board))
    return () if board.last is None or isinstance(board.last, RunPaused) else record.rented


def _let_go(fleet: NodeFleet, journal: SqliteJournal, now_s: float) -> None:
    history: list[Event] = []
    last_s = max((event.t_s for event in noting_nodes(journal.events(), history)), default=0.0)
    t_s = max(now_s, last_s)
    with closing(fleet):
        journal.append([RunResumed(t_s=t_s, down_s=t_s - last_s)])
        journal.append(fleet.let_go(history, t_s))
