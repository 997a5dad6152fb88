"""Commands in folders of their own; and files that several of them write where they run together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from process_bench import Bench, all_events, start, trial_of
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.errors import InputError
from stretto.core.events import JobFinished, JobNoted
from stretto.inputs.jobs import read_jobs
from stretto.inputs.work import CommandLine, Entry, folder_note, in_own_folder
from stretto.substrate.elastic.command import Command, importing, own_environment, resolved, rewritten
from stretto.substrate.elastic.command_output import CommandSetup
from stretto.substrate.elastic.shared_files import SharedFolder, files_written, overwritten, written_elsewhere
from stretto.substrate.local.slots import Slots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").touch()
    return tmp_path


def test_relative_paths_that_are_there_are_made_absolute(folder: Path) -> None:
    argv = ["python", "train.py", "--data=data/x.csv", "data", "./train.py", "--lr", "0.1", "out.pt", "/etc"]
    assert resolved(argv, folder) == [
        "python",
        f"{folder}/train.py",
        f"--data={folder}/data/x.csv",
        f"{folder}/data",
        f"{folder}/train.py",
        "--lr",
        "0.1",
        "out.pt",
        "/etc",
    ]
    assert rewritten(argv, folder) == ["train.py", "--data=data/x.csv", "data", "./train.py"]


def test_modules_code_options_and_programs_on_the_path_stay(folder: Path) -> None:
    (folder / "python").touch()
    (folder / "-x").touch()
    argv = ["python", "-m", "data", "-c", "train.py", "-x", "", "x" * 5000, "{lr}"]
    assert resolved(argv, folder) == argv
    assert resolved(["./python"], folder) == [f"{folder}/python"]


@pytest.mark.parametrize(
    ("own", "user", "told"), [({}, None, "2"), ({}, "7", "7"), ({"OMP_NUM_THREADS": "5"}, "7", "5")]
)
def test_threads_are_the_cores_of_a_slot_unless_they_are_set(
    own: dict[str, str], user: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", user)
    with Bench(tmp_path) as bench:
        bench.slots = Slots(("",), threads_each=2)
        command = bench.code("print(os.environ['OMP_NUM_THREADS'])")
        all_events(bench.started(replace(command, env=own)))
        assert bench.log.read_text() == f"{told}\n"


def test_python_finds_modules_of_the_launch_folder(tmp_path: Path) -> None:
    setup = CommandSetup("a", on_nodes({"0": 1}), BatchChoice(16))
    command = Command(("x",), cwd=tmp_path, in_folder=True)
    own = own_environment(command, setup, restarts=0, job_folder=tmp_path)
    env = importing({"PYTHONPATH": "/lib", **own})
    assert env["PYTHONPATH"] == f"{tmp_path}:/lib"
    assert env["STRETTO_LAUNCH_FOLDER"] == str(tmp_path)


def test_a_command_in_its_folder_finds_its_files_and_keeps_its_own(tmp_path: Path) -> None:
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "helper.py").write_text("VALUE = 3\n")
    (launch / "x.csv").write_text("1")
    (launch / "train.py").write_text(
        "import helper, sys\nopen(sys.argv[1]).read()\nopen('model.pt', 'w').write(str(helper.VALUE))\n"
    )
    with Bench(tmp_path) as bench:
        command = Command((sys.executable, "train.py", "x.csv"), cwd=launch, in_folder=True)
        assert isinstance(all_events(bench.started(command))[-1], JobFinished)
    assert (tmp_path / "jobs" / "a" / "files" / "model.pt").read_text() == "3"
    assert not (launch / "model.pt").exists()


class Theatre:
    """A folder whose files are written by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.files: dict[str, float] = {}
        self.anothers: set[str] = set()
        self.shared = SharedFolder(
            Path("/work"),
            scan=self._scan,
            now_s=lambda: self.now_s,
            is_anothers=lambda path: path.name in self.anothers,
        )

    def _scan(self, folder: Path) -> Iterator[tuple[str, float]]:
        assert folder == Path("/work")
        yield from self.files.items()

    def start(self, *jobs: str) -> None:
        for job in jobs:
            self.now_s += 1
            self.shared.started(job)

    def write(self, name: str) -> None:
        self.now_s += 1
        self.files[name] = self.now_s

    def end(self, job: str) -> tuple[str, str, str] | None:
        self.now_s += 1
        return self.shared.ended(job)


def test_two_jobs_one_after_the_other_that_write_one_file_are_noticed_once() -> None:
    theatre = Theatre()
    theatre.files["old.pt"] = 50.0
    found = []
    for job in ("a", "b", "c"):
        theatre.start(job)
        theatre.write("model.pt")
        found.append(theatre.end(job))
    assert found == [None, ("model.pt", "a", "b"), None]


def test_jobs_side_by_side_are_noticed_when_none_can_have_written_it_every_time() -> None:
    theatre = Theatre()
    theatre.start("a", "b")
    theatre.write("model.pt")
    assert theatre.end("a") is None
    theatre.start("c")
    theatre.write("model.pt")
    assert theatre.end("b") is None, "b may have written it both times"
    theatre.start("d")
    theatre.write("model.pt")
    assert theatre.end("c") is not None


