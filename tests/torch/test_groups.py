"""Around elastic loops: steps outside of them, early ends, whoever leads next, and groups that end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import group_cases
import ranks
from group_cases import BATCH, EXAMPLES, data, model_and_optimizer, step
from ranks import RANKS
from stretto.core.errors import InputError
from stretto.torch import Run
from stretto.torch.group import Group, GroupOrder, OrderKind
from stretto.wire.messages import Finished, FinishEpoch, Left, Ready, Report, Saved
from torch_gang import Cradle, Gang, wait_until


@dataclass(frozen=True)
class Launched:
    """What two workers, launched as torchrun does, have seen, and their folder."""

    seen: list[dict[str, Any]]
    codes: list[int]
    folder: Path


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("run")
    workers = ranks.launched(group_cases.__file__, str(folder))
    return Launched([json.loads(one.last_line) for one in workers], [one.code for one in workers], folder)


@pytest.mark.parametrize("case", ["ordinary_steps", "batch_statistics"])
def test_workers_stay_alike(launched: Launched, case: str) -> None:
    first, second = (seen[case] for seen in launched.seen)
    assert first == second


def test_models_and_optimizers_are_ordinary_ones_after_the_end(launched: Launched) -> None:
    alone = group_cases.after_finish(launched.folder)[1]
    for seen in launched.seen:
        workers, weight, *refusals = seen["after_finish"]
        assert (workers, weight) == (RANKS, pytest.approx(alone))
        assert "the group of 2 workers has not formed" in refusals[0]
        assert "begins after run.finish()" in refusals[1]


def test_a_group_of_the_users_own_is_used_and_stays(launched: Launched) -> None:
    first, second = (seen["users_group"] for seen in launched.seen)
    assert first == second
    assert first[:2] == [RANKS, True]


def test_wrappers_that_share_out_and_average_are_taken_off(launched: Launched) -> None:
    (first, weight, *refusals), (second, other, *_) = (seen["wrapped"] for seen in launched.seen)
    assert sorted(first + second) == sorted(group_cases.data().tensors[0][:, 0].tolist())
    assert weight == other
    assert weight == pytest.approx(trained_alone())
    assert "is still called" in refusals[0]
    assert "was not prepared" in refusals[1]


def trained_alone() -> float:
    """One worker over the same order."""
    model, optimizer = group_cases.model_and_optimizer()
    order: DistributedSampler[Any] = DistributedSampler(group_cases.data(), num_replicas=1, rank=0, seed=5)
    for (x,) in DataLoader(group_cases.data(), batch_size=12, sampler=order):
        group_cases.step(model, optimizer, x)
    return group_cases.weight(model)


def test_a_script_that_ends_leaves_its_group(launched: Launched) -> None:
    assert launched.codes == [0, 0]
    assert [seen["stopped_early"] for seen in launched.seen] == [RANKS, RANKS]
    assert not any(seen["group_at_exit"] for seen in launched.seen)


def reported(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def saved_epoch(folder: Path) -> int | None:
    """The epoch that a run in this folder would go on with."""
    states = sorted(folder.glob("checkpoints/*/state.pt"))
    return torch.load(states[-1], weights_only=True)["epoch"] if states else None


def test_all_workers_may_stop_early(launched: Launched) -> None:
    assert (reported(launched.folder), saved_epoch(launched.folder)) == (2, 2)


def with_bar(epochs: Iterator[int]) -> Iterator[int]:
    """As progress bars do."""
    try:
        yield from epochs
    finally:
        pass


Epochs = Callable[[], Iterator[int]]
Body = Callable[[], None]


class Ends:
    """Ways to leave the loop over epochs."""

    @staticmethod
    def breaks(epochs: Epochs, body: Body) -> None:
        for _ in epochs():
            body()
            break

    @staticmethod
    def returns(epochs: Epochs, body: Body) -> int:
        for epoch in epochs():
            body()
            return epoch
        return -1

    @staticmethod
    def breaks_before(epochs: Epochs, body: Body) -> None:
        for epoch in epochs():
            if epoch == 1:
                break
            body()

    @staticmethod
    def fails(epochs: Epochs, body: Body) -> None:
        for _ in epochs():
            body()
            _fail()


def _fail() -> None:
    raise KeyError("of the user's")


def plain(epochs: Iterator[int]) -> Iterator[int]:
    return epochs


Wrap = Callable[[Iterator[int]], Iterator[int]]


def epochs_and_body(run: Run, wrap: Wrap = plain) -> tuple[Epochs, Body]:
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))

    def body() -> None:
        for (x,) in loader:
            step(model, optimizer, x)
        run.report(loss=1.0)

    return lambda: wrap(run.epochs(9)), body


@pytest.mark.parametrize("wrap", [plain, with_bar])
@pytest.mark.parametrize("end", [Ends.breaks, Ends.returns, Ends.breaks_before, Ends.fails])
def test_an_epoch_that_was_reported_is_kept_however_the_loop_is_left(
    tmp_path: Path, wrap: Wrap, end: Callable[..., Any]
) -> None:
    with contextlib.suppress(KeyError):
        end(*epochs_and_body(Run(tmp_path), wrap))
    assert (reported(tmp_path), saved_epoch(tmp_path)) == (1, 1)


def test_whoever_keeps_the_epochs_ends_them_by_finishing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    epochs, body = epochs_and_body(run)
    kept = epochs()
    Ends.breaks(lambda: kept, body)
    assert (reported(tmp_path), saved_epoch(tmp_path)) == (0, None)
    run.finish()
    assert (reported(tmp_path), saved_epoch(tmp_path)) == (1, 1)


@pytest.mark.parametrize("finishes", [False, True])
def test_an_epoch_that_is_broken_off_is_kept_only_by_finishing(tmp_path: Path, finishes: bool) -> None:
    run = Run(tmp_path)
    model, optimizer, loader = run.prepare(*model_and_optimizer(), DataLoader(data(), batch_size=BATCH))
    for _ in run.epochs(9):
        for number, (x,) in enumerate(loader):
            step(model, optimizer, x)
            if number == 4:
                break
        break
    if finishes:
        run.finish()
    assert (reported(tmp_path), saved_epoch(tmp_path)) == (0, 0 if finishes else None)


@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_outside_loops_are_ordinary_ones(adaptive: bool) -> None:
    run = Run()
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, scheduler, loader = run.prepare(
        model, optimizer, scheduler, loader, per_worker_batch=(1, BATCH // 2), adaptive=adaptive
    )
    (x,) = data().tensors

    def gradient() -> list[float]:
        optimizer.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        return [float(one.grad.norm()) for one in model.parameters()]

    for epoch in run.epochs(2):
        for (part,) in loader:
            complete = run.step_is_complete
            step(model, optimizer, part)
            assert all((one.grad is not None) == complete for one in model.parameters())
            if epoch == 1 and not complete:
                break
        assert run.step_is_complete
        assert run._engine.current.layout.parts == 1
        shown = gradient()
        scheduler.step()
        assert scheduler.last_epoch == epoch + 1
        run.finish() if epoch == 1 else None
        assert gradient() == pytest.approx(shown)
        with torch.no_grad():
            plain = torch.nn.Sequential(*(type(one)(one.in_features, one.out_features) for one in model))
            plain.load_state_dict(model.state_dict())
        torch.autograd.backward(plain(x).square().mean())
        assert shown == pytest.approx([float(one.grad.norm()) for one in plain.parameters()])  # type: ignore[union-attr]


def test_lazy_modules_are_refused_in_words() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    with pytest.raises(InputError, match=r"0\.weight.* has no shape"):
        Run().prepare(lazy)


def test_steps_with_a_checkpoint_are_not_timed(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_every_s=0.0)
    Ends.breaks(*epochs_and_body(run))
    assert run.batch_size == BATCH < EXAMPLES
    assert run._engine._meter.take() == run._engine._tuning_meter.take() == ()


class Done:
    """An exchange that is over."""

    @staticmethod
    def wait() -> None:
        return None


def test_nothing_is_wished_for_before_an_order_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: Done())
    group, wishes = Group(), iter([GroupOrder(OrderKind.BATCH, 8), GroupOrder(OrderKind.BATCH, 16)])
    group.world = RANKS
    seen = [group.agree(lambda: next(wishes)) for _ in range(4)]
    assert seen == [None, GroupOrder(OrderKind.BATCH, 8), None, GroupOrder(OrderKind.BATCH, 16)]


# With a controller


@pytest.fixture(scope="module")
def cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    with Cradle(f"{group_cases.__file__}:train", tmp_path_factory.mktemp("cradle")) as cradle:
        yield cradle


def test_the_next_leader_knows_the_best_epoch_and_what_only_rank_0_has_kept(
    cradle: Cradle, tmp_path: Path
) -> None:
    config = {"epochs": 4, "nap_s": 0.02, "scores": "0.5 0.9 0.3 0.4"}
    with Gang(cradle, tmp_path, config=config, metric="accuracy") as gang:
        gang.spawn("a")
        gang.spawn("b")
        gang.form("a", "b")
        gang.wait("a", Report, lambda report: report.epoch == 2)
        gang.form("b", wait=False)
        gang.wait("b", Finished)
        said = gang.members["a"].said + gang.members["b"].said
        assert {one.progress for one in said if isinstance(one, Saved) and one.best} == {1.0, 2.0}
        ends = [end for _, end in sorted(gang.epoch_ends().items())]
        assert ["rare" in end.values for end in ends] == [True] + [False] * 3
        batches = ends[0].values["batches"]
        assert [end.values["batches"] for end in ends] == [batches * epochs for epochs in (1, 2, 3, 4)]


def test_newcomers_leave_with_the_others_when_the_epoch_is_over(cradle: Cradle, tmp_path: Path) -> None:
    with Gang(cradle, tmp_path, config={"epochs": 100, "nap_s": 0.15}) as gang:
        gang.spawn("a")
        gang.spawn("b")
        gang.form("a")
        gang.wait("b", Ready)
        ends = len(gang.epoch_ends())
        wait_until(lambda: len(gang.epoch_ends()) > ends)
        gang.tell("a", FinishEpoch())
        time.sleep(0.4)
        gang.form("a", "b")
        assert [gang.wait(name, Left).why for name in "ab"] == ["parked", "parked"]


def test_a_run_under_a_controller_may_stop_early(cradle: Cradle, tmp_path: Path) -> None:
    with Gang(cradle, tmp_path, config={"epochs": 9, "nap_s": 0.0, "last": 1}, metric="accuracy") as gang:
        gang.spawn("a")
        gang.spawn("b")
        gang.form("a", "b")
        for name in "ab":
            gang.wait(name, Finished)
        assert sorted(gang.epoch_ends()) == [1, 2]
        assert gang.wait("a", Saved, lambda saved: not saved.best).progress == 2.0
