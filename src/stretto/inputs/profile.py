"""The profile of a training script: the file that `stretto profile` writes, and what a planner believes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import msgspec
import numpy as np

from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.core.observations import SpeedSample
from stretto.core.seeds import child_rng
from stretto.core.units import counted
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.models.speed import AllReduceSpeed, fit_all_reduce
from stretto.planning.learning import NODE_SCALE, LatencyPosterior, Observation, learn_latency, updated_delay
from stretto.planning.profile import Profile, Scaling, Spread, SpreadBelief
from stretto.system.plain_json import UnreadableError, checksum, read_json
from stretto.system.private_files import make_private_folder, write_private

PACE_SD = 0.065
"""Relative standard deviation of a machine's speed, compared with its speed during the probe.
`benchmarks/prediction.py --calibrate` measures it on other studies than the benchmark reports on: 0.05 at one
time, 0.08 at another, but 0.28 of a network whose epochs take milliseconds."""
CROWD_SD = 0.2
"""Relative error of epoch times beside busy neighbours, if only a worker alone on the machine was timed.
Chosen by hand."""
LONE_CHANCE = 1.08
"""Two measurements of the same training differ by up to this factor by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile(Profile):
    """The profile of trials on the probed machine: for busy slots, with corrections for idle ones."""

    slots: int
    lone_epoch: float
    """Time of an epoch while the other slots are idle, relative to when they are busy."""
    lone_start_s: float
    gang_start_s: float
    """What a start or resize to several workers costs."""

    def epoch_factor(self, busy: int) -> float:
        """Epoch time while `busy` slots are busy, relative to all slots busy; linear in between."""
        return self.lone_epoch + (1.0 - self.lone_epoch) * self._crowding(busy)

    def start_s_at(self, busy: int, workers: int = 1) -> float:
        """Cost of starting `workers` workers while `busy` slots are busy."""
        if workers > 1:
            return self.gang_start_s
        return self.lone_start_s + (self.start_s - self.lone_start_s) * self._crowding(busy)

    def _crowding(self, busy: int) -> float:
        return (min(busy, self.slots) - 1) / (self.slots - 1) if self.slots > 1 else 1.0


def beyond_chance(ratio: float) -> float:
    """The ratio of epoch time alone to epoch time beside others, without what chance explains; at most 1."""
    return min(ratio * LONE_CHANCE, 1.0)


def at_another_time(
    latency: LatencyPosterior, rng: np.random.Generator, *, crowded: bool = False
) -> LatencyPosterior:
    """The same machine at a later time: one factor of mean 1 for all trials, exp(s z - s^2 / 2).

    `crowded`: the machine will also be busier than it was.
    """
    draws, sd = latency.draws, float(np.hypot(PACE_SD, CROWD_SD)) if crowded else PACE_SD
    normal = rng.standard_normal(len(draws.epoch_s))
    later_s = draws.epoch_s * np.exp(sd * normal - sd**2 / 2.0)
    return LatencyPosterior(replace(draws, epoch_s=later_s))


FORMAT = "stretto-profile"
VERSION = 1
CHECK = "check"
"""Key of the checksum over the rest of the file. Files of 0.1 have none."""
START_SD = 0.3
"""Relative standard deviation of the cost of a start, compared with the probe; chosen like `PACE_SD`."""
LEAST_STARTS = 3
"""With fewer starts their spread is unknown .."""
UNKNOWN_START_SD = 0.5
""".. and this is assumed."""

