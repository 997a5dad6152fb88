"""The work between two steps: agreement among workers, resize in place, reports, checkpoints, batch tuning.

Everything here runs at a step boundary, on the training thread. During a resize, surviving workers stay at
their place in the user's loop. A new worker runs the user's code from the top and skips what is done.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.torch.batching import Batching
from stretto.torch.data import DataSource, ElasticLoader, LoopRole
from stretto.torch.fingerprint import DivergenceCheck
from stretto.torch.foreign import StepGuard, refuse_loose_parameters, refuse_wrappers_of
from stretto.torch.group import ENDS_GROUP, Group, GroupOrder, OrderKind, backend_for, own_device
from stretto.torch.pack import pack, unpack
from stretto.torch.persistence import Persistence, SavingSettings
from stretto.torch.progress import DataLoop, StepCounting, StepLoop, TrainingProgress
from stretto.torch.session import Session, StopTraining
from stretto.torch.state import KeptValues, PreparedObjects, restore_rng_state, rng_state, seed_rngs
from stretto.torch.step_layout import UNSHARED, CurrentStep, StepLayout
from stretto.torch.step_pattern import StepPatterns
from stretto.torch.stepper import Stepper
from stretto.torch.timing import SpeedMeter
from stretto.wire.messages import Described, EpochEnd, Form, Formed, Leave, Note, Ready, Report

FORMAT = 3
_REPORT_S = 5.0
_FIRST_REPORT_S = 1.0
_LOOK_S = 0.05
"""How often a group checks for orders, in seconds."""
_MOST_STEPS_BETWEEN_LOOKS = 50
_MOST_BATCHES_TO_WAIT = 128
"""How long saving and parking wait for a point from which code that counts batches itself can resume."""
_STEP_HASHES = 1 << 61
_TIMED_STEPS = 16
"""Steps timed before the tuner uses their mean; the first 24 steps of a batch size contain that many."""


@dataclass(slots=True)
class _OpenLoops:
    """The loops that are running."""

    lead: DataLoop | None = None
    """The leading loop: its batches define the steps."""
    beside: list[ElasticLoader] = field(default_factory=list)
    """Loops that run beside the leading one, as in zip()."""
    ran_out_at: int = -1
    """The leading loop's number of batches when a loop beside it last ran out."""


@dataclass(slots=True)
class _Deferred:
    """An order or a checkpoint that waits for a point from which code that counts batches can resume."""

    order: GroupOrder | None = None
    """An order that ends this group."""
    batches: int = 0
    """Batches since the order was agreed on, or since the checkpoint was due."""
    epochs: int = 0
    """Epochs that ended since the order was agreed on."""


