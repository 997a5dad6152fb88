"""The command of a job: its arguments, and the environment of its processes.

In arguments, `{name}` is replaced by the job's hyperparameter of that name. If there is none:

    {workers}    the number of processes
    {batch}      examples per step, over all workers
    {epochs}     the number of epochs, if it is known
    {folder}     the job's own folder, the same for all starts

`{{name}}` stands for `{name}` itself; other braces mean nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.substrate.elastic.command_output import CommandSetup

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.-]*)\}\}|\{([A-Za-z_][\w.-]*)\}")
_FOLDER = "files"
_LAUNCH = "STRETTO_LAUNCH_FOLDER"
_NO_PATHS = frozenset({"-m", "-c"})
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a job. With K workers, K processes run, with ranks as from torchrun."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    cwd: Path | None = None
    metric: str | None = None
    """The key in the reports of a trial by which the study compares trials."""
    in_folder: bool = False
    """Whether it runs in the job's own folder; relative paths in arguments start from `cwd`."""

    @property
    def launch_folder(self) -> Path:
        """The folder from which relative paths in its arguments start."""
        return (self.cwd or Path()).absolute()


def check_placeholders(command: Command, job: Job) -> None:
    """InputError if an argument has an unknown placeholder."""
    known = {**dict(job.config), "workers": "", "batch": "", "folder": "", **_epochs(job)}
    for part in command.argv:
        for match in _PLACEHOLDER.finditer(part):
            if match[2] is not None and match[2] not in known:
                names = ", ".join(f"{{{name}}}" for name in known)
                raise InputError(
                    f"{match[0]} in {part!r} stands for nothing.",
                    where=f"command of job {job.id}",
                    remedy=f"There are {names}; write {{{match[0]}}} for the text itself.",
                )


def own_folder(job_folder: Path) -> Path:
    """The folder in which a command keeps files between its starts."""
    return job_folder / _FOLDER


def filled_in(command: Command, job: Job, setup: CommandSetup, *, job_folder: Path) -> list[str]:
    """The arguments with all placeholders replaced."""
    workers = setup.allocation.worker_count
    folder = own_folder(job_folder)
    own = {"workers": workers, "batch": setup.batch.total(workers), "folder": folder, **_epochs(job)}
    values = {name: str(value) for name, value in {**own, **dict(job.config)}.items()}

    def value_of(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[2] is None else values[match[2]]

    parts = [_PLACEHOLDER.sub(value_of, part) for part in command.argv]
    return resolved(parts, command.launch_folder) if command.in_folder else parts


def resolved(argv: Sequence[str], folder: Path) -> list[str]:
    """The arguments, where every existing path relative to the folder is made absolute.

    This includes the value of `--data=PATH`. It excludes what follows `-m` or `-c` (a module or code), and a
    program without a slash, which is searched on the PATH.
    """
    before = ["", *argv]
    return [
        part if before[at] in _NO_PATHS or (at == 0 and "/" not in part) else _absolute(part, folder)
        for at, part in enumerate(argv)
    ]


def rewritten(argv: Sequence[str], folder: Path) -> list[str]:
    """The arguments that `resolved` would change, as they are written."""
    return [old for old, new in zip(argv, resolved(argv, folder), strict=True) if old != new]


def _absolute(part: str, folder: Path) -> str:
    option, equals, value = part.partition("=") if part.startswith("-") else ("", "", part)
    if not value or value.startswith(("/", "-")) or "\0" in value:
        return part
    try:
        is_there = (folder / value).exists()
    except OSError:  # too long for a name
        return part
    return f"{option}{equals}{folder / value}" if is_there else part


def importing(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python also finds modules of the launch folder."""
    launch = environ.get(_LAUNCH)
    if not launch:
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (launch, environ.get("PYTHONPATH"))))}


def token_of(folder_identity: str, job_id: str) -> str:
    """A token by which only the processes of this job are found, not those of a copy of the run."""
    return f"{folder_identity}:{job_id}"


def own_environment(
    command: Command, setup: CommandSetup, *, restarts: int, job_folder: Path
) -> dict[str, str]:
    """Variables for the processes of a job, the same on all nodes."""
    return {
        **({_LAUNCH: str(command.launch_folder)} if command.in_folder else {}),
        **command.env,
        "STRETTO_JOB": setup.job_id,
        "STRETTO_RESTARTS": str(restarts),
        "STRETTO_WORKERS": str(setup.allocation.worker_count),
        "STRETTO_SERVERS": str(setup.allocation.server_count),
        "STRETTO_NODES": str(len(setup.allocation.nodes)),
        "STRETTO_BATCH_ATOMIC": str(setup.batch.atomic),
        "STRETTO_BATCH_ACCUMULATION": str(setup.batch.accumulation),
        "STRETTO_METRICS_FILE": str(job_folder / METRICS),
        "STRETTO_FOLDER": str(own_folder(job_folder)),
    }


def gang_environment(
    job_id: str, *, world: int, local_world: int, restarts: int, port: int, host: str
) -> dict[str, str]:
    """Variables that torchrun would set on a node; `host` is the node of rank 0."""
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": job_id,
    }


def _epochs(job: Job) -> dict[str, int]:
    return {} if job.work.epochs is None else {"epochs": job.work.epochs}
