"""Several processes of one command: their ranks, their end, their devices, their arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_bench import BATCH, ONE, PYTHON, TWO, Bench, CommandWorkers, all_events, job_of, start, trial_of
from stretto.core.allocation import on_nodes
from stretto.core.errors import InputError
from stretto.core.events import JobFailed, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.elastic.command import Command, check_placeholders, filled_in
from stretto.substrate.elastic.command_output import CommandSetup
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.local.slots import Slots

THREE = on_nodes({"0": 2, "1": 1})
TELL = """
name = os.path.join(os.path.dirname(sys.argv[0]), "told-" + os.environ["STRETTO_JOB"] + os.environ["RANK"])
with open(name, "a") as file:
    file.write(json.dumps(dict(os.environ)) + "\\n")
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


def told(bench: Bench, rank: int, job: str = "a") -> list[dict[str, str]]:
    """The environment of a rank at each of its starts."""
    return [json.loads(line) for line in (bench.folder / f"told-{job}{rank}").read_text().splitlines()]


def test_every_rank_is_told_what_torchrun_would_tell_it(bench: Bench) -> None:
    report = (
        "print(json.dumps({'work_done': 1 + int(os.environ['RANK'])})); print('rank', os.environ['RANK'])"
    )
    events = all_events(bench.started(bench.code(TELL + report), THREE))
    assert [event.kind for event in events] == ["job-reported", "job-finished"]
    assert isinstance(events[0], JobReported)
    assert events[0].work_done == 1, "only rank 0 reports"
    ranks = [told(bench, rank)[0] for rank in range(3)]
    for rank, env in enumerate(ranks):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ranks[0]["MASTER_PORT"],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "a",
        }
        assert {key: env.get(key) for key in expected} == expected
        assert env.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    log = bench.log.read_text()
    assert all(f"rank {rank}" in log for rank in range(3))


def test_each_start_counts_and_no_two_gangs_meet_on_a_port(bench: Bench) -> None:
    ready = "print('{\"epoch\": 1}', flush=True); time.sleep(60)"
    command = bench.code(TELL + ready)
    commands = {"a": command, "b": command}
    substrate = CommandWorkers(commands, bench.folder, slots=Slots(("",) * 6), rules=Rules(command_s=1.0))
    for name in ("a", "b"):
        substrate.admit(job_of(name))
    substrate.apply([start("a", TWO, 1), start("b", TWO, 2)])
    for _ in range(2):
        assert isinstance(substrate.next_event(10.0), JobReported)
    substrate.apply([Instruction(3, Action.RESIZE, "a", THREE, BATCH)])
    assert isinstance(substrate.next_event(10.0), JobReported)
    substrate.close()
    first, second = told(bench, 0)
    assert (first["WORLD_SIZE"], second["WORLD_SIZE"]) == ("2", "3")
    assert (first["TORCHELASTIC_RESTART_COUNT"], second["TORCHELASTIC_RESTART_COUNT"]) == ("0", "1")
    assert first["MASTER_PORT"] != told(bench, 0, "b")[0]["MASTER_PORT"] != second["MASTER_PORT"]


def test_a_job_ends_when_all_its_ranks_have(bench: Bench) -> None:
    code = """
if os.environ["RANK"] == "1":
    time.sleep(0.4)
    open(sys.argv[0] + ".late", "w").close()
"""
    events = all_events(bench.started(bench.code(code), TWO))
    assert [event.kind for event in events] == ["job-finished"]
    assert (bench.folder / "code.py.late").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_gang_and_is_the_failure(bench: Bench, failing: int) -> None:
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "{failing}":
    time.sleep(0.2)
    sys.exit("no more memory")
time.sleep(60)
"""
    bench.grace_s = 0.3
    (event,) = all_events(bench.started(bench.code(code), THREE))
    assert isinstance(event, JobFailed)
    assert event.error.startswith(f"exit code 1 of rank {failing}; its log ends:\n")
    assert "no more memory" in event.error
    assert bench.left() == []


def test_a_rank_that_is_killed_is_named(bench: Bench) -> None:
    code = "if os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    (event,) = all_events(bench.started(bench.code(code), THREE))
    assert isinstance(event, JobFailed)
    assert event.error.startswith("rank 2 killed by SIGKILL")


def test_a_gang_that_is_parked_has_the_grace_to_save(bench: Bench) -> None:
    code = """
def save(*_):
    time.sleep(0.1)
    open(sys.argv[0] + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[0] + ".up" + os.environ["RANK"], "w").close()
