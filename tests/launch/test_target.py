"""What a run is put on, as far as that can be seen without a cluster."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import prepare
from stretto.core.errors import InputError
from stretto.core.events import NodeAdded, NodeLost, NodeReleased, RunPaused, RunResumed, RunStarted
from stretto.driving.local_target import ThisMachine
from stretto.driving.request import TuneRequest, check_request, find_target
from stretto.driving.target import TargetRequest, node_of
from stretto.inputs.cluster import MachineSpec, nodes_offer, slots_offer
from stretto.inputs.study import outline_of, read_outline
from stretto.inputs.work import CommandLine
from stretto.journal.folds.cost import CostMeter
from stretto.planning.profile import Spread
from stretto.pricing.instances import OWN_MACHINE, Instance, Offer
from stretto.profiling.probe_data import SlotMap
from stretto.runs.begin import begin
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.store import check_unclaimed, empty_store, store_of
from stretto.substrate.fleet.commands import Commands
from stretto.substrate.local.slots import Slots
from stretto.substrate.ray.cluster import connected, resources_of
from tune_world import STUDY, write_study

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
RENTED = """
[cluster]
instances = ["g5.xlarge"]
max_nodes = 3
init_s = 30
"""


def asked(on: str, *, slots: int | None = None, store: str = "") -> TargetRequest:
    return TargetRequest(on=on, slots=slots, store=store, runs=Path("runs"), machine=MachineSpec(slots=3))


class TestSite:
    def test_this_machine_has_the_slots_of_the_flag_or_of_the_file(self) -> None:
        for slots, found in ((None, 3), (5, 5)):
            target = find_target(asked("local", slots=slots))
            assert target.asked == {"on": "local", "slots": found, "store": None}
            with target.opened() as here:
                assert here.nodes == here.held == (node_of("local", found),)
                assert here.offer == slots_offer(found, MachineSpec(slots=3))

    def test_who_rents_begins_with_nothing(self) -> None:
        assert ThisMachine(slots=2, rents=True).held == ()

    @pytest.mark.parametrize("on", ["", "kubernetes", "local:1", "rays", "ray:"])
    def test_other_places_are_refused(self, on: str) -> None:
        with pytest.raises(InputError, match="Give local, ray or ray:ADDRESS"):
            find_target(asked(on))

    @pytest.mark.parametrize("slots", [0, 1025])
    @pytest.mark.parametrize("on", ["local", "ray", "ray:10.0.0.1:6379"])
    def test_slots_are_in_range_wherever_they_are(self, on: str, slots: int) -> None:
        with pytest.raises(InputError, match=f"{slots} slots are out of range"):
            find_target(asked(on, slots=slots))

    def test_a_store_nobody_knows_is_refused_in_the_words_of_workers(self) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("fsspec")
        from stretto.torch.remote_checkpoints import RemoteStore  # noqa: PLC0415

        told = []
        for use in (lambda url: find_target(asked("local", store=url)), RemoteStore):
            with pytest.raises(InputError, match="store nowhere://x: fsspec knows no protocol") as refused:
                use("nowhere://x")
            told.append(str(refused.value))
        assert told[0] == told[1]

    def test_commands_keep_their_own_checkpoints(self) -> None:
        pytest.importorskip("fsspec")
        with pytest.raises(InputError, match="a command keeps its own"):
            find_target(asked("local", store="there")).check(CommandLine(("true",)))

    def test_a_path_is_a_store_wherever_workers_begin(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("fsspec")
        monkeypatch.chdir(tmp_path)
        assert store_of("there/", "a run") == str(tmp_path / "there" / "a run")
        assert store_of("s3://bucket/runs/", "a") == "s3://bucket/runs/a"
        (tmp_path / "there" / "a run").mkdir(parents=True)
        empty_store(store_of("there", "a run"))
        assert list((tmp_path / "there").iterdir()) == []
        empty_store("there/is/nothing")

    def test_where_a_run_was_begun_is_written_down(self, tmp_path: Path) -> None:
        study = write_study(tmp_path)
        here = check_request(TuneRequest(study=study, work=f"{tmp_path}/train.py:train"))
        assert (here.asked["on"], here.asked["slots"], here.asked["store"]) == ("local", 2, None)


class TestStore:
    """A place in a store is one run's, whatever others are called."""

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("fsspec")

    @pytest.fixture(params=["{}", "file://{}", "memory://{}"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        return str(request.param).format(tmp_path / "store")

    @staticmethod
    def begin(run_dir: Path, store: str | None, seed: int = 0) -> None:
        asked = {"policy": "x", "seed": seed, "store": store}
        begin(RunFolder(run_dir), RunSpec(kind="run", started_at_s=0.0, asked=asked, slots=1))

    @staticmethod
    def put(url: str, name: str = "jobs/a/state.pt") -> None:
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

        files, place = fsspec.core.url_to_fs(url)
        files.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{place}/{name}", b"weights")

    def test_a_run_goes_on_with_its_own(self, tmp_path: Path, store: str) -> None:
        self.begin(tmp_path / "s", store)
        self.put(store_of(store, "s"))
        for _ in range(2):
            self.begin(tmp_path / "s", store)
            check_unclaimed(store, tmp_path / "s")

    def test_a_new_run_of_an_old_name_does_not_take_over_its_checkpoints(
        self, tmp_path: Path, store: str
    ) -> None:
        self.begin(tmp_path / "s", store)
        self.put(store_of(store, "s"))
        shutil.rmtree(tmp_path / "s")
        for use in (check_unclaimed, lambda store, path: self.begin(path, store, 1)):
            with pytest.raises(InputError, match=r"another run of this name.*another --name or --store"):
                use(store, tmp_path / "s")
        assert not RunFolder(tmp_path / "s").is_begun
        self.begin(tmp_path / "t", store)
        empty_store(store_of(store, "s"))
        self.begin(tmp_path / "s", store, 1)

    def test_of_two_runs_in_different_folders_the_second_is_refused(self, tmp_path: Path, store: str) -> None:
        self.begin(tmp_path / "here" / "s", store)
        with pytest.raises(InputError, match="another run of this name"):
            self.begin(tmp_path / "there" / "s", store)

    def test_an_unclaimed_place_is_not_taken_either(self, tmp_path: Path, store: str) -> None:
        self.put(store_of(store, "s"))
        with pytest.raises(InputError, match=r"has the checkpoints of another run\."):
            self.begin(tmp_path / "s", store)

    def test_a_claim_that_was_cut_short_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "store" / "s").mkdir(parents=True)
        (tmp_path / "store" / "s" / "id").touch()
        self.begin(tmp_path / "s", str(tmp_path / "store"))
        check_unclaimed(str(tmp_path / "store"), tmp_path / "s")

    def test_a_place_that_cannot_be_used_is_told_before_anything_begins(self, tmp_path: Path) -> None:
        (tmp_path / "store").write_text("a file")
        with pytest.raises(InputError, match="cannot be used: NotADirectoryError"):
            self.begin(tmp_path / "s", str(tmp_path / "store"))
        assert not RunFolder(tmp_path / "s").is_begun

    def test_a_study_is_not_even_measured(self, tmp_path: Path) -> None:
        store = str(tmp_path / "store")
        study = write_study(tmp_path)
        request = TuneRequest(
            study=study, work=f"{tmp_path}/train.py:train", store=store, name="s", runs=tmp_path / "runs"
        )
        self.put(store_of(store, "s"))
        with pytest.raises(InputError, match="has the checkpoints of another run"):
            prepare(check_request(request))

    def test_without_a_store_there_is_nothing_to_claim(self, tmp_path: Path) -> None:
        self.begin(tmp_path / "s", None)
        assert not (tmp_path / "s" / "id").exists()


class FakeContext(SimpleNamespace):
    """What Ray tells of the cluster that a process is connected to."""

    gcs_address = "10.0.0.1:6379"
    worker = SimpleNamespace(gcs_client=SimpleNamespace(cluster_id="ours"))


class TestRayCluster:
    def test_slots_are_gpus_where_there_are_any(self) -> None:
        assert resources_of(3, Slots(("", ""))) == {"num_cpus": 3}
        assert resources_of(2, Slots(("0", "1", "2"))) == {"num_gpus": 2}
        with pytest.raises(InputError, match=r"4 slots are more than the 3 GPUs.*at most 3"):
            resources_of(4, Slots(("0", "1", "2")))

    @pytest.mark.parametrize(
        ("address", "there"), [("10.0.0.1:6379", None), ("head:6379", "ours"), (None, None)]
    )
    def test_who_is_connected_goes_on_there(
        self, monkeypatch: pytest.MonkeyPatch, address: str | None, there: str | None
    ) -> None:
        self.connect(monkeypatch, there)
        with connected(address) as found:
            assert found == "10.0.0.1:6379"

    def test_another_cluster_than_the_one_connected_to_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.connect(monkeypatch, "theirs")
        with (
            pytest.raises(InputError, match=r"connected to the Ray cluster at 10.0.0.1:6379, which is not"),
            connected("10.0.0.2:6379"),
        ):
            pass

    def test_nor_is_one_that_does_not_say_which_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connect(monkeypatch, None)
        with (
            pytest.raises(InputError, match=r"at 10.0.0.2:6379 cannot be reached: silence"),
            connected("10.0.0.2:6379"),
        ):
            pass

    @staticmethod
    def connect(monkeypatch: pytest.MonkeyPatch, there: str | None) -> None:
        def client(*, address: str) -> SimpleNamespace:
            assert address
            if there is None:
                raise ConnectionError("silence")
            return SimpleNamespace(cluster_id=there)

        ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=FakeContext)
        monkeypatch.setitem(sys.modules, "ray", cast("ModuleType", ray))
        monkeypatch.setitem(sys.modules, "ray._raylet", cast("ModuleType", SimpleNamespace(GcsClient=client)))


