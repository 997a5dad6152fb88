"""Log shipping: copies logs and metrics, piece by piece, from nodes that do not see the run's folder.

jobs/ID/stdout.log            a file that is shipped
jobs/ID/stdout.log.carried    how many of its bytes have arrived; the next agent continues there
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from stretto.substrate.elastic.guard import LOG_BYTES
from stretto.system.private_files import make_private_folder, private_opener, write_private

_NAMES = ("stdout.log", "metrics.jsonl")
_MAX_PIECE_BYTES = 1 << 20
"""The most bytes of one file that are sent at once."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """The next bytes of a file."""

    path: str
    """Relative to the run's folder."""
    content: bytes


@dataclass(slots=True)
class LogShipper:
    """Reads what jobs under a folder have logged since the last call. Thread-safe.

    A call of `pieces` confirms that the previous pieces have arrived; only then are they recorded as shipped.
    If an agent ends in between, a piece may be shipped twice, but none is lost.
    """

    folder: Path
    _shipped: dict[Path, int] = field(default_factory=dict)
    _sent: dict[Path, int] = field(default_factory=dict)
    """Where the pieces sent last end."""
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self) -> tuple[LogPiece, ...]:
        """The next piece of each file; empty when everything was shipped."""
        with self._asking:
            self._settle()
            found = (self._next(path) for path in self._files())
            return tuple(piece for piece in found if piece.content)

    def _next(self, path: Path) -> LogPiece:
        begin = self._begin(path)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(_MAX_PIECE_BYTES)
        if content:
            self._sent[path] = begin + len(content)
        return LogPiece(str(path.relative_to(self.folder)), content)

    def _settle(self) -> None:
        """Record that the pieces sent last have arrived."""
        for path, end in self._sent.items():
            self._shipped[path] = end
            write_private(_beside(path, ".carried"), str(end).encode(), on_written=lambda _: None)
        self._sent.clear()

    def _begin(self, path: Path) -> int:
        """Where the next piece begins; a file that is shorter than before is a new one."""
        if path not in self._shipped:
            self._shipped[path] = _written_down(_beside(path, ".carried"))
        return self._shipped[path] if self._shipped[path] <= path.stat().st_size else 0

    def _files(self) -> list[Path]:
        return sorted(path for name in _NAMES for path in self.folder.glob(f"jobs/*/{name}"))


def append_pieces(pieces: tuple[LogPiece, ...], folder: Path) -> None:
    """Append pieces to the files in the run's folder."""
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
