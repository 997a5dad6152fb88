"""The elastic loader shares the data among the workers, also after a resize: each example once per pass."""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from stretto.core.errors import InputError
from stretto.torch.foreign import whole_sampler
from stretto.torch.step_layout import UNSHARED, CurrentStep, Share, StepLayout, have_equal_weights

_PASSED_ON = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Options of DataLoader that an elastic loader takes, too."""


@dataclass(slots=True)
class DataPosition:
    """How far a loop has got in its data."""

    pass_number: int = 0
    """Which pass over the data this is, from 0; the order of examples depends on it."""
    examples: int = 0
    """Examples of this pass that are done, by all workers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A dataset and how to load it."""

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool
    drop_last: bool = False
    sampler: Sampler[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted(self.options.keys() - set(_PASSED_ON)):
            raise InputError(
                f"an elastic loader is given {', '.join(unknown)}, and it cuts batches and draws their order "
                "itself, from the run's seed.",
                remedy=f"Leave it out; of DataLoader's options there are {', '.join(_PASSED_ON)}.",
            )

    @property
    def examples(self) -> int:
        """Examples of one pass."""
        return len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]

    @property
    def lack(self) -> str:
        """Why a pass has no batch; empty if it has one."""
        if self.examples == 0:
            return "its dataset or sampler has no examples"
        if self.drop_last and self.examples < self.batch_size:
            return (
                f"its {self.examples} examples are fewer than one batch of {self.batch_size}, and "
                "drop_last=True leaves them out"
            )
        return ""

    def order(self, seed: int, pass_number: int) -> Sequence[int]:
        """The order of examples in a pass, the same on every worker."""
        pass_seed = (seed * 1_000_003 + pass_number) % (1 << 63)
        if self.sampler is not None:
            with _seeded(pass_seed, self.sampler):
                return self._sampled(self.sampler, pass_number)
        if not self.shuffle:
            return range(self.examples)
        generator = torch.Generator().manual_seed(pass_seed)
        return array("q", torch.randperm(self.examples, generator=generator).numpy().tobytes())

    def _sampled(self, sampler: Sampler[int], pass_number: int) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(pass_number)
        order = list(sampler)
        if len(order) < self.examples:
            raise InputError(
                f"the sampler's length is {self.examples}, and it gave {len(order)} indices.",
                remedy="Let its __len__ say how many it gives.",
            )
        return order


@contextmanager
def _seeded(seed: int, sampler: Sampler[int]) -> Iterator[None]:
    """Seed every generator that a sampler may use, and restore them all afterwards."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    own = getattr(sampler, "__dict__", {}).values()
    generators += [one for one in own if isinstance(one, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def source_of(loader: DataLoader[Any], note: Callable[[str], None]) -> DataSource:
    """The data source of an ordinary DataLoader; InputError if it cannot be shared out."""
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "the loader has an iterable dataset, so its examples cannot be shared out by number.",
            remedy="Use a dataset with __getitem__ and __len__.",
        )
    cut: Any = loader.batch_sampler
    made_by_loader = loader.batch_size is not None and type(cut).__name__ == "BatchSampler"
    if not made_by_loader and type(cut) is not BatchSampler:
        raise InputError(
            "the loader has a custom batch sampler, but batches must be cut anew when workers come or go.",
            remedy="Give batch_size and shuffle or sampler instead.",
        )
    options = {name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)}
    sampler = whole_sampler(cut.sampler, note)
    plain = isinstance(sampler, SequentialSampler)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    if shuffled and sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        shuffled = False
    return DataSource(
        dataset=loader.dataset,
        batch_size=cut.batch_size,
        shuffle=shuffled,
        drop_last=cut.drop_last,
        sampler=None if plain or shuffled else sampler,
        options=options,
    )


class _NextBatches:
    """A batch sampler whose batches are set before each loop, so that DataLoader keeps its processes."""

    def __init__(self) -> None:
        self.batches: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches


class LoopRole(Enum):
    """The role of a loop over a loader."""

    LEADS = "its batches define the steps"
    BESIDE = "it runs beside another loop, as in zip(), or inside its body"
    OVER = "it was finished before this worker joined"


class LoaderEngine(Protocol):
    """The engine, as an elastic loader sees it."""

    current: CurrentStep
    seed: int

    def usual_layout(self, source: DataSource) -> StepLayout:
        """How the steps of a loop over this source would be split now."""

    def begin(self, loader: ElasticLoader) -> LoopRole:
        """A loop begins; returns its role."""

    def after_step(self, loader: ElasticLoader) -> bool:
        """A step is complete; True if steps are now split differently."""

    def after_beside(self, loader: ElasticLoader, inside: bool) -> None:
        """A batch of a BESIDE loop is done; `inside`: the loop is nested in the leading one."""

    def is_over(self, loader: ElasticLoader) -> bool:
        """Whether the loop is finished; an adaptive loop may take more or less than one pass."""

    def layout_at(self, step: int) -> StepLayout:
        """How to split a step."""

    def lay_out(self, layout: StepLayout) -> None:
        """Split steps in this way from now on."""

    def end(self, loader: ElasticLoader, ran_out: bool) -> None:
        """A loop ended, maybe by `break`."""


