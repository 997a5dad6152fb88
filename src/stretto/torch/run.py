"""`Run`, the handle for training code: `run.prepare`, `run.epochs`, `run.report`."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stretto.core.errors import InputError
from stretto.torch.data import DataSource, ElasticLoader, source_of
from stretto.torch.engine import Engine
from stretto.torch.foreign import check_optimizer, refuse_users_group, unwrapped_module, whole_sampler
from stretto.torch.persistence import OWN_NAMES, SavingSettings
from stretto.torch.progress import StepCounting, StepLoop
from stretto.torch.rules import RULES, Rule
from stretto.torch.session import Session, StandaloneSession
from stretto.torch.state import KeptAttributes, Stateful
from stretto.torch.step_layout import UNSHARED
from stretto.torch.stepper import Stepper, advance_by_work, skip_before_step_end


class Run:
    """One training run: started by hand, or by a controller that may resize it at any step.

        def train(config, run):
            model = Net(config["width"])
            optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
            loader = DataLoader(dataset, batch_size=128, shuffle=True)
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            for epoch in run.epochs(30):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_of(model(x), y).backward()
                    optimizer.step()
                run.report(accuracy=evaluate(model))

        if __name__ == "__main__":
            train({"width": 64, "lr": 0.1}, stretto.torch.Run())

    With a `folder`, a run started by hand saves checkpoints there, every `checkpoint_every_s` and at the end,
    and resumes from them. Under torchrun the same script trains with a fixed number of workers.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        seed: int = 0,
        checkpoint_every_s: float = 60.0,
        keep_checkpoints: int = 2,
        session: Session | None = None,
    ) -> None:
        session = session or StandaloneSession()
        task = session.task
        self._session = session
        if task is None:
            where = None if folder is None else Path(folder)
            saving = SavingSettings(folder=where, every_s=checkpoint_every_s, checkpoints=keep_checkpoints)
        else:
            saving = SavingSettings(
                folder=Path(task.folder),
                every_s=task.checkpoint_every_s,
                checkpoints=task.keep_checkpoints,
                metric=task.metric,
                maximise=task.maximise,
                tensorboard=task.tensorboard,
                store=task.store,
            )
        self._engine = Engine(session, saving, seed=task.seed if task else seed)
        self._length = 0
        """Epochs, or steps in `run.steps`, of the whole training."""

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._engine.device

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._engine.group.rank

    @property
    def workers(self) -> int:
        """The current number of workers."""
        return self._engine.group.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0; only its reports count."""
        return self._engine.group.is_leader

    @property
    def batch_size(self) -> int:
        """Examples of a step now, over all workers."""
        return self._engine.current.base.total

    @property
    def step_is_complete(self) -> bool:
        """Whether this pass is the last of its step: only then `.grad` is set and `step()` has an effect."""
        self._engine.current.asks_completion = True
        return self._engine.current.share.last

    @property
    def step(self) -> int:
        """Optimisation steps so far; the same on all workers, across resizes and restarts."""
        return self._engine.current.updates

    @property
    def progress(self) -> float:
        """The done part of the training, from 0 to 1; the same on all workers."""
        engine = self._engine
        engine.current.schedule_uses += 1
        done = engine.progress.epochs_done if engine.counting is None else engine.current.updates
        return min(done / self._length, 1.0) if self._length else 0.0

    @property
    def share(self) -> int:
        """In `run.steps`: how many of the `batch_size` examples this worker draws now; at least 1."""
        return len(self.examples)

    @property
    def examples(self) -> range:
        """In `run.steps`: the numbers of those examples, counted from the beginning of the training.

        Each number goes to one worker, once. If a step has fewer examples than there are workers, a worker
        without a share borrows an example, which has weight 0.
        """
        share = self._engine.current.share
        if self._engine.step_loop is None or share is UNSHARED:
            raise InputError(
                "run.share is known only inside `for step in run.steps(n)`.",
                remedy="Read it in the loop, in every step: it changes when workers join or leave.",
            )
        first = self.step * share.step_examples + min(share.start, share.step_examples - 1)
        return range(first, first + max(share.stop - share.start, 1))

    @property
    def report_is_due(self) -> bool:
        """In `run.steps`: whether this step ends an epoch, so it is time to call `run.report`."""
        loop = self._engine.step_loop
        return loop is not None and loop.is_at_last_step and self.step_is_complete

    def keep(self, **values: Any) -> KeptAttributes:
        """Your own values, saved in checkpoints and sent to new workers; read and set them as attributes.

            state = run.keep(best=0.0, patience=3)
            for epoch in run.epochs(30):
                ...
                state.best = max(state.best, accuracy)

        When training begins, they are replaced by the other workers' or the checkpoint's values. All workers
        get rank 0's values at the end of an epoch and before workers join or leave. If your code decides by a
        value, set it equally on all workers.
        """
        if self._engine.joined:
            raise InputError(
                "keep() was called after training has begun.",
                remedy="Call it before run.epochs() or run.steps().",
            )
        self._engine.kept.add(values)
        return KeptAttributes(self._engine.kept)

    def prepare(
        self,
        *things: Any,
        adaptive: bool = False,
        max_batch_size: int | None = None,
        per_worker_batch: tuple[int, int] | None = None,
        accumulate: bool = True,
        lr_rule: Rule = "auto",
    ) -> Any:
        """Make models, optimizers, loaders, schedulers and scalers elastic; returns them in the same order.

        Loaders are replaced by elastic ones, a DistributedDataParallel by the model inside; all others come
        back as the same objects. An optimizer may be given as a function of the model before it. Anything
        else with `state_dict` and `load_state_dict` is saved and restored, too.

        With `adaptive`, the batch size of the first loader follows the gradient noise, up to
        `max_batch_size`, and the learning rate follows the batch size by `lr_rule`. `per_worker_batch` is the
        smallest and the largest batch of one worker; larger ones take several passes, unless `accumulate` is
        False.
        """
        if self._engine.joined:
            raise InputError(
                "prepare() was called after training has begun.", remedy="Call it before run.epochs()."
            )
        if lr_rule not in RULES:
            raise InputError(f"there is no lr_rule {lr_rule!r}.", remedy=f"There are {', '.join(RULES)}.")
        if adaptive or max_batch_size is not None or per_worker_batch is not None or not accumulate:
            self._engine.batching.bound(
                adaptive=adaptive, most=max_batch_size, per_worker=per_worker_batch, accumulates=accumulate
            )
        if self._session.task is not None:
            refuse_users_group()
        prepared: list[Any] = []
        for thing in things:
            models = [one for one in prepared if isinstance(one, torch.nn.Module)]
            is_recipe = callable(thing) and not isinstance(thing, Stateful)
            prepared.append(self._prepare(thing(models[-1]) if is_recipe and models else thing))
        if adaptive:
            self._adapt(prepared, lr_rule)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare(self, thing: Any) -> Any:
        engine = self._engine
        if isinstance(thing, DataLoader):
            return self._elastic(source_of(thing, engine.announce))
        if isinstance(thing, ElasticLoader):  # by run.loader
            engine.expect(thing.source)
            return thing
        if not isinstance(thing, Stateful):
            raise InputError(
                f"an object of type {type(thing).__name__} cannot be prepared.",
                remedy="Give models, optimizers, DataLoaders, schedulers, or anything with state_dict().",
            )
        if isinstance(thing, torch.nn.Module):
            _refuse_lazy(thing)
            alone = self._session.task is None and engine.group.world == 1
            thing = unwrapped_module(thing, engine.announce, alone=alone)
        elif isinstance(thing, Optimizer):
            check_optimizer(thing)
        engine.prepared.add(thing)
        if isinstance(thing, Optimizer):
            first = not engine.steppers
            engine.steppers.append(Stepper(thing, engine.current, engine.group, is_first=first))
        elif isinstance(thing, LRScheduler):
            advance_by_work(thing, engine.current, engine.steps_of_schedules)
        elif isinstance(thing, torch.amp.GradScaler):
            skip_before_step_end(thing, ("unscale_", "step", "update"), engine.current)
        return thing

    def _adapt(self, prepared: list[Any], rule: Rule) -> None:
        loaders = [thing for thing in prepared if isinstance(thing, ElasticLoader)]
        if not self._engine.steppers or not loaders:
            raise InputError(
                "adaptive=True needs an optimizer and a loader in the same prepare().", remedy="Give both."
            )
        scaler = next((thing for thing in prepared if isinstance(thing, torch.amp.GradScaler)), None)
        for stepper in self._engine.steppers:
            stepper.adapt(loaders[0].source.batch_size, rule, scaler)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Any = None,
        **options: Any,
    ) -> ElasticLoader:
        """Make an elastic loader. `batch_size` is the total over all workers; `options` are DataLoader's."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InputError(
                "the dataset has no length, so its examples cannot be split over workers.",
                remedy="Use a dataset with __getitem__ and __len__.",
            )
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}.", remedy="It takes 1 or more.")
        sampler = None if sampler is None else whole_sampler(sampler, self._engine.announce)
        return self._elastic(
            DataSource(
                dataset=dataset,
                batch_size=batch_size,
                shuffle=shuffle and sampler is None,
                drop_last=drop_last,
                sampler=sampler,
                options=options,
            )
        )

    def _elastic(self, source: DataSource) -> ElasticLoader:
        self._engine.expect(source)
        return ElasticLoader(source, self._engine)

    def epochs(self, count: int) -> Iterator[int]:
        """Loop over the epochs left to train, up to `count`; a resumed run continues where it stopped.

        After `break`, the values reported in that epoch count and the model is saved, except inside a loop
        over data. All workers must break in the same epoch.
        """
        engine, task = self._engine, self._session.task
        if engine.counting is not None:
            raise InputError(
                "run.epochs() was called after run.steps().",
                remedy="Train in one loop, over run.steps() or over run.epochs().",
            )
        engine.join()
        if task is not None and task.epochs is not None:
            count = min(count, task.epochs)
        self._length = count
        while engine.progress.epoch < count:
            engine.begin_epoch()
            try:
                yield engine.progress.epoch
            except GeneratorExit:
                engine.stop_early()
                raise
            last = engine.progress.epoch + 1 >= count
            if last:
                engine.refuse_no_step()
            engine.end_epoch(last=last)
        if task is None:
            engine.save_result()

    def steps(self, count: int, *, batch_size: int, report_every: int | None = None) -> Iterator[int]:
        """Loop over the steps left to train, up to `count`; for code that draws its own data.

        `batch_size` is the total over all workers. In each step a worker draws `run.share` examples, and its
        loss is their mean.

            for step in run.steps(5000, batch_size=64, report_every=250):
                x, y = get_batch(run.share)
                ...
                optimizer.step()
                if run.report_is_due:
                    run.report(loss=evaluate(model))

        `report_every` steps are one epoch, also for `epochs` of a job and `max_epochs` of a study. Reported
        values count when an epoch ends. By default an epoch is a tenth of the steps.
        """
        for name, value in (("count", count), ("batch_size", batch_size), ("report_every", report_every)):
            if value is not None and not (type(value) is int and value >= 1):
                raise InputError(
                    f"run.steps() is given {name}={value!r}.", remedy="Give a whole number of at least 1."
                )
        if report_every is None:
            report_every = ceil(count / 10)
        counting = StepCounting(batch_size=batch_size, report_every=report_every)
        self._engine.count_steps(counting)
        return self._steps(count, counting)

    def _steps(self, count: int, counting: StepCounting) -> Iterator[int]:
        engine, task = self._engine, self._session.task
        engine.join()
        epochs = task.epochs if task is not None else None
        if epochs is not None:
            begun = engine.steps_before_epoch
            count = min(count, begun + max(epochs - engine.progress.epoch, 0) * counting.report_every)
        self._length = count
        while engine.current.updates < count:
            engine.begin_epoch()
            loop = engine.step_loop = StepLoop(
                counting,
                count,
                engine.current,
                before=engine.begin_loop,
                after_step=engine.after_step,
                after=engine.end_loop,
            )
            try:
                yield from loop.epoch()
            except GeneratorExit:
                engine.stop_early()
                raise
            finally:
                engine.step_loop = None
            last = engine.current.updates >= count
            if last:
                engine.refuse_no_step()
            engine.end_epoch(last=last)
        if task is None:
            engine.save_result()

    def report(self, **values: float) -> None:
        """Report metrics of the current epoch, in one call or several. Rank 0's values count."""
        if taken := sorted(values.keys() & OWN_NAMES):
            raise InputError(
                f"run.report was given {', '.join(taken)}, which Stretto writes itself.",
                remedy="Leave it out or rename it.",
            )
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._engine.add_values(numbers)
        if self._session.task is None and self.is_main:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            print(f"epoch {self._engine.progress.epoch + 1}: {shown}", flush=True)  # noqa: T201 - run by hand

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The weighted mean of a number over all workers; every worker must call it."""
        pair = torch.tensor([value * weight, weight], dtype=torch.float64)
        total = self._engine.group.sum_between_cpus(pair)
        return float(total[0] / total[1])

    def finish(self) -> None:
        """End training: models and optimizers are ordinary ones again.

        Only needed in scripts that do more after training; under a controller it happens by itself.
        """
        self._engine.finish()

    def finish_saving(self) -> None:
        """Wait until all checkpoints are on the disk."""
        self._engine.finish_saving()


def _refuse_lazy(module: torch.nn.Module) -> None:
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, one in named if torch.nn.parameter.is_lazy(one)]
    if lazy:
        raise InputError(
            f"{', '.join(lazy)} of the {type(module).__name__} has no shape before the first batch.",
            remedy="Let the model compute one batch before prepare(), or give the number of features.",
        )


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # also tensors with one element
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"run.report was given {name}={str(value)[:80]!r}, which is not a number ({error}).",
            remedy="Report numbers only; print other values.",
        ) from error
