"""Figure 5: whether the planner's intervals hold what they promise.

Each of 30 studies lives in a family of worlds of its own. Epochs and delays are observed in one world of the
family, a profile is learned from them and a plan is chosen; then the plan is carried out 10,000 times, every
time in another world of the family: other trials, other nodes, other delays.

The planner believes in log-normal factors with half-normal priors of their spread (planning/learning.py). The
worlds are made otherwise: in half of the families a hyperparameter of three values makes trials faster or
slower, in the others trials differ by a gamma factor; nodes differ by an exponential one, epochs and delays
by a gamma one. All spreads are uniform.

All executions of a plan share what its few observations got wrong: 30 plans drawn blindly would say little.
Families are drawn as a Latin hypercube, and the observed worlds by strata of how long their epochs took and
how much they differed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from common import verdict

from stretto.planning.draws import Draws
from stretto.planning.execution import Execution
from stretto.planning.learning import Observation, learn_delay, learn_latency
from stretto.planning.planner import plan_study
from stretto.planning.profile import Floats, Profile, Scaling
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from stretto.search.rungs import halving_epochs, make_rungs
from stretto.search.study import Direction, Study, halving_stages

SEED = 41
PLANS = 30
COLUMNS = 5
"""Strata of the observed spread; those of the observed level are PLANS / COLUMNS."""
EXECUTIONS = 10_000
OBSERVATIONS = {5: (5, 2), 10: (8, 3), 30: (15, 5)}
"""Number of observations, and on how many trials and nodes they are made."""
SCALINGS = (
    Scaling(((1, 1.0), (2, 1.87), (4, 3.42), (8, 5.6)), spanning=0.1),
    Scaling(((1, 1.0), (2, 1.6), (4, 2.3), (8, 2.9)), spanning=0.2),
)
STUDIES = ((8, 2, 2), (16, 2, 2), (16, 1, 4), (27, 1, 3))
"""(trials, min_epochs, eta)"""
WIDTHS = (0.75, 1.0, 1.5)
"""Relative time of an epoch by the value of a hyperparameter."""


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
    """Worlds of which one is seen and others are lived in."""

    epoch_s: float
    widths: bool
    trial_sd: float
    node_sd: float
    epoch_sd: float
    queue_s: float
    init_s: float
    delay_sd: float
    """Relative."""

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
        )

    def look(self, count: int, rng: np.random.Generator) -> Seen:
        """So many epochs, and the delays of the nodes they ran on, in one world."""
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
    """Mean 1."""
    return rng.gamma(1.0 / sd**2, sd**2, shape)


def families(rng: np.random.Generator) -> list[Family]:
    """A Latin hypercube: every parameter takes every part of its range once."""

    def spread(low: float, high: float) -> list[float]:
        return list(low + (high - low) * strata(rng))

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
    """One number of every equal part of [0, 1), in random order."""
    return np.asarray((rng.permutation(PLANS) + rng.uniform(size=PLANS)) / PLANS)


def learned(seen: Seen, scaling: Scaling, rng: np.random.Generator) -> Profile:
    return Profile(
        latency=learn_latency(seen.epochs, rng),
        scaling=scaling,
        start_s=10.0,
        sync_s=5.0,
        queue_s=learn_delay(seen.queue_s, rng),
        init_s=learn_delay(seen.init_s, rng),
    )


def random_tuning(rng: np.random.Generator, profile: Profile) -> Tuning:
    trials, min_epochs, eta = STUDIES[int(rng.integers(len(STUDIES)))]
    max_epochs = halving_epochs(trials, min_epochs=min_epochs, eta=eta)
    study = Study(
        name="calibration",
        metric="accuracy",
        direction=Direction.MAX,
        trials=trials,
        rungs=make_rungs("additive", min_epochs=min_epochs, eta=eta, max_epochs=max_epochs),
        eta=eta,
        max_epochs=max_epochs,
    )
    return Tuning(
        study=study,
        profile=profile,
        instances=(Instance(name="p3.8xlarge", gpus=4, usd_per_hour=12.24),),
        max_nodes=8,
        billing=Billing(per=(Per.INSTANCE, Per.FUNCTION)[int(rng.integers(2))]),
    )


@dataclass(frozen=True, slots=True)
class Score:
    """One plan against what happened."""

    finishes_held: float
    costs_held: float
    on_time_promised: float
    on_time: float


def score(family: Family, seen: Seen, plan: int) -> Score:
    """Learn, plan, carry out."""
    rng = np.random.default_rng((SEED, plan, len(seen.epochs)))
    fixed = np.random.default_rng((SEED, plan))
    tuning = random_tuning(fixed, learned(seen, SCALINGS[plan // 2 % 2], rng))
    free = plan_study(tuning, rng)
    tightness = fixed.uniform(0.1, 0.9)
    deadline_s = free.fastest.due_s * (free.cheapest.due_s / free.fastest.due_s) ** tightness
    tuning = replace(tuning, limits=Limits(deadline_s=float(deadline_s)))
    chosen = plan_study(tuning, rng).chosen
    assert chosen is not None
    assert chosen.p_on_time is not None
    run = Execution(tuning, family.draws(tuning, rng, EXECUTIONS)).run(chosen.plan)
    return Score(
        finishes_held=_share_within(run.finish_s, chosen.finish_s.p10, chosen.finish_s.p90),
        costs_held=_share_within(run.cost_usd, chosen.cost_usd.p10, chosen.cost_usd.p90),
        on_time_promised=chosen.p_on_time,
        on_time=float((run.finish_s <= deadline_s).mean()),
    )


def _share_within(values: Floats, low: float, high: float) -> float:
    return float(((values >= low) & (values <= high)).mean())


def scores(count: int) -> list[Score]:
    """Of every plan made from so many observations."""
    rng = np.random.default_rng((SEED, count, 0))
    places = rng.permutation(PLANS)
    return [
        score(family, a_look(family, count, int(place), rng), plan)
        for plan, (family, place) in enumerate(
            zip(families(np.random.default_rng(SEED)), places, strict=True)
        )
    ]


def a_look(family: Family, count: int, place: int, rng: np.random.Generator) -> Seen:
    """At a world of one stratum: the slower the observed epochs, then the more they differ, the later."""
    by_level = sorted(
        (family.look(count, rng) for _ in range(5 * PLANS)), key=lambda seen: np.mean(seen.logs)
    )
    row, column = divmod(place, COLUMNS)
    rows = PLANS // COLUMNS
    alike = by_level[row * len(by_level) // rows :][: len(by_level) // rows]
    alike.sort(key=lambda seen: np.std(seen.logs))
    return alike[int((column + rng.uniform()) / COLUMNS * len(alike))]


def _line(name: str, values: Sequence[float]) -> str:
    return f"    {name:24}{np.mean(values):7.1%} (from {min(values):.0%} to {max(values):.0%} by plan)"


def main() -> None:
    print(f"Figure 5: {PLANS} plans (seed {SEED}), {EXECUTIONS:,} executions of each in other worlds")
    for count in OBSERVATIONS:
        began_s = time.process_time()
        found = scores(count)
        print(f"  {count} observations ({time.process_time() - began_s:.0f} s of CPU)")
        for name, held in (
            ("finishes in [P10, P90]", [one.finishes_held for one in found]),
            ("costs in [P10, P90]", [one.costs_held for one in found]),
        ):
            reached = abs(float(np.mean(held)) - 0.8) <= 0.03
            print(f"{_line(name, held)}: {verdict(reached)} (80 +- 3 %)")
        promised = float(np.mean([one.on_time_promised for one in found]))
        kept = [one.on_time for one in found]
        off = float(np.mean(kept)) - promised
        print(f"{_line('on time', kept)}, promised {promised:.1%}: {verdict(abs(off) <= 0.05)} (0.05)")


if __name__ == "__main__":
    main()
