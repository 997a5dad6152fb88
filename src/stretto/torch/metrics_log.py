"""The metrics of a job as people and other tools read them: JSON lines, and TensorBoard where wanted."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.core.private_files import make_private_folder, open_private, private_opener

OWN_NAMES = frozenset({"epoch", "workers", "batch"})
"""What every line has besides the user's metrics."""


class MetricsLog:
    """Appends to `metrics.jsonl` in the job's folder. Never ends training: what goes wrong is noted."""

    def __init__(self, folder: Path, *, tensorboard: bool, note: Callable[[str], None]) -> None:
        self._path = folder / "metrics.jsonl"
        self._note = note
        self._failed = False
        self._board = _board(folder / "tensorboard", note) if tensorboard else None

    def write(self, epoch: int, values: Mapping[str, float], *, workers: int, batch: int) -> None:
        line: dict[str, float] = {"epoch": epoch, "workers": workers, "batch": batch, **values}
        finite = {key: value if math.isfinite(value) else None for key, value in line.items()}
        try:
            make_private_folder(self._path.parent)
            with open(self._path, "a", encoding="utf-8", opener=private_opener) as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            if not self._failed:
                self._note(f"Metrics cannot be written to {self._path}: {error}.")
            self._failed = True
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, epoch)
            self._board.flush()
            self._close_to_others()

    def _close_to_others(self) -> None:
        """TensorBoard makes its files by the umask."""
        with contextlib.suppress(OSError):
            for path in (self._path.parent / "tensorboard").glob("events.*"):
                os.close(open_private(path, os.O_RDONLY))


def _board(folder: Path, note: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        note(f"TensorBoard files are not written: {error}. Install the package tensorboard.")
        return None
    make_private_folder(folder)
    return SummaryWriter(str(folder))
