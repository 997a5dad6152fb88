"""Parts of the Ray substrate that need no cluster to be tried."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("ray")

from live_processes import SUPPORT, eventually
from local_bench import STUB
from stretto.core.errors import InputError
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.elastic.loop import GangLoop
from stretto.substrate.ray.agent import (
    Agent,
    AgentConfig,
    AgentOrder,
    ForkServerAction,
    ForkServerMessage,
    WorkerStart,
)
from stretto.substrate.ray.placement import LeaseHolder
from stretto.wire.checkpoints import UNCOPIED


def config(folder: Path, *, proof: str = "this run") -> AgentConfig:
    (folder / "id").write_text("this run")
    return AgentConfig(
        run="r",
        scratch=folder / "scratch",
        folder=folder,
        proof=proof,
        host="127.0.0.1",
        trainer=STUB,
        grace_s=1.0,
        command_grace_s=1.0,
        slots=1,
        cwd=folder,
        env={},
    )


def spawn(number: int, log: Path) -> AgentOrder:
    start = WorkerStart("127.0.0.1:1", "secret", log, {"STRETTO_SLOT": "0"})
    return AgentOrder(
        number=number, entry="train.py:train", action=ForkServerAction.SPAWN, worker=f"w{number}", start=start
    )


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.chdir(tmp_path)  # an agent goes where its controller is
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    return Agent(config(tmp_path))


def said_by(agent: Agent, worker: str) -> list[WorkerNews]:
    found: list[ForkServerMessage] = []

    def heard() -> bool:
        found.extend(agent.listen().messages)
        return any(one.saying is not None and one.saying.worker == worker for one in found)

    assert eventually(heard), found
    return [one.saying for one in found if one.saying is not None and one.saying.worker == worker]


def close(agent: Agent, number: int) -> None:
    agent.order(AgentOrder(number=number, entry="train.py:train", action=ForkServerAction.CLOSE))
    assert eventually(lambda: not agent._fork_servers)


def test_an_order_that_cannot_be_carried_out_is_told_and_does_not_stop_the_next(
    agent: Agent, tmp_path: Path
) -> None:
    agent.begin()
    (tmp_path / "file").write_text("")
    agent.order(spawn(0, tmp_path / "file" / "stdout.log"))
    (gone,) = said_by(agent, "w0")
    assert gone.kind == "gone"
    assert "file" in gone.error
    agent.order(spawn(1, tmp_path / "jobs" / "a" / "stdout.log"))
    assert said_by(agent, "w1")[0].kind == "born"
    close(agent, 2)


def test_orders_are_carried_out_in_the_sequence_of_their_numbers_once_the_agent_has_begun(
    agent: Agent, tmp_path: Path
) -> None:
    agent.order(spawn(1, tmp_path / "jobs" / "a" / "stdout.log"))
    agent.order(spawn(0, tmp_path / "jobs" / "b" / "stdout.log"))
    assert not agent._fork_servers, "before it has seen whether the node is fit"
    agent.begin()
    born: list[str] = []

    def both() -> bool:
        born.extend(s.saying.worker for s in agent.listen().messages if s.saying and s.saying.kind == "born")
        return len(born) == 2

    assert eventually(both)
    assert born == ["w0", "w1"]
    close(agent, 2)


def test_a_node_that_does_not_see_the_runs_folder_is_not_fit(tmp_path: Path) -> None:
    unfit = Agent(config(tmp_path, proof="another run"))
    with pytest.raises(InputError, match="--store"):
        unfit.begin()


def test_an_agent_that_departs_leaves_nothing_on_its_node(agent: Agent, tmp_path: Path) -> None:
    agent.begin()
    (tmp_path / "scratch" / "jobs" / "a").mkdir(parents=True)
    (tmp_path / "scratch" / "jobs" / "a" / "stdout.log").write_text("carried")
    agent.clean_up()
    assert not (tmp_path / "scratch").exists()
    agent.clean_up()


def test_an_agent_that_departs_before_it_begins_does_not_begin(agent: Agent, tmp_path: Path) -> None:
    agent.clean_up()
    agent.begin()
    assert not (tmp_path / "scratch").exists()


def test_an_agent_that_departs_while_it_begins_leaves_nothing_either(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> dict[str, str]:
        inside.set()
        assert go_on.wait(60)
        return {}

    monkeypatch.setattr("stretto.substrate.ray.agent.training_env", slow)
    begins = threading.Thread(target=agent.begin)
    begins.start()
    assert inside.wait(60)
    departs = threading.Thread(target=agent.clean_up)
    departs.start()
    go_on.set()
    begins.join(60)
    departs.join(60)
    assert not (tmp_path / "scratch").exists()


def test_a_checkpoint_that_is_nowhere_else_stays(agent: Agent, tmp_path: Path) -> None:
    agent.begin()
    kept = tmp_path / "scratch" / "jobs" / "a" / "checkpoints"
    kept.mkdir(parents=True)
    (kept / UNCOPIED).touch()
    agent.clean_up()
    assert kept.exists()


def test_an_agent_that_was_not_let_in_touches_nothing(tmp_path: Path) -> None:
    unfit = Agent(config(tmp_path, proof="another run"))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(InputError):
        unfit.begin()
    unfit.clean_up()
    assert (tmp_path / "scratch").exists(), "it may be that of an agent at work"


def test_each_hold_ends_with_its_own_release_in_whatever_order_they_come() -> None:
    holder = LeaseHolder()
    holder.free("first")
    holder.hold("first")
    ended = threading.Event()

    def hold() -> None:
        holder.hold("second")
        ended.set()

    threading.Thread(target=hold, daemon=True).start()
    assert not ended.wait(0.1), "what the first job gave back is not the second's"
    holder.free("second")
    assert ended.wait(60)


def test_a_lease_that_was_lost_is_no_news_of_a_worker_that_is_gone() -> None:
    GangLoop(lambda: 0.0, lambda *_: None).confused("w1", "Ray took its place away")
