"""A study of unknown speed on a cluster without nodes: one is launched to measure on, and let go of."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from launching import prepare
from made_up_site import MadeUpCluster
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, NodeAdded, NodeLaunched, NodeRefused, NodeReleased
from stretto.core.resources import Resources
from stretto.driving.drive import RealSubstrate
from stretto.driving.local_target import ThisMachine
from stretto.driving.ray_target import RayCluster
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.substrate import TrainingSpec
from stretto.driving.target import OpenTarget
from stretto.inputs.profile import ProbedNode, read_profile
from stretto.launch.expect import expect
from stretto.launch.tune import StudyLaunch
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance, Offer
from stretto.profiling.launched_node import LOOK_S, instance_to_probe, lent_node
from stretto.profiling.origin import node_to_launch
from stretto.profiling.probe_data import ProbeProgress
from stretto.runs.begin import begin
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.results import tune_result
from study_command import StudyCommand
from tune_world import STUDY, endless, write_study

BOX = Instance(name="box", gpus=2, usd_per_hour=3.6)
FAST = Instance(name="fast", gpus=2, usd_per_hour=36.0, speed=2.0)
NODE = Node("tiny-probe-box-1", Resources(gpu=2), "box")
OTHERS = Node("other-box-1", Resources(gpu=4))
"""That another run has launched."""
UNKNOWN = (
    STUDY[: STUDY.index("[profile]")].replace("slots = 2", "")
    + """
