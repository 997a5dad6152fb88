"""One door for all workload files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stretto.core.errors import InputError
from stretto.worlds.philly import LOG_COLUMNS, LogFilter, workload_of_log
from stretto.worlds.workload_csv import COLUMNS, workload_of
from stretto.worlds.applications import Applications
from stretto.worlds.csv_table import read_table
from stretto.worlds.truth import Workload


def load_workload(
    path: Path,
    applications: Applications,
    rng: np.random.Generator,
    *,
    keep: LogFilter | None = None,
) -> Workload:
    """Jobs from a workload file or a cluster log, whichever the header says it is.

    `rng` draws what a log does not tell, and `keep` chooses rows of a log; a workload file needs neither.
    """
    table = read_table(path)
    if set(LOG_COLUMNS) <= set(table.columns):
        return workload_of_log(table, applications, rng, keep=keep or LogFilter())
    if keep is not None:
        raise InputError(
            "rows can be chosen from a cluster log only, and this is none.",
            where=f"{path}:1",
            remedy=f"Leave the choice out, or give a file with the header {','.join(LOG_COLUMNS)}.",
        )
    if not set(COLUMNS) & set(table.columns):
        raise InputError(
            "the header is neither that of a workload nor that of a cluster log.",
            where=f"{path}:1",
            remedy=f"Use {','.join(COLUMNS)} or {','.join(LOG_COLUMNS)}.",
        )
    return workload_of(table, applications)
