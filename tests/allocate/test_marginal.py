"""Sharing out by marginal gain: claims O4 to O6, and the steps by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.allocate.marginal import Claim, RemainingTime, TaskCounts, share_out
from stretto.core.resources import Resources

TASK = Resources(cpu=1)


def served(work: float, thetas: tuple[float, ...]) -> RemainingTime:
    """T = work (a / w + b + c w / p + d w + e p)."""
    a, b, c, d, e = thetas

    def remaining_s(w: int, p: int) -> float:
        return work * (a / w + b + c * w / p + d * w + e * p)

    return remaining_s


def claim(
    remaining_s: RemainingTime, most: TaskCounts = (8, 8), worker: Resources = TASK, server: Resources = TASK
) -> Claim:
    return Claim(worker=worker, server=server, least=(1, 1), most=most, remaining_s=remaining_s)


def workers_only(table_s: list[float], demand: Resources) -> Claim:
    """Remaining time by number of workers."""
    return Claim(
        worker=demand,
        server=Resources(),
        least=(1, 0),
        most=(len(table_s), 0),
        remaining_s=lambda w, _: table_s[w - 1],
    )


amount = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])
demand = st.builds(Resources, gpu=st.sampled_from([0.0, 1.0]), cpu=amount, memory_gib=amount)
theta = st.floats(0.0, 1.0)
some_claim = st.builds(
    lambda worker, server, most, work, thetas, factor: replace(
        claim(served(work, thetas), most, worker=worker, server=server), factor=factor
    ),
    demand,
    demand,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.floats(0.0, 1e4),
    st.tuples(theta, theta, theta, theta, theta),
    st.sampled_from([0.95, 1.0]),
)


def used(claims: list[Claim], counts: list[TaskCounts]) -> Resources:
    needs = [one.worker * w + one.server * p for one, (w, p) in zip(claims, counts, strict=True)]
    return sum(needs, start=Resources())


@given(st.lists(some_claim, min_size=1, max_size=6), st.integers(0, 8), st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_o4_minimum_capacity_and_end(claims: list[Claim], gpus: int, cpus: int) -> None:
    free = Resources(gpu=gpus, cpu=cpus, memory_gib=25)
    counts = share_out(claims, free, free)
    total = used(claims, counts)
    assert total.fits_in(free)
    for one, (w, p) in zip(claims, counts, strict=True):
        if (w, p) == (0, 0):
            continue
        assert one.least[0] <= w <= one.most[0]
        assert one.least[1] <= p <= one.most[1]
        for step in ((1, 0), (0, 1)):
            then = (w + step[0], p + step[1])
            room = (total + one.worker * step[0] + one.server * step[1]).fits_in(free)
            if room and then[0] <= one.most[0] and then[1] <= one.most[1]:
                # Whatever still fits saves nothing.
                assert one.remaining_s(*then) >= one.remaining_s(w, p)


def test_o4_the_minimum_goes_out_in_order_and_who_has_none_is_passed_over() -> None:
    big = claim(served(1.0, (1, 0, 0, 0, 0)), worker=Resources(cpu=5))
    small = claim(served(1.0, (1, 0, 0, 0, 0)), (1, 1))
    free = Resources(cpu=10)
    assert share_out([small, big, big, small], free, free) == [(1, 1), (1, 1), (0, 0), (1, 1)]


def random_thetas(rng: np.random.Generator) -> tuple[float, ...]:
    return tuple((rng.uniform(0.2, 1.0, 5) * [3.0, 0.3, 0.3, 0.03, 0.03]).tolist())


def test_o5_within_two_percent_of_the_optimum() -> None:
    """Three jobs, fourteen containers, all counts tried."""
    gaps = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        times = [served(float(rng.uniform(100, 1000)), random_thetas(rng)) for _ in range(3)]
        counts = share_out([claim(one) for one in times], Resources(cpu=14), Resources(cpu=14))
        best = np.full(15, np.inf)
        best[0] = 0.0
        for one in times:
            by_size = np.full(15, np.inf)
            for w, p in product(range(1, 9), repeat=2):
                if w + p <= 14:
                    by_size[w + p] = min(by_size[w + p], one(w, p))
            best = np.array([min(best[n - k] + by_size[k] for k in range(n + 1)) for n in range(15)])
        ours = sum(one(*got) for one, got in zip(times, counts, strict=True))
        gaps.append(ours / best.min() - 1)
    assert max(gaps) <= 0.02
    assert np.mean(gaps) <= 0.005


def test_o6_a_tenth_of_four_thousand_jobs_in_a_tenth_of_five_seconds() -> None:
    rng = np.random.default_rng(0)
    claims = [claim(served(float(rng.uniform(100, 1e4)), random_thetas(rng)), (16, 16)) for _ in range(400)]
    cluster = Resources(cpu=5120)
    started = time.process_time()
    counts = share_out(claims, cluster, cluster)
    assert time.process_time() - started < 0.5
    assert sum(map(sum, counts)) > 3000


def test_gain_counts_per_share_and_not_per_amount() -> None:
    """One more worker saves a 60 s and b 50 s. It takes 1 of 10 GPUs of a, 4 of 100 CPUs of b.

    By amounts a would win (60 / 1 against 50 / 4); by shares b does (60 / 0.1 against 50 / 0.04).
    """
    cluster = Resources(gpu=10, cpu=100)
    a = workers_only([100.0, 40.0], Resources(gpu=1, cpu=1))
    b = workers_only([100.0, 50.0], Resources(cpu=4))
    assert share_out([a, b], Resources(gpu=10, cpu=9), cluster) == [(1, 0), (2, 0)]


def test_a_misfit_drops_that_job_only() -> None:
    wide = workers_only([1000.0, 1.0], Resources(cpu=8))
    slim = workers_only([100.0, 90.0, 80.0], Resources(cpu=1))
    free = Resources(cpu=12)
    assert share_out([wide, slim], free, free) == [(1, 0), (3, 0)]


def test_lumps_get_past_a_step_that_saves_nothing() -> None:
    free = Resources(cpu=4)
    assert share_out([workers_only([100.0, 100.0, 40.0, 40.0], TASK)], free, free) == [(3, 0)]


def test_a_worker_that_needs_a_server_comes_with_one() -> None:
    table = {(1, 1): 100.0, (2, 1): 101.0, (1, 2): 100.0, (2, 2): 50.0}
    pair = claim(lambda w, p: table[w, p], (2, 2))
    assert share_out([pair], Resources(cpu=4), Resources(cpu=4)) == [(2, 2)]


def test_small_gains_are_not_worth_a_restart() -> None:
    free = Resources(cpu=3)
    ahead = workers_only([100.0, 58.0], TASK)
    behind = replace(workers_only([100.0, 60.0], TASK), held=(2, 0))
    assert share_out([ahead, behind], free, free) == [(2, 0), (1, 0)]
    sticky = [replace(one, resize_s=30.0) for one in (ahead, behind)]
    assert share_out(sticky, free, free) == [(1, 0), (2, 0)]


def test_targets_come_before_growth_the_first_that_fits() -> None:
    trial = replace(claim(served(1.0, (1, 0, 0, 0, 0)), (1, 1)), targets=((4, 8), (4, 2)))
    free = Resources(cpu=10)
    assert share_out([claim(served(1e6, (1, 0, 0.1, 0, 0))), trial], free, free)[1] == (4, 2)
