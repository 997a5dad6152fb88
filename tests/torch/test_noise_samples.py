"""Gradient noise estimates against the exact statistics of a regression whose parameters stand still."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from stretto.core.observations import NoiseSample
from stretto.torch.noise import (
    EARLY_PERIOD,
    EARLY_STEPS,
    FEWEST_SAMPLES,
    FRESH_SAMPLES,
    LEAST_KEPT,
    LEAST_PERIOD,
    READ_STEPS,
    SMOOTHING,
    SPLIT_BUDGET,
    NoiseEstimator,
)
from stretto.torch.rules import ADAM_WARM_STEPS, LEAST_ROOT, AdamPreconditioner, is_adam_like

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


def measure_workers(problem: Regression, workers: int = 4, loss_scale: float = 1.0) -> None:
    """Every worker has an estimator of its own; the sum of their parts stands for the exchange."""
    others = [NoiseEstimator(problem.optimizer, INITIAL_BATCH) for _ in range(workers)]
    for step in range(SAMPLES):
        local = [loss_scale * problem.draw(BATCH // workers) for _ in range(workers)]
        part_sqr = torch.zeros(())
        for worker, gradient in zip(others, local, strict=True):
            for values, parameter in zip(problem.split(gradient), problem.parameters, strict=True):
                worker.part([values], [parameter])
            part_sqr = part_sqr + worker.part_sum()
            worker.total([], step=step, batch=BATCH, part_batch=BATCH / workers)
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


def measure_passes(
    problem: Regression,
    samples: int = SAMPLES,
    *,
    passes: int = 2,
    loss_scale: float = 1.0,
    first_step: int = 0,
) -> None:
    for step in range(first_step, first_step + samples):
        local = [loss_scale * problem.draw(BATCH // passes) for _ in range(passes)]
        for values, parameter in zip(problem.split(local[0]), problem.parameters, strict=True):
            problem.estimator.first_pass([values], [parameter])
        problem.set_gradient(torch.stack(local).mean(dim=0))
        problem.estimator.total(
            problem.parameters, step=step, batch=BATCH, part_batch=BATCH / passes, loss_scale=loss_scale
        )


SOURCES = [measure_workers, measure_passes]


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


def test_accumulating_more_than_two_passes() -> None:
    problem = Regression(torch.optim.SGD)
    measure_passes(problem, passes=4)
    assert_close(problem.found(), problem.truth())


def test_gradients_in_half_precision() -> None:
    """A squared norm beyond the largest half, 65504, is still a number."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))
    estimator = NoiseEstimator(torch.optim.SGD([parameter], lr=0.1), BATCH)
    first, second = (torch.full((64,), value, dtype=torch.float16) for value in (100.0, 102.0))
    estimator.first_pass([first], [parameter])
    parameter.grad = (first + second) / 2
    estimator.total([parameter], step=0, batch=BATCH, part_batch=BATCH / 2)
    sample = estimator.sample()
    assert sample is not None
    assert sample.sqr == pytest.approx(64 * 100.0 * 102.0, rel=1e-3)
    assert sample.var == pytest.approx(64 * 2.0**2 / 4, rel=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_passed_over(bad: float) -> None:
    problem = Regression(torch.optim.SGD)
    measure_passes(problem, 10)
    before = problem.found()
    problem.estimator.first_pass(problem.split(problem.draw(BATCH)), problem.parameters)
    problem.set_gradient(torch.full((FEATURES,), bad))
    problem.estimator.total(problem.parameters, step=10, batch=BATCH, part_batch=BATCH / 2)
    assert problem.found() == before
    measure_passes(problem, 1, first_step=11)
    assert problem.found() != before


def test_adam_says_nothing_before_it_is_warm() -> None:
    problem = Regression(torch.optim.Adam)
    for step in range(ADAM_WARM_STEPS):
        measure_passes(problem, 1, first_step=step)
        assert problem.estimator.sample() is None
        problem.optimizer.step()
    measure_passes(problem, 1, first_step=ADAM_WARM_STEPS)
    assert problem.estimator.sample() is not None


class Ladder:
    """One parameter whose two passes have the gradients g + d and g - d: |G|^2 = g^2 - d^2 and S = B d^2."""

    def __init__(self, initial_batch: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.estimator = NoiseEstimator(torch.optim.SGD([self.parameter], lr=0.1), initial_batch)

    def measure(self, step: int, gradient: float, apart: float, batch: int) -> None:
        self.estimator.first_pass([torch.tensor([gradient + apart])], [self.parameter])
        self.parameter.grad = torch.tensor([gradient])
        self.estimator.total([self.parameter], step=step, batch=batch, part_batch=batch / 2)


def test_estimates_forget_at_the_pace_of_the_initial_batch() -> None:
    """After n steps at the initial batch a sample counts 0.998^n of a new one, but at least 0.9."""
    ladder = Ladder(100)
    ladder.measure(0, 2.0, 1.0, batch=200)
    ladder.measure(12, 3.0, 1.0, batch=200)
    ladder.measure(500, 4.0, 1.0, batch=200)
    first = SMOOTHING ** (2 * 12)
    sample = ladder.estimator.sample()
    assert sample is not None
    total = (3.0 * first + 8.0) * LEAST_KEPT + 15.0
    assert sample.sqr == pytest.approx(total / ((first + 1) * LEAST_KEPT + 1), rel=1e-5)
    assert sample.var == pytest.approx(2.0)


def test_a_larger_batch_tells_more() -> None:
    """Its error in |G|^2 is smaller in proportion, so it counts with the square of the batch."""
    ladder = Ladder(10**6)
    ladder.measure(0, 2.0, 1.0, batch=100)
    ladder.measure(1, 3.0, 0.5, batch=400)
    sample = ladder.estimator.sample()
    assert sample is not None
    assert sample.sqr == pytest.approx((3.0 + 16 * 8.75) / 17, rel=1e-5)


def test_the_noise_scale_is_right_while_gradients_shrink() -> None:
    """Both parts fall a thousandfold and their ratio stays; the average of the parts would lag far behind."""
    problem = Regression(torch.optim.SGD)
    truth = problem.truth()
    for first_step in range(0, SAMPLES, 100):
        measure_passes(problem, 100, first_step=first_step)
        problem.each *= 0.63
    found = problem.found()
    assert found.var / found.sqr == pytest.approx(truth.var / truth.sqr, rel=0.1)


def test_a_gradient_lost_in_the_noise_counts_as_its_error() -> None:
    problem = Regression(torch.optim.SGD)
    problem.each -= problem.each.mean(dim=0)
    for samples in range(1, 200):
        measure_passes(problem, 1, first_step=samples)
        sample, cautious = problem.estimator.sample(), problem.estimator.cautious()
        assert sample is not None
        assert (cautious is None) == (samples < FEWEST_SAMPLES + 1)
        if cautious is not None:
            assert cautious.sqr >= sample.sqr
            assert cautious.sqr > 0
            assert cautious.var == sample.var
    # The error of |G|^2 is at most 2 S / B over the root of the number of samples.
    assert cautious is not None
    assert cautious.sqr <= 2 * 2 * (cautious.var * INITIAL_BATCH) / BATCH / math.sqrt(200)


def test_a_gradient_that_is_sure_needs_no_caution() -> None:
    problem = Regression(torch.optim.SGD)
    measure_passes(problem, 400)
    assert problem.estimator.cautious() == problem.found()


def test_parameters_without_a_gradient_are_left_out() -> None:
    problem = Regression(torch.optim.SGD)
    problem.estimator.first_pass(problem.split(problem.draw(BATCH)), problem.parameters)
    problem.set_gradient(problem.draw(BATCH))
    problem.parameters[1].grad = None
    problem.estimator.total(problem.parameters, step=0, batch=BATCH, part_batch=BATCH / 2)
    assert problem.found().var > 0


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.4, 1.0, 2.5])
def test_splits_keep_within_their_budget(cost: float) -> None:
    later = range(EARLY_STEPS, EARLY_STEPS + 10_000)
    splits = sum(NoiseEstimator.splits(step, cost, initial=True) for step in later)
    assert cost * splits <= SPLIT_BUDGET * len(later) + cost
    assert splits >= min(len(later) // LEAST_PERIOD, 0.9 * SPLIT_BUDGET * len(later) / max(cost, 1e-9)) - 1


def test_the_first_steps_are_split_whatever_it_costs() -> None:
    early = [step for step in range(EARLY_STEPS) if NoiseEstimator.splits(step, 10.0, initial=True)]
    assert early == list(range(0, EARLY_STEPS, EARLY_PERIOD))
    assert len(early) > FEWEST_SAMPLES


def test_an_unknown_cost_is_taken_to_be_high() -> None:
    later = range(EARLY_STEPS, EARLY_STEPS + 2000)
    unknown, cheap = (
        sum(NoiseEstimator.splits(step, cost, initial=True) for step in later) for cost in (None, 1.0)
    )
    assert 0 < unknown < cheap


@pytest.mark.parametrize("cost", [0.02, 1.0, None])
def test_a_batch_that_was_changed_is_sampled_as_often_while_steps_double(cost: float | None) -> None:
    def splits(first: int, last: int, *, initial: bool) -> int:
        return sum(NoiseEstimator.splits(step, cost, initial=initial) for step in range(first, last))

    for first in (128, 256, 512, 1024):
        often = splits(first, 2 * first, initial=False)
        assert often >= max(FRESH_SAMPLES, splits(first, 2 * first, initial=True))
    much_later = range(1 << 14, 1 << 15)
    assert all(
        NoiseEstimator.splits(step, cost, initial=False) == NoiseEstimator.splits(step, cost, initial=True)
        for step in much_later
    )


@pytest.mark.parametrize("pass_steps", range(3, 100))
def test_samples_do_not_always_meet_the_end_of_a_pass(pass_steps: int) -> None:
    """The last two steps of a pass may be too short to be compared; wherever the first pass began."""
    steps = range(256, 256 + max(100 * pass_steps, 2000))
    for sampled in (
        [step for step in steps if NoiseEstimator.compares(step)],
        [step for step in steps if NoiseEstimator.splits(step, 0.5, initial=False)],
    ):
        for begun in (0, 1, 2, pass_steps // 2):
            full = [step for step in sampled if (step - begun) % pass_steps < pass_steps - 2]
            assert len(full) >= 0.5 * (pass_steps - 2) / pass_steps * len(sampled)
            assert max(later - earlier for earlier, later in pairwise(full)) <= len(steps) / 2


def test_state_survives_a_checkpoint(tmp_path: Path) -> None:
    problem, other = Regression(torch.optim.SGD), Regression(torch.optim.SGD)
    measure_passes(problem, 10)
    torch.save(problem.estimator.state_dict(), tmp_path / "noise.pt")
    other.estimator.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    assert other.found() == problem.found()
    for one in (problem, other):
        one.random.manual_seed(3)
        measure_passes(one, 2, first_step=10)
    assert other.found() == problem.found()


def test_pending_measurements_are_part_of_the_state() -> None:
    """On a card results are read some steps later: simulated by a queue put in by hand."""
    problem = Regression(torch.optim.SGD)
    measure_passes(problem, 1)
    state = problem.estimator.state_dict()
    state["pending"] = [[1, "passes", BATCH / 2, BATCH, 2.0, 2.0, 2.0]]
    other = Regression(torch.optim.SGD)
    other.estimator.load_state_dict(state)
    assert other.estimator.state_dict() == state
    other.estimator.read(2)
    assert other.estimator.state_dict() == state
    other.estimator.read(1 + READ_STEPS)
    assert other.estimator.state_dict()["pending"] == []
    assert other.found() != problem.found()


def test_which_optimizers_are_like_adam() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert is_adam_like(torch.optim.AdamW(parameters))
    assert is_adam_like(torch.optim.NAdam(parameters))
    assert not is_adam_like(torch.optim.SGD(parameters))
    assert not is_adam_like(torch.optim.RMSprop(parameters))


def test_an_element_that_hardly_ever_had_a_gradient_does_not_outweigh_the_others() -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.Adam([parameter])
    usual = torch.ones(100)
    usual[0] = 0.0
    for _ in range(ADAM_WARM_STEPS):
        parameter.grad = usual
        optimizer.step()
    ((divided,),) = next(AdamPreconditioner(optimizer).divided([parameter], [torch.ones(100)]))
    assert divided[1:] == pytest.approx(torch.ones(99), rel=0.01)
    assert divided[0] == pytest.approx(1 / LEAST_ROOT, rel=0.02)
