"""Gradient noise estimates against the exact statistics of a regression whose parameters stand still."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from stretto.core.observations import NoiseSample
from stretto.torch.adam import ADAM_WARM_STEPS, is_adam_like
from stretto.torch.noise import (
    EARLY_STEPS,
    FEWEST_SAMPLES,
    MIN_VAR,
    SAMPLE_PERIOD,
    SMOOTHING,
    NoiseEstimator,
)

EXAMPLES, FEATURES = 512, 16
BATCH = 32
INITIAL_BATCH = 100 * BATCH
"""So large that the running average forgets next to nothing in a test."""
SAMPLES = 1500


class Regression:
    """Least squares at parameters 0: every example's gradient is known, and so is the truth about them."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], seed: int = 7) -> None:
        self.random = torch.Generator().manual_seed(seed)
        inputs = torch.randn(EXAMPLES, FEATURES, generator=self.random) * torch.logspace(-1, 0.5, FEATURES)
        targets = 0.3 * inputs.sum(dim=1) + torch.randn(EXAMPLES, generator=self.random)
        self.each = -targets[:, None] * inputs
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (FEATURES - 5, 5)]
        self.optimizer = optimizer(self.parameters, lr=0.0)
        self.estimator = NoiseEstimator(self.optimizer, INITIAL_BATCH)

    def draw(self, examples: int) -> torch.Tensor:
        """The mean gradient of a random batch."""
        return self.each[torch.randint(EXAMPLES, (examples,), generator=self.random)].mean(dim=0)

    def split(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return [gradient[:-5], gradient[-5:]]

    def set_gradient(self, gradient: torch.Tensor) -> None:
        for parameter, values in zip(self.parameters, self.split(gradient), strict=True):
            parameter.grad = values.clone()

    def truth(self, divisor: torch.Tensor | float = 1.0) -> NoiseSample:
        each = (self.each / divisor).double()
        mean = each.mean(dim=0)
        trace = float((each - mean).square().sum(dim=1).mean())
        return NoiseSample(sqr=float(mean.square().sum()), var=trace / INITIAL_BATCH)

    def found(self) -> NoiseSample:
        sample = self.estimator.sample()
        assert sample is not None
        return sample


def sampled_steps(samples: int) -> Iterator[int]:
    """The steps an estimator wants, in order."""
    return (step for step in range(samples * SAMPLE_PERIOD // 2) if NoiseEstimator.wants(step))


def measure_workers(problem: Regression, workers: int = 4, loss_scale: float = 1.0) -> None:
    """Every worker has an estimator of its own; the sum of their parts stands for the exchange."""
    others = [NoiseEstimator(problem.optimizer, INITIAL_BATCH) for _ in range(workers)]
    for step in sampled_steps(SAMPLES):
        local = [loss_scale * problem.draw(BATCH // workers) for _ in range(workers)]
        part_sqr = torch.zeros(())
        for worker, gradient in zip(others, local, strict=True):
            for values, parameter in zip(problem.split(gradient), problem.parameters, strict=True):
                worker.part([values], [parameter])
            part_sqr = part_sqr + worker.part_sum()
            worker.total([], step=step, batch=BATCH)
        problem.set_gradient(torch.stack(local).mean(dim=0))
        problem.estimator.total(
            problem.parameters,
            step=step,
            batch=BATCH,
            part_batch=BATCH / workers,
            parts=workers,
            part_sqr=part_sqr,
            loss_scale=loss_scale,
        )


def measure_passes(problem: Regression, passes: int = 2, loss_scale: float = 1.0) -> None:
    for step in sampled_steps(SAMPLES):
        local = [loss_scale * problem.draw(BATCH // passes) for _ in range(passes)]
        for values, parameter in zip(problem.split(local[0]), problem.parameters, strict=True):
            problem.estimator.first_pass([values], [parameter])
        problem.set_gradient(torch.stack(local).mean(dim=0))
        problem.estimator.total(
            problem.parameters, step=step, batch=BATCH, part_batch=BATCH / passes, loss_scale=loss_scale
        )


def measure_alone(problem: Regression, pairs: int = SAMPLES, loss_scale: float = 1.0) -> None:
    for step in sampled_steps(2 * pairs):
        problem.set_gradient(loss_scale * problem.draw(BATCH))
        problem.estimator.total(problem.parameters, step=step, batch=BATCH, loss_scale=loss_scale)


SOURCES = [measure_workers, measure_passes, measure_alone]


def warm_adam(problem: Regression, *, amsgrad: bool = False) -> torch.Tensor:
    """Lets Adam see some gradients at learning rate 0; what it then divides by, in one row."""
    for _ in range(60):
        problem.set_gradient(problem.draw(BATCH))
        problem.optimizer.step()
    moment = "max_exp_avg_sq" if amsgrad else "exp_avg_sq"
    group = problem.optimizer.param_groups[0]
    rows = []
    for parameter in problem.parameters:
        state = problem.optimizer.state[parameter]
        correction = 1 - group["betas"][1] ** float(state["step"])
        rows.append((state[moment] / correction).sqrt() + group["eps"])
    return torch.cat(rows)


def assert_close(found: NoiseSample, truth: NoiseSample) -> None:
    assert found.sqr == pytest.approx(truth.sqr, rel=0.05)
    assert found.var == pytest.approx(truth.var, rel=0.05)


@pytest.mark.parametrize("measure", SOURCES)
def test_sgd(measure: Callable[[Regression], None]) -> None:
    problem = Regression(torch.optim.SGD)
    measure(problem)
    assert_close(problem.found(), problem.truth())


@pytest.mark.parametrize("measure", SOURCES)
def test_adam_is_judged_by_the_gradient_it_steps_with(measure: Callable[[Regression], None]) -> None:
    problem = Regression(torch.optim.AdamW)
    truth, plain = problem.truth(warm_adam(problem)), problem.truth()
    assert not math.isclose(truth.var / truth.sqr, plain.var / plain.sqr, rel_tol=0.5)
    measure(problem)
    assert_close(problem.found(), truth)


def test_amsgrad_divides_by_the_largest_moment() -> None:
    problem = Regression(lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True))
    truth = problem.truth(warm_adam(problem, amsgrad=True))
    measure_passes(problem)
    assert_close(problem.found(), truth)


@pytest.mark.parametrize("measure", SOURCES)
@pytest.mark.parametrize("loss_scale", [1024.0, torch.tensor(1024.0)])
def test_loss_scale_is_divided_out(measure: Callable[..., None], loss_scale: float) -> None:
    problem = Regression(torch.optim.SGD)
    measure(problem, loss_scale=loss_scale)
    assert_close(problem.found(), problem.truth())


def test_loss_scale_may_change_between_the_two_steps_of_a_pair() -> None:
    same, changing = Regression(torch.optim.SGD), Regression(torch.optim.SGD)
    for step in (0, 1):
        for problem, loss_scale in ((same, 1.0), (changing, 2.0**step)):
            problem.set_gradient(loss_scale * problem.draw(BATCH))
            problem.estimator.total(problem.parameters, step=step, batch=BATCH, loss_scale=loss_scale)
    assert changing.found().sqr == pytest.approx(same.found().sqr, rel=1e-5)
    assert changing.found().var == pytest.approx(same.found().var, rel=1e-5)


def test_accumulating_more_than_two_passes() -> None:
    problem = Regression(torch.optim.SGD)
    measure_passes(problem, passes=4)
    assert_close(problem.found(), problem.truth())


def test_gradients_in_half_precision() -> None:
    """A squared norm beyond the largest half, 65504, is still a number."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))
    estimator = NoiseEstimator(torch.optim.SGD([parameter], lr=0.1), BATCH)
    for step, value in ((0, 100.0), (1, 102.0)):
        parameter.grad = torch.full((64,), value, dtype=torch.float16)
        estimator.total([parameter], step=step, batch=BATCH)
    sample = estimator.sample()
    assert sample is not None
    assert sample.sqr == pytest.approx(64 * 100.0 * 102.0, rel=1e-3)
    assert sample.var == pytest.approx(64 * 2.0**2 / 2, rel=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_passed_over(bad: float) -> None:
    problem = Regression(torch.optim.SGD)
    measure_alone(problem, 10)
    before = problem.found()
    problem.set_gradient(torch.full((FEATURES,), bad))
    for step in (10 * SAMPLE_PERIOD, 10 * SAMPLE_PERIOD + 1):
        problem.estimator.total(problem.parameters, step=step, batch=BATCH)
    assert problem.found() == before
    for step in (11 * SAMPLE_PERIOD, 11 * SAMPLE_PERIOD + 1):
        problem.set_gradient(problem.draw(BATCH))
        problem.estimator.total(problem.parameters, step=step, batch=BATCH)
    assert problem.found() != before


def test_adam_says_nothing_before_it_is_warm() -> None:
    problem = Regression(torch.optim.Adam)
    for step in range(SAMPLE_PERIOD):
        problem.set_gradient(problem.draw(BATCH))
        if problem.estimator.wants(step):
            problem.estimator.total(problem.parameters, step=step, batch=BATCH)
        if step < ADAM_WARM_STEPS:
            problem.optimizer.step()
    assert problem.estimator.sample() is None
    for step in (SAMPLE_PERIOD, SAMPLE_PERIOD + 1):
        problem.set_gradient(problem.draw(BATCH))
        problem.estimator.total(problem.parameters, step=step, batch=BATCH)
    assert problem.estimator.sample() is not None


def test_a_better_source_starts_anew() -> None:
    problem = Regression(torch.optim.SGD)
    problem.each *= 1000.0
    measure_alone(problem, 10)
    problem.each /= 1000.0
    measure_passes(problem)
    assert_close(problem.found(), problem.truth())


def test_estimates_forget_at_the_pace_of_the_initial_batch() -> None:
    """After n steps at the initial batch a sample counts 0.999^n of a new one, but at least 0.95."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    estimator = NoiseEstimator(torch.optim.SGD([parameter], lr=0.1), 100)

    def pair(step: int, gradient: float) -> None:
        for number in (step, step + 1):
            parameter.grad = torch.tensor([gradient])
            estimator.total([parameter], step=number, batch=200)

    pair(0, 1.0)
    pair(SAMPLE_PERIOD, 3.0)
    pair(20 * SAMPLE_PERIOD, 5.0)
    first = 0.999 ** (2 * SAMPLE_PERIOD)
    total = (1.0 * first + 9.0) * 0.95 + 25.0
    sample = estimator.sample()
    assert sample is not None
    assert sample.sqr == pytest.approx(total / ((first + 1) * 0.95 + 1), rel=1e-5)
    assert sample.var == MIN_VAR


def test_caution_makes_the_gradient_larger_until_it_is_sure() -> None:
    problem = Regression(torch.optim.SGD)
    gaps = []
    for pairs in range(1, 41):
        for number in (pairs * SAMPLE_PERIOD, pairs * SAMPLE_PERIOD + 1):
            problem.set_gradient(problem.draw(BATCH))
            problem.estimator.total(problem.parameters, step=number, batch=BATCH)
        sample, cautious = problem.estimator.sample(), problem.estimator.cautious()
        assert sample is not None
        if cautious is None:
            assert pairs <= FEWEST_SAMPLES + 1
            continue
        assert cautious.sqr > sample.sqr
        assert cautious.var == sample.var
        gaps.append(cautious.sqr - sample.sqr)
    assert gaps[-1] < gaps[0]


def test_a_step_that_is_not_the_next_is_not_compared() -> None:
    problem = Regression(torch.optim.SGD)
    for step in (0, SAMPLE_PERIOD + 1, 2 * SAMPLE_PERIOD):
        problem.set_gradient(problem.draw(BATCH))
        problem.estimator.total(problem.parameters, step=step, batch=BATCH)
    assert problem.estimator.sample() is None


def test_parameters_without_a_gradient_are_left_out() -> None:
    problem = Regression(torch.optim.SGD)
    for step in (0, 1):
        problem.set_gradient(problem.draw(BATCH))
        problem.parameters[1].grad = None
        problem.estimator.total(problem.parameters, step=step, batch=BATCH)
    assert problem.found().sqr > 0


def test_the_same_steps_are_sampled_everywhere_and_come_in_pairs() -> None:
    later = range(EARLY_STEPS, EARLY_STEPS + 12 * SAMPLE_PERIOD)
    wanted = [step for step in later if NoiseEstimator.wants(step)]
    assert wanted[1::2] == [step + 1 for step in wanted[::2]]
    assert len(wanted) == 24
    assert sum(NoiseEstimator.splits(step) for step in later) == 4
    assert all(NoiseEstimator.wants(step) for step in range(2000) if NoiseEstimator.splits(step))
    assert sum(NoiseEstimator.splits(step) for step in range(EARLY_STEPS)) == EARLY_STEPS // 12


def test_biased_samples_count_only_when_better_ones_are_long_past() -> None:
    problem = Regression(torch.optim.SGD)

    def pair(step: int) -> None:
        for number in (step, step + 1):
            problem.set_gradient(problem.draw(BATCH))
            problem.estimator.total(problem.parameters, step=number, batch=BATCH)

    problem.estimator.first_pass(problem.split(problem.draw(BATCH // 2)), problem.parameters)
    problem.set_gradient(problem.draw(BATCH))
    problem.estimator.total(problem.parameters, step=0, batch=BATCH, part_batch=BATCH // 2)
    unbiased = problem.found()
    pair(SAMPLE_PERIOD)
    assert problem.found() == unbiased
    pair(round(INITIAL_BATCH / BATCH / (1 - SMOOTHING)) // SAMPLE_PERIOD * SAMPLE_PERIOD + SAMPLE_PERIOD)
    assert problem.found() != unbiased


def test_state_survives_a_checkpoint(tmp_path: Path) -> None:
    problem, other = Regression(torch.optim.SGD), Regression(torch.optim.SGD)
    measure_alone(problem, 10)
    torch.save(problem.estimator.state_dict(), tmp_path / "noise.pt")
    other.estimator.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    assert other.found() == problem.found()
    for one in (problem, other):
        one.random.manual_seed(3)
        for step in (10 * SAMPLE_PERIOD, 10 * SAMPLE_PERIOD + 1):
            one.set_gradient(one.draw(BATCH))
            one.estimator.total(one.parameters, step=step, batch=BATCH)
    assert other.found() == problem.found()


def test_pending_measurements_are_part_of_the_state() -> None:
    """On a card results are read a pair later: simulated by a queue put in by hand."""
    problem = Regression(torch.optim.SGD)
    measure_alone(problem, 1)
    state = problem.estimator.state_dict()
    state["pending"] = [[1, "steps", BATCH, BATCH, 2.0, 2.0, 2.0]]
    other = Regression(torch.optim.SGD)
    other.estimator.load_state_dict(state)
    assert other.estimator.state_dict() == state
    other.set_gradient(other.draw(BATCH))
    other.estimator.total(other.parameters, step=SAMPLE_PERIOD, batch=BATCH)
    assert other.estimator.state_dict()["pending"] == []
    assert other.found() != problem.found()


def test_which_optimizers_are_like_adam() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert is_adam_like(torch.optim.AdamW(parameters))
    assert is_adam_like(torch.optim.NAdam(parameters))
    assert not is_adam_like(torch.optim.SGD(parameters))
    assert not is_adam_like(torch.optim.RMSprop(parameters))