_REMEDY = "Measure again with `stretto profile`."


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEpoch:
    """One whole epoch, timed while the other slots were as busy as in a study."""

    config: int
    """Index of the configuration."""
    workers: int
    epoch_s: float
    first: bool
    """The first after a start or resize, which is often slower."""
    lone: bool = False
    """The other slots were idle instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedConfig:
    """A configuration whose training failed during the probe."""

    config: int
    """Index of the configuration."""
    error: str
    """Last line of the traceback."""
    log: str = ""
    """Path of its log; empty: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedNode:
    """A node that was launched for the probe and released afterwards."""

    instance: str
    queue_s: float
    """Time its request waited."""
    init_s: float
    """Time until it was ready, with the training code loaded."""
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a measurement comes from: which code, machine and study."""

    code: str
    """Digest of the files of the training code that are known."""
    machine: str
    """The host and, without a cluster, the devices that were used."""
    nodes: tuple[str, ...]
    """Nodes of the cluster that were measured on."""
    study: str
    """Digest of the parts of the study file that affect speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """What a probe measured. Times are in seconds; empty or None: not measured."""

    what: str
    """The entry or command."""
    slots: int
    measured_s: float
    """How long the probe took."""
    configs: tuple[dict[str, Value], ...]
    epochs: tuple[TimedEpoch, ...]
    speeds: tuple[SpeedSample, ...]
    """The mean for each number of workers and batch size, all of one configuration."""
    warm_up_s: float | None
    """The very first start, which also loads the training code."""
    starts_s: tuple[float, ...]
    resizes_s: tuple[float, ...]
    examples: int | None
    """Examples of an epoch, as the training code reports."""
    speed: AllReduceSpeed | None
    """The model of a step's time, fitted to `speeds`."""
    not_measured: tuple[str, ...]
    """Sentences on what is missing."""
    lone_starts_s: tuple[float, ...] = ()
    """Starts while the other slots were idle."""
    gang_starts_s: tuple[float, ...] = ()
    """Starts of several workers at once; `starts_s` and `lone_starts_s` are of one worker."""
    node: ProbedNode | None = None
    """The node that was launched for the probe, if any."""
    origin: Origin | None = None
    """None: unknown."""
    given_s: float | None = None
    """Time limit of the probe from the first training step on; None: unknown."""
    cut_short: bool = False
    """The time limit ended the probe early."""
    most_workers: int | None = None
    """Largest number of workers of one trial, if that is less than all slots."""
    failed: tuple[FailedConfig, ...] = ()

    @property
    def tells_epochs(self) -> bool:
        """Whether the length of an epoch is known."""
        return bool(self.epochs) or (self.examples is not None and self.examples_per_s(1) is not None)

    @property
    def failure(self) -> str:
        """One line about the configurations that failed; empty if none did."""
        if not self.failed:
            return ""
        first = self.failed[0]
        values = ", ".join(f"{name} = {_short(value)}" for name, value in self.configs[first.config].items())
        log = f"; log: {first.log}" if first.log else ""
        return (
            f"{len(self.failed)} of {counted(len(self.configs), 'configuration')} failed when tried, "
            f"the first with {values or 'no hyperparameters'}: {first.error}{log}"
        )

    @property
    def only_lone(self) -> bool:
        """Single workers were timed only while the other slots were idle."""
        lone = {one.lone for one in self.epochs if one.workers == 1}
        return self.slots > 1 and lone == {True}

    def epoch_times_s(self, workers: int, config: int | None = None, *, lone: bool = False) -> list[float]:
        """Times of steady epochs with `workers` workers; first or lone epochs only if there are no others."""
        lone = lone or (workers == 1 and self.only_lone)
        seen = [
            one
            for one in self.epochs
            if one.workers == workers and one.lone == lone and (config is None or one.config == config)
        ]
        return [one.epoch_s for one in seen if not one.first] or [one.epoch_s for one in seen]

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """Numbers of workers for which epochs or steps were timed."""
        epochs, steps = (one.workers for one in self.epochs), (one.workers for one in self.speeds)
        return tuple(sorted({*epochs, *steps}))

    def speedup(self, workers: int) -> float | None:
        """Speed relative to one worker, by epochs of the same configuration, else by steps; None: unknown."""
        if workers == 1:
            return 1.0
        ratios = [
            float(np.log(fmean(alone) / fmean(together)))
            for config in range(len(self.configs))
            if (alone := self.epoch_times_s(1, config)) and (together := self.epoch_times_s(workers, config))
        ]
        if ratios:
            return float(np.exp(fmean(ratios)))
        alone_rate, rate = self.examples_per_s(1), self.examples_per_s(workers)
        return None if alone_rate is None or rate is None else rate / alone_rate

    def examples_per_s(self, workers: int) -> float | None:
        """The highest rate over all batch sizes; None: not measured."""
        rates = [
            workers * one.atomic / one.step_s
            for one in self.speeds
            if one.workers == workers and one.step_s > 0
        ]
        return max(rates, default=None)

    @property
    def lone_epoch(self) -> float:
        """Epoch time while the other slots are idle, relative to when they are busy; 1: not measured."""
        ratios = [
            median(lone) / median(busy)
            for config in range(len(self.configs))
            if (lone := self.epoch_times_s(1, config, lone=True)) and (busy := self.epoch_times_s(1, config))
        ]
        return fmean(ratios) if ratios else 1.0

    @property
    def lone_start_s(self) -> float:
        """Cost of a start while the other slots are idle; that of any start if it was not measured."""
        if not self.lone_starts_s:
            return self.start_s
        return median(self.lone_starts_s) + self.first_epoch_extra_s

    @property
    def first_epoch_extra_s(self) -> float:
        """How much longer the first epoch after a start takes than later ones, if both were timed."""
        extra = [
            one.epoch_s - fmean(steady)
            for one in self.epochs
            if one.first
            and (
                steady := [
                    other.epoch_s
                    for other in self.epochs
                    if not other.first
                    and (other.config, other.workers, other.lone) == (one.config, one.workers, one.lone)
                ]
            )
        ]
        return max(fmean(extra), 0.0) if extra else 0.0

    @property
    def start_s(self) -> float:
        """Cost of a warm start: the time until it trains, plus the extra time of its first epoch.

        The median, because the first checkpoint of a process takes several times as long as later ones.
        If no warm start was measured, the first start is an upper bound; otherwise the usual prior.
        """
        if self.starts_s:
            return median(self.starts_s) + self.first_epoch_extra_s
        return DEFAULT_RESIZE_S if self.warm_up_s is None else self.warm_up_s

    @property
    def loading_s(self) -> float:
        """How much longer the very first start took than others."""
        return max((self.warm_up_s or 0.0) - self.start_s, 0.0)

    @property
    def gang_start_s(self) -> float:
        """Cost of starting several workers, or of resizing one worker to several."""
        seen = (*self.resizes_s, *self.gang_starts_s)
        return median(seen) + self.first_epoch_extra_s if seen else self.start_s

    @property
    def start_sd(self) -> float:
        """Relative uncertainty of the cost of a start."""
        seen = self.starts_s
        if len(seen) < LEAST_STARTS or not any(seen):
            return UNKNOWN_START_SD
        return float(np.hypot(START_SD, stdev(seen) / fmean(seen) / len(seen) ** 0.5))

    @property
    def scaling(self) -> Scaling:
        """Measured speed by workers; more workers than were tried gain nothing."""
        known = ((workers, self.speedup(workers)) for workers in self.worker_counts if workers > 1)
        return Scaling(((1, 1.0), *((workers, speedup) for workers, speedup in known if speedup is not None)))


