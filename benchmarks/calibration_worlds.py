"""Families of worlds for figure 5: one world of a family is observed, plans are carried out in the others.

The planner believes in log-normal factors with half-normal priors of their spread (planning/learning.py).
These worlds differ from that. In half of the families, a hyperparameter with three values changes the speed
of trials; in the others, trials differ by a gamma factor. Nodes differ by an exponential factor, epochs and
delays by a gamma factor. All spreads are drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.planning.draws import Draws
from stretto.planning.learning import Observation, learn_delay, learn_latency
from stretto.planning.profile import Floats, Latency, Profile, Scaling, Spread
from stretto.planning.tuning import Tuning
from stretto.search.space import Config
from stretto.search.study import Direction, halving_stages

PLANS = 30
COLUMNS = 5
"""Strata of the observed spread; those of the observed level are PLANS / COLUMNS."""
OBSERVATIONS = {5: (5, 2), 10: (8, 3), 30: (15, 5)}
"""Number of observations, and on how many trials and nodes they are made."""
WIDTHS = (0.75, 1.0, 1.5)
"""Relative time of an epoch by the value of a hyperparameter."""
START_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed in one world."""

    epochs: Sequence[Observation]
    queue_s: Sequence[float]
    init_s: Sequence[float]

    @property
    def logs(self) -> Floats:
        return np.log([one.epoch_s for one in self.epochs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Worlds of one kind: one is observed, plans are carried out in the others."""

    epoch_s: float
    widths: bool
    trial_sd: float
    node_sd: float
    epoch_sd: float
    queue_s: float
    init_s: float
    delay_sd: float
    """Relative to the mean."""

    def trials(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        if self.widths:
            return rng.choice(WIDTHS, size=shape) * _gamma(rng, 0.03, shape)
        return _gamma(rng, self.trial_sd, shape)

    def nodes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return 1.0 + self.node_sd * (rng.standard_exponential(shape) - 1.0)

    def draws(self, tuning: Tuning, rng: np.random.Generator, samples: int) -> Draws:
        """Worlds as the execution model takes them."""
        stages = halving_stages(tuning.study)
        nodes = tuning.max_nodes
        return Draws(
            epoch_s=np.full(samples, self.epoch_s),
            trials=self.trials(rng, (samples, tuning.study.trials)),
            nodes=self.nodes(rng, (samples, nodes)),
            # The mean of n gamma factors is a gamma factor with a spread smaller by the root of n.
            epochs=tuple(
                _gamma(rng, self.epoch_sd / stage.epochs**0.5, (samples, stage.trials)) for stage in stages
            ),
            queue_s=tuple(self.queue_s * _gamma(rng, self.delay_sd, (samples,)) for _ in stages),
            init_s=tuple(self.init_s * _gamma(rng, self.delay_sd, (samples, nodes)) for _ in stages),
            starts=np.ones(samples),
        )

    def truth(self, scaling: Scaling) -> Profile:
        """Worlds as simulations take them: the same means and spreads, by log-normal laws."""
        return Profile(
            latency=Latency(
                epoch_s=self.epoch_s, trial_sd=self.trial_sd, node_sd=self.node_sd, epoch_sd=self.epoch_sd
            ),
            scaling=scaling,
            start_s=START_S,
            queue_s=Spread(self.queue_s, self.queue_s * self.delay_sd),
            init_s=Spread(self.init_s, self.init_s * self.delay_sd),
        )

    def look(self, count: int, rng: np.random.Generator) -> Seen:
        """The observation of `count` epochs in one world, with the delays of the nodes that they ran on."""
        trial_count, node_count = OBSERVATIONS[count]
        trials, nodes = self.trials(rng, (trial_count,)), self.nodes(rng, (node_count,))
        epochs = _gamma(rng, self.epoch_sd, (count,))
        epochs_of = [
            Observation(
                trial=str(index % trial_count),
                node=str(index % node_count),
                epoch_s=self.epoch_s
                * trials[index % trial_count]
                * nodes[index % node_count]
                * epochs[index],
            )
            for index in range(count)
        ]
        queue, init = (_gamma(rng, self.delay_sd, (node_count,)) for _ in range(2))
        return Seen(epochs_of, list(self.queue_s * queue), list(self.init_s * init))


def _gamma(rng: np.random.Generator, sd: float, shape: tuple[int, ...]) -> Floats:
    """Factors with mean 1."""
    return rng.gamma(1.0 / sd**2, sd**2, shape)


def families(rng: np.random.Generator) -> list[Family]:
    """A Latin hypercube: every parameter takes every part of its range once."""

    def spread(low: float, high: float) -> list[float]:
        return list((low + (high - low) * strata(rng)).tolist())

    columns = zip(
        spread(20, 120),
        spread(0.02, 0.3),
        spread(0.0, 0.1),
        spread(0.01, 0.2),
        spread(10, 60),
        spread(20, 90),
        spread(0.1, 0.5),
        strict=True,
    )
    return [
        Family(
            epoch_s=epoch_s,
            widths=index % 2 == 0,
            trial_sd=trial_sd,
            node_sd=node_sd,
            epoch_sd=epoch_sd,
            queue_s=queue_s,
            init_s=init_s,
            delay_sd=delay_sd,
        )
        for index, (epoch_s, trial_sd, node_sd, epoch_sd, queue_s, init_s, delay_sd) in enumerate(columns)
    ]


def strata(rng: np.random.Generator) -> Floats:
    """One number from every equal part of [0, 1), in random order."""
    return np.asarray((rng.permutation(PLANS) + rng.uniform(size=PLANS)) / PLANS)


def learned(seen: Seen, scaling: Scaling, rng: np.random.Generator) -> Profile:
    return Profile(
        latency=learn_latency(seen.epochs, rng),
        scaling=scaling,
        start_s=START_S,
        queue_s=learn_delay(seen.queue_s, rng),
        init_s=learn_delay(seen.init_s, rng),
    )


def a_look(family: Family, count: int, place: int, rng: np.random.Generator) -> Seen:
    """The index of a world's stratum: first by the mean of the observed epochs, then by their spread."""
    by_level = sorted(
        (family.look(count, rng) for _ in range(5 * PLANS)), key=lambda seen: np.mean(seen.logs)
    )
    row, column = divmod(place, COLUMNS)
    rows = PLANS // COLUMNS
    alike = by_level[row * len(by_level) // rows :][: len(by_level) // rows]
    alike.sort(key=lambda seen: np.std(seen.logs))
    return alike[int((column + rng.uniform()) / COLUMNS * len(alike))]


@dataclass(frozen=True, slots=True)
class Chances:
    """Learning curves in which any trial may win; `widths`: a hyperparameter sets a trial's speed."""

    widths: bool
    name: str = "chances"
    metric: str = "accuracy"
    direction: Direction = Direction.MAX
    notes: tuple[str, ...] = ()
    most_epochs: None = None
    configs: None = None

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(rng.uniform(size=epochs).tolist())

    def relative_time(self, config: Config) -> float | None:
        return float(dict(config)["width"]) if self.widths else None
