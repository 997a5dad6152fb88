"""`plan` of a study for a cluster that is there: what `tune` would show, and do, on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from launching import planned, prepare, start
from made_up_site import MadeUpCluster
from stretto.core.cluster import Node
from stretto.driving.ray_target import RayCluster
from stretto.driving.request import TuneRequest, check_request
from stretto.driving.target import OpenTarget, node_of
from stretto.inputs.cluster import nodes_offer
from stretto.launch.to_plan import PlannableStudy
from stretto.planning.forecast import Forecast
from stretto.simulation.plan import Planned
from study_command import StudyCommand
from tune_world import STUDY, endless, simulated, write_study

RENTED = """
[cluster]
max_nodes = 4
queue_s = 30
init_s = 60
[[cluster.instance]]
name = "box"
gpus = 2
usd_per_hour = 7.2
[ray]
launch = "true {name} {instance}"
"""
KNOWN = STUDY.replace("slots = 2", "usd_per_slot_hour = 3.6")
UNKNOWN = KNOWN[: KNOWN.index("[profile]")]
DEADLINE_S = 600.0


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes of the cluster, two of them at first."""
    nodes = [node_of("a", 2), node_of("b", 2)]

    @contextmanager
    def opened(self: RayCluster) -> Iterator[OpenTarget]:
        rented, all_nodes = self.request.rented, tuple(nodes)
        offer = nodes_offer(len(nodes), 2, self.request.machine) if rented is None else rented.offer
        kept = () if rented is None else all_nodes
        yield MadeUpCluster(
            slots=4,
            machine=self.request.machine,
            there=all_nodes,
            kept=kept,
            idle=all_nodes,
            offered=offer,
        )

    monkeypatch.setattr(RayCluster, "opened", opened)
    monkeypatch.chdir(tmp_path)
    return nodes


def request(text: str) -> TuneRequest:
    study = write_study(Path(), text)
    work = None if "[profile]" in text else "train.py:train"
    return TuneRequest(study=study, work=work, policy="rubberband", on="ray", deadline_s=DEADLINE_S)


def found(text: str) -> PlannableStudy:
    return planned(request(text), make=endless)


def followed(planned: Planned | None) -> Forecast:
    assert planned is not None
    return planned.outcome.followed(planned.tuning.limits)


def as_planned(study: PlannableStudy) -> Planned:
    return study.plan(deadline_s=None, planner="search", rule="quantile", seed=0)


@pytest.mark.parametrize("text", [KNOWN + RENTED, UNKNOWN + RENTED, KNOWN, UNKNOWN])
def test_it_is_the_plan_that_tune_shows(text: str) -> None:
    study = found(text)
    tuned = dataclasses.replace(request(text), work="train.py:train")
    prepared = prepare(check_request(tuned), make=endless)
    shown, tuned_by = followed(as_planned(study)), followed(prepared.expectation.planned)
    assert shown.due_s < DEADLINE_S - 60.0, "no other is chosen if planning takes a while"
    assert shown.plan == tuned_by.plan
    assert (shown.finish_s, shown.cost_usd) == (tuned_by.finish_s, tuned_by.cost_usd)


@pytest.mark.parametrize("text", [KNOWN + RENTED, UNKNOWN + RENTED])
def test_nodes_that_are_there_are_counted_on(there: list[Node], text: str) -> None:
    with_two = as_planned(found(text)).outcome.earliest.due_s
    del there[1]
    with_one = as_planned(found(text)).outcome.earliest.due_s
    assert with_two < with_one - 10.0


@pytest.mark.parametrize("text", [KNOWN, UNKNOWN])
def test_a_fixed_cluster_is_planned_for_by_its_nodes(text: str) -> None:
    study = found(text)
    assert {stage.instance for stage in followed(as_planned(study)).plan.stages} == {"slots-2"}
    assert study.file.tuning.max_nodes == 2
    assert "Planned for 4 slots, of the cluster." in study.notes


@pytest.mark.parametrize("usd_per_slot_hour", [0.0, 3.6])
def test_nodes_that_are_there_cost_what_was_predicted(usd_per_slot_hour: float) -> None:
    """Those of one's own at their price, from start to end; nothing is rented where they are enough."""
    text = KNOWN.replace("3.6", str(usd_per_slot_hour)) + RENTED
    tuned = dataclasses.replace(request(text), work="train.py:train")
    prepared = prepare(check_request(tuned), make=endless)
    assert max(stage.nodes for stage in followed(prepared.expectation.planned).plan.stages) <= 2
    result = start(prepared, make=simulated)
    assert result.predicted_cost_usd is not None
    assert result.cost_usd == pytest.approx(4 * usd_per_slot_hour / 3600 * result.finished_s, rel=0.02)
    assert result.predicted_cost_usd.mean == pytest.approx(result.cost_usd, rel=0.05)


def test_a_budget_counts_them() -> None:
    finish_s = followed(as_planned(found(KNOWN + RENTED))).finish_s.mean
    own_usd = 4 * 3.6 / 3600 * finish_s
    for budget_usd, is_enough in ((0.9 * own_usd, False), (1.2 * own_usd, True)):
        asked = dataclasses.replace(request(KNOWN + RENTED), budget_usd=budget_usd)
        assert as_planned(planned(asked)).outcome.feasible == is_enough


def test_the_command_says_what_it_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stretto.cli.plan.study_to_plan", partial(planned, make=endless))
    write_study(Path(), KNOWN + RENTED)
    stretto = StudyCommand(monkeypatch, capsys)
    code, out, err = stretto("plan", "study.toml", "--on", "ray", "--deadline", "10m")
    assert "slots per trial" in out, "as tune calls them"
    assert (code, err) == (0, "Planned for [cluster], whose nodes join the cluster.\n")
    told = stretto.json("plan", "study.toml", "--on", "ray", "--deadline", "10m")
    assert (told["deadline_s"], told["feasible"]) == (600.0, True)


@pytest.mark.parametrize(
    ("usd_per_slot_hour", "box_usd", "told"), [(0.0, 7.2, "a box costs $7.2"), (3.6, 0.0, "$7.2")]
)
def test_whatever_may_cost_is_agreed_to(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    usd_per_slot_hour: float,
    box_usd: float,
    told: str,
) -> None:
    """Also if the first type that can be rented is free, or all are, and what is there is not."""
    free_first = '[[cluster.instance]]\nname = "free"\ngpus = 2\nusd_per_hour = 0\n[[cluster.instance]]'
    rented = RENTED.replace("[[cluster.instance]]", free_first).replace("7.2", str(box_usd))
    write_study(Path(), KNOWN.replace("3.6", str(usd_per_slot_hour)) + rented)
    words = (
        "tune",
        "study.toml",
        "train.py:train",
        "--policy",
        "rubberband",
        "--on",
        "ray",
        "--deadline",
        "10m",
    )
    code, _, err = StudyCommand(monkeypatch, capsys)(*words)
    assert code == 2
    assert told in err
    assert "without a terminal to ask on" in err
