"""What happens between steps: agreeing with peers, regrouping, reporting, saving, adapting the batch.

Everything here runs at a step boundary, on the thread that trains. Survivors of a resize stay where they
are in the user's loop; a newcomer runs the user's code from the top, skips what is done, and meets them.
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
"""About so often a group looks whether it is to do something else."""
_MOST_STEPS_BETWEEN_LOOKS = 50
_MOST_BATCHES_TO_WAIT = 128
"""So long saving and parking wait for a moment where code that counts batches itself can go on from."""
_STEP_HASHES = 1 << 61
_TIMED_STEPS = 16
"""So many steps tell how long one takes; of the first two dozen of a size as many are ordinary ones."""


@dataclass(slots=True)
class _Open:
    """The loops that go on."""

    lead: DataLoop | None = None
    """The one whose batches are the steps."""
    beside: list[ElasticLoader] = field(default_factory=list)
    """Those that go on beside it."""
    ran_out_at: int = -1
    """Batches given when one beside ran out last."""


@dataclass(slots=True)
class _Waiting:
    """What waits for a moment where code that counts batches itself can go on from."""

    order: GroupOrder | None = None
    """Ends this group."""
    batches: int = 0
    """Since that was agreed on, or a checkpoint was due."""
    epochs: int = 0
    """Ends of epochs since that was agreed on."""


class Engine:
    """The machinery behind a `Run`."""

    _is_whole = True
    """This process was there from the first epoch on."""

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
        """How the run counts steps, if it does."""
        self.step_loop: StepLoop | None = None
        """The loop that counts, while it goes on."""
        self.joined = False
        self._persistence = Persistence(saving, note=self.note, on_saved=session.send)
        self._meter = SpeedMeter()
        self._tuning_meter = SpeedMeter()
        """The same times for our own tuning, which wants them sooner than a report is due."""
        self._values: dict[str, float] = {}
        self._divergence_check = DivergenceCheck(self.group, self.current, self.steppers, self.prepared.names)
        self.current.backward.when_over = self._backward_over
        self._guard = StepGuard(lambda: self.prepared.things, lambda: self.current.share is not UNSHARED)
        self._saved_at = self._place
        """The place of which a checkpoint was surely written."""
        self._in_loop = False
        self._open = _Open()
        self._worth_of: float | None = None
        self._loop_is_open = False
        """An elastic loop of this epoch has begun, and not come to its end; perhaps it never will."""
        self._says_whole = False
        self._is_finished = False
        self._sources: list[DataSource] = []
        self._batches = 0
        """Taken by this process."""
        self._stepped = False
        """Whether a prepared optimizer was ever told to step, by whoever trained so far."""
        self._finish_epoch = False
        self._step_patterns = StepPatterns()
        self._step_hash = 0
        """Stands for which optimizers stepped in which batches since the group formed."""
        self._waiting = _Waiting()
        self._described = False
        self._announcements: list[str] = []
        """Notices about what was prepared, until there is a leader to give them."""
        self._reported_s = time.monotonic()
        self._report_after_s = _FIRST_REPORT_S

    # Joining and regrouping

    def join(self) -> None:
        """Become part of a group, with the state of those who are there, or of the last checkpoint."""
        if self.joined:
            return
        self.joined = True
        if self.counting is not None:  # steps before the loop are not among those that it counts
            self.current.updates = 0
            self.current.stepped_ids.clear()
        self._refuse_no_data()
        if self.session.task is None:
            self._refuse_wrappers()
        if self.session.task is not None or self.group.world > 1:
            refuse_loose_parameters([one.optimizer for one in self.steppers], self.prepared.things)
            self._guard.begin()
        if self.session.task is None:
            self.group.form_from_environment(backend_for(self.device))
            self._take_up(share_state=True)
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
        self._take_up(share_state=form.share_state)
        self._formed(form)
        self._give_announcements()

    def _refuse_no_data(self) -> None:
        lacks = [source.lack for source in self._sources]
        if lacks and all(lacks):
            raise InputError(
                f"there is nothing to train on: the loader has no batch to give, as {lacks[0]}.",
                remedy="Look at how the data is read and filtered, or lower batch_size or drop drop_last.",
            )

    def _refuse_to_describe(self) -> None:
        """An epoch is over of code that was started only to hear what it trains on, and it did not say."""
        task = self.session.task
        if task is not None and task.describe_only and not self._described:
            raise InputError(
                "the first epoch went by without a batch of an elastic loader, so its steps cannot be shared "
                "out over workers.",
                remedy="Go through a loader that run.prepare gives, inside run.epochs; code that draws its "
                "own data loops over run.steps(n, batch_size=..).",
            )

    def refuse_no_step(self) -> None:
        """At the end of a run: one that went through no loader, or never stepped, has trained nothing."""
        never_looped = self._is_whole and not self._described and not self.current.stepped_ids
        if never_looped and (self.steppers or self._sources):
            raise InputError(
                "nothing was trained: the epochs went by without a batch of a loader.",
                remedy="Go through the loader that run.prepare or run.loader gives, inside run.epochs.",
            )
        if not self._batches or self._stepped or self.current.stepped_ids or not self.steppers:
            return
        lacks = "".join(f" One loader has no batch to give: {one.lack}." for one in self._sources if one.lack)
        raise InputError(
            f"nothing was trained: {self._batches} batches were taken, and no optimizer that was given to "
            f"run.prepare was told to step.{lacks}",
            remedy="Call step() of the prepared optimizer; to evaluate only, prepare no optimizer.",
        )

    def _refuse_wrappers(self) -> None:
        if dist.is_initialized():  # else no such wrapper can have been made
            trained = [one for stepper in self.steppers for one in stepper.parameters()]
            refuse_wrappers_of(trained, gc.get_objects)

    def _take_up(self, *, share_state: bool) -> None:
        """Rank 0 goes on from its checkpoint, if there is one, and the others from rank 0's state."""
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
        self._step_hash = self._waiting.batches = 0
        self._arrange()
        if self.group.is_leader:
            self.session.send(Formed(form.generation))

    def _regroup(self, generation: int) -> None:
        self._share_kept()  # the one that leads may leave
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
            if self.current.share is UNSHARED and not self._says_whole and not self.progress.has_looped:
                self._say_whole()

    def _say_whole(self) -> None:
        """An epoch without an elastic loop: nobody shares the data out."""
        self._says_whole = True
        if self.group.is_leader and self.progress.in_epoch:
            self.note(
                f"The {self.group.world} workers take steps outside any elastic loader, each with a batch of "
                f"its own, so a step has {self.group.world} batches. To share one out, loop over a loader "
                "from run.prepare() or over run.steps(n, batch_size=..)."
            )

    def _arrange(self) -> None:
        """Share steps out over the group as it is now. Outside elastic loops a step is one pass."""
        self.current.base = self.batching.layout(self.group)
        self.current.share = UNSHARED
        self.lay_out(self.current.base if self._in_loop else self.current.base.in_passes(1))
        self._meter.skip()
        self._tuning_meter.skip()
        for stepper in self.steppers:
            stepper.skip()

    def expect(self, source: DataSource) -> None:
        """A loader that was prepared: until a loop begins, its batch size is the run's."""
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
        """How a loop over this would share out its steps, as things stand."""
        return self.batching.usual(source, self.group)

    def layout_at(self, step: int) -> StepLayout:
        """How a step is shared out: as usual, or, now and then, in two passes by one worker."""
        base = self.current.base
        if not self.progress.counts or base.parts > 1 or base.total == 1:
            return base
        return base.in_passes(2) if any(one.splits(step) for one in self.steppers) else base

    # Epochs and loops

    def count_steps(self, counting: StepCounting) -> None:
        """The run counts its steps, in this way; InputError if it was begun in another."""
        if self.joined and self.counting != counting:
            raise InputError(
                "run.steps() comes after another loop of this run.",
                remedy="Train in one loop, over run.steps() or over run.epochs().",
            )
        if self.batching.adaptive:
            raise InputError(
                "run.steps() has a batch of fixed size, and prepare() was given adaptive=True.",
                remedy="Leave out adaptive=True, or loop over run.epochs() and a loader.",
            )
        self.counting = counting
        self.expect(counting.source)

    @property
    def steps_before_epoch(self) -> int:
        """Steps that were counted before the present epoch began."""
        assert self.counting is not None
        return self.current.updates - self.progress.examples // self.counting.batch_size

    def _go_on_counting(self, saved: list[int] | None) -> None:
        own = self.counting
        if saved != (None if own is None else [own.batch_size, own.report_every]):
            before, now = (
                "run.epochs()" if one is None else f"run.steps(batch_size={one[0]}, report_every={one[1]})"
                for one in (saved, None if own is None else [own.batch_size, own.report_every])
            )
            raise InputError(
                f"the saved state is of a loop over {before}, and this code loops over {now}.",
                remedy="Loop as before, or start a run of another name.",
            )

    def begin_epoch(self) -> None:
        if self._is_finished:
            raise InputError(
                f"epoch {self.progress.epoch} begins after run.finish().",
                remedy="Call run.finish() after the last epoch, or not at all.",
            )
        self._loop_is_open = False
        for stepper in self.steppers:
            stepper.reducer.arrange()  # parameters may have been frozen, thawed or added
        self.progress.begin_epoch()

    def begin(self, loader: ElasticLoader) -> LoopRole:
        """A loop over a loader begins: the one that leads, or one beside it."""
        if self.step_loop is not None:
            raise InputError(
                "an elastic loader is used inside `for step in run.steps(n)`, which shares out steps itself.",
                remedy="Loop over run.epochs(n) and the loader, or draw run.share examples in each step.",
            )
        if loader in self._open.beside:
            self.end(loader, ran_out=False)  # the one before was left standing
        if self._open.lead is None or self._open.lead is loader:
            return LoopRole.LEADS if self.begin_loop(loader) else LoopRole.OVER
        self.progress.enter_beside(self._number(loader), loader)
        self._open.beside.append(loader)
        return LoopRole.BESIDE

    def end(self, loader: ElasticLoader, ran_out: bool) -> None:
        """A loop is over. If it was beside another one and ran out, that one may be over, too, by zip()."""
        if self._open.lead is loader:
            self.end_loop()
        if loader not in self._open.beside:  # the epoch of this one is over
            return
        self._open.beside.remove(loader)
        self.progress.leave_beside(self._number(loader))
        if ran_out:
            self._open.ran_out_at = self.current.batches_given
            self._spread_buffers()

    def _number(self, loader: ElasticLoader) -> int:
        """Of a loader, in the order in which they were prepared."""
        return next(number for number, one in enumerate(self._sources) if one is loader.source)

    def begin_loop(self, loader: DataLoop) -> bool:
        """Whether there is anything left of this loop."""
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
        self._open.lead = loader if self._in_loop else None
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
        """From here on every pass is a step of its own."""
        self._open.lead = None
        if self._in_loop:
            self._in_loop = False
            if self._open.ran_out_at == self.current.batches_given:
                self._loop_is_open = False
            self.current.share = UNSHARED
            self.lay_out(self.current.base.in_passes(1))

    def is_over(self, loader: DataLoop) -> bool:
        return self.progress.is_over(loader)

    def after_step(self, loader: DataLoop) -> bool:
        """A step is done. True if steps are shared out differently from now on."""
        if self._open.lead is not loader:
            self._refuse_another_epoch()
        self._batches += 1
        if self._open.beside:
            self._settle_beside(loader)
        self._beat(loader)
        self.current.step += 1
        if self.current.is_updated or loader is self.step_loop or not self.steppers:
            self.current.updates += 1
        self.current.is_updated = False
        self.session.count_step()
        self.progress.advance(loader)
        usual = (
            self.current.share.step_examples == self.current.base.total
            and self.current.layout == self.current.base
        )
        usual &= self.progress.counts or not self.batching.adaptive
        waits = [wait for stepper in self.steppers for wait in stepper.reducer.waits]
        self._meter.boundary(self.current.base, self.group.nodes, waits, usual=usual)
        if self.batching.adaptive:
            self._tuning_meter.boundary(self.current.base, self.group.nodes, waits, usual=usual)
        if self.progress.counts:
            self.progress.units += self._worth()
            self._worth_of = None
        if self.is_over(loader):
            # Whoever joined or resumed here would find nothing left to loop over, and the code after the loop
            # may need what a loop sets. The end of the epoch is near.
            self._loop_is_open = False
            self._step_patterns.end()
            self.end_loop()
            self._spread_buffers()
            return False
        order = self._order_here(loader)
        self._tend(loader)
        return self._obey(order)

    def _worth(self) -> float:
        """Steps at the initial batch that the present one is worth; the same whenever it is asked."""
        if self._worth_of is None:
            noise = self.steppers[0].sample() if self.steppers else None
            self._worth_of = self.batching.worth(noise, self.current.share.step_examples)
        return self._worth_of

    def steps_of_schedules(self) -> int | None:
        """By how many steps the present one takes schedules on; None outside of loops that adapt."""
        if not self._in_loop or not self.progress.counts:
            return None
        return self.progress.steps_by(self._worth())

    def _spread_buffers(self) -> None:
        if self.group.world > 1:
            self.group.spread(self.prepared.buffers(), self.device)  # all evaluate with the same

    def _settle_beside(self, lead: DataLoop) -> None:
        """What loops beside have given was part of the step that is over."""
        together = [loader for loader in self._open.beside if loader.unsettled]
        if together:
            self._refuse_split([lead.source, *(loader.source for loader in together)])
        for loader in together:
            loader.settle()

    def _refuse_split(self, together: list[DataSource]) -> None:
        """InputError where a batch is made in several passes, or would be by one worker alone.

        Loops together must not fail only once workers leave.
        """
        splits = self.current.layout.passes > 1 or any(self.batching.splits_alone(one) for one in together)
        if splits or any(one is self.batching.counted for one in together):
            raise InputError(
                "two elastic loaders are looped over together, and with adaptive=True or per_worker_batch a "
                "batch may be made in several passes.",
                remedy="Leave these out, let per_worker_batch end at the larger batch size, or loop over one "
                "loader whose dataset gives the examples of both.",
            )

    def _refuse_another_epoch(self) -> None:
        """Whoever joins or resumes between the two begins all loops anew, and would be elsewhere in it."""
        if not self._is_finished:
            raise InputError(
                "a loop over an elastic loader goes on from one epoch into the next.",
                remedy="Begin the loop within each epoch: `for x, y in loader` or iter(loader).",
            )

    def after_beside(self, loader: ElasticLoader, inside: bool) -> None:
        """A batch of a loop beside another one is done, or `inside` the body of that one."""
        if loader not in self._open.beside:
            self._refuse_another_epoch()
        if not inside:
            return
        self._batches += 1
        self._stepped = self._stepped or bool(self.current.stepped_ids)
        self.current.updates += self.current.is_updated
        self.current.is_updated = False
        self.session.count_step()

    def _beat(self, loader: DataLoop) -> None:
        """Take note of who stepped with this batch, and whose gradients wait for a later one."""
        told, steps, waits = self.current.stepped_ids, 0, False
        for place, stepper in enumerate(self.steppers):
            if id(stepper.optimizer) in told:
                steps |= 1 << place
                stepper.stepped()
            else:
                waits |= stepper.passed()
        told.clear()
        if steps:
            self._stepped = True
        elif waits and loader is not self.step_loop:
            self._forbid_accumulation()
        self._step_patterns.beat(steps, len(self.steppers), waits=waits, asked_length=loader.asked_length)
        self._step_hash = (self._step_hash * 31 + steps + 1) % _STEP_HASHES

    def _forbid_accumulation(self) -> None:
        """Where what code counts as batches may be several passes of one, a batch may be skipped only."""
        split = self.current.layout.passes > 1 and not self.current.asks_completion
        if split or self.progress.counts:
            for stepper in self.steppers:
                stepper.refuse_adding(_refuse_accumulation)

    def _order_here(self, loader: DataLoop) -> GroupOrder | None:
        """What is agreed on, where that can be obeyed: a newcomer's count of batches begins at 0."""
        if self._waiting.order is None:
            if not self._step_patterns.always_steps:
                self.group.check_every = 1
            order = self._agree()
            if order is None or order.code not in ENDS_GROUP or self._may_join(loader):
                return order
            self._waiting.order, self._waiting.batches, self._waiting.epochs = order, 0, 0
            return None
        self._waiting.batches += 1
        too_long = self._waiting.batches >= _MOST_BATCHES_TO_WAIT
        if self._may_join(loader) or (too_long and self._waiting.order.code is OrderKind.PARK):
            order, self._waiting.order = self._waiting.order, None
            return order
        if self._waiting.batches == _MOST_BATCHES_TO_WAIT and self.group.is_leader:
            self.note(
                "workers change at the end of the epoch, as the code does not step with every batch, nor in "
                "a pattern that a newcomer could follow from its beginning."
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
        """Steps that the run counts itself have the same numbers everywhere."""
        if not isinstance(loader, ElasticLoader) or not self.steppers:
            return True
        if any(one.left == 0 for one in self._open.beside):  # what zip() ends with is not for newcomers
            return False
        return self._step_patterns.may_join(lambda: loader.steps)

    def _next_order(self) -> GroupOrder | None:
        order = self.session.next_order()
        if order is not None or self.batching.order is not None or not self.batching.adaptive:
            return order
        return self._own_batch()

    def _own_batch(self) -> GroupOrder | None:
        """Without somebody else to decide, an adaptive run picks its batch size itself."""
        self.batching.saw(self._tuning_meter.take(_TIMED_STEPS))
        if not self.batching.is_due(self.current.step):
            return None
        noise = self.steppers[0].sample() if self.steppers else None
        change = self.batching.tune(self.group, noise, self.current.step)
        for meter in (self._meter, self._tuning_meter):
            meter.begin()  # looking takes time
        if change is None:
            return None
        self.note(change.reason)
        return GroupOrder(OrderKind.BATCH, change.batch.atomic, change.batch.accumulation)

    def end_epoch(self, *, last: bool) -> None:
        """An epoch is over: report it, and wait for what is decided on that."""
        if not self.progress.in_epoch:  # the user has finished the run within it
            return
        self._refuse_to_describe()
        self.progress.end_epoch()
        self.end_loop()
        self._open.beside.clear()
        self._meter.skip()
        values, self._values = self._values, {}
        if self.group.is_leader:
            self._report_epoch(values)
        if last:
            return
        self._hear_leader()
        task = self.session.task
        if not self._finish_epoch:
            if self.group.is_leader and task is not None and task.waits_for_ack:
                self.session.wait_for_ack(self.progress.epoch)
            self._save_if_due()
            self._obey(self._order_between_epochs())
        if self._finish_epoch:
            self._park()

    def _order_between_epochs(self) -> GroupOrder | None:
        """What is agreed on, where that can be obeyed; what has waited for a whole epoch is obeyed anyway."""
        order, self._waiting.order = self._waiting.order, None
        if order is None:
            order = self._agree(at_once=True)
            self._waiting.epochs = self._waiting.batches = 0
        if order is None or order.code is not OrderKind.REGROUP:
            return order
        self._waiting.epochs += 1
        if self._step_patterns.may_join_between_epochs or self._waiting.epochs > 2:
            self._waiting.epochs = 0
            return order
        self._waiting.order = order
        return None

    def _hear_leader(self) -> None:
        """Whoever leads next must know the best score; and newcomers, whether all leave now."""
        best = self._persistence.best
        score, leaves = self.group.tell((math.nan if best is None else best, float(self._finish_epoch)))
        self._persistence.best = None if math.isnan(score) else score
        self._finish_epoch = bool(leaves)
        self._share_kept()

    def _share_kept(self) -> None:
        """Whoever leads next must have the kept values of the worker that leads now."""
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
        """The loop over epochs was left, be it by an exception: nothing here may need the other workers.

        What was reported stands for the epoch. In the midst of a loop over the data the model may be what
        the exception is about, so it is not kept.
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
        print(f"stretto: {text}", flush=True)  # noqa: T201 - the job's own log
        self.session.send(Note(text))

    def announce(self, text: str) -> None:
        """A notice about what is prepared: given once, by whoever leads when training begins."""
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
        if self._persistence.is_best(values) and self.prepared:  # else there is no model to keep
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

    def _tend(self, loader: DataLoop) -> None:
        """What rank 0 does now and then."""
        if not self.group.is_leader:
            return
        now_s = time.monotonic()
        if now_s - self._reported_s >= self._report_after_s:
            self._report()
        if self._persistence.is_due and self._waiting.order is None:
            self._waiting.batches += 1
            fits = self._step_patterns.may_save or self._may_join(loader)
            if fits or self._waiting.batches >= _MOST_BATCHES_TO_WAIT:
                self._waiting.batches = 0
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
        """Training is over: keep its result, leave the group, and leave models and optimizers alone."""
        self._is_finished = True
        self.stop_early()
        self.save_result()
        self.finish_saving()
        self.end_loop()
        for stepper in self.steppers:
            stepper.release()
        self.group.leave()

    def save_result(self) -> None:
        """Keep what was trained, unless that was done already."""
        if self.joined and self.group.is_leader and self._place != self._saved_at:
            self._save(wait=True)

    @property
    def _place(self) -> tuple[int, int]:
        """Other numbers whenever something was trained."""
        return self.current.step, self.current.updates

    def finish_saving(self) -> None:
        self._guard.end()
        self._persistence.finish()

    # State

    def state(self) -> dict[str, Any]:
        """Everything somebody needs to go on from here."""
        counting = self.counting
        return {
            "format": FORMAT,
            "step": self.current.step,
            "stepped": self._stepped,
            "updates": self.current.updates,
            "counting": None if counting is None else [counting.batch_size, counting.report_every],
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
                f"the saved state has format {state.get('format')}, and this version reads {FORMAT}.",
                remedy="Start a run of another name.",
            )
        self.prepared.restore(state)
        self.progress.restore(state)
        self.current.step = state["step"]
        self._stepped = bool(state.get("stepped", True))
        self._is_whole = False
        self.current.updates = state.get("updates", state["step"])
        self._go_on_counting(state.get("counting"))
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
        "backward() adds to the gradients of a batch that came to its end without optimizer.step(), so they "
        "are accumulated by hand, and with adaptive=True or per_worker_batch a batch may be made in several "
        "passes.",
        remedy="Step with every batch: per_worker_batch alone splits a large one; or leave adaptive=True out "
        "and count batches where run.step_is_complete. Where a batch is skipped, call zero_grad() before the "
        "next backward(). A GradScaler is given to run.prepare, too.",
    )
