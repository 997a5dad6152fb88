"""What rank 0 of a run saves: metrics, periodic checkpoints and the best checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.system.private_files import make_private_folder, open_private, private_opener
from stretto.torch.checkpoint import CheckpointStore, LoadedCheckpoint, RemoteCheckpoint
from stretto.torch.remote_checkpoints import RemoteCheckpoints, RemoteStore
from stretto.wire.checkpoints import STATE_FILE, BestCheckpoint
from stretto.wire.messages import Saved

OWN_NAMES = frozenset({"epoch", "workers", "batch"})
"""Fields that every line of `metrics.jsonl` has besides the user's metrics."""


class MetricsLog:
    """Appends to `metrics.jsonl` in the job's folder. Errors become notes; they never stop training."""

    def __init__(self, folder: Path, *, tensorboard: bool, note: Callable[[str], None]) -> None:
        self._path = folder / "metrics.jsonl"
        self._note = note
        self._failed = False
        self._tensorboard = _tensorboard(folder / "tensorboard", note) if tensorboard else None

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
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, epoch)
            self._tensorboard.flush()
            self._close_to_others()

    def _close_to_others(self) -> None:
        """Make TensorBoard's files private; it creates them by the umask."""
        with contextlib.suppress(OSError):
            for path in (self._path.parent / "tensorboard").glob("events.*"):
                os.close(open_private(path, os.O_RDONLY))


def _tensorboard(folder: Path, note: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        note(f"TensorBoard files are not written: {error}. Install the package tensorboard.")
        return None
    make_private_folder(folder)
    return SummaryWriter(str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingSettings:
    """What to save, and how often."""

    folder: Path | None
    """None: save nothing."""
    every_s: float
    checkpoints: int
    metric: str | None = None
    """The checkpoint of the epoch with the best value of this metric is kept, too."""
    maximise: bool = True
    tensorboard: bool = False
    store: str = ""
    """An fsspec URL; checkpoints are copied there, so that other nodes can resume from them."""


class Persistence:
    """Saves for rank 0. The other workers only track the best score, as they may become rank 0."""

    def __init__(
        self, saving: SavingSettings, *, note: Callable[[str], None], on_saved: Callable[[Saved], None]
    ) -> None:
        self._saving = saving
        self._note = note
        self._on_saved = on_saved
        self._store: CheckpointStore | None = None
        self._mirror: RemoteCheckpoints | None = None
        self._log: MetricsLog | None = None
        self._saved_s = time.monotonic()
        self.best: float | None = None
        """The best score of the metric so far; higher is better."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next checkpoint."""
        every_s = self._saving.every_s
        return self._saving.folder is not None and time.monotonic() - self._saved_s >= every_s

    def load(self) -> dict[str, Any] | None:
        """The state of the newest intact checkpoint.

        Reports the best checkpoint again: the process that saved it may have been killed before reporting it.
        """
        if self._saving.folder is None:
            return None
        store = self._open_store()
        elsewhere = self._mirror.found() if self._mirror is not None else []
        loaded, best = store.load(elsewhere), store.best()
        if loaded is None:
            return None
        if self._mirror is not None:
            self._catch_up(self._mirror, elsewhere, loaded, best)
        elif best is not None:
            self._on_saved(Saved(progress=best.progress, path=str(best.path), best=True))
        return loaded.state

    def _catch_up(
        self,
        mirror: RemoteCheckpoints,
        elsewhere: list[RemoteCheckpoint],
        loaded: LoadedCheckpoint,
        best: BestCheckpoint | None,
    ) -> None:
        """Copy checkpoints that an outage of the store held up, and report the newer of the best ones."""
        there = next((one for one in elsewhere if one.best), None)
        if there is not None:
            self._on_saved(Saved(progress=there.progress, path=f"{there.where}/{STATE_FILE}", best=True))
        if best is not None and (there is None or best.progress > there.progress):
            mirror.offer(best.path.parent, best=True)
        if all(loaded.progress != one.progress for one in elsewhere):
            mirror.offer(loaded.path.parent, best=False)

    def save(
        self, state: Callable[[], dict[str, Any]], progress: float, *, best: bool = False, wait: bool = False
    ) -> bool:
        """Save a checkpoint. False if it was skipped or, with `wait`, if it is not safely stored."""
        if self._saving.folder is None:
            return False
        self._saved_s = time.monotonic()
        store, mirror = self._open_store(), self._mirror

        def saved(path: Path, is_best: bool) -> None:
            if mirror is not None:
                mirror.offer(path.parent, best=is_best)
            else:
                self._on_saved(Saved(progress=progress, path=str(path), best=is_best))

        written = store.save(state(), progress=progress, best=best, wait=wait, on_saved=saved)
        return mirror.flush() if mirror is not None and wait and written else written

    def write_metrics(self, epoch: int, values: Mapping[str, float], *, workers: int, batch: int) -> None:
        folder = self._saving.folder
        if folder is None:
            return
        if self._log is None:
            self._log = MetricsLog(folder, tensorboard=self._saving.tensorboard, note=self._note)
        self._log.write(epoch, values, workers=workers, batch=batch)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Whether these values have the best score so far; if so, remember the score."""
        value = values.get(self._saving.metric) if self._saving.metric else None
        if value is None:
            return False
        score = value if self._saving.maximise else -value
        if score != score or (self.best is not None and score <= self.best):  # noqa: PLR0124  (NaN)
            return False
        self.best = score
        return True

    def finish(self) -> None:
        """Wait until everything is on the disk and, if possible, in the store."""
        if self._store is not None:
            self._store.close()
        if self._mirror is not None:
            self._mirror.close()

    def _open_store(self) -> CheckpointStore:
        saving = self._saving
        assert saving.folder is not None
        if self._store is None:
            folder, keep = saving.folder / "checkpoints", saving.checkpoints
            if saving.store:
                mirror = RemoteCheckpoints(
                    RemoteStore(saving.store), keep=keep, note=self._note, on_saved=self._on_saved
                )
                self._store = CheckpointStore(folder, keep=keep, note=self._note, in_use=mirror.in_use)
                self._mirror = mirror
            else:
                self._store = CheckpointStore(folder, keep=keep, note=self._note)
        return self._store