class ElasticLoader:
    """Iterate over it as over a DataLoader; `batch_size` is the total over all workers."""

    def __init__(self, source: DataSource, engine: LoaderEngine) -> None:
        self.source = source
        self.position = DataPosition()
        self.uncounted = 0
        """Examples of a BESIDE loop's current batch, which is not counted as done yet."""
        self._engine = engine
        self._current = engine.current
        self._drawn: tuple[int, Sequence[int]] | None = None
        """The number of the current pass, and its order of examples."""
        self._loops = 0
        """Loops begun so far."""
        self._role = LoopRole.OVER
        """The role of the latest loop."""
        self._is_open = False
        """Whether a loop is running."""
        self._iterations = 0
        """Completed iterations of this loop."""
        self._joined_late = False
        """Whether this worker joined in the middle of this loop."""
        self.asked_length = False
        """Whether the user's code called len() within this loop."""
        self._next_batches = _NextBatches()
        self._generator = torch.Generator()  # keeps the user's generators untouched
        self._batches: DataLoader[Any] = DataLoader(
            source.dataset, batch_sampler=self._next_batches, generator=self._generator, **source.options
        )

    @property
    def dataset(self) -> Dataset[Any]:
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """Examples of a step now, over all workers."""
        return self._engine.usual_layout(self.source).total

    @property
    def steps(self) -> int:
        """Optimisation steps of a whole pass at the current batch size."""
        whole, rest = divmod(self.source.examples, self.batch_size)
        return whole + (rest > 0 and not self.source.drop_last)

    def __len__(self) -> int:
        """Iterations of a whole pass now; a step in several passes takes one iteration for each.

        In a worker that joined in the middle of a pass, only its own iterations count: its index began at 0.
        """
        self.asked_length |= self._is_open
        if self._is_open and self._joined_late:
            return self._iterations + self._iterations_of(self.source.examples - self.position.examples)
        return self._iterations_of(self.source.examples)

    def _iterations_of(self, examples: int) -> int:
        usual, fewer = self._engine.usual_layout(self.source), []
        steps, left = divmod(examples, usual.total)
        if left and not self.source.drop_last:
            steps += 1
            last_two = min(left + usual.total, examples)
            first = self._next_step(usual.total, last_two)
            fewer = [size for size in (first, last_two - first) if 0 < size < usual.total]
        return (steps - len(fewer)) * usual.passes + sum(_for_fewer(usual, n).passes for n in fewer)

    @property
    def left(self) -> int:
        """Examples left in this pass."""
        left = self.source.examples - self.position.examples - self.uncounted
        total = self.batch_size if self._role is LoopRole.BESIDE else self._current.base.total
        return 0 if self.source.drop_last and left < total else left

    def __iter__(self) -> Iterator[Any]:
        own: list[weakref.ref[Iterator[Any]]] = []
        loop = self._loop(own)
        own.append(weakref.ref(loop))
        return loop

    def _loop(self, own: list[weakref.ref[Iterator[Any]]]) -> Iterator[Any]:
        if self._loops == 0:
            _refuse_cycle(own[0]())
        role = self._engine.begin(self)
        if role is LoopRole.OVER:
            return
        self._loops += 1
        number, ran_out = self._loops, False
        self._role, self._is_open, self.asked_length, self.uncounted = role, True, False, 0
        self._iterations, self._joined_late = 0, self.position.examples > 0
        try:
            yield from self._steps() if role is LoopRole.LEADS else self._beside()
            ran_out = True
        finally:
            if number == self._loops:
                self._is_open = False
                self._engine.end(self, ran_out)

    def _refuse_two_at_once(self) -> NoReturn:
        raise InputError(
            "two loops over the same elastic loader run at once.",
            remedy="Prepare one loader for each loop.",
        )

    def _steps(self) -> Iterator[Any]:
        """The batches of the leading loop."""
        while not self._engine.is_over(self):
            if self.left == 0:
                self.position = DataPosition(self.position.pass_number + 1)
                if self.left == 0:  # even a new pass has no batch
                    return
            yield from self._stretch()

    def _beside(self) -> Iterator[Any]:
        """The batches of a loop beside the leading one.

        Gradients are weighted by the shares of the leading loop, so this loop's shares must have the same
        weights. If they cannot, every worker gets the whole batch: then all workers compute the same
        gradient, and the weighted mean is correct.
        """
        number = self._loops
        while self.left:
            layout, order = self._layout_beside(), self._order()
            coming: deque[Share] = deque()
            self._next_batches.batches = self._cut_beside(layout, order, coming)
            self._generator.manual_seed(self._transform_seed())
            for batch in self._batches:
                share, at = coming.popleft(), self.position.examples
                if layout.workers > 1 and not self._fits_lead(layout, share):
                    batch = self._load(list(order[at : at + share.step_examples]))  # noqa: PLW2901
                self.uncounted, given_at = share.step_examples, self._current.batches_given
                yield batch
                if number != self._loops:
                    self._refuse_two_at_once()
                self._iterations += 1
                self.count_batch()
                self._engine.after_beside(self, self._current.batches_given == given_at)
                if self._layout_beside() != layout:
                    break

    def _fits_lead(self, layout: StepLayout, share: Share) -> bool:
        lead = self._current.share
        examples = None if lead is UNSHARED else lead.step_examples
        return have_equal_weights(self._current.layout, examples, layout, share.step_examples)

    def count_batch(self) -> None:
        """Count the current batch as done."""
        self.position.examples += self.uncounted
        self.uncounted = 0

    def _layout_beside(self) -> StepLayout:
        return self._engine.usual_layout(self.source).in_passes(1)

    def _cut_beside(
        self, layout: StepLayout, order: Sequence[int], coming: deque[Share]
    ) -> Iterator[list[int]]:
        at, end = self.position.examples, self.position.examples + self.left
        while at < end:
            examples = min(layout.total, end - at)
            if examples < layout.total and self.source.drop_last:
                return
            share = layout.shares(examples)[0]
            coming.append(share)
            yield _indices(order, at, share)
            at += examples

    def _load(self, indices: list[int]) -> Any:
        dataset: Any = self.source.dataset
        examples = (
            dataset.__getitems__(indices)
            if hasattr(dataset, "__getitems__")
            else [dataset[index] for index in indices]
        )
        return self._batches.collate_fn(examples)

    def _stretch(self) -> Iterator[Any]:
        """The next batches, until the pass ends, the loop ends or steps are split differently."""
        number, coming = self._loops, deque[tuple[StepLayout, Share]]()
        self._next_batches.batches = self._cut_up(self._order(), coming)
        self._generator.manual_seed(self._transform_seed())
        for batch in self._batches:
            layout, share = coming.popleft()
            if layout != self._current.layout:
                self._engine.lay_out(layout)
            self._current.share = share
            self._current.batches_given += 1
            yield batch
            if number != self._loops:
                self._refuse_two_at_once()
            self._iterations += 1
            if share.last:
                self.position.examples += share.step_examples
                changed = self._engine.after_step(self)
                if changed or self._engine.is_over(self):
                    return

    def _order(self) -> Sequence[int]:
        """The order of examples in the current pass; drawn once."""
        number = self.position.pass_number
        if self._drawn is None or self._drawn[0] != number:
            self._drawn = number, self.source.order(self._engine.seed, number)
        return self._drawn[1]

    def _transform_seed(self) -> int:
        """The seed of random transforms: different for every worker and every call of `_stretch`."""
        at = (self._engine.seed, self.position.pass_number, self.position.examples, self._current.base.rank)
        return int.from_bytes(hashlib.sha256(repr(at).encode()).digest()[:7])

    def _cut_up(self, order: Sequence[int], coming: deque[tuple[StepLayout, Share]]) -> Iterator[list[int]]:
        """Yield the example indices of this worker's passes, and append each pass to `coming`."""
        at, end, step = self.position.examples, self.position.examples + self.left, self._current.step
        base = self._current.base
        while at < end:
            # Inside this loop, a loop over another loader may have changed the base layout.
            layout = self._engine.layout_at(step) if self._current.base == base else base
            examples = self._next_step(layout.total, end - at)
            if examples < layout.total:
                if self.source.drop_last:
                    return
                layout = _for_fewer(base, examples)
            for share in layout.shares(examples):
                coming.append((layout, share))
                yield _indices(order, at, share)
            at, step = at + examples, step + 1

    def _next_step(self, total: int, left: int) -> int:
        """Examples of the next step, with `left` examples left in the pass.

        At the user's own batch size, the last step takes what is left. At a larger batch, which we chose, a
        small last step would give a noisy gradient that momentum carries into many steps. So if less than
        half a batch would remain, the last two steps share their examples.
        """
        if total > self.source.batch_size and total < left < 1.5 * total and not self.source.drop_last:
            return ceil(left / 2)
        return min(total, left)


def _refuse_cycle(loop: object) -> None:
    """Refuse itertools.cycle: it repeats stored batches, which were cut for the group at that time."""
    if any(type(one) is itertools.cycle for one in gc.get_referrers(loop)):
        raise InputError(
            "itertools.cycle repeats the stored batches of an elastic loader, but batches must be cut anew "
            "when workers come or go.",
            remedy="Start a new loop over the loader instead: "
            "`def forever(loader): while True: yield from loader`.",
        )


def _for_fewer(base: StepLayout, examples: int) -> StepLayout:
    """The layout of a step with fewer examples: only as many passes as they need."""
    return base.in_passes(ceil(examples / (base.workers * base.atomic)))


def _indices(order: Sequence[int], start: int, share: Share) -> list[int]:
    """The examples of a share. An empty share borrows one example; its weight of 0 cancels it."""
    first = start + min(share.start, share.step_examples - 1)
    return list(order[first : max(start + share.stop, first + 1)])
