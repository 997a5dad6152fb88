"""Averaging gradients over passes and workers.

After `backward()` of a step's last pass every `.grad` is what one worker would have got from the whole
batch in one go, so clipping, unscaling and logging see the right thing. Before that, `.grad` is None: the
passes are added up out of sight. Gradients lie side by side in flat buckets, and a bucket's exchange starts
as soon as its last gradient is there, while the rest of the backward pass goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.core.errors import InputError
from stretto.torch.group import Group, waited
from stretto.torch.step_layout import UNSHARED, CurrentStep, Share
from stretto.torch.timing import Wait, timing_event

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the exchange begins early."""


class GradientObserver(Protocol):
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
        self.buffer = torch.empty(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._marks = self.buffer.split([*sizes, len(sizes)])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        """Gradients of the present backward pass that are not there yet."""
        self.is_begun = False
        """Whether the buffer holds gradients of the present step that are not shown."""
        self._seen: set[int] = set()
        """Places of the parameters that had a gradient in any pass of this step."""
        self.work: Any = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Show gradients that are there already as our own, so that they are not weighed again."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or _is(gradient, view):
                continue
            view.copy_(gradient)
            parameter.grad = view

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Add the gradients of a backward pass that is complete, and hide them."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                if not self.is_begun:
                    view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be "
                    "averaged over workers or passes.",
                    remedy="Make its layer with sparse=False.",
                )
            self._seen.add(place)
            if not _is(gradient, view):  # else it was added to what we have shown, with its weight
                if self.is_begun:
                    view.add_(gradient, alpha=weight)
                else:
                    torch.mul(gradient, weight, out=view) if weight != 1.0 else view.copy_(gradient)
            parameter.grad = None
        self.is_begun = True

    @torch.no_grad()
    def start_mean(self, group: Group, workers: int) -> None:
        """Begin to average over the workers; beside it, whether anybody has a gradient."""
        self._marks.fill_(1.0 if len(self._seen) == len(self.parameters) else 0.0)
        if len(self._seen) < len(self.parameters):
            for place in self._seen:
                self._marks[place] = 1.0
        self.buffer.mul_(1.0 / workers)
        self.work = group.start_sum(self.buffer)

    def give(self, *, exchanged: bool) -> None:
        """Show the average. A parameter without a gradient anywhere stays without."""
        shown = set(self._seen)
        if exchanged and len(shown) < len(self.parameters):
            shown.update(place for place, mark in enumerate(self._marks.abs().tolist()) if mark > 0)
        for place in shown:
            self.parameters[place].grad = self.views[place]
        self._seen.clear()
        self.is_begun = False  # what is not in `.grad` any more when the next gradients come was dropped


