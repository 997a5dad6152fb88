"""Monte Carlo samples of a study, drawn once: all plans are compared on the same trials, nodes and delays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from stretto.planning.forecast import StudyProgress, stages_left
from stretto.planning.profile import Floats, SpreadDraws
from stretto.planning.tuning import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Samples of everything uncertain; the first axis of every array is the sample."""

    epoch_s: Floats
    """[sample]: the mean time of an epoch."""
    trials: Floats
    """[sample, trial]: a trial keeps its factor through all stages."""
    nodes: Floats
    """[sample, node]: a node keeps its factor as long as it is held."""
    epochs: tuple[Floats, ...]
    """By stage, [sample, trial]: the mean of the factors of the stage's epochs."""
    queue_s: tuple[Floats, ...]
    """By stage, [sample]: each stage requests nodes once."""
    init_s: tuple[Floats, ...]
    """By stage, [sample, node]: the start-up of a node."""
    starts: Floats
    """[sample]: time of a start relative to the believed one; the same for all starts of a sample."""

    @property
    def samples(self) -> int:
        return len(self.epoch_s)


def draw_study(
    tuning: Tuning, rng: np.random.Generator, samples: int, start: StudyProgress | None = None
) -> Draws:
    """Samples of everything uncertain in a study, or in the rest of one."""
    stages = stages_left(tuning.study, start)
    profile, nodes = tuning.profile, tuning.max_nodes
    latency = profile.latency.draw(rng, samples)
    queue, init = profile.queue_s.draw(rng, samples), profile.init_s.draw(rng, samples)
    chance = _Chance(rng, samples)
    trials = chance.factors(latency.trial_sd, max(stage.trials for stage in stages))
    known = start.trial_factors[: trials.shape[1]] if start else ()
    trials[:, : len(known)] = known
    return Draws(
        epoch_s=latency.epoch_s,
        trials=trials,
        nodes=chance.factors(latency.node_sd, nodes),
        # We treat the mean of many log-normal factors as log-normal with the right mean and variance.
        epochs=tuple(chance.factors(latency.epoch_sd / stage.epochs**0.5, stage.trials) for stage in stages),
        queue_s=tuple(chance.delays(queue, 1)[:, 0] for _ in stages),
        init_s=tuple(chance.delays(init, nodes) for _ in stages),
        starts=chance.factors(np.full(samples, profile.start_sd), 1)[:, 0]
        if profile.start_sd
        else np.ones(samples),
    )


def first_samples(draws: Draws, samples: int) -> Draws:
    """The first `samples` of the samples."""
    return Draws(
        epoch_s=draws.epoch_s[:samples],
        trials=draws.trials[:samples],
        nodes=draws.nodes[:samples],
        epochs=tuple(factors[:samples] for factors in draws.epochs),
        queue_s=tuple(delays[:samples] for delays in draws.queue_s),
        init_s=tuple(delays[:samples] for delays in draws.init_s),
        starts=draws.starts[:samples],
    )


def sources(draws: Draws) -> dict[str, Draws]:
    """By source of uncertainty: the same samples with this source fixed at its mean."""
    return {
        "mean epoch time": replace(draws, epoch_s=_held(draws.epoch_s)),
        "trial speed": replace(draws, trials=_held(draws.trials)),
        "node speed": replace(draws, nodes=_held(draws.nodes)),
        "epoch to epoch": replace(draws, epochs=tuple(_held(factors) for factors in draws.epochs)),
        "queueing for nodes": replace(draws, queue_s=tuple(_held(delays) for delays in draws.queue_s)),
        "node start-up": replace(draws, init_s=tuple(_held(delays) for delays in draws.init_s)),
        "starts of trials": replace(draws, starts=_held(draws.starts)),
    }


def _held(values: Floats) -> Floats:
    return np.broadcast_to(values.mean(axis=0), values.shape)


class _Chance:
    """Log-normal factors by Latin hypercube sampling: each factor takes every part of its range once.

    This needs far fewer samples for the quantiles of sums of many factors.
    """

    def __init__(self, rng: np.random.Generator, samples: int) -> None:
        self._rng = rng
        parts = (np.arange(samples) + rng.uniform(1e-9, 1.0, samples)) / samples
        normal = NormalDist()
        self._normal = np.array([normal.inv_cdf(part) for part in parts.tolist()])

    def factors(self, relative_sd: Floats, count: int) -> Floats:
        """Mean 1: exp(s z - s^2 / 2), s^2 = log(1 + sd^2)."""
        variance = np.log1p(relative_sd**2)[:, None]
        normal = self._rng.permuted(np.tile(self._normal, (count, 1)), axis=1).T
        return np.asarray(np.exp(np.sqrt(variance) * normal - variance / 2.0))

    def delays(self, spread: SpreadDraws, count: int) -> Floats:
        relative_sd = np.divide(spread.sd, spread.mean, out=np.zeros_like(spread.sd), where=spread.mean > 0)
        return spread.mean[:, None] * self.factors(relative_sd, count)
