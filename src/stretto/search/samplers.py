"""Samplers draw the configurations of trials, and may learn from their results.

The same calls in the same order give the same configurations. So a study is resumed by repeating the calls
that its journal implies.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from stretto.core.errors import InputError
from stretto.core.job import Value
from stretto.core.seeds import child_rng
from stretto.search.space import ChoiceDimension, Config, Dimension, IntDimension, Space
from stretto.search.study import Direction, Study


class Sampler(Protocol):
    """Draws the configurations of trials. Trials are numbered from 0; each is asked for once, in order."""

    @property
    def size(self) -> int | None:
        """The number of configurations; None: unlimited."""

    @property
    def learns(self) -> bool:
        """Whether results influence later draws. Then trials should be drawn as late as possible."""

    def ask(self, number: int) -> Config:
        """The configuration of trial `number`."""

    def tell(self, number: int, config: Config, epoch: int, value: float | None, *, final: bool) -> None:
        """The metric after `epoch` epochs (None: not a number). `final`: it is the trial's last result."""


class RandomSampler:
    """Random search: the configuration of trial n depends on the seed and n only."""

    size = None
    learns = False

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def ask(self, number: int) -> Config:
        return self._space.sample(child_rng(self._seed, "config", str(number)))

    def tell(self, number: int, config: Config, epoch: int, value: float | None, *, final: bool) -> None:
        """Does nothing: random draws do not depend on results."""


class ListedSampler:
    """A list of configurations, such as the rows of a table. Each is drawn once, in a random order."""

    learns = False

    def __init__(self, configs: Sequence[Config], seed: int) -> None:
        self._configs = configs
        self._order: list[int] = child_rng(seed, "listed configs").permutation(len(configs)).tolist()

    @property
    def size(self) -> int:
        return len(self._configs)

    def ask(self, number: int) -> Config:
        return self._configs[self._order[number]]

    def tell(self, number: int, config: Config, epoch: int, value: float | None, *, final: bool) -> None:
        """Does nothing: draws do not depend on results."""


OPTUNA_CLASSES = {"tpe": "TPESampler", "cmaes": "CmaEsSampler", "gp": "GPSampler", "qmc": "QMCSampler"}
"""Optuna's samplers by the names that users write."""

OPTUNA_OPTIONS: dict[str, dict[str, Any]] = {
    "cmaes": {"consider_pruned_trials": True, "warn_independent_sampling": False},
    "gp": {"warn_independent_sampling": False},
    "qmc": {"scramble": True, "warn_independent_sampling": False},
}
"""Options of Optuna's samplers: trials stopped at a rung count, and warnings about random draws are off."""

ALSO_NEEDED = {"cmaes": "cmaes", "gp": "torch"}
"""Packages that a sampler of Optuna imports once it has results, but that Optuna does not install."""

SAMPLERS = ("random", *OPTUNA_CLASSES)
"""The names that a study file may use."""


class OptunaSampler:
    """One of Optuna's samplers.

    A stopped trial counts as pruned, with its results. If its last result is not a number, it failed.
    """

    size = None

    def __init__(self, space: Space, name: str, *, seed: int, direction: Direction, max_epochs: int) -> None:
        if not space:
            raise InputError(
                f"sampler {name} has nothing to choose: the space is empty.",
                remedy="Add a hyperparameter to [space], or use sampler random.",
            )
        self.learns = name != "qmc"
        self._space = space
        self._max_epochs = max_epochs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls some of its samplers experimental
            self._optuna = _import_optuna(name)
            self._study = self._optuna.create_study(
                direction="maximize" if direction is Direction.MAX else "minimize",
                sampler=self._make(name, seed),
            )
        self._distributions = {one.name: self._distribution(one) for one in space.dimensions}
        self._trials: dict[int, Any] = {}

    def ask(self, number: int) -> Config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask(self._distributions)
        self._trials[number] = trial
        return tuple((one.name, _drawn(one, trial.params[one.name])) for one in self._space.dimensions)

    def tell(self, number: int, config: Config, epoch: int, value: float | None, *, final: bool) -> None:  # noqa: ARG002
        known = value is not None and math.isfinite(value)
        if not final:
            if known:
                self._trials[number].report(value, epoch)
            return
        trial, state = self._trials.pop(number), self._optuna.trial.TrialState
        if not known:
            self._study.tell(trial, state=state.FAIL)
        elif epoch >= self._max_epochs:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=state.PRUNED)

    def _make(self, name: str, seed: int) -> Any:
        kind = getattr(self._optuna.samplers, OPTUNA_CLASSES[name])
        own_seed = int(child_rng(seed, "optuna", name).integers(2**31))
        return kind(seed=own_seed, **OPTUNA_OPTIONS.get(name, {}))

    def _distribution(self, dimension: Dimension) -> Any:
        kinds = self._optuna.distributions
        if isinstance(dimension, ChoiceDimension):
            return kinds.CategoricalDistribution(dimension.values)
        if isinstance(dimension, IntDimension):
            return kinds.IntDistribution(dimension.low, dimension.high, log=dimension.log)
        return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def make_sampler(name: str, space: Space, study: Study, seed: int) -> Sampler:
    """The sampler of a study by its name."""
    if name == "random":
        return RandomSampler(space, seed)
    if name not in OPTUNA_CLASSES:
        raise InputError(f"there is no sampler {name!r}.", remedy=f"There are {', '.join(SAMPLERS)}.")
    return OptunaSampler(space, name, seed=seed, direction=study.direction, max_epochs=study.max_epochs)


def _import_optuna(name: str) -> Any:
    try:
        import optuna  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"sampler {name} needs Optuna, which is not installed.",
            remedy="pip install 'stretto[search]', or use sampler random.",
        ) from error
    package = ALSO_NEEDED.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(
            f"sampler {name} needs the package {package}, which is not installed.",
            remedy=f"pip install {package}, or use sampler tpe.",
        )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _drawn(dimension: Dimension, value: Any) -> Value:
    """The value as a plain Python number, text or bool."""
    if isinstance(dimension, ChoiceDimension):
        return dimension.values[dimension.values.index(value)]
    return int(value) if isinstance(dimension, IntDimension) else float(value)