def test_a_file_of_each_job_is_no_reason_to_say_anything() -> None:
    theatre = Theatre()
    theatre.start("a", "b")
    for _ in range(3):
        theatre.write("a.pt")
        theatre.write("b.pt")
    assert theatre.end("a") is None
    theatre.start("c")
    theatre.write("b.pt")
    theatre.write("c.pt")
    assert theatre.end("b") is None
    theatre.write("c.pt")
    assert theatre.end("c") is None


def test_what_nobody_of_ours_wrote_does_not_count() -> None:
    theatre = Theatre()
    theatre.start("a")
    theatre.write("notes.txt")
    assert theatre.end("a") is None
    theatre.write("notes.txt")
    theatre.start("b")
    assert theatre.end("b") is None
    for job in ("c", "d"):
        theatre.start(job)
        theatre.write("notes.txt")
        assert theatre.end(job) is None, "it was written while no job ran"


def test_a_file_of_a_run_before_may_still_be_written_by_two_jobs() -> None:
    theatre = Theatre()
    theatre.files["model.pt"] = 50.0
    theatre.start("a")
    theatre.write("other.pt")
    assert theatre.end("a") is None
    for job, found in (("b", None), ("c", ("model.pt", "b", "c"))):
        theatre.start(job)
        theatre.write("model.pt")
        assert theatre.end(job) == found


def test_no_job_is_blamed_for_a_file_that_another_process_writes() -> None:
    theatre = Theatre()
    theatre.anothers.add("tune.log")
    found = []
    for job in ("a", "b", "c"):
        theatre.start(job)
        theatre.write("tune.log")
        if job != "a":
            theatre.write("model.pt")
        found.append(theatre.end(job))
    assert found == [None, None, ("model.pt", "b", "c")]


PRINTS_TO_A_FILE = """
import subprocess, sys
from pathlib import Path
from stretto.substrate.elastic.shared_files import written_elsewhere
folder = Path(sys.argv[1])
with (folder / "model.pt").open("w") as file:
    argv = [sys.executable, "-I", "-S", "-c", "input()"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=file)
    (folder / "plain.pt").touch()
    names = ("tune.log", "other.log", "read.log", "model.pt", "plain.pt", "gone.pt")
    print([name for name in names if written_elsewhere(folder / name)])
    child.communicate(b"\\n")
"""


def test_the_output_of_this_run_and_of_others_is_not_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "read.log").touch()
    argv = [sys.executable, "-c", PRINTS_TO_A_FILE, str(tmp_path)]
    with (
        (tmp_path / "tune.log").open("w") as output,
        (tmp_path / "other.log").open("w"),
        (tmp_path / "read.log").open(),
    ):
        subprocess.run(argv, stdout=output, check=True, timeout=60)
    assert (tmp_path / "tune.log").read_text() == "['tune.log', 'other.log']\n"
    assert not written_elsewhere(tmp_path / "tune.log")


def test_source_text_hidden_files_and_runs_are_not_looked_at(folder: Path) -> None:
    for name in ("model.pt", "data/best.pt", ".git/x", "runs/x.pt", "data/deep/x.pt", "venv/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert {name for name, _ in files_written(folder)} == {"model.pt", "data/best.pt", "data/x.csv"}
    assert list(files_written(folder / "not there")) == []


def test_it_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    with Bench(tmp_path) as bench:
        code = bench.code("open('model.pt', 'w').write('1')")
        command = Command(code.argv, cwd=tmp_path / "launch")
        substrate = bench.substrate(command, "s")
        for job_id in ("a", "b"):
            substrate.admit(trial_of(job_id, epochs=None))
        notes = []
        for number, job_id in enumerate(("a", "b"), start=1):
            substrate.apply([start(job_id, number=number)])
            notes += [event.text for event in all_events(substrate) if isinstance(event, JobNoted)]
    assert notes == [overwritten(("model.pt", "a", "b"), tmp_path / "launch")]
    assert "a and b may both have written model.pt" in notes[0]
    assert "--in-folder" in notes[0]
    assert "{folder}" in notes[0]


def test_in_folder_of_a_job_and_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def train(config, run): pass\n")
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        '[[job]]\nname = "a"\nepochs = 1\ncommand = ["python3", "train.py"]\nin_folder = true\n'
        '[[job]]\nname = "b"\nepochs = 1\ncommand = ["python3", "train.py"]\n'
    )
    first, second = (job.work for job in read_jobs(jobs).jobs)
    assert isinstance(first, CommandLine)
    assert isinstance(second, CommandLine)
    assert (first.in_folder, second.in_folder) == (True, False)
    assert "takes train.py" in folder_note(first, Path("runs/x"))
    assert folder_note(second, Path("runs/x")) == ""
    jobs.write_text('[[job]]\nname = "a"\nepochs = 1\nentry = "train.py:train"\nin_folder = true\n')
    with pytest.raises(InputError, match="about a command"):
        read_jobs(jobs)
    with pytest.raises(InputError, match="--in-folder"):
        in_own_folder(Entry(tmp_path / "train.py", "train"), asked=True)
    assert json.dumps(first.rewritten) == '["train.py"]'