[cluster]
max_nodes = 4
init_s = 10
[[cluster.instance]]
name = "box"
gpus = 2
usd_per_hour = 3.6
[ray]
launch = "up {name} {instance}"
start_timeout = "2m"
"""
)


class ScriptedFleet:
    """Nodes come as the test says, one thing told at every look."""

    def __init__(self, *news: Event) -> None:
        self.news = list(news)
        self.wishes: list[Wish] = []
        self.closed = 0

    def provision(self, wish: Wish, t_s: float) -> Sequence[Event]:
        del t_s
        self.wishes.append(wish)
        return [NodeLaunched(t_s=0.0, node=NODE)]

    def look(self, t_s: float) -> Sequence[Event]:
        return [dataclasses.replace(self.news.pop(0), t_s=t_s)] if self.news else []

    def recall(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        del history, t_s
        return []

    def release_all(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        del history, t_s
        return []

    def close(self) -> None:
        self.closed += 1


CAME = NodeAdded(t_s=25.0, node=NODE, queue_s=5.0, init_s=20.0)
OFFER = Offer(instances=(FAST, BOX), max_nodes=2, billing=Billing())


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def now_s(self) -> float:
        return self.s

    def sleep(self, s: float) -> None:
        self.s += s


class TestLending:
    def test_the_type_that_profiles_are_about_is_launched(self) -> None:
        assert instance_to_probe(OFFER) == BOX
        assert instance_to_probe(dataclasses.replace(OFFER, instances=(FAST,))) == FAST

    def test_a_node_costs_from_its_launch_until_it_is_let_go_of(self) -> None:
        fleet, clock = ScriptedFleet(NodeReleased(t_s=1.0, node_id="another"), CAME), Clock()
        with lent_node(fleet, OFFER, within_s=60.0, now_s=clock.now_s, sleep=clock.sleep) as node:
            assert fleet.wishes == [Wish((("box", 1),))]
            clock.s = 1100.0
        assert fleet.closed == 1
        told = node.told(3.0)
        assert told.cost_usd == pytest.approx(0.1)
        assert told == ProbedNode(instance="box", queue_s=5.0, init_s=23.0, cost_usd=told.cost_usd)

    def test_it_costs_until_it_is_gone(self) -> None:
        clock = Clock()

        class Slow(ScriptedFleet):
            def close(self) -> None:
                super().close()
                clock.s += 50.0

        with lent_node(Slow(CAME), OFFER, within_s=60.0, now_s=clock.now_s, sleep=clock.sleep) as node:
            clock.s = 1100.0
        assert node.cost_usd == pytest.approx(0.15)

    def test_a_refusal_is_told_with_its_reason(self) -> None:
        refused = NodeRefused(t_s=1.0, instance="box", count=1, why="no quota (log: a.log)")
        fleet, clock = ScriptedFleet(refused), Clock()
        lent = lent_node(fleet, OFFER, within_s=60.0, now_s=clock.now_s, sleep=clock.sleep)
        with pytest.raises(InputError, match=r"no quota \(log: a\.log\)"), lent:
            pytest.fail("there is none")
        assert fleet.closed == 1

    def test_a_node_that_does_not_come_is_not_waited_for_beyond_the_time(self) -> None:
        fleet, clock = ScriptedFleet(), Clock()
        lent = lent_node(fleet, OFFER, within_s=60.0, now_s=clock.now_s, sleep=clock.sleep)
        with pytest.raises(InputError, match=r"after 1m 00s.*start_timeout"), lent:
            pytest.fail("there is none")
        assert clock.s <= 1060.0 + 2 * LOOK_S
        assert fleet.closed == 1

    def test_whoever_is_ended_by_a_signal_lets_go_of_it(self) -> None:
        fleet, clock = ScriptedFleet(CAME), Clock()
        lent = lent_node(fleet, OFFER, within_s=60.0, now_s=clock.now_s, sleep=clock.sleep)
        with pytest.raises(KeyboardInterrupt), lent:
            os.kill(os.getpid(), signal.SIGTERM)
        assert fleet.closed == 1


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ScriptedFleet]:
    """Those that were made, of a cluster that has no node of its own, only one that another run pays for."""
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, UNKNOWN)
    made: list[ScriptedFleet] = []

    def fleet(folder: RunFolder, purpose: str) -> ScriptedFleet:
        assert (folder.name, purpose) == ("tiny", "probe")
        made.append(ScriptedFleet(CAME))
        return made[-1]

    def look(offer: Offer) -> MadeUpCluster:
        up = any(not fleet.closed for fleet in made)
        there = (OTHERS, dataclasses.replace(NODE, instance="")) if up else (OTHERS,)
        return MadeUpCluster(
            slots=2,
            there=there,
            kept=there,
            offered=offer,
            make_fleet=fleet,
            look=lambda: look(offer),
        )

    @contextmanager
    def opened(self: RayCluster) -> Iterator[OpenTarget]:
        assert self.request.rented is not None
        yield look(self.request.rented.offer)

    monkeypatch.setattr(RayCluster, "opened", opened)
    return made


def checked(deadline_s: float | None = None, budget_usd: float | None = None) -> CheckedStudy:
    return check_request(
        TuneRequest(
            study=Path("study.toml"),
            work="train.py:train",
            policy="rubberband",
            on="ray",
            deadline_s=deadline_s,
            budget_usd=budget_usd,
        )
    )


def to_launch(asked: CheckedStudy) -> Instance | None:
    with asked.target.opened() as target:
        return node_to_launch(asked, target)


def test_it_is_measured_once_and_what_the_node_took_is_believed(fleets: list[ScriptedFleet]) -> None:
    asked = checked()
    assert to_launch(asked) == BOX
    prepared = prepare(asked, make=endless)
    (fleet,) = fleets
    assert fleet.closed == 1
    measured = read_profile(asked.folder.profile)
    assert measured.slots == BOX.gpus, "on that node alone"
    node = measured.node
    assert node is not None
    assert (node.queue_s, node.init_s) == (5.0, 20.0)
    profile = prepared.tuning.profile
    assert (profile.queue_s.mean, profile.init_s.mean) == (5.0, 15.0), "10 s were believed, and 20 s seen"
    assert profile.latency.epoch_s == pytest.approx(10.0, rel=0.2)
    assert to_launch(asked) is None
    prepare(asked, make=endless)
    assert len(fleets) == 1


@pytest.mark.usefixtures("fleets")
def test_the_time_of_a_probe_is_a_share_of_what_starting_nodes_leaves() -> None:
    said: list[ProbeProgress] = []
    prepare(checked(deadline_s=600.0), make=endless, on_progress=said.append)
    assert said[0] == ProbeProgress(0.0, 120.0, "waiting for a box, launched for this")
    assert said[1].time_s == pytest.approx((600.0 - 25.0) / 8, abs=2.0)


def test_a_deadline_that_is_over_before_nodes_are_there_is_told(fleets: list[ScriptedFleet]) -> None:
    with pytest.raises(InputError, match=r"deadline of 20s leaves no time.*box takes 25s"):
        prepare(checked(deadline_s=20.0), make=endless)
    assert fleets[0].closed == 1


@pytest.mark.usefixtures("fleets")
def test_what_it_cost_counts_in_the_end() -> None:
    asked = checked()
    prepared = prepare(asked, make=endless)
    node = read_profile(asked.folder.profile).node
    assert node is not None
    assert node.cost_usd == pytest.approx(0.06, abs=0.01), "a minute is the least that is billed"
    spec = RunSpec(kind="tune", started_at_s=0.0, asked=asked.asked, slots=8, offer=prepared.offer)
    begin(asked.folder, dataclasses.replace(spec, file=str(Path("study.toml").absolute())))
    assert tune_result(asked.folder, None).cost_usd == node.cost_usd


@pytest.mark.usefixtures("fleets")
def test_it_is_taken_off_the_budget_and_added_to_what_is_expected() -> None:
    asked = checked(budget_usd=10.0)
    prepared = prepare(asked, make=endless)
    assert asked.measuring_usd > 0.0
    assert prepared.tuning.limits.budget_usd == 10.0 - asked.measuring_usd
    planned = prepared.expectation.planned
    assert planned is not None
    assert planned.tuning.limits == prepared.tuning.limits
    expected = expect(
        asked.outline,
        prepared.tuning,
        asked.policy_for(prepared.tuning),
        policy_name="rubberband",
        options={},
    )
    assert expected.cost_usd is not None
    assert prepared.expectation.cost_usd is not None
    spent_usd = prepared.expectation.cost_usd.mean - expected.cost_usd.mean
    assert spent_usd == pytest.approx(asked.measuring_usd)


@pytest.mark.usefixtures("fleets")
def test_the_budget_may_be_spent_with_it() -> None:
    with pytest.raises(InputError, match=r"budget of \$0\.01 is spent: measuring .* has cost \$0\.06"):
        prepare(checked(budget_usd=0.01), make=endless)
    prepare(checked(budget_usd=10.0), make=endless)


def test_two_at_a_time_do_not_take_the_node_from_each_other(fleets: list[ScriptedFleet]) -> None:
    asked = checked()

    def other(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        with ThreadPoolExecutor() as others:
            refused = others.submit(prepare, _without_nodes(asked), make=endless).exception()
        assert "working on this run" in str(refused)
        return endless(training, folder, clock)

    def _without_nodes(asked: CheckedStudy) -> CheckedStudy:
        fleets[-1].closed += 1  # the other command was given before the node was there
        return asked

    prepare(asked, make=other)


class TestAsking:
    @pytest.fixture
    def stretto(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> StudyCommand:
        return StudyCommand(monkeypatch, capsys)

    def test_nothing_is_launched_before_somebody_agrees(
        self, stretto: StudyCommand, fleets: list[ScriptedFleet]
    ) -> None:
        told = stretto.refused(
            "tune", "study.toml", "train.py:train", "--policy", "rubberband", "--on", "ray"
        )
        assert "a box is launched for it, at $3.6 an hour" in told
        assert "Add --yes" in told
        assert fleets == []

    @pytest.mark.usefixtures("fleets")
    def test_what_measuring_took_of_the_budget_is_told(
        self, stretto: StudyCommand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stopped(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ThisMachine, "make", lambda _, *given: endless(*given))
        monkeypatch.setattr(StudyLaunch, "start", stopped)
        words = ("--policy", "rubberband", "--on", "ray", "--budget", "10", "--yes")
        code, _, err = stretto("tune", "study.toml", "train.py:train", *words)
        assert code == 1
        assert "Measuring has cost $0.06 of the $10 budget" in err

    def test_a_plan_says_what_it_would_take(self, stretto: StudyCommand, fleets: list[ScriptedFleet]) -> None:
        told = stretto.refused("plan", "study.toml", "train.py:train", "--on", "ray")
        assert "the cluster has no node to measure on" in told
        assert "`stretto tune` launches a box for that, at $3.6 an hour" in told
        assert fleets == []
