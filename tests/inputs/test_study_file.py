"""Study files: the example reads as meant, and whatever is wrong is said with its place."""

from __future__ import annotations

import copy
import math
import random
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.inputs.cluster import MachineSpec
from stretto.inputs.study import EXAMPLE_STUDY, StudyFile, outline_of, parse_study, read_study, study_of
from stretto.planning.profile import Latency, Spread
from stretto.pricing.billing import Billing, Per
from stretto.search.study import Direction, halving_stages

HERE = Path("study.toml")
EXAMPLE: dict[str, Any] = tomllib.loads(EXAMPLE_STUDY)


def changed(section: str, **values: Any) -> dict[str, Any]:
    """The example with some keys of one section set; None takes a key away."""
    tables = copy.deepcopy(EXAMPLE)
    for key, value in values.items():
        tables.setdefault(section, {})[key] = value
        if value is None:
            del tables[section][key]
    return tables


def read(section: str, **values: Any) -> StudyFile:
    return study_of(changed(section, **values), HERE)


class TestExample:
    def test_it_is_the_study_of_the_documentation(self) -> None:
        found = parse_study(EXAMPLE_STUDY, HERE)
        tuning = found.tuning
        assert (tuning.study.trials, tuning.study.metric, tuning.study.direction) == (64, "accuracy", "max")
        assert [stage.trials for stage in halving_stages(tuning.study)] == [64, 32, 16, 8, 4, 2, 1]
        assert halving_stages(tuning.study)[-1].last_epoch == 508
        assert [(one.name, one.gpus, one.usd_per_hour) for one in tuning.instances] == [
            ("p3.8xlarge", 4, 12.24)
        ]
        assert (tuning.max_nodes, found.fixed_nodes) == (16, 4)
        assert (tuning.limits.deadline_s, tuning.limits.budget_usd, tuning.limits.q) == (7200.0, 120.0, 0.9)
        assert tuning.billing == Billing()
        assert tuning.profile.scaling.points == ((1, 1.0), (2, 1.87), (4, 3.42), (8, 5.6))
        assert (tuning.profile.queue_s, tuning.profile.init_s) == (Spread(40.0, 10.0), Spread(30.0, 8.0))
        assert [one.name for one in found.space.dimensions] == ["lr", "momentum"]
        assert (found.sampler, found.world.curves) == ("random", "builtin:resnet")
        assert found.world.profile == tuning.profile

    def test_every_field_has_a_comment(self) -> None:
        fields = [line for line in EXAMPLE_STUDY.splitlines() if "=" in line.partition("#")[0]]
        assert len(fields) > 25
        assert not [line for line in fields if "#" not in line]

    def test_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "study.toml"
        path.write_bytes(("\ufeff" + EXAMPLE_STUDY.replace("\n", "\r\n")).encode())
        assert read_study(path).tuning == parse_study(EXAMPLE_STUDY, HERE).tuning

    def test_the_rest_may_be_left_out(self) -> None:
        least: dict[str, Any] = {
            "study": {"name": "s", "metric": "loss", "direction": "min", "trials": 3},
            "halving": {"rungs": [], "eta": 2, "max_epochs": 5},
            "space": {"lr": {"float": [0, 1]}},
            "cluster": {"instances": ["p3.2xlarge"], "max_nodes": 2},
            "profile": {"epoch_s": 10, "speedup": {"1": 1}},
        }
        found = study_of(least, HERE)
        assert found.tuning.study.direction is Direction.MIN
        assert found.tuning.profile.latency == Latency(epoch_s=10.0)
        assert (found.tuning.limits.deadline_s, found.tuning.limits.budget_usd) == (None, None)
        assert (found.fixed_nodes, found.sampler, found.world.curves) == (2, "random", "builtin:resnet")