class TestRaySection:
    def study(self, ray: str) -> dict[str, object]:
        return tomllib.loads(STUDY + RENTED + ray)

    def test_without_it_nothing_is_rented_for_real(self) -> None:
        found = outline_of(self.study(""), Path("study.toml"))
        assert (found.has_cluster, found.rented) == (True, None)

    def test_commands_bring_up_what_the_cluster_names(self) -> None:
        ray = '[ray]\nlaunch = "up {name} {instance}"\nstart_timeout = "2m"\n'
        found = outline_of(self.study(ray), Path("s.toml"))
        assert found.rented is not None
        assert [instance.name for instance in found.rented.offer.instances] == ["g5.xlarge"]
        assert (found.rented.offer.max_nodes, found.rented.offer.slots) == (3, 3)
        assert (found.rented.nodes.launch, found.rented.nodes.start_s) == ("up {name} {instance}", 120.0)
        assert (found.rented.nodes.slot, found.rented.init_s) == ("GPU", Spread(30.0))

    @pytest.mark.parametrize(
        ("ray", "told"),
        [
            ("[ray]\n", "launch or autoscaler = true"),
            ('[ray]\nlaunch = "up"\nautoscaler = true\n', "one of the two"),
            ('[ray]\nautoscaler = true\nrelease = "down"\n', "releases nodes itself"),
            ('[ray]\nautoscaler = true\nslot = "tpu"\n', "one of gpu, cpu"),
            ('[ray]\nautoscaler = true\nstart_timeout = "soon"\n', "not a duration"),
            ("[ray]\nautoscaler = true\nlaunches = 1\n", "Did you mean launch?"),
            ('[ray]\nlaunch = "up {name}"\n', r"has no \{instance\}.*--labels=stretto-node=\{name\}"),
            ('[ray]\nlaunch = "up {adress}"\n', r"study.toml: ray.launch: 'up \{adress\}' has"),
            (
                '[ray]\nlaunch = "up {name} {instance}"\nrelease = "down {nme}"\n',
                r"study.toml: ray.release: .*\{nme\}",
            ),
        ],
    )
    def test_nonsense_is_refused(self, ray: str, told: str) -> None:
        with pytest.raises(InputError, match=told.replace("?", r"\?")):
            outline_of(self.study(ray), Path("study.toml"))

    @pytest.mark.parametrize("command", ["launch", "release"])
    def test_a_command_that_is_no_program_is_refused_before_anything_is_connected_to(
        self, command: str, tmp_path: Path
    ) -> None:
        words = {"launch": "true {name} {instance}", "release": "true"}
        words[command] = f"no-such-program {words[command]}"
        ray = "".join(f'{name} = "{text}"\n' for name, text in words.items())
        rented = outline_of(self.study(f"[ray]\n{ray}"), Path("study.toml")).rented
        target = find_target(
            TargetRequest(on="ray", runs=tmp_path, machine=MachineSpec(), rents=True, rented=rented)
        )
        with (
            pytest.raises(InputError, match=rf"\[ray\] {command}: 'no-such-program' is not"),
            target.opened(),
        ):
            pass

    def test_it_needs_a_cluster(self) -> None:
        tables = self.study("[ray]\nautoscaler = true\n")
        del tables["cluster"]
        with pytest.raises(InputError, match=r"no \[cluster\]"):
            outline_of(tables, Path("study.toml"))


