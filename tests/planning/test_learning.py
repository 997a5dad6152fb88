"""What observations teach, and that what they leave open is not forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planning_cases import CLOUD, executed, rows, sha, tuned
from stretto.core.errors import InputError
from stretto.planning.learning import LatencyPosterior, Observation, learn_delay, learn_latency
from stretto.planning.planner import plan_study
from stretto.planning.profile import Latency


def observe(
    rng: np.random.Generator, latency: Latency, *, trials: int, nodes: int, epochs: int, speed: float = 1.0
) -> list[Observation]:
    """Every trial on one node for some epochs."""

    def factors(sd: float, count: int) -> list[float]:
        variance = np.log1p(sd**2)
        return list(np.exp(rng.normal(-variance / 2, variance**0.5, count)))

    by_trial, by_node = factors(latency.trial_sd, trials), factors(latency.node_sd, nodes)
    return [
        Observation(
            trial=str(trial),
            node=str(trial % nodes),
            epoch_s=latency.epoch_s * by_trial[trial] * by_node[trial % nodes] * factor / speed,
            speed=speed,
        )
        for trial in range(trials)
        for factor in factors(latency.epoch_sd, epochs)
    ]


def learned(observations: list[Observation]) -> LatencyPosterior:
    return learn_latency(observations, np.random.default_rng(0))


def test_many_observations_give_the_truth() -> None:
    truth = Latency(epoch_s=35.0, trial_sd=0.2, node_sd=0.03, epoch_sd=0.08)
    belief = learned(observe(np.random.default_rng(1), truth, trials=40, nodes=8, epochs=10))
    assert belief.epoch_s == pytest.approx(35.0, rel=0.08)
    assert belief.trial_sd == pytest.approx(0.2, rel=0.3)
    assert belief.epoch_sd == pytest.approx(0.08, rel=0.1)
    assert belief.node_sd < 0.1


def test_what_lasts_is_told_from_what_passes() -> None:
    rng = np.random.default_rng(2)
    lasting, passing = (
        learned(observe(rng, latency, trials=6, nodes=2, epochs=5))
        for latency in (
            Latency(epoch_s=10.0, trial_sd=0.3, epoch_sd=0.02),
            Latency(epoch_s=10.0, trial_sd=0.02, epoch_sd=0.3),
        )
    )
    assert lasting.trial_sd > 5 * lasting.epoch_sd
    assert passing.epoch_sd > passing.trial_sd


def test_few_observations_leave_the_level_open() -> None:
    truth = Latency(epoch_s=10.0, trial_sd=0.2, node_sd=0.03, epoch_sd=0.05)
    rng = np.random.default_rng(3)
    few, many = (learned(observe(rng, truth, trials=trials, nodes=2, epochs=1)) for trials in (4, 40))
    assert few.draws.epoch_s.std() > 2 * many.draws.epoch_s.std()


def test_the_unit_of_time_does_not_matter() -> None:
    seen = observe(np.random.default_rng(4), Latency(epoch_s=10.0, trial_sd=0.2), trials=5, nodes=2, epochs=2)
    seconds = learned(seen)
    minutes = learned([replace(one, epoch_s=one.epoch_s / 60) for one in seen])
    assert seconds.epoch_s == pytest.approx(60 * minutes.epoch_s)
    assert seconds.trial_sd == pytest.approx(minutes.trial_sd)


def test_observations_on_more_gpus_are_brought_to_one() -> None:
    truth = Latency(epoch_s=10.0, trial_sd=0.1, epoch_sd=0.05)
    one, four = (
        learned(observe(np.random.default_rng(5), truth, trials=5, nodes=2, epochs=2, speed=speed))
        for speed in (1.0, 3.3)
    )
    assert one.epoch_s == pytest.approx(four.epoch_s)


def test_five_observations_foretell_four_of_five_trials() -> None:
    """The middle 80 % of what is predicted for another trial on another node, over many small samples."""
    rng = np.random.default_rng(6)
    truth = Latency(epoch_s=10.0, trial_sd=0.2, node_sd=0.04, epoch_sd=0.08)
    new = np.array([one.epoch_s for one in observe(rng, truth, trials=1000, nodes=1000, epochs=1)])
    held = []
    for _ in range(60):
        draws = learned(observe(rng, truth, trials=5, nodes=2, epochs=1)).draws
        logs = np.log1p(np.stack([draws.trial_sd, draws.node_sd, draws.epoch_sd]) ** 2).sum(axis=0)
        predicted = draws.epoch_s * np.exp(np.sqrt(logs) * rng.standard_normal(len(logs)) - logs / 2)
        low, high = np.quantile(predicted, (0.1, 0.9))
        held.append(((new >= low) & (new <= high)).mean())
    assert np.mean(held) == pytest.approx(0.8, abs=0.07)


def test_delays_are_learned_with_their_doubt() -> None:
    rng = np.random.default_rng(7)
    few, many = learn_delay([30.0, 42.0], rng), learn_delay(list(rng.gamma(25.0, 1.6, 200)), rng)
    assert many.mean == pytest.approx(40.0, rel=0.05)
    assert many.sd == pytest.approx(8.0, rel=0.2)
    assert few.draws.mean.std() > 3 * many.draws.mean.std()
    assert few.draw(rng, 10).mean.shape == (10,)


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, float("nan")], [float("inf")], [-1.0]])
def test_delays_must_be_positive(bad: list[float]) -> None:
    with pytest.raises(InputError):
        learn_delay(bad, np.random.default_rng(0))
    with pytest.raises(InputError):
        learn_latency(
            [Observation(trial="a", node="b", epoch_s=value) for value in bad], np.random.default_rng(0)
        )


def test_drawing_all_of_a_posterior_keeps_its_mean() -> None:
    belief = learned(
        observe(np.random.default_rng(8), Latency(epoch_s=9.0, trial_sd=0.2), trials=5, nodes=2, epochs=1)
    )
    for samples in (100, 2000, 5000):
        drawn = belief.draw(np.random.default_rng(1), samples)
        assert len(drawn.epoch_s) == samples
        assert drawn.epoch_s.mean() == pytest.approx(belief.epoch_s, rel=0.05)


def test_a_learned_profile_widens_the_forecast_and_the_doubt_has_a_name() -> None:
    study = sha(8, 2, 2)
    truth = Latency(epoch_s=35.0, trial_sd=0.1, node_sd=0.03, epoch_sd=0.05)
    belief = learned(observe(np.random.default_rng(9), truth, trials=3, nodes=2, epochs=1))
    plan = rows(study, (1, 8, 2), (2, 4, 2), (4, 2, 2), (4, 1, 1))
    stated, doubted = (
        executed(tuned(study, replace(CLOUD, latency=latency)), samples=2000).run(plan).finish_s
        for latency in (truth, belief)
    )
    assert doubted.std() / doubted.mean() > 1.2 * stated.std() / stated.mean()
    tuning = tuned(study, replace(CLOUD, latency=belief), deadline_s=5000.0)
    doubts = plan_study(tuning, np.random.default_rng(0)).doubts
    assert {doubts[0].name, doubts[1].name} == {"mean epoch time", "trial speed"}
