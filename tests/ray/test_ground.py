"""What becomes of nodes whose agent is lost, seen without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("ray")

from live_processes import eventually
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, NodeAdded, NodeLost
from stretto.core.resources import Resources
from stretto.substrate.elastic.fork_servers import WorkerNews
from stretto.substrate.ray import ground as ground_module
from stretto.substrate.ray.agent import AgentNews, ForkServerMessage
from stretto.substrate.ray.ground import WARM_UP_S, RayGround
from stretto.substrate.ray.log_shipping import LogPiece
from stretto.substrate.ray.nodes import RayNode

BOX = Node("box-1", Resources(gpu=1), "box")


class ScriptedFleet:
    """Tells what the test wants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.news: list[Event] = []
        self.wishes: list[Wish] = []
        self.released: list[str] = []
        self.given_up: list[str] = []
        self.there = True

    def nodes(self) -> tuple[Node, ...]:
        return (BOX,)

    def where(self, name: str) -> RayNode | None:
        node = RayNode(ray_id="0" * 16, name=name, host="h", slots=1, instance="box", draining=False)
        return node if self.there else None

    def provision(self, wish: Wish, t_s: float) -> list[Event]:
        del t_s
        self.wishes.append(wish)
        return []

    def look(self, t_s: float) -> list[Event]:
        del t_s
        news, self.news = self.news, []
        return news

    def recall(self, history: Iterable[Event], t_s: float) -> list[Event]:
        del history
        return self.look(t_s)

    def release(self, nodes: Sequence[str], t_s: float) -> list[Event]:
        del t_s
        self.released += nodes
        return []

    def give_up(self, node_id: str, t_s: float) -> list[Event]:
        del t_s
        self.given_up.append(node_id)
        return []

    def close(self) -> None:
        """Nothing is open."""


class SilentAgent:
    """An agent that is whatever the test says."""

    made: list[SilentAgent]
    is_silent = False

    def __init__(self, node: RayNode, charge: object, listener: RayGround, awake_s: object) -> None:
        del charge, awake_s
        self.node = node
        self.listener = listener
        self.done: list[str] = []
        self.may_depart = threading.Event()
        self.may_depart.set()
        self.made.append(self)

    def order(self, *_: object) -> None:
        """Not carried out."""

    def disconnect(self) -> None:
        """Nobody is there."""

    def remaining_logs(self, patience_s: float) -> Iterator[tuple[LogPiece, ...]]:
        del patience_s
        self.done.append("remaining_logs")
        yield (LogPiece("jobs/a/stdout.log", b"its last words"),)

    def clean_up(self, patience_s: float) -> None:
        del patience_s
        assert self.may_depart.wait(20.0)
        self.done.append("clean_up")

    def begin(self) -> None:
        self.listener.began(self)  # type: ignore[arg-type]

    def say(self, entry: str, saying: WorkerNews | None) -> None:
        self.listener.heard(self, AgentNews((ForkServerMessage(entry, saying),)))  # type: ignore[arg-type]

    def die(self, error: BaseException) -> None:
        self.listener.lost(self, error)  # type: ignore[arg-type]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[SilentAgent]:
    SilentAgent.made = []
    monkeypatch.setattr(ground_module, "AgentClient", SilentAgent)
    return SilentAgent.made


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet()


@pytest.fixture
def ground(fleet: ScriptedFleet, agents: list[SilentAgent], tmp_path: Path) -> RayGround:
    del agents
    return settled(fleet, tmp_path)


def settled(fleet: ScriptedFleet, tmp_path: Path, scratch: Path | None = None) -> RayGround:
    made = RayGround(
        fleet,  # type: ignore[arg-type]
        slots=4,
        resource="GPU",
        host="h",
        config_of=lambda _: None,  # type: ignore[arg-type, return-value]
        scratch_of=None if scratch is None else lambda _: scratch,
        run="r",
        run_dir=tmp_path,
        idle_s=10.0,
    )
    made.settle(_at_once, lambda *_: None, lambda: 0.0)
    return made


def _at_once(step: Callable[[], None]) -> None:
    step()