class TestValues:
    def test_rungs_three_ways(self) -> None:
        assert read("halving", rungs="geometric").tuning.study.rungs == (4, 8, 16, 32, 64, 128, 256)
        assert read("halving", rungs=[3, 9], min_epochs=None).tuning.study.rungs == (3, 9)

    def test_an_sd_alone_is_shared_by_trial_node_and_epoch(self) -> None:
        latency = read("profile", epoch_s={"mean": 35, "sd": 7}).tuning.profile.latency
        assert latency.trial_sd == latency.node_sd == latency.epoch_sd
        assert (1 + latency.trial_sd**2) ** 3 == pytest.approx(1 + (7 / 35) ** 2)

    def test_sds_written_out_are_seconds(self) -> None:
        found = read("profile", epoch_s={"mean": 40, "trial_sd": 4, "epoch_sd": 2})
        assert found.tuning.profile.latency == Latency(epoch_s=40.0, trial_sd=0.1, epoch_sd=0.05)

    @pytest.mark.parametrize(("written", "seconds"), [("1h30m", 5400.0), (90, 90.0), ("20m", 1200.0)])
    def test_deadlines(self, written: object, seconds: float) -> None:
        assert read("limits", deadline=written).tuning.limits.deadline_s == seconds

    def test_the_world_differs_where_it_says_so(self) -> None:
        truth = {"epoch_s": 50, "start_s": 90, "queue_s": {"mean": 100}, "spanning": 0.2, "curves": "x.csv"}
        found = read("world", **truth)
        believed, true = found.tuning.profile, found.world.profile
        assert (true.latency, true.start_s) == (Latency(epoch_s=50.0), 90.0)
        assert (true.queue_s, true.init_s) == (Spread(100.0), believed.init_s)
        assert (true.scaling.spanning, true.scaling.points) == (0.2, believed.scaling.points)
        assert believed == parse_study(EXAMPLE_STUDY, HERE).tuning.profile
        faster = {"1": 1.0, "16": 9.0}
        assert read("world", speedup=faster).world.profile.scaling.points == ((1, 1.0), (16, 9.0))

    def test_billing(self) -> None:
        billing = {
            "billing": "function",
            "minimum_s": 0,
            "granularity_s": 60,
            "usd_per_gb": 0.1,
            "dataset_gb": 3,
        }
        assert read("cluster", **billing).tuning.billing == Billing(
            per=Per.FUNCTION, minimum_s=0.0, granularity_s=60.0, usd_per_gb=0.1, dataset_gb=3.0
        )

    def test_instances_from_everywhere(self, tmp_path: Path) -> None:
        (tmp_path / "prices.csv").write_text("instance,gpus,usd_per_hour\np3.8xlarge,4,1.5\nrack,8,3\n")
        box = {"name": "box", "gpus": 2, "usd_per_hour": 0.5}
        study = tmp_path / "study.toml"
        picked = study_of(changed("cluster", prices="prices.csv", instance=[box]), study)
        assert [(one.name, one.usd_per_hour) for one in picked.tuning.instances] == [
            ("p3.8xlarge", 1.5),
            ("box", 0.5),
        ]
        listed = study_of(changed("cluster", prices="prices.csv", instances=None), study)
        assert [one.name for one in listed.tuning.instances] == ["p3.8xlarge", "rack"]

    def test_a_table_of_curves_needs_no_space(self) -> None:
        tables = changed("world", curves="curves.csv")
        del tables["space"]
        assert not study_of(tables, HERE).space