def believe(
    measured: MeasuredProfile,
    *,
    same_machine: bool = True,
    queue_s: SpreadBelief | None = None,
    init_s: SpreadBelief | None = None,
) -> Profile:
    """The belief for a plan after the probe; the fewer epochs were timed, the wider are its draws.

    `same_machine`: trials run where the probe ran. Then nodes do not differ, but the machine's speed may have
    changed. `queue_s` and `init_s` are the prior delays of nodes that are launched.
    """
    queue_s, init_s = Spread(0.0) if queue_s is None else queue_s, Spread(0.0) if init_s is None else init_s
    if measured.node is not None and not same_machine:
        queue_s = updated_delay(queue_s, [measured.node.queue_s])
        init_s = updated_delay(init_s, [measured.node.init_s])
    scaling, rng = measured.scaling, child_rng(0, "profile")
    observations = _observations(measured, scaling)
    latency = learn_latency(observations, rng, node_scale=0.0 if same_machine else NODE_SCALE)
    if same_machine or measured.only_lone:
        latency = at_another_time(latency, rng, crowded=measured.only_lone)
    if same_machine:
        return MachineProfile(
            latency=latency,
            scaling=scaling,
            start_s=measured.start_s,
            start_sd=measured.start_sd,
            queue_s=queue_s,
            init_s=init_s,
            slots=measured.slots,
            lone_epoch=beyond_chance(measured.lone_epoch),
            lone_start_s=min(measured.lone_start_s, measured.start_s),
            gang_start_s=measured.gang_start_s,
        )
    return Profile(
        latency=latency,
        scaling=scaling,
        start_s=measured.start_s,
        start_sd=measured.start_sd,
        queue_s=queue_s,
        init_s=init_s,
    )


def _observations(measured: MeasuredProfile, scaling: Scaling) -> list[Observation]:
    """Steady epochs by configuration; if none was completed, one computed from the time of a step."""
    timed = [
        Observation(trial=str(config), node="here", epoch_s=epoch_s, speed=scaling.speedup(workers))
        for config in range(len(measured.configs))
        for workers in measured.worker_counts
        for epoch_s in measured.epoch_times_s(workers, config)
    ]
    if timed:
        return timed
    rate = measured.examples_per_s(1)
    if rate is None or measured.examples is None:
        raise InputError(f"the profile of {measured.what} has no epoch and no step.", remedy=_REMEDY)
    return [Observation(trial="0", node="here", epoch_s=measured.examples / rate)]


