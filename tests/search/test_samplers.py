"""Samplers: asked and told the same, they draw the same."""

from __future__ import annotations

import math
import sys

import pytest

from stretto.core.errors import InputError
from stretto.search.samplers import (
    SAMPLERS,
    ListedSampler,
    OptunaSampler,
    RandomSampler,
    Sampler,
    make_sampler,
)
from stretto.search.space import ChoiceDimension, Config, FloatDimension, IntDimension, Space
from stretto.search.study import Direction, Study

SPACE = Space(
    (
        FloatDimension("lr", 1e-4, 1.0, log=True),
        IntDimension("width", 16, 128),
        ChoiceDimension("momentum", (0.9, "auto", True)),
    )
)
STUDY = Study(name="s", metric="loss", direction=Direction.MIN, trials=40, rungs=(1, 3), eta=3, max_epochs=9)


def loss(config: Config) -> float:
    """Least at lr 0.01."""
    return abs(math.log10(float(dict(config)["lr"])) + 2.0)


def search(sampler: Sampler, trials: int, *, at_once: int = 3) -> list[Config]:
    """A study in which every third trial ends, every seventh diverges and the others stop at a rung."""
    configs: list[Config] = []
    for number in range(trials + at_once):
        if number < trials:
            configs.append(sampler.ask(number))
        done = number - at_once
        if done < 0:
            continue
        config = configs[done]
        last = STUDY.max_epochs if done % 3 == 0 else 1
        value = None if done % 7 == 6 else loss(config)
        sampler.tell(done, config, last, value, final=False)
        sampler.tell(done, config, last, value, final=True)
    return configs


class TestRandom:
    def test_a_trial_depends_on_its_number_and_the_seed_only(self) -> None:
        sampler = RandomSampler(SPACE, seed=3)
        in_order = [sampler.ask(number) for number in range(5)]
        assert sampler.ask(3) == in_order[3]
        assert len({str(config) for config in in_order}) == 5
        assert RandomSampler(SPACE, seed=4).ask(0) != in_order[0]


class TestListed:
    def test_every_row_once_in_an_order_of_the_seed(self) -> None:
        rows: list[Config] = [(("row", number),) for number in range(20)]
        drawn = [ListedSampler(rows, seed=1).ask(number) for number in range(20)]
        assert sorted(drawn) == rows
        assert drawn != rows
        assert drawn != [ListedSampler(rows, seed=2).ask(number) for number in range(20)]
        assert ListedSampler(rows, seed=1).size == 20


@pytest.mark.parametrize("name", ["tpe", "qmc"])
class TestOptuna:
    def test_told_the_same_it_draws_the_same(self, name: str) -> None:
        pytest.importorskip("optuna")
        once, again = (search(make_sampler(name, SPACE, STUDY, seed=5), 16) for _ in range(2))
        assert once == again
        assert once != search(make_sampler(name, SPACE, STUDY, seed=6), 16)

    def test_values_are_plain_and_within_the_space(self, name: str) -> None:
        pytest.importorskip("optuna")
        for config in search(make_sampler(name, SPACE, STUDY, seed=0), 12):
            values = dict(config)
            assert [key for key, _ in config] == ["lr", "width", "momentum"]
            assert type(values["lr"]) is float
            assert 1e-4 <= values["lr"] <= 1.0
            assert type(values["width"]) is int
            assert values["momentum"] in {0.9, "auto", True}


@pytest.mark.parametrize(
    ("direction", "least", "most"), [(Direction.MIN, 0.0, 0.5), (Direction.MAX, 1.5, 2.0)]
)
def test_tpe_learns_which_way_is_better(direction: Direction, least: float, most: float) -> None:
    """The good ones are trained to the end, the others stop at the first rung."""
    pytest.importorskip("optuna")
    sampler = OptunaSampler(SPACE, "tpe", seed=1, direction=direction, max_epochs=9)
    good = []
    for number in range(50):
        config = sampler.ask(number)
        good.append(least <= loss(config) <= most)
        epoch = 9 if good[-1] else 1
        sampler.tell(number, config, epoch, loss(config), final=False)
        sampler.tell(number, config, epoch, loss(config), final=True)
    assert sum(good[-15:]) >= sum(good[:15]) + 4


def test_a_trial_that_showed_nothing_teaches_nothing() -> None:
    pytest.importorskip("optuna")
    sampler = make_sampler("tpe", SPACE, STUDY, seed=1)
    config = sampler.ask(0)
    sampler.tell(0, config, 0, None, final=True)
    assert sampler.ask(1) != config


class TestRefused:
    def test_an_unknown_name(self) -> None:
        with pytest.raises(InputError, match="random, tpe"):
            make_sampler("bayes", SPACE, STUDY, seed=0)

    def test_without_optuna(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "optuna", None)
        assert make_sampler("random", SPACE, STUDY, seed=0).ask(0)
        with pytest.raises(InputError, match=r"stretto\[search\]"):
            make_sampler("tpe", SPACE, STUDY, seed=0)

    def test_a_sampler_whose_package_is_missing_says_which(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("optuna")
        monkeypatch.setitem(sys.modules, "cmaes", None)
        with pytest.raises(InputError, match="cmaes"):
            make_sampler("cmaes", SPACE, STUDY, seed=0)

    def test_nothing_to_choose(self) -> None:
        for name in SAMPLERS[1:]:
            with pytest.raises(InputError, match="empty"):
                make_sampler(name, Space(), STUDY, seed=0)