class TestRefused:
    @pytest.mark.parametrize(
        ("section", "values", "place", "words"),
        [
            ("study", {"trails": 3}, "study", "Did you mean trials"),
            ("study", {"trials": None}, "study.trials", "missing"),
            ("study", {"trials": 0}, "study.trials", "0 is not a whole number from 1"),
            ("study", {"trials": 2.0}, "study.trials", "2.0 is not a whole"),
            ("study", {"trials": True}, "study.trials", "True is not a whole"),
            ("study", {"direction": "up"}, "study.direction", "one of max, min"),
            ("study", {"sampler": "bayes"}, "study.sampler", "one of random, tpe"),
            ("study", {"name": ""}, "study.name", "non-empty"),
            ("halving", {"eta": 1}, "halving.eta", "from 2"),
            ("halving", {"rungs": "linear"}, "halving.rungs", "one of additive, geometric"),
            ("halving", {"rungs": [4, 2], "min_epochs": None}, "halving.rungs", "rung 2"),
            ("halving", {"rungs": [4, 508], "min_epochs": None}, "halving.rungs", "rung 508"),
            ("halving", {"rungs": [4.0], "min_epochs": None}, "halving.rungs", "whole numbers"),
            ("halving", {"rungs": [4]}, "halving.min_epochs", "written out"),
            ("halving", {"min_epochs": 508}, "halving.min_epochs", "below max_epochs 508. Lower it, or"),
            ("halving", {"min_epochs": 1, "max_epochs": 1}, "halving.min_epochs", "1. Raise max_epochs, or"),
            ("space", {"lr": math.nan}, "space.lr", r"nan is not.*Write .*\{ log = \[1e-4, 1e-1\] \}"),
            ("space", {"lr": 0.1}, "space.lr", r"says no kind.*\{ log = \[1e-4, 1e-1\] \}"),
            ("space", {"lr": {"log": [math.nan, 1]}}, "space.lr.log[0]", r"Write \{ float"),
            ("space", {"lr": {"choice": [math.nan]}}, "space.lr.choice[0]", "such as 0.1"),
            ("space", {"é" * 51: {"log": [0.1, 1]}}, "space", "has 102 bytes. Take one of 100 at most"),
            ("study", {"trials": math.nan}, "study.trials", "Give a finite number"),
            ("space", {"lr": {"log": [0, 1]}}, "space.lr", "above 0"),
            ("limits", {"deadline": "soon"}, "limits.deadline", "'soon' is not a duration"),
            ("limits", {"deadline": 0}, "limits.deadline", "above 0"),
            ("limits", {"deadline": "9" * 400}, "limits.deadline", "above 0"),
            ("limits", {"budget_usd": -1}, "limits.budget_usd", "-1 is not"),
            ("limits", {"q": 1.0}, "limits.q", "below 1"),
            ("limits", {"q": math.nan}, "limits.q", "nan is not"),
            ("cluster", {"instances": ["p3.8xlage"]}, "cluster.instances", "Did you mean p3.8xlarge"),
            ("cluster", {"instances": []}, "cluster.instances", "nothing to train on"),
            ("cluster", {"instances": ["p3.8xlarge"] * 2}, "cluster.instances", "twice"),
            ("cluster", {"instances": "p3.8xlarge"}, "cluster.instances", "a list of names"),
            ("cluster", {"instance": [{"name": "a"}]}, "cluster.instance[0]", "gpus is missing"),
            ("cluster", {"instance": {"name": "a"}}, "cluster.instance", r"\[\[cluster.instance\]\]"),
            ("cluster", {"nodes": 17}, "cluster.nodes", "from 1 to 16"),
            ("cluster", {"billing": "hour"}, "cluster.billing", "one of instance, function"),
            ("cluster", {"granularity_s": 0}, "cluster.granularity_s", "above 0"),
            ("cluster", {"queue_s": {"mean": -1}}, "cluster.queue_s.mean", "0 or more"),
            ("cluster", {"queue_s": {"mean": 1, "std": 2}}, "cluster.queue_s", "Did you mean sd"),
            ("cluster", {"init_s": {"mean": 0, "sd": 1}}, "cluster.init_s.sd", "times the mean"),
            ("profile", {"epoch_s": 0}, "profile.epoch_s", "above 0"),
            ("profile", {"epoch_s": {"mean": 3, "sd": math.inf}}, "profile.epoch_s.sd", "inf is not"),
            ("profile", {"epoch_s": {"mean": 3, "sd": 1, "node_sd": 1}}, "profile.epoch_s.node_sd", "covers"),
            ("profile", {"speedup": {"2": 1.9}}, "profile.speedup", '"1" = 1.0'),
            ("profile", {"speedup": {"1": 1.1}}, "profile.speedup", "at speed 1"),
            (
                "profile",
                {"speedup": {"1": 1.0, "two": 2}},
                "profile.speedup",
                "'two' is not a number of GPUs",
            ),
            ("profile", {"speedup": {"1": 1.0, "2": 0}}, "profile.speedup.2", "above 0"),
            ("profile", {"speedup": [1.0]}, "profile.speedup", "a table such as"),
            ("profile", {"spanning": 1}, "profile.spanning", "below 1"),
            ("profile", {"sync_s": 3}, "profile", "not known"),
            ("world", {"start_s": "1m"}, "world.start_s", "'1m' is not a finite number"),
        ],
    )
    def test_with_place_value_rule_and_remedy(
        self, section: str, values: dict[str, Any], place: str, words: str
    ) -> None:
        with pytest.raises(InputError, match=words) as caught:
            read(section, **values)
        assert caught.value.where == f"study.toml: {place}"
        assert caught.value.remedy

    @pytest.mark.parametrize("section", ["study", "halving", "space", "cluster", "profile"])
    def test_a_section_that_is_missing_or_no_table(self, section: str) -> None:
        for value in (None, 3):
            tables = copy.deepcopy(EXAMPLE)
            del tables[section]
            if value is not None:
                tables[section] = value
            with pytest.raises(InputError) as caught:
                study_of(tables, HERE)
            assert caught.value.where.startswith(f"study.toml: {section}")

    def test_an_unknown_section(self) -> None:
        with pytest.raises(InputError, match="Did you mean halving"):
            study_of({**EXAMPLE, "halfing": {}}, HERE)

    def test_what_is_nested_too_deeply(self) -> None:
        with pytest.raises(InputError, match=r"study\.toml: is nested too deeply\. Write it flat"):
            parse_study("a = " + "[" * 2000 + "]" * 2000, HERE)

    def test_a_rule_is_said_once(self) -> None:
        with pytest.raises(InputError) as caught:
            read("study", trials=-3)
        assert str(caught.value).count("a whole number from 1 to") == 1

    def test_a_file_of_jobs(self) -> None:
        with pytest.raises(InputError, match=r"is a file of jobs, not a study\. `stretto run study\.toml`"):
            study_of({"job": [{}]}, HERE)

    def test_a_price_list_that_is_not_there(self) -> None:
        with pytest.raises(InputError, match=r"nowhere\.csv"):
            read("cluster", prices="nowhere.csv")

    @pytest.mark.parametrize(
        "text",
        [
            "[study",
            "a = " + "[" * 5000,
            "a" + ".a" * 5000 + " = 1",
            "a = " + "9" * 5000,
            "a = 0x" + "f" * 5000,
            "[study]\nname = 1979-05-27",
        ],
    )
    def test_texts_that_are_no_study(self, text: str) -> None:
        with pytest.raises(InputError, match=r"study\.toml"):
            parse_study(text, HERE)

    @pytest.mark.parametrize("content", [b"\xff", b"\x00"])
    def test_files_that_are_no_text(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "study.toml"
        path.write_bytes(content)
        for wrong in (path, tmp_path, tmp_path / "none.toml"):
            with pytest.raises(InputError, match=str(wrong)):
                read_study(wrong)


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers() | st.text(max_size=3), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.floats() | st.text(max_size=3), max_size=2)
)


