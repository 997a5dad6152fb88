"""The substrate of a real run on this machine: elastic workers for functions, processes for commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.driving.drive import RealSubstrate
from stretto.inputs.work import CommandLine, Entry, RealWork, sample_job
from stretto.runs.folder import RunFolder
from stretto.search.study import Direction, Study
from stretto.substrate.elastic.command import Command, check_placeholders
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.substrate import Files
from stretto.substrate.fleet.provision import noting_nodes
from stretto.substrate.local.commands import ProcessSubstrate
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import RentedSlots, Slots, find_slots

MACHINE_NODE = "local"


class CommandsFor(Mapping[str, Command]):
    """The command of any job, by its id."""

    def __init__(self, command_of: Callable[[str], Command]) -> None:
        self._command_of = command_of

    def __getitem__(self, job_id: str) -> Command:
        return self._command_of(job_id)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class CommandSubstrate:
    """Runs commands; slots that a policy rents are all slots of the one machine."""

    changes_batch_in_place = False

    def __init__(
        self,
        commands: Mapping[str, Command],
        *,
        run_dir: Path,
        slots: Slots,
        clock: Callable[[], float],
        retries: int,
    ) -> None:
        devices = (
            {MACHINE_NODE: slots.devices} if len(set(slots.devices)) == len(slots) and slots.has_gpus else {}
        )
        self._inner = ProcessSubstrate(
            (Node(MACHINE_NODE, Resources(gpu=len(slots))),),
            commands,
            run_dir=run_dir,
            devices=devices,
            clock=clock,
            retries=retries,
            threads=slots.threads_each,
        )
        self._rented = RentedSlots(len(slots))
        self._nodes: deque[Event] = deque()
        self._running: set[str] = set()
        self._finishing = False
        self._last_number = 0

    def now_s(self) -> float:
        return self._inner.now_s()

    def admit(self, job: Job) -> None:
        self._inner.admit(job)

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._last_number = max(self._last_number, instruction.number)
            self._follow(instruction)
        self._inner.apply([_on_this_machine(instruction) for instruction in instructions])

    def provision(self, wish: Wish) -> None:
        self._nodes.extend(self._rented.provision(wish, self.now_s()))

    def next_event(self, until_s: float) -> Event | None:
        """The next event; None at `until_s`, or, if that is never, once nothing runs any more."""
        event = self._nodes.popleft() if self._nodes else self._inner.next_event(until_s)
        if isinstance(event, JobFinished | JobFailed):
            self._running.discard(event.job_id)
        elif isinstance(event, JobReported) and event.results and self._finishing:
            self._park([event.job_id])
        return event

    def recover(self, history: Iterable[Event]) -> None:
        about_nodes: list[Event] = []
        self._inner.recover(self._followed(noting_nodes(history, about_nodes)))
        self._nodes.extend(self._rented.recall(about_nodes, self.now_s()))

    def _followed(self, history: Iterable[Event]) -> Iterator[Event]:
        """The same, as commands are told; who runs in the end is noted."""
        for event in history:
            if isinstance(event, Decided):
                for instruction in event.instructions:
                    self._last_number = max(self._last_number, instruction.number)
                    self._follow(instruction)
            elif isinstance(event, JobFinished | JobFailed):
                self._running.discard(event.job_id)
            yield _as_told(event)

    def finish_epochs(self) -> None:
        """Let every trial run to its next result, which is the end of its epoch, and park it there."""
        self._finishing = True

    def close(self) -> None:
        self._inner.close()

    def stop_now(self) -> None:
        self._inner.stop_now()

    def _follow(self, instruction: Instruction) -> None:
        if instruction.action in {Action.PARK, Action.STOP}:
            self._running.discard(instruction.job_id)
        else:
            self._running.add(instruction.job_id)

    def _park(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            if job_id in self._running:
                self._last_number += 1
                self.apply([Instruction(self._last_number, Action.PARK, job_id, NOTHING, BatchChoice(0))])


def _on_this_machine(instruction: Instruction) -> Instruction:
    workers = instruction.allocation.worker_count
    return replace(instruction, allocation=on_nodes({MACHINE_NODE: workers}))


def _as_told(event: Event) -> Event:
    """A decision as the processes saw it."""
    if not isinstance(event, Decided):
        return event
    return replace(event, instructions=tuple(_on_this_machine(one) for one in event.instructions))


LARGEST_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """What a substrate must know of a run."""

    work: Callable[[Job], RealWork]
    """What a job trains; all of a run's work is of one kind, so this answers for any job."""
    slots: int
    nodes: tuple[Node, ...] = ()
    """That are there from the start."""
    study: Study | None = None
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False
    temporary: bool = False
    """To see how it goes: nothing of it is kept."""
    describe_only: bool = False
    """Training code need not go further than to say what it wants."""

    @property
    def runs_commands(self) -> bool:
        return not isinstance(self.work(sample_job()), Entry)


MakeSubstrate = Callable[[TrainingSpec, RunFolder, Callable[[], float]], RealSubstrate]
"""Makes the substrate of a run in a folder, given its clock."""


def count_slots() -> int:
    """One for every GPU of this machine that may be used; without any, one for every core."""
    return len(find_slots())


def make_substrate(
    training: TrainingSpec, folder: RunFolder, clock: Callable[[], float], store: str = ""
) -> RealSubstrate:
    """On this machine: elastic workers if a run trains functions, processes if it runs commands.

    `store` is where checkpoints of functions go, too.
    """
    slots = find_slots(training.slots)
    if not training.runs_commands:
        return LocalSubstrate(
            spec_of=lambda job: training_job(training, job),
            run_dir=folder.path,
            slots=slots,
            clock=clock,
            rules=Rules(retries=training.retries),
            files=Files(tensorboard=training.tensorboard, store=store),
        )
    check_commands(training)
    return CommandSubstrate(
        CommandsFor(lambda job_id: _command(training, sample_job(job_id))),
        run_dir=folder.path,
        slots=slots,
        clock=clock,
        retries=training.retries,
    )


def training_job(training: TrainingSpec, job: Job) -> TrainingJob:
    """What an elastic substrate is told of a job."""
    study = training.study if job.study is not None else None
    return TrainingJob(
        entry=str(training.work(job)),
        config=dict(job.config),
        epochs=job.work.epochs,
        seed=int(child_rng(training.seed, "training", job.id).integers(LARGEST_SEED)),
        metric=None if study is None else study.metric,
        maximise=study is None or study.direction is Direction.MAX,
        waits_for_ack=study is not None,
        follows_batch=job.study is None,
        describe_only=training.describe_only,
    )


def command_job(training: TrainingSpec, job: Job) -> TrainingJob:
    """What an elastic substrate is told of a job that runs a command."""
    command, work = _command(training, job), training.work(job)
    assert isinstance(work, CommandLine)
    check_placeholders(command, job)
    return TrainingJob(
        entry=work.program,
        config=dict(job.config),
        epochs=job.work.epochs,
        metric=command.metric,
        command=command,
    )


def check_commands(training: TrainingSpec) -> None:
    """InputError if something is asked that only training functions can do."""
    if training.tensorboard:
        raise InputError(
            "--tensorboard is for training functions; a command writes its own files.", remedy="Leave it out."
        )


def _command(training: TrainingSpec, job: Job) -> Command:
    work = training.work(job)
    assert isinstance(work, CommandLine)
    metric = None if training.study is None else training.study.metric
    return Command(work.argv, cwd=work.folder, metric=metric, in_folder=work.in_folder)
