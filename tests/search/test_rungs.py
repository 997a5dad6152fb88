"""Rungs, stages and brackets, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.search.halving import (
    Bracket,
    Spacing,
    check_rungs,
    halving_epochs,
    hyperband_brackets,
    make_rungs,
)
from stretto.search.study import Direction, Stage, Study, halving_stages


def sha(trials: int, min_epochs: int, eta: int) -> tuple[Stage, ...]:
    """Stages of SHA(n, r, eta) with additive rungs."""
    max_epochs = halving_epochs(trials, min_epochs=min_epochs, eta=eta)
    rungs = make_rungs("additive", min_epochs=min_epochs, eta=eta, max_epochs=max_epochs)
    study = Study(
        name="s",
        metric="m",
        direction=Direction.MAX,
        trials=trials,
        rungs=rungs,
        eta=eta,
        max_epochs=max_epochs,
    )
    return halving_stages(study)


class TestRungs:
    def test_published_geometric(self) -> None:
        assert make_rungs("geometric", min_epochs=2, eta=4, max_epochs=200) == (2, 8, 32, 128)

    def test_published_additive(self) -> None:
        rungs = make_rungs("additive", min_epochs=4, eta=2, max_epochs=508)
        assert rungs == (4, 12, 28, 60, 124, 252)

    def test_r1_eight_trials(self) -> None:
        assert sha(8, 4, 2) == (Stage(1, 4, 8), Stage(5, 12, 4), Stage(13, 28, 2), Stage(29, 60, 1))

    def test_r1_sixty_four_trials(self) -> None:
        stages = sha(64, 4, 2)
        assert len(stages) == 7
        assert stages[-1] == Stage(253, 508, 1)

    def test_trials_that_do_not_divide(self) -> None:
        assert [stage.trials for stage in sha(10, 1, 3)] == [10, 3, 1]

    @given(
        spacing=st.sampled_from(["geometric", "additive"]),
        min_epochs=st.integers(1, 50),
        eta=st.integers(2, 5),
        max_epochs=st.integers(1, 2000),
    )
    def test_they_ascend_and_end_before_the_last_epoch(
        self, spacing: Spacing, min_epochs: int, eta: int, max_epochs: int
    ) -> None:
        rungs = make_rungs(spacing, min_epochs=min_epochs, eta=eta, max_epochs=max_epochs)
        assert check_rungs(rungs, max_epochs) == rungs
        lengths = [after - before for before, after in pairwise((0, *rungs))]
        if spacing == "additive":
            assert all(after == eta * before for before, after in pairwise(lengths))
        else:
            assert all(after == eta * before for before, after in pairwise(rungs))

    @pytest.mark.parametrize("rungs", [[0], [2, 2], [3, 1], [9], [10]])
    def test_written_rungs_are_checked(self, rungs: list[int]) -> None:
        with pytest.raises(InputError, match="ascending"):
            check_rungs(rungs, 9, where="f")

    @pytest.mark.parametrize(("min_epochs", "eta"), [(0, 2), (1, 1)])
    def test_rungs_that_never_end_are_refused(self, min_epochs: int, eta: int) -> None:
        with pytest.raises(InputError):
            make_rungs("geometric", min_epochs=min_epochs, eta=eta, max_epochs=9)
        with pytest.raises(InputError):
            halving_epochs(8, min_epochs=min_epochs, eta=eta)


class TestHyperband:
    def test_the_published_example(self) -> None:
        """R = 81, eta = 3: 81, 34, 15, 8 and 5 trials."""
        rungs = make_rungs("geometric", min_epochs=1, eta=3, max_epochs=81)
        brackets = hyperband_brackets(rungs, eta=3)
        assert [bracket.trials for bracket in brackets] == [81, 34, 15, 8, 5]
        assert [bracket.first_rung for bracket in brackets] == [0, 1, 2, 3, 4]

    def test_a_study_is_shared_out_in_proportion(self) -> None:
        rungs = make_rungs("geometric", min_epochs=1, eta=3, max_epochs=81)
        shared = hyperband_brackets(rungs, eta=3, trials=64)
        assert [bracket.trials for bracket in shared] == [36, 15, 7, 4, 2]
        assert hyperband_brackets(rungs, eta=3, trials=1) == (Bracket(1, 0),)

    @given(rungs=st.integers(0, 8), eta=st.integers(2, 5), trials=st.integers(1, 500))
    def test_every_trial_is_in_one_bracket(self, rungs: int, eta: int, trials: int) -> None:
        brackets = hyperband_brackets(range(rungs), eta, trials)
        assert sum(bracket.trials for bracket in brackets) == trials
        assert all(bracket.trials > 0 for bracket in brackets)
        assert all(before.first_rung < after.first_rung for before, after in pairwise(brackets))
