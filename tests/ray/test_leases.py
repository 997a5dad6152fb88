"""Seats, whatever keeps them, without a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("ray")

from hypothesis import given
from hypothesis import strategies as st

from stretto.substrate.ray.leases import Leases
from stretto.substrate.ray.nodes import RayNode
from stretto.substrate.ray.placement import ReservationRequest

NODES = ("n1", "n2")


@dataclass(frozen=True)
class Method:
    """Called as those of Ray's actors are."""

    do: Callable[..., Any]
    job_id: str = ""

    def options(self, *, name: str, concurrency_group: str) -> Method:
        assert concurrency_group == "holds"
        return Method(self.do, name)

    def remote(self, worker_id: str) -> Any:
        return self.do(worker_id, self.job_id)


class Held:
    """What Ray gives for a call that is on its way."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def future(self) -> Future[None]:
        return self._future


class ScriptedHolder:
    """An actor that holds leases; dead when the test says so."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.hold = Method(self._hold)
        self.free = Method(self._free)
        self._last = Held()

    def _hold(self, worker_id: str, job_id: str) -> Held:
        assert worker_id not in self.shown
        self.shown[worker_id] = job_id
        self._last = Held()
        return self._last

    def _free(self, worker_id: str, _: str) -> None:
        del self.shown[worker_id]

    def die(self) -> None:
        self._last.future().set_exception(RuntimeError("the actor died"))


@dataclass
class ScriptedReservation:
    """A lease that comes and goes when the test says so."""

    holder: ScriptedHolder
    ready: Callable[[str], None]
    lost: Callable[[], None]
    came: bool = False
    times_released: int = 0

    def come(self, gpus: str = "") -> None:
        self.came = True
        self.ready(gpus)

    def release(self) -> None:
        self.times_released += 1


class Play:
    """Seats, and what they have to do with."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.made: list[ScriptedReservation] = []
        self.holder = ScriptedHolder()
        self.lost: list[str] = []
        self.is_closed = False
        self.leases = Leases(
            run="r",
            placer=self,
            scratch_of=None,
            where=lambda name: RayNode(
                ray_id=f"ray {name}", name=name, host="h", slots=2, instance="", draining=False
            ),
            now_s=lambda: self.now_s,
            post=lambda step: step(),
            on_lost=self.lost.append,
        )

    def reserve(self, request: ReservationRequest) -> ScriptedReservation:
        assert request.name == f"r lease {len(self.made) + 1} on {request.node.name}"
        assert request.node.ray_id == f"ray {request.node.name}"
        self.made.append(ScriptedReservation(self.holder, request.on_ready, request.on_lost))
        return self.made[-1]

    def close(self) -> None:
        assert {reservation.times_released for reservation in self.made} <= {1}
        self.is_closed = True

    def granted(self) -> list[str]:
        return [worker for worker, _ in self.leases.grants()]

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.leases.tidy()


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_lease_shows_its_job_from_when_it_can_be_had_until_it_is_given_back(play: Play) -> None:
    play.leases.ask("w1", "a", "n1")
    assert play.granted() == []
    assert play.holder.shown == {}
    play.made[0].come("3")
    ((worker, place),) = play.leases.grants()
    assert (worker, place.env["CUDA_VISIBLE_DEVICES"]) == ("w1", "3")
    assert play.holder.shown == {"w1": "a"}
    play.leases.give_back("w1")
    assert play.holder.shown == {}


def test_a_lease_that_is_empty_is_taken_again_and_shows_the_next_job(play: Play) -> None:
    play.leases.ask("w1", "a", "n1")
    play.made[0].come()
    assert play.granted() == ["w1"]
    play.leases.give_back("w1")
    play.leases.ask("w2", "b", "n1")
    assert play.granted() == ["w2"]
    assert play.holder.shown == {"w2": "b"}
    assert len(play.made) == 1


def test_who_waits_for_a_lease_gets_one_that_is_given_back(play: Play) -> None:
    play.leases.ask("w1", "a", "n1")
    play.made[0].come()
    play.leases.ask("w2", "b", "n1")
    assert play.granted() == ["w1"]
    play.leases.give_back("w1")
    assert play.granted() == ["w2"]
    assert [reservation.times_released for reservation in play.made] == [0, 1]


def test_a_lease_that_ray_has_no_room_for_is_left_when_it_is_not_wanted_any_more(play: Play) -> None:
    play.leases.ask("w1", "a", "n1")
    assert play.leases.withdraw("w1")
    assert play.made[0].times_released == 1
    play.made[0].come()
    play.made[0].lost()
    assert (play.granted(), play.holder.shown) == ([], {})


@pytest.mark.parametrize("how", ["its group is removed", "its holder dies"])
def test_a_lease_that_is_taken_away_is_told_unless_its_node_went(play: Play, how: str) -> None:
    for worker, node in (("w1", "n1"), ("w2", "n2")):
        play.leases.ask(worker, "a", node)
        play.made[-1].come()
        assert play.granted() == [worker]
        play.made[-1].lost() if how == "its group is removed" else play.holder.die()
    assert play.holder.shown == {}
    play.wait(4.0)
    assert play.lost == []
    play.leases.lose("n2")
    play.wait(2.0)
    assert play.lost == ["w1"]
    play.leases.give_back("w1")
    play.leases.close()


def test_a_lease_that_stays_empty_is_given_back_to_ray(play: Play) -> None:
    play.leases.ask("w1", "a", "n1")
    play.made[0].come()
    assert play.granted() == ["w1"]
    play.wait(60.0)
    play.leases.give_back("w1")
    play.wait(9.0)
    assert play.made[0].times_released == 0
    play.wait(2.0)
    assert play.made[0].times_released == 1
    assert play.leases.abandoned() == ["1"]


SOME = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["ask", "ask", "lose"]), SOME.map(lambda some: NODES[some % len(NODES)])),
    st.tuples(st.sampled_from(["ready", "ready", "lost", "withdraw", "give back"]), SOME),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 20.0])),
)


@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_each_lease_is_left_once_and_shows_who_has_it(steps: list[tuple[str, Any]]) -> None:
    play, asked = Play(), 0
    had: Counter[str] = Counter()
    sitting: list[str] = []
    for what, how in steps:
        coming = [reservation for reservation in play.made if not reservation.came]
        if what == "ask":
            asked += 1
            play.leases.ask(f"w{asked}", "a", how)
        elif what == "lose":
            play.leases.lose(how)
        elif what == "ready" and coming:
            coming[how % len(coming)].come()
        elif what == "lost" and play.made:
            play.made[how % len(play.made)].lost()
        elif what == "withdraw":
            play.leases.withdraw(f"w{asked - how}")
        elif what == "give back" and sitting:
            play.leases.give_back(sitting.pop(how % len(sitting)))
        elif what == "wait":
            play.wait(how)
        granted = play.granted()
        sitting += granted
        had.update(granted)
        assert set(play.holder.shown) <= set(sitting)
        assert len(play.holder.shown) <= sum(reservation.times_released == 0 for reservation in play.made)
    assert set(had.values()) <= {1}, "nobody is placed twice"
    play.leases.close()
    assert play.is_closed
    assert play.holder.shown == {}