class TestExamples:
    @pytest.mark.parametrize("name", ["study-ssh.toml", "study-aws.toml"])
    def test_studies_are_read(self, name: str) -> None:
        found = read_outline(EXAMPLES / name)
        assert found.rented is not None
        assert found.profile is not None

    def test_the_commands_are_those_that_can_be_run(self) -> None:
        rented = read_outline(EXAMPLES / "study-ssh.toml").rented
        assert rented is not None
        Commands(launch=rented.nodes.launch, release=rented.nodes.release)

    def test_the_cluster_is_one_that_ray_reads(self) -> None:
        ray = pytest.importorskip("ray")
        yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
        config = yaml.safe_load((EXAMPLES / "ray-aws.yaml").read_text(encoding="utf-8"))
        schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
        jsonschema.validate(config, json.loads(schema.read_text(encoding="utf-8")))
        rented = read_outline(EXAMPLES / "study-aws.toml").rented
        assert rented is not None
        offered = {instance.name: instance.gpus for instance in rented.offer.instances}
        types = [one for one in config["available_node_types"].values() if "labels" in one]
        assert {one["labels"]["stretto-instance"]: one["resources"]["GPU"] for one in types} == offered


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6)), max_size=30),
)
def test_a_layout_gives_what_is_asked_and_no_node_holds_more_than_it_has(
    sizes: list[int], steps: list[tuple[str, int]]
) -> None:
    slot_map = SlotMap([node_of(str(number), slots) for number, slots in enumerate(sizes)])
    held: dict[str, dict[str, int]] = {}
    for job_id, workers in steps:
        room = sum(sizes) - sum(sum(nodes.values()) for name, nodes in held.items() if name != job_id)
        if not workers:
            slot_map.clear(job_id)
            held.pop(job_id, None)
        elif workers <= room:
            before = held.get(job_id, {})
            held[job_id] = dict(slot_map.place(job_id, workers).workers)
            assert sum(held[job_id].values()) == workers
            stay = sum(min(count, held[job_id].get(node, 0)) for node, count in before.items())
            assert stay == min(workers, sum(before.values())), "who is there stays"
        for number, slots in enumerate(sizes):
            assert sum(nodes.get(str(number), 0) for nodes in held.values()) <= slots


