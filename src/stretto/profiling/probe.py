"""A short probe of a training script: how long its steps, epochs, starts and resizes take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.core.substrate import Substrate
from stretto.core.units import format_duration
from stretto.driving.drive import NoObserver, Observer, wall_clock
from stretto.driving.early_stop import EarlyStop
from stretto.driving.local_target import ThisMachine
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget, kept_log
from stretto.inputs.profile import MeasuredProfile
from stretto.inputs.work import CommandLine, Entry, RealWork
from stretto.profiling.drive import NO_BATCH, PROBE, Probe
from stretto.profiling.probe_data import (
    LOADING_S,
    Describe,
    Imported,
    OnProgress,
    ProbeSpec,
    ProbeTime,
    SlotMap,
)
from stretto.search.space import Config
from stretto.search.study import Direction, Study
from stretto.substrate.elastic.substrate import ElasticSubstrate
from stretto.substrate.local.slots import whole_machine
from stretto.wire.messages import Described

ANY_STUDY = Study(
    name=PROBE, metric="epoch", direction=Direction.MAX, trials=1, rungs=(), eta=2, max_epochs=10**6
)
"""For training without a study: its epochs are timed, whatever it reports. A command prints `epoch`."""

MORE_TIME = "Give more time: --time 30m."


def probe(
    work: RealWork,
    configs: Sequence[Config],
    *,
    slots: int,
    time_s: float,
    target: OpenTarget | None = None,
    nodes: tuple[Node, ...] = (),
    study: Study = ANY_STUDY,
    seed: int = 0,
    on_progress: OnProgress = lambda _: None,
    more_time: str = MORE_TIME,
    first_epoch_s: float | None = None,
    loading_s: float = LOADING_S,
    max_workers: int | None = None,
    log: Path | None = None,
) -> MeasuredProfile:
    """Trains some configurations for a moment, on `slots` of a target; None: of this machine.

    - `nodes`: the nodes of the target that have these slots; empty: all of them.
    - `first_epoch_s`: the longest wait for the end of a first epoch, if `time_s` is too short for it.
    - `loading_s`: the longest wait for a first sign of training.
    - `max_workers`: workers of one training; None: all slots.
    - `log`: where to keep the log of the first training that fails; the folder of the probe is removed.
    - `more_time`: the remedy if the probe had too little time.
    """
    target = ThisMachine(slots=slots) if target is None else target
    nodes = nodes or target.nodes
    if not nodes:
        raise InputError(
            f"{target.words} has no node yet to measure on.",
            where=str(work),
            remedy="Let one join and start again; or measure elsewhere with `stretto profile`, and write "
            '[profile] file = "profile.json" in the study.',
        )
    spec = ProbeSpec(
        what=probed_as(work, target),
        configs=tuple(configs),
        tier=Tier.ELASTIC if isinstance(work, Entry) else Tier.RIGID,
        max_workers=max_workers,
        epochs=None if isinstance(work, Entry) else study.max_epochs,  # a command may have to be told
        shows_epochs_only=not isinstance(work, Entry),
        steps_suffice=study is ANY_STUDY,
    )
    training = TrainingSpec(
        work=lambda _: work,
        study=study,
        slots=slots,
        nodes=nodes,
        seed=seed,
        retries=0,
        temporary=True,
        runs_commands=isinstance(work, CommandLine),
    )
    with target.scratch("probe", log) as folder:
        substrate = target.make(training, folder, wall_clock(time.time()))
        try:
            elastic = substrate if isinstance(substrate, ElasticSubstrate) else None
            if training.runs_commands:  # there is nothing to describe or import
                elastic = None
            measured = measure(
                spec,
                substrate,
                slots=slots,
                nodes=nodes,
                time_s=time_s,
                describe=_nothing_said if elastic is None else elastic.described,
                imported=None if elastic is None else elastic.is_born,
                on_progress=on_progress,
                observer=NoObserver() if study is ANY_STUDY else EarlyStop(folder, study, NoObserver()),
                more_time=more_time,
                first_epoch_s=first_epoch_s,
                loading_s=loading_s,
            )
            return _with_a_log_kept(measured, log)
        finally:  # a command may have something to clear away
            (substrate.close if training.runs_commands else substrate.stop_now)()


def _nothing_said(job_id: str) -> Described | None:
    """Nothing: commands do not describe themselves."""
    del job_id
    return None


def _with_a_log_kept(measured: MeasuredProfile, place: Path | None) -> MeasuredProfile:
    """The profile with the log of the first failed configuration kept; other logs are removed."""
    failed = tuple(
        dataclasses.replace(one, log=kept_log(Path(one.log), place if one is measured.failed[0] else None))
        for one in measured.failed
    )
    return dataclasses.replace(measured, failed=failed)


def probed_as(work: RealWork, target: OpenTarget) -> str:
    """The name of the training in a profile: the work, and " on Ray" if it ran there."""
    return f"{work}{target.mark}"


def slots_of(nodes: Iterable[Node]) -> int:
    """The number of slots of these nodes."""
    return sum(node.gpus for node in nodes)


def measure(
    spec: ProbeSpec,
    substrate: Substrate,
    *,
    slots: int,
    time_s: float,
    nodes: Sequence[Node] = (),
    describe: Describe = lambda _: None,
    imported: Imported | None = None,
    on_progress: OnProgress = lambda _: None,
    observer: Observer | None = None,
    more_time: str = MORE_TIME,
    first_epoch_s: float | None = None,
    loading_s: float = LOADING_S,
) -> MeasuredProfile:
    """Probes on nodes that have `slots` together, by default on one node "local", and stops all copies.

    `time_s` counts from the first sign of training, without loading its code. `describe` gives the
    description of a job's training code once it is known; `imported` says whether its function runs, if that
    can be seen.
    """
    if slots < 1:
        raise InputError(f"{slots} slots hold no worker.", remedy="Give at least one.")
    if not 0.0 < time_s < float("inf"):
        raise InputError(f"a probe of {time_s:g} s measures nothing.", remedy="Give a time such as 90s.")
    probe = Probe(
        spec,
        substrate,
        slots=slots,
        slot_map=SlotMap(nodes or (whole_machine(slots),)),
        time=ProbeTime(
            usual_s=time_s,
            first_epoch_s=time_s if first_epoch_s is None else first_epoch_s,
            loading_s=loading_s,
        ),
        describe=describe,
        imported=imported,
        on_progress=on_progress,
        observer=observer or NoObserver(),
    )
    silence = ""
    try:
        probe.run()
        silence = probe.silence()
    finally:
        probe.stop()
    measured = probe.result()
    if not measured.epochs and not measured.speeds:
        raise no_epoch(measured, more_time, probe.noted, silence, is_command=spec.shows_epochs_only)
    return measured


def no_epoch(
    measured: MeasuredProfile, more_time: str, noted: str = "", silence: str = "", *, is_command: bool
) -> InputError:
    """The error of a probe that did not see how long an epoch takes.

    `noted` may name the reason; `silence` says what a silent training may have been doing.
    """
    prints = ' (a command prints {"epoch": 1} when its first epoch ends)' if is_command else ""
    loops = "Give the loader to run.prepare, and go through it inside run.epochs."
    return InputError(
        f"the first epoch did not end within {format_duration(measured.measured_s)}"
        f"{f': {silence}' if silence else ''}{prints}.",
        where=measured.what,
        remedy=" ".join(filter(None, (noted, loops if silence == NO_BATCH else "", more_time))),
    )
