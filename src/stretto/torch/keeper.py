"""What a run leaves behind in its folder: metrics, checkpoints at regular times, and the best one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.torch.checkpoint import CheckpointStore
from stretto.torch.metrics_log import MetricsLog
from stretto.wire.messages import Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept, and how often."""

    folder: Path | None
    """None: nothing is kept."""
    every_s: float
    checkpoints: int
    metric: str | None = None
    """The checkpoint of the epoch in which this was best is kept too."""
    maximise: bool = True
    tensorboard: bool = False


class Keeper:
    """Rank 0's hand on the disk; other ranks never use theirs."""

    def __init__(
        self, keeping: Keeping, *, note: Callable[[str], None], on_saved: Callable[[Saved], None]
    ) -> None:
        self._keeping = keeping
        self._note = note
        self._on_saved = on_saved
        self._store: CheckpointStore | None = None
        self._log: MetricsLog | None = None
        self._saved_s = time.monotonic()
        self.best: float | None = None
        """The best score of the metric so far; more is better."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for another checkpoint."""
        every_s = self._keeping.every_s
        return self._keeping.folder is not None and time.monotonic() - self._saved_s >= every_s

    def load(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint that is whole.

        The best one is told again: whoever saved it may have been killed before it could tell.
        """
        if self._keeping.folder is None:
            return None
        store = self._open_store()
        loaded, best = store.load(), store.best()
        if loaded is not None and best is not None:
            self._on_saved(Saved(progress=best.progress, path=str(best.path), best=True))
        return None if loaded is None else loaded.state

    def save(
        self, state: Callable[[], dict[str, Any]], progress: float, *, best: bool = False, wait: bool = False
    ) -> bool:
        """Whether a checkpoint is written, or, with `wait`, whether it is safe."""
        if self._keeping.folder is None:
            return False
        self._saved_s = time.monotonic()

        def saved(path: Path, is_best: bool) -> None:
            self._on_saved(Saved(progress=progress, path=str(path), best=is_best))

        return self._open_store().save(state(), progress=progress, best=best, wait=wait, on_saved=saved)

    def write_metrics(self, epoch: int, values: Mapping[str, float], *, workers: int, batch: int) -> None:
        folder = self._keeping.folder
        if folder is None:
            return
        if self._log is None:
            self._log = MetricsLog(folder, tensorboard=self._keeping.tensorboard, note=self._note)
        self._log.write(epoch, values, workers=workers, batch=batch)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Whether an epoch with these values is the best so far; it is from now on."""
        value = values.get(self._keeping.metric) if self._keeping.metric else None
        if value is None:
            return False
        score = value if self._keeping.maximise else -value
        if score != score or (self.best is not None and score <= self.best):  # noqa: PLR0124  (NaN)
            return False
        self.best = score
        return True

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        if self._store is not None:
            self._store.close()

    def _open_store(self) -> CheckpointStore:
        assert self._keeping.folder is not None
        if self._store is None:
            folder = self._keeping.folder / "checkpoints"
            self._store = CheckpointStore(folder, keep=self._keeping.checkpoints, note=self._note)
        return self._store
