"""What to run for a job: its arguments filled in, and what its processes are told in their environment.

In arguments, `{name}` stands for a hyperparameter of the job, or, where it has none of that name, for

    {workers}    processes of the job
    {batch}      examples per step, over all workers
    {epochs}     after how many epochs it is done, if that is known
    {folder}     a folder of the job's own, the same whenever it is started

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
    """What to run for a job."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    cwd: Path | None = None
    metric: str | None = None
    """Of a study's trials: the key in their reports by which they are compared."""
    in_folder: bool = False
    """It runs in the job's own folder; relative paths among its arguments are those of `cwd`."""

    @property
    def launch_folder(self) -> Path:
        """Where it would run; relative paths that its user writes begin there."""
        return (self.cwd or Path()).absolute()


def check_placeholders(command: Command, job: Job) -> None:
    """InputError if an argument has a placeholder that stands for nothing."""
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
    """Where a job's command keeps what it wants to find again when it is started again."""
    return job_folder / _FOLDER


def filled_in(command: Command, job: Job, setup: CommandSetup, *, job_folder: Path) -> list[str]:
    """The arguments with every placeholder replaced."""
    workers = setup.allocation.worker_count
    folder = own_folder(job_folder)
    own = {"workers": workers, "batch": setup.batch.total(workers), "folder": folder, **_epochs(job)}
    values = {name: str(value) for name, value in {**own, **dict(job.config)}.items()}

    def value_of(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[2] is None else values[match[2]]

    parts = [_PLACEHOLDER.sub(value_of, part) for part in command.argv]
    return resolved(parts, command.launch_folder) if command.in_folder else parts


def resolved(argv: Sequence[str], folder: Path) -> list[str]:
    """The arguments with every relative path that is there, from the folder on, made absolute.

    That is also the value of `--data=PATH`, and not what follows `-m` or `-c`, which names a module or is
    code. A program without a slash is looked for on the PATH.
    """
    before = ["", *argv]
    return [
        part if before[at] in _NO_PATHS or (at == 0 and "/" not in part) else _absolute(part, folder)
        for at, part in enumerate(argv)
    ]


def rewritten(argv: Sequence[str], folder: Path) -> list[str]:
    """Those arguments that would be made absolute, as they are written."""
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
    """An environment in which Python finds modules of the folder where the command was given, too."""
    launch = environ.get(_LAUNCH)
    if not launch:
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (launch, environ.get("PYTHONPATH"))))}


def token_of(folder_identity: str, job_id: str) -> str:
    """What the processes of a job carry, and no other process does, not even one of a copy of the run."""
    return f"{folder_identity}:{job_id}"


def own_environment(
    command: Command, setup: CommandSetup, *, restarts: int, job_folder: Path
) -> dict[str, str]:
    """What processes of the job are told, on whatever node they are."""
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
    """What torchrun would tell every rank of a node; `host` is where the first rank is."""
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
