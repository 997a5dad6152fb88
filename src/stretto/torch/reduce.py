"""Averaging gradients over passes and workers.

After `backward()` of a step's last pass every `.grad` is what one worker would have got from the whole
batch in one go, so clipping, unscaling and logging see the right thing. Before that, `.grad` is None: the
passes are added up out of sight. Gradients lie side by side in flat buckets, and a bucket's exchange starts
as soon as its last gradient is there, while the rest of the backward pass goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.torch.group import Group, waited
from stretto.torch.turn import Turn

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the exchange begins early."""


class Watcher(Protocol):
    """Whoever wants to see gradients: a worker's own before they are averaged, and the average."""

    def wants(self) -> bool:
        """Whether it looks at the present step; the same on all workers."""

    def part(self, gradients: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
        """A worker's mean over its passes, bucket by bucket; or the first of one worker's passes."""

    def whole(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradient of the step is complete."""


class _Bucket:
    """Some parameters of one kind, and one buffer for all their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        pieces = self.buffer.split(sizes)
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        """Gradients of the present backward pass that are not there yet."""
        self.seen: set[int] = set()
        """Places of the parameters that had a gradient in any pass of this step."""
        self.work: Any = None

    def take(self, *, first: bool, weight: float) -> None:
        """Add the gradients of a pass that is complete, and hide them."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                if first:
                    view.zero_()
                continue
            self.seen.add(place)
            if gradient.data_ptr() == view.data_ptr():  # zeroed in place, not dropped, by the user
                if weight != 1.0:
                    view.mul_(weight)
            elif first:
                torch.mul(gradient, weight, out=view) if weight != 1.0 else view.copy_(gradient)
            else:
                view.add_(gradient, alpha=weight)
            parameter.grad = None

    def give(self) -> None:
        """Show the average. A parameter without a gradient anywhere stays without."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if place in self.seen or bool(view.any()):
                parameter.grad = view
        self.seen.clear()


class Reducer:
    """Watches the parameters of one optimizer. Idle, at no cost, while one worker makes one pass a step."""

    def __init__(self, parameters: Callable[[], list[torch.nn.Parameter]], turn: Turn, group: Group) -> None:
        self._all_parameters = parameters
        self._parameters: list[torch.nn.Parameter] = []
        self._turn = turn
        self._group = group
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._hooks: list[Any] = []
        self._launched = 0
        self._in_backward = False
        self._watcher: Watcher | None = None
        self.sync_s = 0.0
        """Time the last step waited for other workers' gradients."""

    def watch(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def warm_up(self) -> None:
        """Have the memory of the first exchange at hand, where nobody waits for it yet."""
        self._take_note()
        self._make_buckets()
        for bucket in self._buckets:
            bucket.buffer.zero_()  # only what was written to once is really there

    def arrange(self) -> None:
        """Take note of a new layout, and of the parameters that are trained now."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.sync_s = 0.0
        self._in_backward = False
        self._take_note()
        if self._turn.layout.parts == 1:
            if self._watcher is None:  # else a step in two passes comes again soon
                self._buckets, self._bucket_of = [], {}
            return
        self._make_buckets()
        self._reset()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._parameters]

    def _take_note(self) -> None:
        trained = [parameter for parameter in self._all_parameters() if parameter.requires_grad]
        if [id(one) for one in trained] != [id(one) for one in self._parameters]:
            self._parameters, self._buckets, self._bucket_of = trained, [], {}

    def _make_buckets(self) -> None:
        if not self._buckets:
            self._buckets = _buckets(self._parameters)
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    @property
    def _watched(self) -> bool:
        return self._watcher is not None and self._watcher.wants()

    def _reset(self) -> None:
        self._launched = 0
        self._in_backward = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            _at_end_of_backward(self._end_backward)
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        bucket.missing -= 1
        if self._turn.share.last and bucket.missing <= 0:
            self._launch_ready()

    def _launch_ready(self) -> None:
        """In one order on all workers: a bucket waits for those before it."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing <= 0:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._launched += 1
        share, layout = self._turn.share, self._turn.layout
        bucket.take(first=share.first, weight=share.weight)
        bucket.buffer.mul_(1.0 / layout.passes)
        if layout.workers == 1:
            return
        if self._watched:
            self._watcher.part(bucket.views, bucket.parameters)  # type: ignore[union-attr]
        bucket.buffer.mul_(1.0 / layout.workers)
        bucket.work = self._group.start_sum(bucket.buffer)

    def _end_backward(self) -> None:
        if not self._turn.share.last:
            self._end_pass()
            return
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        began_s = time.perf_counter()
        for bucket in self._buckets:
            if bucket.work is not None:
                waited(bucket.work)
                bucket.work = None
        self.sync_s = time.perf_counter() - began_s
        for bucket in self._buckets:
            bucket.give()
        self._reset()
        if self._watched:
            self._watcher.whole(self._parameters)  # type: ignore[union-attr]

    def _end_pass(self) -> None:
        share = self._turn.share
        for bucket in self._buckets:
            bucket.take(first=share.first, weight=share.weight)
        if self._turn.layout.workers == 1 and share.first and self._watched:
            for bucket in self._buckets:
                self._watcher.part(bucket.views, bucket.parameters)  # type: ignore[union-attr]
        self._reset()


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """To be called while gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[_Bucket]:
    """Gradients come in about the reverse order of the parameters."""
    buckets: list[_Bucket] = []
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for parameter in reversed(parameters):
        kind = (parameter.device, parameter.dtype)
        waiting = by_kind.setdefault(kind, [])
        waiting.append(parameter)
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= (_BUCKET_BYTES if buckets else _FIRST_BUCKET_BYTES):
            buckets.append(_Bucket(waiting))
            by_kind[kind], sizes[kind] = [], 0
    buckets.extend(_Bucket(waiting) for waiting in by_kind.values() if waiting)
    return buckets
