"""What a trial or job runs: a training function in a file, or any command. Checked before anything starts."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.core.errors import InputError, did_you_mean
from stretto.core.job import BatchLimits, Job, Role, Work
from stretto.core.resources import Resources
from stretto.search.space import Config
from stretto.substrate.elastic.command import Command, check_placeholders, rewritten

_EXAMPLE = "Write FILE:FUNCTION, such as train.py:train."


@dataclass(frozen=True, slots=True)
class Entry:
    """A function `train(config, run)` in a Python file."""

    path: Path
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Any program. Placeholders such as `{lr}` in its arguments stand for the values of a trial."""

    argv: tuple[str, ...]
    folder: Path | None = None
    """The working folder: that of the file that names the command; None: the current folder."""
    in_folder: bool = False
    """Each job runs in a separate folder; relative paths in the command still start from `folder`."""

    @property
    def rewritten(self) -> list[str]:
        """Arguments that are relative paths, which are made absolute."""
        return rewritten(self.argv, (self.folder or Path()).absolute()) if self.in_folder else []

    @property
    def program(self) -> str:
        """The program; a relative path starts from its folder."""
        program = self.argv[0]
        return program if self.folder is None or "/" not in program else str(self.folder / program)

    def __str__(self) -> str:
        return " ".join(self.argv)


RealWork = Entry | CommandLine


def in_own_folder(work: RealWork, *, asked: bool, where: str = "--in-folder") -> RealWork:
    """The work; if `asked`, each job runs in a separate folder. InputError if that is impossible."""
    if not asked:
        return work
    if isinstance(work, Entry):
        raise InputError(
            "it is about a command; a training function keeps its checkpoints in its job's folder.",
            where=where,
            remedy="Leave it out.",
        )
    return replace(work, in_folder=True)


def folder_note(work: RealWork, folder: Path) -> str:
    """A note for users about commands in separate folders; empty for other work."""
    if not isinstance(work, CommandLine) or not work.in_folder:
        return ""
    taken = ", ".join(work.rewritten)
    begin = (work.folder or Path()).absolute()
    paths = f"; from {begin} it takes {taken}" if taken else f"; none of its arguments is a path in {begin}"
    return f"The command runs in {folder}/jobs/NAME/files, a folder of each job's own{paths}."


def find_entry(text: str, folder: Path, *, where: str = "") -> Entry:
    """The function that `text` names. The file is parsed, not run."""
    file, colon, function = text.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise InputError(f"{text!r} does not name a training function.", where=where, remedy=_EXAMPLE)
    path = (folder / file).absolute()
    tree = _parse(path, where)
    found = dict(_bound(tree.body))
    if function not in found:
        functions = [name for name, node in found.items() if isinstance(node, ast.FunctionDef)]
        raise InputError(
            f"{path} has no function {function!r}.",
            where=where,
            remedy=f"{did_you_mean(function, functions)}It has {', '.join(functions) or 'none'}.",
        )
    _check_function(found[function], path, function, where)
    _check_parameters(found[function], path, where)
    return Entry(path, function)


def check_command(
    argv: Sequence[str], names: Iterable[str], *, where: str = "", folder: Path | None = None
) -> CommandLine:
    """Checks that a command can be started and that its placeholders are hyperparameters in `names`.

    `folder`: its working folder; None: the current one.
    """
    if not argv or not argv[0]:
        raise InputError("there is no command to run.", where=where, remedy="Give one: -- python train.py.")
    command = CommandLine(tuple(argv), None if folder is None else folder.absolute())
    if shutil.which(command.program) is None:
        start = "" if command.folder is None else f" from {command.folder} on, where it is to run"
        raise InputError(
            f"{argv[0]!r} is not a program that can be run.",
            where=where,
            remedy=f"Name one on the PATH, or give its path{start}.",
        )
    check_placeholders(Command(command.argv), sample_job(config=tuple((name, "") for name in names)))
    return command


def sample_job(job_id: str = "trial", config: Config = ()) -> Job:
    """A job with this name and configuration, for checks."""
    return Job(
        id=job_id,
        application="",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1)),
        batch=BatchLimits(initial=1, requested=1, max=1, per_gpu_min=1, per_gpu_max=1),
        work=Work(units_per_epoch=1.0, epochs=1),
        config=config,
    )


def _parse(path: Path, where: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}).",
            where=where,
            remedy="Give the path of the training script.",
        ) from error
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        raise InputError(f"{path}{place} is not Python: {error}.", where=where, remedy="Mend it.") from error


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that are bound at the top level of a module, also under `if` and `try`."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield (alias.asname or alias.name).partition(".")[0], node
            case ast.Assign():
                for target in node.targets:
                    yield from ((one.id, node) for one in ast.walk(target) if isinstance(one, ast.Name))
            case ast.If() | ast.Try():
                yield from _bound([*node.body, *node.orelse])


def _check_function(node: ast.stmt, path: Path, name: str, where: str) -> None:
    """Refuses what is certainly not a function; imported or computed names may be one."""
    match node:
        case ast.AsyncFunctionDef():
            kind = "a coroutine"
        case ast.ClassDef():
            kind = "a class"
        case ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict() | ast.Set()):
            kind = "a value"
        case _:
            return
    raise InputError(
        f"{path}, line {node.lineno}: {name} is {kind}, and not a function.",
        where=where,
        remedy="Name one that is defined by def NAME(config, run).",
    )


def _check_parameters(node: ast.stmt, path: Path, where: str) -> None:
    """The function must take two arguments, config and run."""
    if not isinstance(node, ast.FunctionDef):
        return
    given = node.args
    takes = len(given.posonlyargs) + len(given.args)
    needs = takes - len(given.defaults)
    extra = [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    if needs > 2 or extra or (takes < 2 and given.vararg is None):
        raise InputError(
            f"{path}, line {node.lineno}: {node.name}({ast.unparse(given)}) does not take config and run.",
            where=where,
            remedy=f"Write def {node.name}(config, run).",
        )
