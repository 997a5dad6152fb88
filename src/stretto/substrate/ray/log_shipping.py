"""What jobs write on a node that has no part in the run's folder, carried there piece by piece.

jobs/ID/stdout.log            what is carried
jobs/ID/stdout.log.carried    how many of its bytes were: another agent of the run goes on there
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from stretto.substrate.elastic.guard import LOG_BYTES
from stretto.system.private_files import make_private_folder, private_opener, write_private

_NAMES = ("stdout.log", "metrics.jsonl")
_MOST = 1 << 20
"""Bytes of one file that are carried at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of a file."""

    path: str
    """Relative to the run's folder."""
    content: bytes


@dataclass(slots=True)
class Tail:
    """The logs and metrics of all jobs under a folder, as far as they were not carried yet.

    Who asks again has laid down what was given before; until then it is not written down as carried. An
    agent that ends in between leaves a piece to be carried twice, and none to be lost. Several threads may
    ask.
    """

    folder: Path
    _carried: dict[Path, int] = field(default_factory=dict)
    _given: dict[Path, int] = field(default_factory=dict)
    """How far files have come with what was given last."""
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self) -> tuple[Piece, ...]:
        """The next piece of each file that has one; nothing once all that is there was carried."""
        with self._asking:
            self._settle()
            found = (self._next(path) for path in self._files())
            return tuple(piece for piece in found if piece.content)

    def _next(self, path: Path) -> Piece:
        begin = self._begin(path)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(_MOST)
        if content:
            self._given[path] = begin + len(content)
        return Piece(str(path.relative_to(self.folder)), content)

    def _settle(self) -> None:
        """What was given has come."""
        for path, end in self._given.items():
            self._carried[path] = end
            write_private(_beside(path, ".carried"), str(end).encode(), on_written=lambda _: None)
        self._given.clear()

    def _begin(self, path: Path) -> int:
        """Where the next piece begins; a file that has become shorter is another one."""
        if path not in self._carried:
            self._carried[path] = _written_down(_beside(path, ".carried"))
        return self._carried[path] if self._carried[path] <= path.stat().st_size else 0

    def _files(self) -> list[Path]:
        return sorted(path for name in _NAMES for path in self.folder.glob(f"jobs/*/{name}"))


def lay_down(pieces: tuple[Piece, ...], folder: Path) -> None:
    """Add what came to the files of the run."""
    for piece in pieces:
        path = folder / piece.path
        make_private_folder(path.parent)
        with open(path, "ab", opener=private_opener) as file:
            file.write(piece.content)
            is_too_long = path.suffix == ".log" and file.tell() > LOG_BYTES
        if is_too_long:  # bounded here as on the node
            path.replace(_beside(path, ".1"))


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _written_down(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0
