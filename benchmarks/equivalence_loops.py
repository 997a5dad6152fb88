"""Training loops as people write them, on small data. Every worker logs what it did.

`train` is what workers run; `config["loop"]` names one of LOOPS or REFUSED.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

from stretto.torch import Run

EXAMPLES, BATCH = 240, 24
STEPS = EXAMPLES // BATCH
"""Examples of an epoch."""
_NAP_S, _LONG_NAP_S = 0.02, 0.5
_NEARLY_DONE = 0.7


class Data(Dataset[tuple[Tensor, Tensor, int]]):
    """A dataset whose examples contain their index."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(EXAMPLES, 20, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Log:
    """Writes what a worker did as lines that the benchmark reads afterwards."""

    def __init__(self, config: dict[str, Any], run: Run) -> None:
        self._seen, self._go = Path(config["seen"]), Path(config["go"])
        self._run = run

    def step(self, epoch: int, numbers: Iterable[int]) -> None:
        """One pass; slowly, while resizes are still to come."""
        self._write(["seen", epoch, self._run.workers, [int(number) for number in numbers]])
        if not self._go.exists():
            time.sleep(_LONG_NAP_S if self._run.progress > _NEARLY_DONE else _NAP_S)

    def epoch(self, epoch: int, *models: nn.Module) -> None:
        """The exact bits of the parameters at the end of an epoch."""
        digest = hashlib.sha256()
        for parameter in itertools.chain(*(model.parameters() for model in models)):
            digest.update(parameter.detach().numpy().tobytes())
        self._write(["model", epoch, self._run.rank, digest.hexdigest()])

    def _write(self, row: list[Any]) -> None:
        with self._seen.open("a") as file:
            file.write(json.dumps(row) + "\n")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def loss_of(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(data.x), data.y))


def plain(config: dict[str, Any], run: Run, log: Log) -> None:
    data, model = Data(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = StepLR(optimizer, 5, 0.9)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for epoch in run.epochs(config["epochs"]):
        for x, y, numbers in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log.step(epoch, numbers)
        scheduler.step()
        log.epoch(epoch, model)
        run.report(loss=loss_of(model, data))


def _simple(config: dict[str, Any], run: Run, log: Log, loader: Any, *things: Any) -> None:
    """Adam over some loader, whatever is particular about it."""
    data, model = Data(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    model, optimizer, loader, *_ = run.prepare(model, optimizer, loader, *things)
    for epoch in run.epochs(config["epochs"]):
        for x, y, numbers in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            log.step(epoch, numbers)
        log.epoch(epoch, model)
        run.report(loss=loss_of(model, data))


def adam(config: dict[str, Any], run: Run, log: Log) -> None:
    _simple(config, run, log, DataLoader(Data(), batch_size=BATCH, shuffle=True))


def weighted_sampler(config: dict[str, Any], run: Run, log: Log) -> None:
    sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(EXAMPLES)], EXAMPLES)
    _simple(config, run, log, DataLoader(Data(), batch_size=BATCH, sampler=sampler))


def persistent_workers(config: dict[str, Any], run: Run, log: Log) -> None:
    loader = DataLoader(Data(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    _simple(config, run, log, loader)


def distributed_sampler(config: dict[str, Any], run: Run, log: Log) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Data(), num_replicas=2, rank=0, seed=3)
    _simple(config, run, log, DataLoader(Data(), batch_size=BATCH, sampler=sampler))


def pad_collate(config: dict[str, Any], run: Run, log: Log) -> None:
    data = Data()

    def collate(batch: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, list[int]]:
        x, y, numbers = zip(*batch, strict=True)
        cut = [one[: 5 + number % 16] for one, number in zip(x, numbers, strict=True)]
        padded = pad_sequence(cut, batch_first=True)
        return nn.functional.pad(padded, (0, 20 - padded.shape[1])), torch.stack(y), list(numbers)

    _simple(config, run, log, DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate))