while not (os.path.exists(sys.argv[0] + ".up1") and os.path.exists(sys.argv[0] + ".up0")): time.sleep(0.01)
print('{"epoch": 1}', flush=True)
time.sleep(60)
"""
    bench.grace_s = 10.0
    substrate = bench.started(bench.code(code), TWO)
    assert isinstance(substrate.next_event(20.0), JobReported)
    substrate.apply([Instruction(2, Action.PARK, "a", on_nodes({}), BATCH)])
    assert all_events(substrate) == []
    assert (bench.folder / "code.py0").exists()
    assert (bench.folder / "code.py1").exists()


def devices_of(bench: Bench, job: str) -> list[str]:
    return [env["CUDA_VISIBLE_DEVICES"] for env in told(bench, 0, job)]


def test_jobs_never_share_a_device_and_give_theirs_back(bench: Bench) -> None:
    waits = "print('{\"epoch\": 1}', flush=True); time.sleep(60)"
    command = bench.code(TELL + waits)
    names = ("a", "b", "c")
    slots, rules = Slots(("GPU-a", "GPU-b", "7", "GPU-c")), Rules(command_s=1.0)
    substrate = CommandWorkers(dict.fromkeys(names, command), bench.folder, slots=slots, rules=rules)
    for name in names:
        substrate.admit(job_of(name))
    substrate.apply([start("a", on_nodes({"0": 2, "1": 1}), 1), start("b", ONE, 2)])
    for _ in range(2):
        assert isinstance(substrate.next_event(10.0), JobReported)
    substrate.apply(
        [
            Instruction(3, Action.PARK, "a", on_nodes({}), BATCH),
            start("c", on_nodes({"0": 2}), 4),
        ]
    )
    assert isinstance(substrate.next_event(10.0), JobReported)
    substrate.close()
    of_a, of_c = [set(devices_of(bench, job)[0].split(",")) for job in ("a", "c")]
    assert of_a == {"GPU-a", "GPU-b", "7"}
    assert devices_of(bench, "b") == ["GPU-c"]
    assert of_c < of_a, "those that were given back"
    assert len(of_c) == 2


def test_the_local_rank_is_the_index_of_the_own_device(bench: Bench) -> None:
    bench.slots = Slots(("GPU-a", "GPU-b", "7", "GPU-c"))
    slot_of = {device: str(slot) for slot, device in enumerate(bench.slots.devices)}
    all_events(bench.started(bench.code(TELL), THREE))
    ranks = [told(bench, rank)[0] for rank in range(3)]
    assert len({env["CUDA_VISIBLE_DEVICES"] for env in ranks}) == 1
    assert [env["LOCAL_RANK"] for env in ranks] == ["0", "1", "2"]
    assert len({slot_of[device] for device in ranks[0]["CUDA_VISIBLE_DEVICES"].split(",")}) == 3


@pytest.mark.parametrize("seen", [None, "0,1"])
def test_commands_see_all_gpus_if_slots_share_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seen: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    bench.slots = Slots(("0", "1", "0", "1"))
    all_events(bench.started(bench.code(TELL), TWO))
    assert [told(bench, rank)[0].get("CUDA_VISIBLE_DEVICES") for rank in range(2)] == [seen, seen]


def arguments(job: Job, *argv: str) -> list[str]:
    command = Command(argv)
    check_placeholders(command, job)
    return filled_in(command, job, CommandSetup(job.id, THREE, BATCH), job_folder=Path("/runs/r/jobs/a"))


def test_hyperparameters_and_what_the_job_runs_with_are_filled_in() -> None:
    job = trial_of("a", epochs=12, lr=1e-05, width=64, name="a b", nesterov=True)
    given = ["--lr={lr}", "{width}x{width}", "{name}", "{nesterov}", "{workers} {batch} {epochs}"]
    assert arguments(job, *given) == ["--lr=1e-05", "64x64", "a b", "True", "3 48 12"]


def test_a_hyperparameter_goes_before_what_has_the_same_name() -> None:
    assert arguments(trial_of("a", batch=99), "{batch}") == ["99"]


def test_other_braces_stay_as_they_are() -> None:
    given = ["{{lr}}", '{"lr": {lr}, "a": {}}', "{}", "{ lr }", "${HOME", "{0}"]
    expected = ["{lr}", '{"lr": 0.1, "a": {}}', "{}", "{ lr }", "${HOME", "{0}"]
    assert arguments(trial_of("a", lr=0.1), *given) == expected


def test_a_placeholder_that_stands_for_nothing_is_refused_when_the_job_comes(tmp_path: Path) -> None:
    command = Command((*PYTHON, "--lr={learning_rate}"))
    with Bench(tmp_path) as bench, pytest.raises(InputError) as raised:
        bench.substrate(command, "s").admit(trial_of("a", lr=0.1))
    assert "{learning_rate} in '--lr={learning_rate}' stands for nothing" in str(raised.value)
    assert "{lr}, {workers}, {batch}, {folder}, {epochs}" in str(raised.value)
    assert "write {{learning_rate}} for the text itself" in str(raised.value)
    with pytest.raises(InputError, match="stands for nothing"):
        arguments(trial_of("a", epochs=None), "{epochs}")