def spoil(rng: random.Random, table: dict[str, Any], junk: Any) -> None:
    """Put junk somewhere into the tables, or take something away."""
    key = rng.choice(list(table) or ["new"])
    inner = table.get(key)
    if isinstance(inner, dict) and rng.random() < 0.8:
        spoil(rng, inner, junk)
    elif rng.random() < 0.2:
        table.pop(key, None)
    else:
        table[key] = junk


class TestFuzz:
    @settings(max_examples=400, deadline=None)
    @given(junk=st.lists(JUNK, min_size=1, max_size=3), seed=st.integers(0, 10**6))
    def test_spoilt_tables_are_read_or_refused(self, junk: list[Any], seed: int) -> None:
        tables, rng = copy.deepcopy(EXAMPLE), random.Random(seed)
        for one in junk:
            spoil(rng, tables, one)
        found = refused = None
        try:
            found = study_of(tables, HERE)
        except InputError as error:
            refused = str(error)
        if found is None:
            assert refused is not None
            assert refused.startswith("study.toml")
        else:
            assert math.isfinite(found.tuning.profile.latency.node_sd + found.world.profile.start_s)

    @settings(max_examples=200, deadline=None)
    @given(at=st.integers(0, len(EXAMPLE_STUDY)), cut=st.integers(0, 30), text=st.text(max_size=8))
    def test_spoilt_texts_are_read_or_refused(self, at: int, cut: int, text: str) -> None:
        spoilt = EXAMPLE_STUDY[:at] + text + EXAMPLE_STUDY[at + cut :]
        refused = ""
        try:
            assert parse_study(spoilt, HERE).tuning.instances
        except InputError as error:
            refused = str(error)
        assert not refused or "study.toml" in refused or "csv" in refused