def profile_json(measured: MeasuredProfile) -> dict[str, Any]:
    """The profile as JSON data: the content of the file, and the answer of `--json`."""
    measures: dict[str, Any] = msgspec.to_builtins(measured)
    fields = {"format": FORMAT, "version": VERSION, **measures}
    return {**fields, CHECK: checksum(fields)}


def write_profile(path: Path, measured: MeasuredProfile) -> None:
    """Write the file whole or not at all."""
    text = json.dumps(profile_json(measured), indent=1, allow_nan=False) + "\n"
    make_private_folder(path.parent)
    write_private(path, text.encode())


def read_profile(path: Path) -> MeasuredProfile:
    """Reads a profile; InputError if the file is not one."""
    where = str(path)
    try:
        fields = read_json(path)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}).", where=where, remedy=_REMEDY) from error
    except UnreadableError as error:
        raise InputError(f"is not JSON: {error}.", where=where, remedy=_REMEDY) from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise InputError("is not a profile.", where=where, remedy=_REMEDY)
    check = fields.pop(CHECK, None)
    if check is not None and check != checksum({"format": FORMAT, **fields}):
        raise InputError(
            f"is not as it was measured: its {CHECK} does not match.",
            where=where,
            remedy=f"{_REMEDY} If you changed it on purpose, remove the line with {CHECK}.",
        )
    if (version := fields.pop("version", None)) != VERSION:
        raise InputError(
            f"is of version {version!r}, and this program reads version {VERSION}.",
            where=where,
            remedy=_REMEDY,
        )
    try:
        measured = msgspec.convert(fields, MeasuredProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"does not read as a profile: {error}.", where=where, remedy=_REMEDY) from error
    _check(measured, where)
    return measured


def spent_usd(path: Path) -> float:
    """Cost of measuring the profile in this file; 0 if there is no such file."""
    node = read_profile(path).node if path.is_file() else None
    return 0.0 if node is None else node.cost_usd


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _check(measured: MeasuredProfile, where: str) -> None:
    """Times must be positive, and every measurement must belong to a configuration."""
    times = [*(one.epoch_s for one in measured.epochs), *(one.step_s for one in measured.speeds)]
    counts = [measured.slots, *measured.worker_counts, 1 if measured.examples is None else measured.examples]
    starts_s = (*measured.starts_s, *measured.lone_starts_s, *measured.gang_starts_s)
    node = measured.node
    brought_up = () if node is None else (node.queue_s, node.init_s, node.cost_usd)
    delays = [*starts_s, *measured.resizes_s, measured.warm_up_s or 0.0, *brought_up]
    if not all(0.0 < time_s < float("inf") for time_s in times):
        raise InputError("an epoch or step has a time that is not above 0.", where=where, remedy=_REMEDY)
    if not all(0.0 <= delay_s < float("inf") for delay_s in delays):
        raise InputError("a start has a negative time or cost.", where=where, remedy=_REMEDY)
    tried = [*(one.config for one in measured.epochs), *(one.config for one in measured.failed)]
    if min(counts) < 1 or any(not 0 <= config < len(measured.configs) for config in tried):
        raise InputError("a count is below 1, or an epoch has no configuration.", where=where, remedy=_REMEDY)


LEAST_OTHERS = 3
"""Least number of points to fit a model to when one is left out."""


def fit_speed(speeds: Sequence[SpeedSample]) -> AllReduceSpeed | None:
    """The model of the step time; None if no step was timed."""
    return fit_all_reduce(speeds) if speeds else None


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error of the model at one measured step time."""

    sample: SpeedSample
    fitted_s: float
    residual: float
    left_out: float | None
    """Error of a model fitted to all other points; None: too few others, or none with as many workers."""


def fit_errors(speeds: Sequence[SpeedSample]) -> tuple[FitError, ...]:
    """The error of the model at every measured point, fitted with and without that point."""
    model = fit_speed(speeds)
    if model is None:
        return ()
    errors = []
    for sample in speeds:
        fitted_s = _step_s(model, sample)
        others = [one for one in speeds if one is not sample]
        known = len(others) >= LEAST_OTHERS and any(one.workers == sample.workers for one in others)
        left_out = _step_s(fit_all_reduce(others), sample) / sample.step_s - 1.0 if known else None
        errors.append(FitError(sample, fitted_s, fitted_s / sample.step_s - 1.0, left_out))
    return tuple(errors)


def _step_s(model: AllReduceSpeed, sample: SpeedSample) -> float:
    return float(model.step_s(sample.nodes, sample.workers, sample.atomic))