def accumulation(config: dict[str, Any], run: Run, log: Log) -> None:
    """Two batches a step, counted by hand."""
    data, model = Data(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    loader = DataLoader(data, batch_size=BATCH // 2, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(config["epochs"]):
        optimizer.zero_grad()
        for i, (x, y, numbers) in enumerate(loader):
            (cross_entropy(model(x), y) / 2).backward()
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            log.step(epoch, numbers)
        log.epoch(epoch, model)
        run.report(loss=loss_of(model, data))


def two_loaders(config: dict[str, Any], run: Run, log: Log) -> None:
    data, model = Data(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    first = DataLoader(data, batch_size=BATCH, shuffle=True)
    second = DataLoader(Data(seed=2), batch_size=BATCH, shuffle=True)
    model, optimizer, first, second = run.prepare(model, optimizer, first, second)
    for epoch in run.epochs(config["epochs"]):
        for (x, y, numbers), (noisy, labels, others) in zip(first, second, strict=True):
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + 0.1 * cross_entropy(model(noisy), labels)).backward()
            optimizer.step()
            log.step(epoch, [*numbers, *(int(number) + EXAMPLES for number in others)])
        log.epoch(epoch, model)
        run.report(loss=loss_of(model, data))


def gan(config: dict[str, Any], run: Run, log: Log) -> None:
    torch.manual_seed(1)
    data = Data()
    generator, critic = nn.Linear(20, 20), nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
    steps_g = torch.optim.Adam(generator.parameters(), lr=0.001)
    steps_c = torch.optim.Adam(critic.parameters(), lr=0.001)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    generator, critic, steps_g, steps_c, loader = run.prepare(generator, critic, steps_g, steps_c, loader)
    for epoch in run.epochs(config["epochs"]):
        for x, _, numbers in loader:
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            made = generator(x.flip(1))
            steps_c.zero_grad()
            real = binary_cross_entropy_with_logits(critic(x), ones)
            (real + binary_cross_entropy_with_logits(critic(made.detach()), zeros)).backward()
            steps_c.step()
            steps_g.zero_grad()
            binary_cross_entropy_with_logits(critic(made), ones).backward()
            steps_g.step()
            log.step(epoch, numbers)
        log.epoch(epoch, generator, critic)
        with torch.no_grad():
            run.report(loss=float(mse_loss(generator(data.x), data.x)))


def one_cycle(config: dict[str, Any], run: Run, log: Log) -> None:
    """OneCycle and a moving average of the weights, both by step."""
    data, model = Data(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=config["epochs"] * STEPS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, average, loader = run.prepare(model, optimizer, scheduler, average, loader)
    for epoch in run.epochs(config["epochs"]):
        for x, y, numbers in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if run.step_is_complete:
                scheduler.step()
                average.update_parameters(model)
            log.step(epoch, numbers)
        log.epoch(epoch, model, average)
        run.report(loss=loss_of(average, data))


def counted_steps(config: dict[str, Any], run: Run, log: Log) -> None:
    """As nanoGPT: no loader, a rate computed from the step, and own values that are kept."""
    data, model = Data(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer = run.prepare(model, optimizer)
    state = run.keep(best=math.inf, epoch=0)
    for step in run.steps(config["epochs"] * STEPS, batch_size=BATCH, report_every=STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * min((step + 1) / 50, 1.0) * (1.1 - run.progress)
        numbers = [number * 7 % EXAMPLES for number in run.examples]
        optimizer.zero_grad()
        cross_entropy(model(data.x[numbers]), data.y[numbers]).backward()
        optimizer.step()
        log.step(step // STEPS, numbers)
        if run.report_is_due:
            log.epoch(state.epoch, model)
            state.best, state.epoch = min(state.best, loss_of(model, data)), state.epoch + 1
            run.report(loss=state.best)


def own_counter(config: dict[str, Any], run: Run, log: Log) -> None:
    """NanoGPT as it is, with a loader: a counter of the script's own sets the rate."""
    data, model = Data(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
    iter_num = 0
    for epoch in run.epochs(config["epochs"]):
        for x, y, numbers in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.005 / (1 + iter_num)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            iter_num += 1
            log.step(epoch, numbers)
        run.report(loss=loss_of(model, data))


def _make_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def own_group(config: dict[str, Any], run: Run, log: Log) -> None:
    _make_group()
    adam(config, run, log)


def sharded(config: dict[str, Any], run: Run, log: Log) -> None:
    """FSDP2 makes DTensors of the parameters; here by hand, of one shard."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    model = nn.Linear(20, 2)
    _make_group()
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    adam(config, run, log)


def unprepared_optimizer(config: dict[str, Any], run: Run, log: Log) -> None:
    data, model = Data(), net()
    model, loader = run.prepare(model, DataLoader(data, batch_size=BATCH, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in run.epochs(config["epochs"]):
        for x, y, numbers in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            log.step(epoch, numbers)


def closure(config: dict[str, Any], run: Run, log: Log) -> None:
    del log
    data, model = Data(), net()
    optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    for _ in run.epochs(config["epochs"]):
        for x, y, _ in loader:
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))


def iterable(config: dict[str, Any], run: Run, log: Log) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Data())

    _simple(config, run, log, DataLoader(Endless(), batch_size=BATCH))


Loop = Callable[[dict[str, Any], Run, Log], None]
LOOPS: dict[str, Loop] = {
    "SGD, StepLR, clipping": plain,
    "Adam": adam,
    "run.steps, run.keep": counted_steps,
    "accumulation by hand": accumulation,
    "zip of two loaders": two_loaders,
    "DistributedSampler": distributed_sampler,
    "WeightedRandomSampler": weighted_sampler,
    "pad collate": pad_collate,
    "persistent workers": persistent_workers,
    "GAN": gan,
    "OneCycle, EMA": one_cycle,
}
REFUSED: dict[str, Loop] = {
    "own counter sets the rate": own_counter,
    "own process group (DDP)": own_group,
    "FSDP (DTensor)": sharded,
    "optimizer not prepared": unprepared_optimizer,
    "closure (LBFGS)": closure,
    "iterable dataset": iterable,
}


def train(config: dict[str, Any], run: Run) -> None:
    torch.set_num_threads(1)
    (LOOPS | REFUSED)[config["loop"]](config, run, Log(config, run))