def test_types_of_ones_own_may_be_picked_by_name() -> None:
    own = '[[cluster.instance]]\nname = "our-box"\ngpus = 8\nusd_per_hour = 4.0\n\n[profile]'
    text = EXAMPLE_STUDY.replace("[profile] ", own + " ", 1).replace(
        '["p3.8xlarge"]', '["our-box", "p3.8xlarge"]'
    )
    found = parse_study(text, HERE).tuning.instances
    assert [(one.name, one.gpus) for one in found] == [("our-box", 8), ("p3.8xlarge", 4)]


class TestOneMachine:
    LEAST: ClassVar[dict[str, Any]] = {
        "study": {"name": "s", "metric": "loss", "direction": "min", "trials": 3},
        "halving": {"rungs": [], "eta": 2, "max_epochs": 5},
        "space": {"lr": {"float": [0, 1]}},
    }

    def test_a_study_that_is_trained_here_needs_no_cluster_and_no_profile(self) -> None:
        found = outline_of(self.LEAST, HERE)
        assert (found.profile, found.has_cluster, found.machine) == (None, False, MachineSpec())
        assert (found.entry, found.command) == (None, ())

    def test_to_plan_it_both_are_needed(self) -> None:
        with pytest.raises(InputError, match=r"profile is missing.*stretto profile"):
            study_of(self.LEAST, HERE)
        profile = {"epoch_s": 10, "speedup": {"1": 1}}
        with pytest.raises(InputError, match=r"cluster is missing.*machine"):
            study_of({**self.LEAST, "profile": profile}, HERE)

    def test_a_machine_with_slots_is_a_cluster(self) -> None:
        machine = {"slots": 4, "usd_per_slot_hour": 0.5}
        profile = {"epoch_s": 10, "speedup": {"1": 1}}
        found = study_of({**self.LEAST, "profile": profile, "machine": machine}, HERE)
        assert [(one.name, one.gpus, one.usd_per_hour) for one in found.tuning.instances] == [
            ("slot", 1, 0.5)
        ]
        assert (found.tuning.max_nodes, found.fixed_nodes) == (4, 4)

    @pytest.mark.parametrize(
        "machine", [{"slots": 0}, {"slots": -2}, {"slots": "all"}, {"usd_per_slot_hour": -1}]
    )
    def test_nonsense_is_refused(self, machine: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="machine"):
            outline_of({**self.LEAST, "machine": machine}, HERE)

    def test_entry_and_command_exclude_each_other(self) -> None:
        study = {**self.LEAST["study"], "entry": "t.py:train", "command": ["true"]}
        with pytest.raises(InputError, match="Keep one"):
            outline_of({**self.LEAST, "study": study}, HERE)

    def test_a_measured_profile_excludes_a_written_one(self) -> None:
        with pytest.raises(InputError, match="is given beside file"):
            outline_of({**self.LEAST, "profile": {"file": "p.json", "epoch_s": 1}}, HERE)
        with pytest.raises(InputError, match=r"p\.json"):
            outline_of({**self.LEAST, "profile": {"file": "p.json"}}, HERE)