def kinds(events: Iterable[Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_lost_agent_is_a_lost_node_until_another_agent_has_begun(
    ground: RayGround, agents: list[SilentAgent]
) -> None:
    agents[0].begin()
    assert kinds(ground.look(1.0)) == []
    agents[0].die(RuntimeError("killed"))
    assert kinds(ground.look(2.0)) == ["node-lost"]
    assert kinds(ground.look(4.0)) == []
    assert len(agents) == 2
    agents[1].begin()
    assert ground.look(5.0) == [NodeAdded(t_s=5.0, node=BOX)]


def test_a_wish_made_before_the_fleet_knew_of_the_loss_is_made_again_when_it_does(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    agents[0].begin()
    agents[0].die(RuntimeError("the node is dead"))
    assert kinds(ground.look(1.0)) == ["node-lost"]
    ground.provision(Wish((("box", 1),)), 1.1)
    fleet.news.append(NodeLost(t_s=3.0, node_id=BOX.id))
    assert kinds(ground.look(3.0)) == [], "it was heard already"
    assert fleet.wishes == [Wish((("box", 1),))] * 2


def test_a_wish_from_before_the_loss_is_not_made_again(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    ground.provision(Wish((("box", 1),)), 0.0)
    agents[0].begin()
    agents[0].die(RuntimeError("the node is dead"))
    ground.look(1.0)
    fleet.news.append(NodeLost(t_s=3.0, node_id=BOX.id))
    ground.look(3.0)
    assert len(fleet.wishes) == 1


def lose_agents(ground: RayGround, agents: list[SilentAgent], times: int, every_s: float) -> None:
    for number in range(times):
        agents[-1].begin()
        ground.look(every_s * number)
        agents[-1].die(RuntimeError("no memory"))
        ground.look(every_s * number + every_s / 2)
        ground.look(every_s * number + every_s / 2 + 2)


def test_a_node_that_keeps_losing_its_agents_is_given_up(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    ground._nodes["another"] = BOX
    lose_agents(ground, agents, 3, every_s=10.0)
    assert fleet.given_up == [BOX.id]
    assert "no memory" in caplog.text


def test_a_run_without_a_node_of_use_ends_and_says_why(ground: RayGround, agents: list[SilentAgent]) -> None:
    with pytest.raises(InputError, match="no memory"):
        lose_agents(ground, agents, 3, every_s=10.0)


def test_losses_far_apart_are_not_counted_together(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    lose_agents(ground, agents, 5, every_s=1000.0)
    assert fleet.given_up == []


def test_what_is_wrong_with_the_first_node_is_said_at_once_and_with_a_later_one_is_not_fatal(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    unfit = InputError("it does not see the folder.", remedy="Share it.")
    agents[0].die(unfit)
    with pytest.raises(InputError, match="does not see"):
        ground.look(1.0)
    agents[0].begin()
    ground.look(2.0)
    late = Node("box-2", Resources(gpu=1), "box")
    fleet.news.append(NodeAdded(t_s=3.0, node=late))
    ground.look(3.0)
    agents[-1].die(unfit)
    assert ground.look(4.0) == [NodeLost(t_s=4.0, node_id="box-2")]


LATE = Node("box-2", Resources(gpu=1), "box")
READY = WorkerNews("ready", "")


@pytest.fixture
def arriving(ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet) -> SilentAgent:
    """A node that has come after it was launched, and loads the training code."""
    ground.expect("train.py:train")
    fleet.news.append(NodeAdded(t_s=3.0, node=LATE, queue_s=1.0, init_s=2.0))
    assert ground.look(3.0) == []
    return agents[-1]


def test_a_launched_node_is_told_of_when_it_has_loaded_the_code(
    ground: RayGround, arriving: SilentAgent
) -> None:
    arriving.say("another.py:train", READY)
    assert ground.look(4.0) == []
    arriving.say("train.py:train", READY)
    assert ground.look(5.0) == [NodeAdded(t_s=5.0, node=LATE, queue_s=1.0, init_s=4.0)]
    assert ground.look(6.0) == []


def test_how_long_a_node_took_that_nobody_saw_come_is_not_known(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    ground.expect("train.py:train")
    fleet.news.append(NodeAdded(t_s=3.0, node=LATE))
    assert ground.recall([], 3.0) == []
    agents[-1].say("train.py:train", READY)
    assert ground.look(5.0) == [NodeAdded(t_s=5.0, node=LATE)]


def test_code_that_cannot_be_loaded_does_not_keep_a_node_away(
    ground: RayGround, arriving: SilentAgent
) -> None:
    arriving.say("train.py:train", None)
    assert kinds(ground.look(4.0)) == ["node-added"]


@pytest.mark.usefixtures("arriving")
def test_a_node_that_takes_too_long_is_told_of(ground: RayGround) -> None:
    assert ground.look(2.9 + WARM_UP_S) == []
    assert kinds(ground.look(3.0 + WARM_UP_S)) == ["node-added"]


@pytest.mark.usefixtures("arriving")
def test_who_wishes_again_is_told_what_has_come(ground: RayGround) -> None:
    assert kinds(ground.provision(Wish(()), 4.0)) == ["node-added"]


def test_a_node_that_is_lost_while_it_loads_has_come_first(
    ground: RayGround, arriving: SilentAgent, fleet: ScriptedFleet
) -> None:
    del arriving
    fleet.news.append(NodeLost(t_s=4.0, node_id=LATE.id))
    assert kinds(ground.look(4.0)) == ["node-added", "node-lost"]


def test_a_node_whose_agent_is_lost_while_it_loads_has_come_first(
    ground: RayGround, agents: list[SilentAgent], arriving: SilentAgent
) -> None:
    agents[0].begin()
    ground.look(3.5)
    arriving.die(RuntimeError("killed"))
    assert kinds(ground.look(4.0)) == ["node-added", "node-lost"]


def test_a_node_is_given_back_when_nobody_is_on_it_any_more(ground: RayGround, fleet: ScriptedFleet) -> None:
    fleet.there = False
    ground._agents.clear()
    ground.ask("w1", "a", BOX.id)
    ground.provision(Wish((), (BOX.id,)), 0.0)
    assert fleet.released == []
    assert ground.withdraw("w1")
    ground.look(1.0)
    assert fleet.released == [BOX.id]


def test_a_node_is_given_back_once_what_is_left_there_was_fetched_and_cleared_away(
    fleet: ScriptedFleet, agents: list[SilentAgent], tmp_path: Path
) -> None:
    ground = settled(fleet, tmp_path / "run", tmp_path / "scratch")
    agents[0].may_depart.clear()
    ground.provision(Wish((), (BOX.id,)), 0.0)
    ground.look(1.0)
    assert fleet.released == []
    agents[0].may_depart.set()

    def given_back() -> bool:
        ground.look(2.0)
        return fleet.released == [BOX.id]

    assert eventually(given_back)
    assert agents[0].done == ["remaining_logs", "clean_up"]
    assert (tmp_path / "run" / "jobs" / "a" / "stdout.log").read_bytes() == b"its last words"


def test_an_agent_that_is_seen_off_may_be_silent(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    agents[0].may_depart.clear()
    ground.provision(Wish((), (BOX.id,)), 0.0)
    agents[0].is_silent = True
    assert ground.look(1.0) == []
    assert fleet.released == []
    agents[0].may_depart.set()


def test_a_node_that_cannot_be_cleared_away_is_given_back_in_the_end(
    ground: RayGround, agents: list[SilentAgent], fleet: ScriptedFleet
) -> None:
    agents[0].may_depart.clear()
    ground.provision(Wish((), (BOX.id,)), 0.0)
    ground.look(1000.0)
    assert fleet.released == [BOX.id]
    agents[0].may_depart.set()


@pytest.mark.parametrize("keeps_files", [False, True])
def test_files_stay_on_nodes_only_where_there_was_no_time_to_copy_them(
    ground: RayGround, agents: list[SilentAgent], keeps_files: bool
) -> None:
    ground.keeps_files = keeps_files
    ground.close()
    assert ("clean_up" in agents[0].done) is not keeps_files