class Engine:
    """The machinery behind a `Run`."""

    _began_at_start = True
    """Whether this process trains from the first epoch on."""

    def __init__(
        self,
        session: Session,
        saving: SavingSettings,
        *,
        seed: int,
    ) -> None:
        self.session = session
        self.group = Group(session.rendezvous)
        self.current = CurrentStep(StepLayout(total=1), StepLayout(total=1))
        self.prepared = PreparedObjects()
        self.steppers: list[Stepper] = []
        self.batching = Batching()
        self.seed = seed
        self.device = own_device()
        self.progress = TrainingProgress()
        self.kept = KeptValues()
        self.counting: StepCounting | None = None
        """How `run.steps` counts; None with `run.epochs`."""
        self.step_loop: StepLoop | None = None
        """The running loop of `run.steps`."""
        self.joined = False
        self._persistence = Persistence(saving, note=self.note, on_saved=session.send)
        self._meter = SpeedMeter()
        self._tuning_meter = SpeedMeter()
        """The same times for the batch tuner, which needs them before the next report."""
        self._values: dict[str, float] = {}
        self._divergence_check = DivergenceCheck(self.group, self.current, self.steppers, self.prepared.names)
        self.current.backward.when_over = self._backward_over
        self._guard = StepGuard(lambda: self.prepared.things, lambda: self.current.share is not UNSHARED)
        self._saved_at = self._place
        """The step of the last checkpoint that is known to be on the disk."""
        self._in_loop = False
        self._loops = _OpenLoops()
        self._step_worth: float | None = None
        self._loop_is_open = False
        """An elastic loop of this epoch has begun and not ended; the user may have left it early."""
        self._has_noted_unshared = False
        self._is_finished = False
        self._sources: list[DataSource] = []
        self._batches = 0
        """Batches processed by this process."""
        self._stepped = False
        """Whether a prepared optimizer ever stepped in this run, also before a restart."""
        self._finish_epoch = False
        self._step_patterns = StepPatterns()
        self._step_hash = 0
        """A hash over all batches since the group formed: which optimizers stepped in each."""
        self._deferred = _Deferred()
        self._described = False
        self._announcements: list[str] = []
        """Notices about prepared objects; rank 0 prints them when training begins."""
        self._reported_s = time.monotonic()
        self._report_after_s = _FIRST_REPORT_S

    # Joining and regrouping

    def join(self) -> None:
        """Join a group, with the state of its members or of the last checkpoint."""
        if self.joined:
            return
        self.joined = True
        if self.counting is not None:  # steps made before the loop do not count
            self.current.updates = 0
            self.current.stepped_ids.clear()
        self._refuse_no_data()
        if self.session.task is None and dist.is_initialized():  # DistributedDataParallel needs a group
            trained = [one for stepper in self.steppers for one in stepper.parameters()]
            refuse_wrappers_of(trained, gc.get_objects)
        if self.session.task is not None or self.group.world > 1:
            refuse_loose_parameters([one.optimizer for one in self.steppers], self.prepared.things)
            self._guard.begin()
        if self.session.task is None:
            self.group.form_from_environment(backend_for(self.device))
            self._load_state(share_state=True)
            self._divergence_check.regrouped()
            self._arrange()
            self._give_announcements()
            return
        if self.session.task.describe_only:
            return
        assert self.session.rendezvous is not None
        for stepper in self.steppers:
            stepper.reducer.warm_up()
        self.session.send(Ready(self.session.rendezvous.new_address()))
        form = self.session.wait_for_form(None)
        self._form(form)
        assert isinstance(form, Form)
        self._load_state(share_state=form.share_state)
        self._formed(form)
        self._give_announcements()

    def _refuse_no_data(self) -> None:
        lacks = [source.lack for source in self._sources]
        if lacks and all(lacks):
            raise InputError(
                f"there is nothing to train on: the loader has no batch, because {lacks[0]}.",
                remedy="Check how the data is read and filtered, lower batch_size, or drop drop_last.",
            )

    def _refuse_to_describe(self) -> None:
        """Fail a `describe_only` task whose first epoch ended without an elastic loop."""
        task = self.session.task
        if task is not None and task.describe_only and not self._described:
            raise InputError(
                "the first epoch used no batch of an elastic loader, so its steps cannot be split over "
                "workers.",
                remedy="Loop over a loader from run.prepare, inside run.epochs; if your code draws its own "
                "data, loop over run.steps(n, batch_size=..).",
            )

    def refuse_no_step(self) -> None:
        """Fail at the end of a run that used no batch, or in which no prepared optimizer stepped."""
        never_looped = self._began_at_start and not self._described and not self.current.stepped_ids
        if never_looped and (self.steppers or self._sources):
            raise InputError(
                "nothing was trained: the epochs used no batch of a prepared loader.",
                remedy="Loop over the loader from run.prepare or run.loader, inside run.epochs.",
            )
        if not self._batches or self._stepped or self.current.stepped_ids or not self.steppers:
            return
        lacks = "".join(f" One loader has no batch: {one.lack}." for one in self._sources if one.lack)
        raise InputError(
            f"nothing was trained: {self._batches} batches were used, but step() of a prepared optimizer was "
            f"never called.{lacks}",
            remedy="Call step() of the prepared optimizer. To evaluate only, prepare no optimizer.",
        )

    def _load_state(self, *, share_state: bool) -> None:
        """Rank 0 loads its checkpoint, if there is one; the others get rank 0's state."""
        if self.group.is_leader:
            state = self._persistence.load()
            if state is not None:
                self._restore(state)
        if share_state:
            self._share_state(newcomer=True)

    def _form(self, form: Form | Leave) -> None:
        if isinstance(form, Leave):
            self.group.leave()
            raise StopTraining("not part of the next group")
        self.batching.order = (
            None if form.batch is None else BatchChoice(form.batch.atomic, form.batch.accumulation)
        )
        self.group.form(
            generation=form.generation,
            rank=form.rank,
            world=form.world,
            nodes=form.nodes,
            store=form.store,
            backend=backend_for(self.device),
        )

    def _formed(self, form: Form) -> None:
        self._divergence_check.regrouped()
        self._step_hash = self._deferred.batches = 0
        self._arrange()
        if self.group.is_leader:
            self.session.send(Formed(form.generation))

    def _regroup(self, generation: int) -> None:
        self._share_kept()  # rank 0 may leave
        form = self.session.wait_for_form(generation)
        self._form(form)
        assert isinstance(form, Form)
        if form.share_state:
            self._share_state(newcomer=False)
        self._formed(form)
        self.progress.interrupt()

    def _share_state(self, *, newcomer: bool) -> None:
        if self.group.world == 1:
            return
        if self.group.is_leader:
            self.group.share(pack(self.state()), self.device)
            return
        if not newcomer:
            self.group.share(None, self.device)
            return
        header, tensors = self.group.share(None, self.device, pack(self.prepared.modules()))
        self._restore(unpack(header, tensors))
        seed_rngs(self.seed * 7919 + self.current.step * 31 + self.group.rank)

    def _backward_over(self) -> None:
        if self.current.share.last and self.current.layout.workers > 1:
            self._divergence_check.exchanged()
            unshared = self.current.share is UNSHARED and not self.progress.has_looped
            if unshared and not self._has_noted_unshared:
                self._note_unshared()

    def _note_unshared(self) -> None:
        """Tell the user that without an elastic loop, every worker processes whole batches."""
        self._has_noted_unshared = True
        if self.group.is_leader and self.progress.in_epoch:
            self.note(
                f"The {self.group.world} workers train outside an elastic loader, each on its own batch, so "
                f"one step uses {self.group.world} batches. To split a batch over workers, loop over a "
                "loader from run.prepare() or over run.steps(n, batch_size=..)."
            )

    def _arrange(self) -> None:
        """Split steps over the current group. Outside elastic loops a step is one pass."""
        self.current.base = self.batching.layout(self.group)
        self.current.share = UNSHARED
        self.lay_out(self.current.base if self._in_loop else self.current.base.in_passes(1))
        self._meter.skip()
        self._tuning_meter.skip()
        for stepper in self.steppers:
            stepper.skip()

    def expect(self, source: DataSource) -> None:
        """Register the source of a prepared loader."""
        self.batching.expect(source)
        if all(source is not one for one in self._sources):
            self._sources.append(source)
        self.progress.counted = self.batching.counted
        if not self.joined:
            self.current.base = self.batching.layout(self.group)

    def lay_out(self, layout: StepLayout) -> None:
        self.current.layout = layout
        for stepper in self.steppers:
            stepper.reducer.arrange()

    def usual_layout(self, source: DataSource) -> StepLayout:
        """How the steps of a loop over this source would be split now."""
        return self.batching.usual(source, self.group)

    def layout_at(self, step: int) -> StepLayout:
        """How to split a step. A single worker sometimes makes two passes, to measure gradient noise."""
        base = self.current.base
        if not self.progress.counts or base.parts > 1 or base.total == 1:
            return base
        return base.in_passes(2) if any(one.splits(step) for one in self.steppers) else base

    # Epochs and loops

    def count_steps(self, counting: StepCounting) -> None:
        """Use `run.steps`; InputError if the run already trains in another loop."""
        if self.joined and self.counting != counting:
            raise InputError(
                "run.steps() comes after another loop of this run.",
                remedy="Train in one loop, over run.steps() or over run.epochs().",
            )
        if self.batching.adaptive:
            raise InputError(
                "run.steps() has a fixed batch size, but prepare() was given adaptive=True.",
                remedy="Leave out adaptive=True, or loop over run.epochs() and a loader.",
            )
        self.counting = counting
        self.expect(counting.source)

    @property
    def steps_before_epoch(self) -> int:
        """Steps counted before the current epoch began."""
        assert self.counting is not None
        return self.current.updates - self.progress.examples // self.counting.batch_size

    @property
    def _counting_state(self) -> list[int] | None:
        own = self.counting
        return None if own is None else [own.batch_size, own.report_every]

    def _check_counting(self, saved: list[int] | None) -> None:
        own = self._counting_state
        if saved != own:
            before, now = (
                "run.epochs()" if one is None else f"run.steps(batch_size={one[0]}, report_every={one[1]})"
                for one in (saved, own)
            )
            raise InputError(
                f"the saved state is of a loop over {before}, but this code loops over {now}.",
                remedy="Loop as before, or start a run with another name.",
            )

    def begin_epoch(self) -> None:
        if self._is_finished:
            raise InputError(
                f"epoch {self.progress.epoch} begins after run.finish().",
                remedy="Call run.finish() after the last epoch, or not at all.",
            )
        self._loop_is_open = False
        for stepper in self.steppers:
            stepper.reducer.arrange()  # parameters may have been frozen, unfrozen or added
        self.progress.begin_epoch()

    def begin(self, loader: ElasticLoader) -> LoopRole:
        """A loop over a loader begins; returns its role."""
        if self.step_loop is not None:
            raise InputError(
                "an elastic loader is used inside `for step in run.steps(n)`, which splits steps itself.",
                remedy="Loop over run.epochs(n) and the loader, or draw run.share examples in each step.",
            )
        if loader in self._loops.beside:
            self.end(loader, ran_out=False)  # its previous loop was never finished
        if self._loops.lead is None or self._loops.lead is loader:
            return LoopRole.LEADS if self.begin_loop(loader) else LoopRole.OVER
        self.progress.enter_beside(self._number(loader), loader)
        self._loops.beside.append(loader)
        return LoopRole.BESIDE

    def end(self, loader: ElasticLoader, ran_out: bool) -> None:
        """A loop over a loader ended. If a loop in zip() ran out, the leading loop may end as well."""
        if self._loops.lead is loader:
            self.end_loop()
        if loader not in self._loops.beside:  # its epoch has ended
            return
        self._loops.beside.remove(loader)
        self.progress.leave_beside(self._number(loader))
        if ran_out:
            self._loops.ran_out_at = self.current.batches_given
            self._spread_buffers()

    def _number(self, loader: ElasticLoader) -> int:
        """The place of a loader among the prepared ones."""
        return next(number for number, one in enumerate(self._sources) if one is loader.source)

    def begin_loop(self, loader: DataLoop) -> bool:
        """Begin the leading loop; False if it was finished before this worker joined."""
        if not self.progress.in_epoch:
            raise InputError(
                "an elastic loader is used outside `for epoch in run.epochs(n)`.",
                remedy="Loop over run.epochs(n); to evaluate, use an ordinary DataLoader.",
            )
        self.progress.enter_loop(loader)
        if not self._described:
            self._describe(self.progress.counted or loader.source)
        self.batching.use(loader.source, adapts=self.progress.counts)
        self._in_loop = self._loop_is_open = self.progress.find_place(loader)
        self._loops.lead = loader if self._in_loop else None
        self._arrange()
        if self._in_loop:
            self._step_patterns.begin(self.progress.epoch, self.progress.loop)
            self._stepped = self._stepped or bool(self.current.stepped_ids)
            self.current.stepped_ids.clear()
            for stepper in self.steppers:
                stepper.begin_loop(adapts=self.progress.counts)
        return self._in_loop

    def _describe(self, source: DataSource) -> None:
        self._described = True
        task = self.session.task
        limits = self.batching.limits(source)
        if self.group.is_leader:
            self.session.send(
                Described(
                    examples=source.examples,
                    batch=limits.initial,
                    adaptive=self.batching.adaptive,
                    max_batch=limits.max,
                    per_worker_min=limits.per_gpu_min,
                    per_worker_max=limits.per_gpu_max,
                    accumulation=limits.accumulation,
                )
            )
        if task is not None and task.describe_only:
            raise StopTraining("described")

    def end_loop(self) -> None:
        """The leading loop ended: from here on every pass is a whole step."""
        self._loops.lead = None
        if self._in_loop:
            self._in_loop = False
            if self._loops.ran_out_at == self.current.batches_given:
                self._loop_is_open = False
            self.current.share = UNSHARED
            self.lay_out(self.current.base.in_passes(1))

    def is_over(self, loader: DataLoop) -> bool:
        return self.progress.is_over(loader)

    def after_step(self, loader: DataLoop) -> bool:
        """A step is done. True if steps are split differently from now on."""
        if self._loops.lead is not loader:
            self._refuse_another_epoch()
        self._batches += 1
        if self._loops.beside:
            self._count_beside(loader)
        self._record_batch(loader)
        current = self.current
        current.step += 1
        if current.is_updated or loader is self.step_loop or not self.steppers:
            current.updates += 1
        current.is_updated = False
        self.session.count_step()
        self.progress.advance(loader)
        self._time_step()
        if self.progress.counts:
            self.progress.units += self._worth()
            self._step_worth = None
        if self.is_over(loader):
            # No resize and no checkpoint here: a worker that starts from here would skip the loop, but the
            # code after it may need variables that the loop sets. The end of the epoch follows soon.
            self._loop_is_open = False
            self._step_patterns.end()
            self.end_loop()
            self._spread_buffers()
            return False
        order = self._order_here(loader)
        self._report_and_save(loader)
        return self._obey(order)

    def _time_step(self) -> None:
        current = self.current
        usual = current.share.step_examples == current.base.total and current.layout == current.base
        usual &= self.progress.counts or not self.batching.adaptive
        waits = [wait for stepper in self.steppers for wait in stepper.reducer.waits]
        self._meter.boundary(current.base, self.group.nodes, waits, usual=usual)
        if self.batching.adaptive:
            self._tuning_meter.boundary(current.base, self.group.nodes, waits, usual=usual)

    def _worth(self) -> float:
        """How many steps at the initial batch the current one is worth; cached until the step ends."""
        if self._step_worth is None:
            noise = self.steppers[0].sample() if self.steppers else None
            self._step_worth = self.batching.worth(noise, self.current.share.step_examples)
        return self._step_worth

    def steps_of_schedules(self) -> int | None:
        """How many steps a scheduler advances in the current step; None outside adaptive loops."""
        if not self._in_loop or not self.progress.counts:
            return None
        return self.progress.steps_by(self._worth())

    def _spread_buffers(self) -> None:
        if self.group.world > 1:
            self.group.spread(self.prepared.buffers(), self.device)  # so that all evaluate the same model

    def _count_beside(self, lead: DataLoop) -> None:
        """Count the batches of loops beside the leading one as part of the completed step."""
        together = [loader for loader in self._loops.beside if loader.uncounted]
        if together:
            self._refuse_split([lead.source, *(loader.source for loader in together)])
        for loader in together:
            loader.count_batch()

    def _refuse_split(self, together: list[DataSource]) -> None:
        """InputError if a batch needs several passes now, or would with a single worker.

        So loops in zip() fail at once, not only after workers leave.
        """
        splits = self.current.layout.passes > 1 or any(self.batching.splits_alone(one) for one in together)
        if splits or any(one is self.batching.counted for one in together):
            raise InputError(
                "two elastic loaders are looped over together, but with adaptive=True or per_worker_batch a "
                "batch may take several passes.",
                remedy="Leave these out, raise the maximum of per_worker_batch to the larger batch size, or "
                "loop over one loader whose dataset returns the examples of both.",
            )

    def _refuse_another_epoch(self) -> None:
        """Refuse a loop that spans two epochs: a worker that joins in the second could not find its place."""
        if not self._is_finished:
            raise InputError(
                "a loop over an elastic loader continues from one epoch into the next.",
                remedy="Begin the loop within each epoch: `for x, y in loader` or iter(loader).",
            )

    def after_beside(self, loader: ElasticLoader, inside: bool) -> None:
        """A batch of a loop beside the leading one is done; `inside`: in a loop nested in its body."""
        if loader not in self._loops.beside:
            self._refuse_another_epoch()
        if not inside:
            return
        self._batches += 1
        self._stepped = self._stepped or bool(self.current.stepped_ids)
        self.current.updates += self.current.is_updated
        self.current.is_updated = False
        self.session.count_step()

    def _record_batch(self, loader: DataLoop) -> None:
        """Record which optimizers stepped with this batch, and which hold gradients for a later step."""
        stepped_ids, steps, waits = self.current.stepped_ids, 0, False
        for place, stepper in enumerate(self.steppers):
            if id(stepper.optimizer) in stepped_ids:
                steps |= 1 << place
                stepper.stepped()
            else:
                waits |= stepper.passed()
        stepped_ids.clear()
        if steps:
            self._stepped = True
        elif waits and loader is not self.step_loop:
            self._forbid_accumulation()
        self._step_patterns.record(steps, len(self.steppers), waits=waits, asked_length=loader.asked_length)
        self._step_hash = (self._step_hash * 31 + steps + 1) % _STEP_HASHES

    def _forbid_accumulation(self) -> None:
        """Refuse gradients accumulated by hand where one batch may take several passes."""
        split = self.current.layout.passes > 1 and not self.current.asks_completion
        if split or self.progress.counts:
            for stepper in self.steppers:
                stepper.refuse_adding(_refuse_accumulation)

    def _order_here(self, loader: DataLoop) -> GroupOrder | None:
        """The order to obey now. A resize is deferred while the code's count of batches matters."""
        if self._deferred.order is None:
            if not self._step_patterns.always_steps:
                self.group.check_every = 1
            order = self._agree()
            if order is None or order.code not in ENDS_GROUP or self._may_join(loader):
                return order
            self._deferred.order, self._deferred.batches, self._deferred.epochs = order, 0, 0
            return None
        self._deferred.batches += 1
        too_long = self._deferred.batches >= _MOST_BATCHES_TO_WAIT
        if self._may_join(loader) or (too_long and self._deferred.order.code is OrderKind.PARK):
            order, self._deferred.order = self._deferred.order, None
            return order
        if self._deferred.batches == _MOST_BATCHES_TO_WAIT and self.group.is_leader:
            self.note(
                "workers will join or leave at the end of the epoch, because the code does not step with "
                "every batch, nor in a pattern that a new worker could join."
            )
        return None

    def _agree(self, *, at_once: bool = False) -> GroupOrder | None:
        order = self.group.agree(
            self._next_order,
            at_once=at_once,
            step_hash=self._step_hash,
            length_asked_in=self._step_patterns.length_asked_in,
        )
        if self.group.length_asked_in is not None:
            self._step_patterns.agree(self.group.length_asked_in)
        return order

    def _may_join(self, loader: DataLoop) -> bool:
        """Whether a new worker may join here. Always in `run.steps`: its counter is the run's own."""
        if not isinstance(loader, ElasticLoader) or not self.steppers:
            return True
        if any(one.left == 0 for one in self._loops.beside):  # zip() is about to end
            return False
        return self._step_patterns.may_join(lambda: loader.steps)

    def _next_order(self) -> GroupOrder | None:
        order = self.session.next_order()
        if order is not None or self.batching.order is not None or not self.batching.adaptive:
            return order
        return self._own_batch()

    def _own_batch(self) -> GroupOrder | None:
        """Without an order from a controller, an adaptive run tunes its batch size itself."""
        self.batching.observe(self._tuning_meter.take(_TIMED_STEPS))
        if not self.batching.is_due(self.current.step):
            return None
        noise = self.steppers[0].sample() if self.steppers else None
        change = self.batching.tune(self.group, noise, self.current.step)
        for meter in (self._meter, self._tuning_meter):
            meter.begin()  # the search takes time
        if change is None:
            return None
        self.note(change.reason)
        return GroupOrder(OrderKind.BATCH, change.batch.atomic, change.batch.accumulation)

    def end_epoch(self, *, last: bool) -> None:
        """An epoch is over: report it, and obey what the controller decides."""
        if not self.progress.in_epoch:  # the code called run.finish() within it
            return
        self._refuse_to_describe()
        self.progress.end_epoch()
        self.end_loop()
        self._loops.beside.clear()
        self._meter.skip()
        values, self._values = self._values, {}
        if self.group.is_leader:
            self._report_epoch(values)
        if last:
            return
        self._sync_with_leader()
        task = self.session.task
        if not self._finish_epoch:
            if self.group.is_leader and task is not None and task.waits_for_ack:
                self.session.wait_for_ack(self.progress.epoch)
            self._save_if_due()
            self._obey(self._order_between_epochs())
        if self._finish_epoch:
            self._park()

    def _order_between_epochs(self) -> GroupOrder | None:
        """The order to obey between epochs. A deferred resize waits for at most two epochs."""
        order, self._deferred.order = self._deferred.order, None
        if order is None:
            order = self._agree(at_once=True)
            self._deferred.epochs = self._deferred.batches = 0
        if order is None or order.code is not OrderKind.REGROUP:
            return order
        self._deferred.epochs += 1
        if self._step_patterns.may_join_between_epochs or self._deferred.epochs > 2:
            self._deferred.epochs = 0
            return order
        self._deferred.order = order
        return None

    def _sync_with_leader(self) -> None:
        """Copy rank 0's best score and kept values, as any worker may become rank 0, and its FINISH_EPOCH."""
        best = self._persistence.best
        score, leaves = self.group.tell((math.nan if best is None else best, float(self._finish_epoch)))
        self._persistence.best = None if math.isnan(score) else score
        self._finish_epoch = bool(leaves)
        self._share_kept()

    def _share_kept(self) -> None:
        """Copy rank 0's kept values to all workers."""
        if self.group.world == 1:
            return
        digests = self.group.gather([self.kept.digest()])
        if all(one == digests[0] for one in digests):
            return
        own = pack(self.kept.state_dict()) if self.group.is_leader else None
        header, tensors = self.group.share(own, self.device)
        if not self.group.is_leader:
            self.kept.take(unpack(header, tensors))

    def stop_early(self) -> None:
        """The user's code left the loop over epochs, maybe by an exception. Must not wait for other workers.

        Reported values count for the epoch. The model is saved unless a loop over data was cut short: it may
        have caused the exception.
        """
        if self.progress.in_epoch and self._values:
            self.end_epoch(last=True)
        if self.session.task is None and not self._loop_is_open:
            self.save_result()

    def _obey(self, order: GroupOrder | None) -> bool:
        if order is None:
            return False
        match order.code:
            case OrderKind.REGROUP:
                self._regroup(order.first)
            case OrderKind.BATCH:
                self.batching.choose(BatchChoice(order.first, order.second), self.group.world)
                self._arrange()
            case OrderKind.PARK:
                self._park()
            case OrderKind.FINISH_EPOCH:
                self._finish_epoch = True
                return False
            case OrderKind.NOTHING:
                return False
        return True

    def _park(self) -> None:
        saved = self._save(wait=True) if self.group.is_leader else True
        self.group.leave()
        raise StopTraining("parked", saved=saved)

    # Reporting and saving

    def add_values(self, values: dict[str, float]) -> None:
        self._values.update(values)

    def note(self, text: str) -> None:
        print(f"stretto: {text}", flush=True)  # noqa: T201 - the job's log
        self.session.send(Note(text))

    def announce(self, text: str) -> None:
        """Queue a notice about a prepared object; rank 0 prints it when training begins."""
        self._announcements.append(text)

    def _give_announcements(self) -> None:
        given, self._announcements = self._announcements, []
        if self.group.is_leader and self.current.step == 0:
            for text in given:
                self.note(text)

    def _report_epoch(self, values: dict[str, float]) -> None:
        self._persistence.write_metrics(
            self.progress.epoch, values, workers=self.group.world, batch=self.current.base.total
        )
        self._report((EpochEnd(epoch=self.progress.epoch, values=values, epoch_s=self.progress.epoch_s),))
        if self._persistence.is_best(values) and self.prepared:  # without prepared objects there is no model
            self._save(best=True)

    def _report(self, ends: tuple[EpochEnd, ...] = ()) -> None:
        self._reported_s, self._report_after_s = time.monotonic(), _REPORT_S
        step_s = self._meter.step_s
        if step_s:
            steps = round(_LOOK_S / step_s)
            self.group.check_every = min(max(steps, 1), _MOST_STEPS_BETWEEN_LOOKS)
        self.session.send(
            Report(
                progress=self.progress.epochs_done,
                epoch=self.progress.epoch,
                steps=self.current.step,
                speeds=self._meter.take(),
                noise=self.steppers[0].sample() if self.steppers else None,
                ends=ends,
            )
        )

    def _report_and_save(self, loader: DataLoop) -> None:
        """Report and save if due; only rank 0 does."""
        if not self.group.is_leader:
            return
        now_s = time.monotonic()
        if now_s - self._reported_s >= self._report_after_s:
            self._report()
        if self._persistence.is_due and self._deferred.order is None:
            self._deferred.batches += 1
            fits = self._step_patterns.may_save or self._may_join(loader)
            if fits or self._deferred.batches >= _MOST_BATCHES_TO_WAIT:
                self._deferred.batches = 0
                self._save_if_due()

    def _save_if_due(self) -> None:
        if self.group.is_leader and self._persistence.is_due:
            self._save()
            self._meter.skip()
            self._tuning_meter.skip()

    def _save(self, *, best: bool = False, wait: bool = False) -> bool:
        if wait:
            self._saved_at = self._place
        return self._persistence.save(self.state, self.progress.epochs_done, best=best, wait=wait)

    def finish(self) -> None:
        """End training: save the result, leave the group, and restore the optimizers."""
        self._is_finished = True
        self.stop_early()
        self.save_result()
        self.finish_saving()
        self.end_loop()
        for stepper in self.steppers:
            stepper.release()
        self.group.leave()

    def save_result(self) -> None:
        """Save a last checkpoint, unless nothing changed since the previous one."""
        if self.joined and self.group.is_leader and self._place != self._saved_at:
            self._save(wait=True)

    @property
    def _place(self) -> tuple[int, int]:
        """A value that differs after any further training."""
        return self.current.step, self.current.updates

    def finish_saving(self) -> None:
        self._guard.end()
        self._persistence.finish()

    # State

    def state(self) -> dict[str, Any]:
        """The whole training state: enough to resume here."""
        return {
            "format": FORMAT,
            "step": self.current.step,
            "stepped": self._stepped,
            "updates": self.current.updates,
            "counting": self._counting_state,
            "kept": self.kept.state_dict(),
            "values": dict(self._values),
            "best": self._persistence.best,
            "batching": self.batching.state_dict(),
            "noise": [stepper.noise.state_dict() if stepper.noise else None for stepper in self.steppers],
            "gradients": [stepper.gradients() for stepper in self.steppers],
            "cadence": self._step_patterns.state(),
            "chance": rng_state(),
            **self.progress.state(),
            **self.prepared.state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise InputError(
                f"the saved state has format {state.get('format')}, but this version reads {FORMAT}.",
                remedy="Start a run with another name.",
            )
        self.prepared.restore(state)
        self.progress.restore(state)
        self.current.step = state["step"]
        self._stepped = bool(state.get("stepped", True))
        self._began_at_start = False
        self.current.updates = state.get("updates", state["step"])
        self._check_counting(state.get("counting"))
        for text in self.kept.load_state_dict(state.get("kept", {})):
            self.note(text)
        self._values, self._persistence.best = dict(state["values"]), state["best"]
        self.batching.load_state_dict(state["batching"])
        for stepper, noise in zip(self.steppers, state["noise"], strict=True):
            if stepper.noise is not None and noise is not None:
                stepper.noise.load_state_dict(noise)
        for stepper, gradients in zip(self.steppers, state.get("gradients", ()), strict=False):
            stepper.take_gradients(gradients)
        if "cadence" in state:
            self._step_patterns.restore(state["cadence"])
        restore_rng_state(state["chance"])


def _refuse_accumulation() -> None:
    raise InputError(
        "backward() adds to the gradients of a batch that ended without optimizer.step(). Such gradients, "
        "accumulated by hand, do not work with adaptive=True or per_worker_batch, where a batch may take "
        "several passes.",
        remedy="Step with every batch: per_worker_batch alone splits a large one. Or leave adaptive=True out "
        "and count batches only if run.step_is_complete. After skipping a batch, call zero_grad() before the "
        "next backward(). Give a GradScaler to run.prepare, too.",
    )