def test_gangs_grow_on_their_own_node() -> None:
    slot_map = SlotMap([node_of("a", 2), node_of("b", 2)])
    first, second = slot_map.place("one", 1), slot_map.place("two", 1)
    assert {first.nodes, second.nodes} == {("a",), ("b",)}
    assert slot_map.place("one", 2).shape == (2,)


class TestCost:
    def test_nodes_of_ones_own_cost_by_their_slots_while_they_are_there(self) -> None:
        meter = CostMeter((), OWN_MACHINE, 3.6)
        meter.observe(RunStarted(t_s=0.0, identity={"policy": "x"}, nodes=(node_of("a", 2),)))
        meter.observe(NodeAdded(t_s=100.0, node=node_of("b", 1)))
        meter.observe(NodeLost(t_s=200.0, node_id="a"))
        assert meter.cost_usd(300.0) == pytest.approx(0.001 * (2 * 200 + 1 * 200))

    def test_those_taken_from_a_pool_cost_until_they_are_given_back(self) -> None:
        offer = nodes_offer(2, 4, MachineSpec(usd_per_slot_hour=0.9))
        node = replace(node_of("x", 4), instance=offer.instances[0].name)
        rented = NodeAdded(t_s=10.0, node=node)
        meter = CostMeter(offer.instances, offer.billing, 0.9)
        for event in (rented, NodeReleased(t_s=110.0, node_id="x")):
            meter.observe(event)
        assert meter.cost_usd(1000.0) == pytest.approx(0.001 * 100)

    @pytest.mark.parametrize(("paused", "rented_s"), [(True, 100), (False, 1100)])
    def test_after_a_kill_what_was_rented_is_paid_for_and_ones_own_is_not(
        self, *, paused: bool, rented_s: int
    ) -> None:
        offer = Offer(instances=(Instance(name="box", gpus=2, usd_per_hour=3.6),), max_nodes=2)
        own, box = node_of("mine", 2), replace(node_of("box-1", 2), instance="box")
        slot = replace(node_of("slot-1", 1), instance=slots_offer(1, MachineSpec()).instances[0].name)
        for node, usd, held_s in ((own, 0.002, 100), (box, 0.001, rented_s), (slot, 0.001, 100)):
            there = slots_offer(1, MachineSpec(usd_per_slot_hour=3.6)) if node is slot else offer
            meter = CostMeter(there.instances, there.billing, 3.6)
            meter.observe(RunStarted(t_s=0.0, identity={"policy": "x"}, nodes=()))
            meter.observe(NodeAdded(t_s=0.0, node=node))
            if paused:
                meter.observe(RunPaused(t_s=100.0))
            meter.observe(RunResumed(t_s=1100.0, down_s=1000.0))
            meter.observe(NodeLost(t_s=1100.0, node_id=node.id))
            assert meter.cost_usd(2000.0) == pytest.approx(usd * held_s)
