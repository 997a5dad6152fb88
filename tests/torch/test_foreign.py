"""What other tools leave in training code: taken off with a notice, or refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from stretto.core.errors import InputError
from stretto.torch import Run
from stretto.torch.data import source_of
from stretto.torch.foreign import unwrapped_module
from stretto.wire.messages import Failed
from torch_gang import Cradle, Gang

DATA = TensorDataset(torch.arange(20.0)[:, None])


@pytest.fixture
def group() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sampler_of(part: int, **options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=3, rank=part, **options)


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_distributed_sampler_gives_every_example_once(in_batches: bool) -> None:
    notes: list[str] = []
    sampler = sampler_of(1, seed=7, drop_last=True)
    loader: DataLoader[Any] = (
        DataLoader(DATA, batch_sampler=BatchSampler(sampler, 6, drop_last=False))
        if in_batches
        else DataLoader(DATA, batch_size=6, sampler=sampler)
    )
    source = source_of(loader, notes.append)
    assert (source.batch_size, source.drop_last, source.examples) == (6, False, 20)
    first, second = source.order(0, 0), source.order(0, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    plain: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=1, rank=0, seed=7)
    assert first == list(plain)
    assert len(notes) == 1
    assert "3 parts are put together" in notes[0]


def test_a_distributed_sampler_that_does_not_shuffle_keeps_the_order() -> None:
    assert list(Run().loader(DATA, 5, sampler=sampler_of(0, shuffle=False)).source.order(0, 3)) == list(
        range(20)
    )


def test_what_shares_data_out_in_its_own_way_is_refused() -> None:
    class Grouped(DistributedSampler[Any]):
        pass

    sampler: Any = Grouped(DATA, num_replicas=2, rank=0)
    with pytest.raises(InputError, match="Grouped gives each of 2 workers a part"):
        Run().prepare(DataLoader(DATA, batch_size=4, sampler=sampler))


def test_the_notice_is_given_once_training_begins(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.prepare(DataLoader(DATA, batch_size=4, sampler=sampler_of(2)))
    assert capsys.readouterr().out == ""
    next(iter(run.epochs(1)))
    assert "stretto: the DistributedSampler's 3 parts" in capsys.readouterr().out


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_comes_back_bare() -> None:
    inner = torch.nn.Linear(1, 1)
    notes: list[str] = []
    assert unwrapped_module(DistributedDataParallel(inner), notes.append, alone=True) is inner
    assert "returns the Linear inside" in notes[0]
    parallel = DataParallel(inner)
    assert unwrapped_module(parallel, notes.append, alone=True) is parallel
    assert unwrapped_module(parallel, notes.append, alone=False) is inner
    with pytest.raises(InputError, match="0 of the Sequential is wrapped"):
        Run().prepare(torch.nn.Sequential(DistributedDataParallel(inner)))


@pytest.mark.usefixtures("group")
def test_sharded_models_are_refused_before_training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InputError, match=r"sharded by FSDP.*as a command"):
        Run().prepare(model)
    with pytest.raises(InputError, match="parameter 0 is a DTensor"):
        Run().prepare(torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_cannot_be_handed_on_is_refused_before_training() -> None:
    with pytest.raises(InputError, match="weight is a meta tensor"):
        Run().prepare(torch.nn.Linear(2, 2, device="meta"))


OWN_GROUP = """
import torch.distributed as dist
from torch.distributed import init_process_group

def train(config, run):
    if config["how"] == "imported":
        init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for epoch in run.epochs(1):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_an_own_process_group_is_refused_under_a_controller(tmp_path: Path) -> None:
    script = tmp_path / "own_group.py"
    script.write_text(OWN_GROUP)
    with Cradle(f"{script}:train", tmp_path) as cradle:
        for how in ("imported", "later"):
            with Gang(cradle, tmp_path / how, config={"how": how}) as gang:
                gang.spawn("w0")
                if how == "later":
                    gang.form("w0")
                said = gang.wait("w0", Failed).traceback
                assert said.startswith("the training code calls torch.distributed.init_process_group")
                assert "Leave out the call" in said


# Nothing to train on


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(TensorDataset(torch.zeros(0, 1)), batch_size=4), "has no examples"),
        (lambda: DataLoader(DATA, batch_size=4, sampler=[]), "has no examples"),
        (
            lambda: DataLoader(DATA, batch_size=64, drop_last=True),
            "20 examples are fewer than one batch of 64",
        ),
    ],
)
def test_a_run_without_a_batch_fails_with_the_reason(loader: Any, reason: str) -> None:
    run = Run()
    run.prepare(loader())
    with pytest.raises(InputError, match=f"nothing to train on.*{reason}"):
        next(iter(run.epochs(3)))


def test_a_run_that_goes_through_no_loader_fails_with_the_reason() -> None:
    run = Run()
    run.prepare(DataLoader(DATA, batch_size=5))
    with pytest.raises(InputError, match=r"the epochs used no batch.* inside run\.epochs"):
        list(run.epochs(3))
    assert list(Run().epochs(3)) == [0, 1, 2], "whoever prepares nothing trains in a way of their own"


@pytest.mark.parametrize("steps", ["once", "after the data", ""])
def test_a_run_that_never_steps_fails_with_the_reason(steps: str) -> None:
    run = Run()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    few = DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=4, drop_last=True)
    loader, _, _ = run.prepare(DataLoader(DATA, batch_size=5), few, optimizer)

    def train() -> None:
        for epoch in run.epochs(2):
            for (x,) in loader:
                model(x).mean().backward()
                if steps == "once" and epoch == 0:
                    optimizer.step()
            if steps == "after the data" and epoch == 1:
                optimizer.step()

    if steps:
        train()
        return
    with pytest.raises(InputError, match=r"nothing was trained: 8 batches.*its 3 examples are fewer"):
        train()
