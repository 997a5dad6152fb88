"""An elastic loader: every example of a pass is seen once, however often the number of workers changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from stretto.core.errors import InputError
from stretto.torch.turn import Layout, Share, Turn

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
"""Options of DataLoader that mean the same here."""


@dataclass(slots=True)
class Position:
    """Where in the data a loop is."""

    pass_number: int = 0
    """Passes over the data begun before this one."""
    examples: int = 0
    """Examples of this pass that are done, by all workers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The data and how it is to be loaded."""

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool
    drop_last: bool = False
    sampler: Sampler[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """Of one pass."""
        return len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]

    def order(self, seed: int, pass_number: int) -> Sequence[int]:
        """The indices of a pass, the same on every worker."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + pass_number) % (1 << 63))
        if self.sampler is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator.initial_seed())
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(pass_number)
                return list(self.sampler)
        if not self.shuffle:
            return range(self.examples)
        order: list[int] = torch.randperm(self.examples, generator=generator).tolist()
        return order


def source_of(loader: DataLoader[Any]) -> Source:
    """What an ordinary DataLoader loads; InputError for the kinds that cannot be shared out."""
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "the loader has an iterable dataset, whose examples have no numbers to share out.",
            remedy="Use a dataset with __getitem__ and __len__.",
        )
    if loader.batch_size is None or type(loader.batch_sampler).__name__ != "BatchSampler":
        raise InputError(
            "the loader has a batch sampler of its own, and batches must be cut anew for each group.",
            remedy="Give batch_size and shuffle or sampler instead.",
        )
    options = {name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)}
    plain = isinstance(loader.sampler, SequentialSampler)
    shuffled = isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    if shuffled and loader.sampler.num_samples != len(loader.dataset):  # type: ignore[attr-defined,arg-type]
        shuffled = False
    return Source(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=shuffled,
        drop_last=loader.drop_last,
        sampler=None if plain or shuffled else loader.sampler,  # type: ignore[arg-type]
        options=options,
    )


class ElasticLoader:
    """Iterate over it as over a DataLoader; `batch_size` is the total over all workers.

    `before(loader)` is asked when a loop begins: False if the loop was already over when this worker came.
    `after_step(loader)` is told when a step is complete: True if the way data is shared out has changed.
    `is_over(loader)` says whether the loop ends here although data may be left, or must go on without.
    `layout_at(step)` says how a step is shared out, and `lay_out(layout)` is told when that changes.
    """

    def __init__(
        self,
        source: Source,
        turn: Turn,
        *,
        seed: int,
        before: Callable[[ElasticLoader], bool],
        after_step: Callable[[ElasticLoader], bool],
        is_over: Callable[[ElasticLoader], bool],
        layout_at: Callable[[int], Layout],
        lay_out: Callable[[Layout], None],
    ) -> None:
        self.source = source
        self.position = Position()
        self._turn = turn
        self._seed = seed
        self._before = before
        self._after_step = after_step
        self._is_over = is_over
        self._layout_at = layout_at
        self._lay_out = lay_out

    @property
    def dataset(self) -> Dataset[Any]:
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """Examples of a step at present, over all workers."""
        return self._turn.base.total

    def __len__(self) -> int:
        """Iterations of a whole pass as things stand: steps times passes."""
        whole, rest = divmod(self.source.examples, self._turn.base.total)
        return (whole + (rest > 0 and not self.source.drop_last)) * self._turn.base.passes

    @property
    def left(self) -> int:
        """Examples of this pass that are still to be trained on."""
        left = self.source.examples - self.position.examples
        return 0 if self.source.drop_last and left < self._turn.base.total else left

    def __iter__(self) -> Iterator[Any]:
        if not self._before(self):
            return
        while not self._is_over(self):
            if self.left == 0:
                self.next_pass()
            yield from self._stretch()

    def next_pass(self) -> None:
        self.position = Position(self.position.pass_number + 1)

    def _stretch(self) -> Iterator[Any]:
        """Batches from here on, until the data of this pass ends, the loop is over or the layout changes."""
        order = self.source.order(self._seed, self.position.pass_number)
        passes = list(self._passes())
        generator = torch.Generator().manual_seed(self._chance())  # else the user's own would be disturbed
        batches = DataLoader(
            self.source.dataset,
            batch_sampler=[_indices(order, start, share) for start, _, share in passes],
            generator=generator,
            **self.source.options,
        )
        for (_, layout, share), batch in zip(passes, batches, strict=True):
            if layout != self._turn.layout:
                self._lay_out(layout)
            self._turn.share = share
            yield batch
            if share.last:
                self.position.examples += share.step_examples
                changed = self._after_step(self)
                if changed or self._is_over(self):
                    return

    def _chance(self) -> int:
        """What random transforms draw from: other numbers for every stretch and every worker."""
        at = (self._seed, self.position.pass_number, self.position.examples, self._turn.base.rank)
        return int.from_bytes(hashlib.sha256(repr(at).encode()).digest()[:7])

    def _passes(self) -> Iterator[tuple[int, Layout, Share]]:
        """This worker's passes over what is left, each with the place where its step begins."""
        at, end, step = self.position.examples, self.position.examples + self.left, self._turn.step
        while at < end:
            layout = self._layout_at(step)
            examples = min(layout.total, end - at)
            if examples < layout.total and self.source.drop_last:
                return
            for share in layout.shares(examples):
                yield at, layout, share
            at, step = at + examples, step + 1


def _indices(order: Sequence[int], start: int, share: Share) -> list[int]:
    """The examples of a share. An empty one borrows an example, which its weight of 0 takes out again."""
    stop = max(share.stop, share.start + 1)
    place = min(share.start, share.step_examples - 1) if stop > share.step_examples else share.start
    return [order[start + one] for one in range(place, max(share.stop, place + 1))]
