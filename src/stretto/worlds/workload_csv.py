"""Reads workload files: a job per row with its time of submission, application and request.

name,time,application,num_replicas,batch_size, in any order and nothing else; time in seconds.
"""

from __future__ import annotations

from pathlib import Path

from stretto.core.errors import InputError
from stretto.worlds.applications import Applications, Configuration
from stretto.worlds.csv_table import Table, read_table
from stretto.worlds.truth import Workload, make_workload

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def read_workload(path: Path, applications: Applications) -> Workload:
    """The jobs of a workload file, with the truth about them from `applications`."""
    return workload_of(read_table(path), applications)


def workload_of(table: Table, applications: Applications) -> Workload:
    """The same from a table that was read already."""
    line_of: dict[str, int] = {}
    known = []
    for row in table.require(COLUMNS).rows:
        name = row.text("name")
        if name in line_of:
            raise InputError(
                f"name {name!r} is already that of the job in line {line_of[name]}.",
                where=row.where,
                remedy="Give every job a name of its own.",
            )
        line_of[name] = row.line
        request = Configuration(row.whole("num_replicas"), row.whole("batch_size"))
        application = applications.get(row.text("application"), where=row.where)
        job = application.job(name, row.number("time"), request, where=row.where)
        known.append((job, application.truth))
    return make_workload(table.path.stem, known)
