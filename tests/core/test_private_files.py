"""Runs that nobody else on the machine can read or lock, whatever the umask is."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launching import prepare, start
from stretto.driving.request import TuneRequest, check_request
from stretto.runs.folder import RunFolder
from stretto.system.private_files import GROUP_READABLE, close_to_others, make_private_folder, open_private
from tune_world import simulated, write_study

NOBODY = 65534
JOBS = """
[[job]]
name = "a"
command = ["python", "-c", "import os; open(os.environ['STRETTO_FOLDER'] + '/mine', 'w'); print('hello')"]
epochs = 1
"""
MASKS = pytest.mark.parametrize("umask", [0o000, 0o077, 0o777], ids=["open", "closed", "nothing"])


def modes(folder: Path) -> dict[str, int]:
    found = {".": folder, **{str(path.relative_to(folder)): path for path in folder.rglob("*")}}
    return {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}


@MASKS
def test_whatever_the_umask_files_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private_folder(tmp_path / "runs" / "a")
        os.close(open_private(tmp_path / "runs" / "a" / "file", os.O_WRONLY | os.O_CREAT))
        assert os.umask(umask) == umask, "the umask is the user's"
    finally:
        os.umask(before)
    assert modes(tmp_path / "runs") == {".": 0o700, "a": 0o700, "a/file": 0o600}


def test_a_run_of_an_older_version_is_closed_when_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o2775)
    (tmp_path / "a" / "log").touch(0o644)
    close_to_others(tmp_path / "a")
    os.close(open_private(tmp_path / "a" / "log", os.O_WRONLY | os.O_APPEND))
    assert modes(tmp_path / "a") == {".": 0o2700, "log": 0o600}
    close_to_others(tmp_path / "nowhere")


def test_a_group_may_be_let_in_but_not_to_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GROUP_READABLE, "1")
    monkeypatch.chdir(tmp_path)
    checked = check_request(TuneRequest(study=write_study(tmp_path), work="train.py:train", policy="asha"))
    start(prepare(checked, make=simulated), make=simulated)
    found = modes(checked.folder.path)
    assert found.pop("journal.sqlite.lock") == 0o600
    assert set(found.values()) == {0o750, 0o640}
    monkeypatch.setenv(GROUP_READABLE, "0")
    make_private_folder(tmp_path / "b")
    assert modes(tmp_path / "b") == {".": 0o700}


@pytest.mark.processes
def test_a_real_run_under_an_open_umask(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    command = [sys.executable, "-c", "from stretto.cli.start import main; main()", "run", "jobs.toml"]
    subprocess.run([*command, "--slots", "1"], cwd=tmp_path, check=True, capture_output=True, umask=0)
    found = modes(tmp_path / "runs")
    assert found.pop("jobs/jobs/a/files/mine", None) == 0o666, "the umask of a command is the user's"
    folders = {name for name in found if (tmp_path / "runs" / name).is_dir()}
    wrong = {name for name, mode in found.items() if mode != (0o700 if name in folders else 0o600)}
    assert wrong == set()
    assert {"jobs/journal.sqlite", "jobs/journal.sqlite.lock", "jobs/jobs/a/stdout.log"} <= found.keys()


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_can_neither_read_a_run_nor_hold_its_lock() -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    try:
        make_private_folder(place / "runs" / "a")
        folder = RunFolder(place / "runs" / "a")
        folder.write("spec", {"kind": "run"})
        os.close(open_private(folder.lock, os.O_RDWR | os.O_CREAT))
        # Even in a folder that a group may look into, the lock cannot be opened.
        (place / "runs").chmod(0o755)
        tries = (
            f"import os, sys\nos.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "for path in sys.argv[1:]:\n"
            "    try:\n        os.listdir(path) if path.endswith('/') else open(path)\n"
            "    except PermissionError:\n        continue\n"
            "    sys.exit(path)\n"
        )
        paths = [f"{folder.path}/", str(folder.path / "spec.json"), str(folder.lock)]
        subprocess.run([sys.executable, "-c", tries, *paths], check=True)
        folder.path.chmod(0o755)
        subprocess.run([sys.executable, "-c", tries, *paths[1:]], check=True)
    finally:
        shutil.rmtree(place)


def test_files_of_tensorboard_are_closed_once_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics_log = pytest.importorskip("stretto.torch.persistence")
    (tmp_path / "tensorboard").mkdir()

    class Board:
        def add_scalar(self, *_: object) -> None:
            (tmp_path / "tensorboard" / "events.1").touch()
            (tmp_path / "tensorboard" / "events.1").chmod(0o666)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(metrics_log, "_tensorboard", lambda *_: Board())
    log = metrics_log.MetricsLog(tmp_path, tensorboard=True, note=print)
    log.write(1, {"loss": 0.5}, workers=1, batch=8)
    assert modes(tmp_path)["tensorboard/events.1"] == 0o600
