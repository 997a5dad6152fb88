"""What tells one run from all others, whatever they are called: a random number in its folder."""

from __future__ import annotations

import secrets
from pathlib import Path

from stretto.core.private_files import write_private

ID_FILE = "id"


def identity(run_dir: Path) -> str:
    """Of the run in this folder, which is given one if it has none."""
    found = known_identity(run_dir)
    if found is None:
        found = secrets.token_hex(16)
        write_private(run_dir / ID_FILE, found.encode("ascii"))
    return found


def folder_identity(run_dir: Path) -> str:
    """Of the run in this very folder, wherever it is moved to in its file system; a copy has another."""
    found, status = identity(run_dir), run_dir.stat()
    return f"{found}:{status.st_dev}:{status.st_ino}"


def known_identity(run_dir: Path) -> str | None:
    """Of the run in this folder; None if it has none yet."""
    try:
        return (run_dir / ID_FILE).read_text(encoding="ascii", errors="replace") or None
    except FileNotFoundError:
        return None
