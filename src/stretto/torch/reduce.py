"""Averages gradients over passes and workers (all-reduce in buckets).

After `backward()` of a step's last pass, every `.grad` is the gradient of the whole batch, as one worker
would compute it in one pass. So clipping, unscaling and logging see the right values. Before that, `.grad` is
None: the passes are summed in buffers of our own. Gradients lie side by side in flat buckets. A bucket is
exchanged as soon as its last gradient is there, while the backward pass continues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.core.errors import InputError
from stretto.torch.group import Group, wait_for
from stretto.torch.step_layout import UNSHARED, CurrentStep, Share
from stretto.torch.timing import Wait, timing_event

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first exchange starts early."""


class GradientObserver(Protocol):
    """Something that observes gradients before and after they are averaged."""

    def wants(self) -> bool:
        """Whether to observe the current step; the same on all workers."""

    def part(self, gradients: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
        """A worker's gradient before averaging, bucket by bucket; with one worker, that of the first pass."""

    def whole(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The step's gradient is complete, in `.grad`."""


class _Bucket:
    """Parameters of one dtype and device, with one buffer for all their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.empty(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._has_gradient = self.buffer.split([*sizes, len(sizes)])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        """Gradients of this backward pass that have not arrived yet."""
        self.is_begun = False
        """Whether the buffer holds gradients of this step that are not in `.grad`."""
        self._seen: set[int] = set()
        """Indices of parameters that had a gradient in any pass of this step."""
        self.work: Any = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Move existing gradients into the buffer, so that they are not weighted again."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or _is(gradient, view):
                continue
            view.copy_(gradient)
            parameter.grad = view

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Add the gradients of a complete backward pass to the buffer, and set `.grad` to None."""
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
                    remedy="Create its layer with sparse=False.",
                )
            self._seen.add(place)
            if not _is(gradient, view):  # else autograd has added to our buffer, with the weight
                if self.is_begun:
                    view.add_(gradient, alpha=weight)
                else:
                    torch.mul(gradient, weight, out=view) if weight != 1.0 else view.copy_(gradient)
            parameter.grad = None
        self.is_begun = True

    @torch.no_grad()
    def start_mean(self, group: Group, workers: int) -> None:
        """Start to average over workers; with the gradients, sum which parameters have one."""
        self._has_gradient.fill_(1.0 if len(self._seen) == len(self.parameters) else 0.0)
        if len(self._seen) < len(self.parameters):
            for place in self._seen:
                self._has_gradient[place] = 1.0
        self.buffer.mul_(1.0 / workers)
        self.work = group.start_sum(self.buffer)

    def give(self, *, exchanged: bool) -> None:
        """Put the average into `.grad`. Parameters without a gradient on any worker keep None."""
        shown = set(self._seen)
        if exchanged and len(shown) < len(self.parameters):
            workers = self._has_gradient.abs().tolist()
            shown.update(place for place, count in enumerate(workers) if count > 0)
        for place in shown:
            self.parameters[place].grad = self.views[place]
        self._seen.clear()
        self.is_begun = False


class Reducer:
    """Averages the gradients of one optimizer's parameters. Costs nothing with one worker and one pass.

    Several backward passes may add to one step, as in plain PyTorch. Then `.grad`, already averaged, is
    averaged again with what was added; averaging an average does not change it.
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
        """The pass of the latest gradients."""
        self._has_stepped = False
        """Whether the optimizer's `step()` was called in this pass."""
        self._backwards = 0
        """Calls of `backward()` in this pass, before `step()`."""
        self._usual_backwards = 0
        """The same number in the previous pass."""
        self._observer: GradientObserver | None = None
        self.has_gradients = False
        self._event_now = timing_event()
        self.waits: list[Wait] = []
        """When the last step waited for other workers' gradients."""
        current.backward.add(self)

    def watch(self, observer: GradientObserver) -> None:
        self._observer = observer

    def warm_up(self) -> None:
        """Allocate the buckets before the group forms, when no worker waits for this one."""
        self._find_parameters()
        self._make_buckets()
        for bucket in self._buckets:
            bucket.buffer.zero_()  # memory is allocated when first written to

    def arrange(self) -> None:
        """Adapt to a new layout and to the parameters that are trainable now."""
        self._remove_hooks()
        self.waits = []
        self._share = None
        self._find_parameters()
        if self._current.layout.parts == 1:
            if self._observer is None:  # else we will need them again at the next split step
                self._drop_buckets()
            return
        self._make_buckets()
        for bucket in self._buckets:
            bucket.adopt()
        self._reset()
        self._add_hooks(self._parameters)

    def stepped(self) -> None:
        """The optimizer's `step()` was called. In an incomplete step, later gradients are dropped."""
        self._has_stepped = True

    def catch_up(self) -> None:
        """Before a step: handle parameters that became trainable without our notice."""
        if self._hooks and self._add_new_parameters():
            self.launch()
            self.collect()

    def release(self) -> None:
        """Stop averaging gradients."""
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

    def _find_parameters(self) -> None:
        trained = [parameter for parameter in self._all_parameters() if parameter.requires_grad]
        if [id(one) for one in trained] != [id(one) for one in self._parameters]:
            self._parameters = trained
            self._drop_buckets()

    def _add_new_parameters(self) -> bool:
        """Make buckets for parameters that were unfrozen or added; False if there are none."""
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
        """The weight of this pass's gradient in the worker's mean over its passes."""
        return (
            1.0
            if self._current.share is UNSHARED
            else self._current.share.weight / self._current.layout.passes
        )

    @property
    def _measures(self) -> bool:
        """Whether to call the observer now.

        With several calls of `backward()` per step, a worker's own part cannot be separated.
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
        """Weight a gradient that autograd will add to our buffer."""
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
        self._add_new_parameters()

    def _launch_ready(self) -> None:
        """Launch buckets in the same order on all workers: each waits for those before it."""
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
                    wait_for(bucket.work)
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
    """Whether a gradient lies in our buffer."""
    return gradient.data_ptr() == view.data_ptr()


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[_Bucket]:
    """Buckets in reverse order of the parameters, about the order in which gradients arrive."""
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
