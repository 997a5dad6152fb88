"""Commands under `run`, `tune` and their probe: how far they go, where they run and keep their files."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from launching import start_run
from stretto.core.errors import InputError
from stretto.driving.request import TuneRequest, check_request
from stretto.inputs.jobs import read_jobs
from stretto.inputs.work import CommandLine, check_command
from stretto.launch.jobs import RunRequest, check_run
from stretto.profiling.origin import code_files
from stretto.profiling.probe import ANY_STUDY, probe
from stretto.runs.explain import explain
from stretto.runs.folder import RunFolder
from stretto.search.study import Direction, Study
from tune_world import STUDY

ENDLESS = """
import json, os, time
open(os.path.join(os.environ["STRETTO_FOLDER"], "kept"), "w").close()
for epoch in range(1, 10000):
    print(json.dumps(dict(epoch=epoch, accuracy=epoch / 10)), flush=True)
    time.sleep(0.1)
"""
A_STUDY = Study(
    name="s", metric="accuracy", direction=Direction.MAX, trials=1, rungs=(), eta=2, max_epochs=10**6
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of jobs, other than the one that this process is in."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there" / "endless.py").write_text(ENDLESS)
    return tmp_path / "there"


def jobs_file(folder: Path, *command: str) -> Path:
    path = folder / "jobs.toml"
    path.write_text(f'[[job]]\nname = "a"\ncommand = {json.dumps(command)}\nepochs = 3\n')
    return path


def test_a_job_of_a_file_runs_where_the_file_is_and_no_further_than_it_says(elsewhere: Path) -> None:
    path = jobs_file(elsewhere, sys.executable, "endless.py")
    result = start_run(check_run(RunRequest(jobs=path, policy="fifo", slots=1)))
    (job,) = result.jobs
    assert (job.state, job.epochs, job.metrics) == ("finished", 3, {"accuracy": 0.3})
    told = [(line.what, line.text) for line in explain(RunFolder(result.run), "a").lines]
    assert ("note", "its command was ended: it has shown 3 epochs, all that were asked for") in told
    assert (result.run / "jobs" / "a" / "files" / "kept").exists()


def test_programs_of_a_file_are_looked_for_from_where_it_is(elsewhere: Path) -> None:
    (elsewhere / "train.sh").write_text("#!/bin/sh\n")
    (elsewhere / "train.sh").chmod(0o755)
    (job,) = read_jobs(jobs_file(elsewhere, "./train.sh", "endless.py")).jobs
    assert job.work == CommandLine(("./train.sh", "endless.py"), elsewhere)
    assert {path.name for path in code_files(job.work)} == {"train.sh", "endless.py"}
    with pytest.raises(InputError, match=f"give its path from {elsewhere} on, where it is to run"):
        read_jobs(jobs_file(elsewhere, "./no.sh"))


def test_a_command_of_a_study_s_file_runs_where_that_is_and_one_that_is_given_here(elsewhere: Path) -> None:
    study = elsewhere / "study.toml"
    study.write_text(STUDY.replace("[study]", f'[study]\ncommand = ["{sys.executable}", "{{lr}}"]', 1))
    assert check_request(TuneRequest(study=study)).work == CommandLine((sys.executable, "{lr}"), elsewhere)
    given = check_request(TuneRequest(study=study, work=(sys.executable, "{lr}"))).work
    assert given == CommandLine((sys.executable, "{lr}"), None)


def test_what_a_probe_keeps_goes_away_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = tmp_path / "told"
    code = f"import sys; open({str(told)!r}, 'w').write(sys.argv[1])\n{ENDLESS}"
    probe(check_command((sys.executable, "-c", code, "{folder}"), ()), [()], slots=1, time_s=1.0)
    folder = Path(told.read_text())
    assert folder.is_relative_to(tmp_path)
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


@pytest.mark.parametrize("study", [A_STUDY, None], ids=["of a study", "of none"])
def test_a_probe_says_which_value_is_not_a_number(study: Study | None) -> None:
    name = "epoch" if study is None else study.metric
    code = f"import json, time\nprint(json.dumps(dict({name}='high')), flush=True)\ntime.sleep(60)"
    command = check_command((sys.executable, "-c", code), ())
    time_s = 60.0 if study else 0.5
    with pytest.raises(InputError, match=rf"{name} \w+ \w+ as 'high', which is not a number"):
        probe(command, [()], slots=1, time_s=time_s, study=study or ANY_STUDY)


def test_an_unknown_placeholder_is_told_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"\{lr\}, \{workers\}, \{batch\}, \{folder\}, \{epochs\}"):
        check_command((sys.executable, "{out}"), ["lr"])