class Reducer:
    """Watches the parameters of one optimizer. Idle, at no cost, while one worker makes one pass a step.

    Several backward passes may add to one step, as they do to `.grad` without us: what is shown already is
    averaged again together with what was added, and an average stays what it is.
    """

    def __init__(
        self, parameters: Callable[[], list[torch.nn.Parameter]], current: CurrentStep, group: Group
    ) -> None:
        self._all_parameters = parameters
        self._parameters: list[torch.nn.Parameter] = []
        self._current = current
        self._group = group
        self._buckets: list[_Bucket] = []
        self._place_of: dict[torch.nn.Parameter, tuple[_Bucket, Tensor]] = {}
        self._hooks: list[Any] = []
        self._launched = 0
        self._share: Share | None = None
        """The pass that gradients came from last."""
        self._has_stepped = False
        """The optimizer was told to step in the present pass."""
        self._backwards = 0
        """Backward passes of the present pass that were over before that."""
        self._usual_backwards = 0
        """The same of the pass before."""
        self._observer: GradientObserver | None = None
        self.has_gradients = False
        self._event_now = timing_event()
        self.waits: list[Wait] = []
        """Of the last step, for other workers' gradients."""
        current.backward.add(self)

    def watch(self, observer: GradientObserver) -> None:
        self._observer = observer

    def warm_up(self) -> None:
        """Have the memory of the first exchange at hand, where nobody waits for it yet."""
        self._take_note()
        self._make_buckets()
        for bucket in self._buckets:
            bucket.buffer.zero_()  # only what was written to once is really there

    def arrange(self) -> None:
        """Take note of a new layout, and of the parameters that are trained now."""
        self._remove_hooks()
        self.waits = []
        self._share = None
        self._take_note()
        if self._current.layout.parts == 1:
            if self._observer is None:  # else a step in two passes comes again soon
                self._drop_buckets()
            return
        self._make_buckets()
        for bucket in self._buckets:
            bucket.adopt()
        self._reset()
        self._add_hooks(self._parameters)

    def stepped(self) -> None:
        """The optimizer was told to step; inside a step, what still comes in this pass is not for it."""
        self._has_stepped = True

    def catch_up(self) -> None:
        """See to parameters that are trained by now, of which nothing was noticed yet; before a step."""
        if self._hooks and self._take_in():
            self.launch()
            self.collect()

    def release(self) -> None:
        """Leave gradients alone from now on."""
        self._remove_hooks()
        self._drop_buckets()

    def _add_hooks(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            weigh = functools.partial(self._weighed, parameter)
            self._hooks.append(parameter.register_hook(weigh))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _take_note(self) -> None:
        trained = [parameter for parameter in self._all_parameters() if parameter.requires_grad]
        if [id(one) for one in trained] != [id(one) for one in self._parameters]:
            self._parameters = trained
            self._drop_buckets()

    def _take_in(self) -> bool:
        """Make buckets for parameters that were thawed or added meanwhile; whether there are such."""
        new = [one for one in self._all_parameters() if one.requires_grad and one not in self._place_of]
        self._parameters += new
        self._add_buckets(new)
        self._add_hooks(new)
        return bool(new)

    def _make_buckets(self) -> None:
        if not self._buckets:
            self._add_buckets(self._parameters)

    def _add_buckets(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for bucket in _buckets(parameters):
            self._buckets.append(bucket)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self._place_of[parameter] = (bucket, view)

    def _drop_buckets(self) -> None:
        self._buckets, self._place_of = [], {}

    @property
    def _weight(self) -> float:
        """Of a gradient of the present pass in the worker's own mean over its passes."""
        return (
            1.0
            if self._current.share is UNSHARED
            else self._current.share.weight / self._current.layout.passes
        )

    @property
    def _measures(self) -> bool:
        """Whether the watcher looks at what is complete now.

        Of a step that several backward passes add to, workers cannot tell whose part is whose.
        """
        if self._has_stepped or self._observer is None or not self._observer.wants():
            return False
        return self._current.layout.workers == 1 or (self._backwards == 0 and self._usual_backwards <= 1)

    def _reset(self) -> None:
        self._launched = 0
        self.has_gradients = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _weighed(self, parameter: torch.nn.Parameter, gradient: Tensor) -> Tensor | None:
        """A gradient that is about to be added to one that we have shown."""
        _, view = self._place_of[parameter]
        if parameter.grad is None or not _is(parameter.grad, view) or self._weight == 1.0:
            return None
        return gradient * self._weight

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._current.share is UNSHARED or self._current.share is not self._share:
            self._begin_pass()
        if self._has_stepped and not self._current.share.last:
            return
        self.has_gradients = True
        self._current.backward.gradient_came()
        bucket, _ = self._place_of[parameter]  # type: ignore[index]
        bucket.missing -= 1
        if self._current.share.last and bucket.missing <= 0 and self._current.backward.may_begin(self):
            self._launch_ready()

    def _begin_pass(self) -> None:
        if self._current.share is UNSHARED and self.has_gradients:
            return
        self._share = self._current.share
        self._has_stepped = False
        self._usual_backwards, self._backwards = self._backwards, 0
        if self._share.first:
            self.waits = []
            for bucket in self._buckets:
                bucket.is_begun = False
        self._take_in()

    def _launch_ready(self) -> None:
        """In one order on all workers: a bucket waits for those before it."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing <= 0:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._launched += 1
        bucket.take(self._weight)
        workers = self._current.layout.workers
        if workers == 1:
            return
        if self._measures:
            self._observer.part(bucket.views, bucket.parameters)  # type: ignore[union-attr]
        bucket.start_mean(self._group, workers)

    def launch(self) -> None:
        if self._current.share.last:
            for bucket in self._buckets[self._launched :]:
                self._launch(bucket)

    def collect(self) -> None:
        if self._current.share.last:
            self._complete_step()
        else:
            self._end_pass()
        self._backwards += not self._has_stepped
        self._reset()

    def _complete_step(self) -> None:
        if any(bucket.work is not None for bucket in self._buckets):
            began = self._event_now()
            for bucket in self._buckets:
                if bucket.work is not None:
                    waited(bucket.work)
                    bucket.work = None
            self.waits.append((began, self._event_now()))
        alone = self._current.layout.workers == 1
        for bucket in self._buckets:
            bucket.give(exchanged=not alone)
        if self._measures and (not alone or self._backwards + 1 == self._usual_backwards):
            self._observer.whole(self._parameters)  # type: ignore[union-attr]

    def _end_pass(self) -> None:
        for bucket in self._buckets:
            bucket.take(self._weight)
        if self._current.layout.workers == 1 and self._current.share.first and self._measures:
            for bucket in self._buckets:
                self._observer.part(bucket.views, bucket.parameters)  # type: ignore[union-attr]


def _is(gradient: Tensor, view: Tensor) -> bool:
    """Whether a gradient is the one that we have shown, perhaps zeroed or added to since."""
    return gradient.data_ptr() == view.data_ptr()


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
