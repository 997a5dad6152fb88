"""What jobs write on a node that has no part in the run's folder, carried there piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
    """The logs and metrics of all jobs under a folder, as far as they were not carried yet."""

    folder: Path
    _carried: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What is there already was carried by an earlier agent of this run."""
        self._carried.update((path, path.stat().st_size) for path in self._files())

    def pieces(self) -> tuple[Piece, ...]:
        found = []
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self._carried.get(path, 0))
                content = file.read(_MOST)
            if content:
                self._carried[path] = self._carried.get(path, 0) + len(content)
                found.append(Piece(str(path.relative_to(self.folder)), content))
        return tuple(found)

    def _files(self) -> list[Path]:
        return sorted(path for name in _NAMES for path in self.folder.glob(f"jobs/*/{name}"))


def lay_down(pieces: tuple[Piece, ...], folder: Path) -> None:
    """Add what came to the files of the run."""
    for piece in pieces:
        path = folder / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece.content)
