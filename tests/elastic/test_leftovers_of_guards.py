"""Processes that outlived their guard are ended before the job is started again; nobody else's are."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from process_bench import Bench, all_events, eventually
from stretto.core.events import JobFailed, JobFinished, JobNoted, JobReported
from stretto.substrate.elastic import command as process_command
from stretto.substrate.elastic import guard as process_guard
from stretto.substrate.elastic.guard import TOKEN, end_leftovers, found_before, processes_of
from stretto.system import limits as scarcity
from stretto.system.identity import folder_identity, identity
from stretto.system.limits import PATIENCE_S, Retry, limit_text, scarce_number

TRAINS_IN_A_GRANDCHILD = """
child = "import os, signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" \\
    "open(%r, 'a').write(str(os.getpid()) + '\\\\n')\\ntime.sleep(600)"
pids = os.path.join({folder!r}, "pids")
subprocess.Popen([sys.executable, "-I", "-S", "-c", child % pids], start_new_session=True)
while not os.path.exists(pids):
    time.sleep(0.01)
print('{{"work_done": 1}}', flush=True)
if os.path.exists(os.path.join({folder!r}, "again")):
    sys.exit(0)
time.sleep(600)
"""


class Timeline:
    """Processes that end when they are told, and a clock."""

    def __init__(self, **obeys: bool) -> None:
        self.now_s = 0.0
        self.left = dict(enumerate(obeys.values(), start=1))
        self.signals: list[tuple[int, int]] = []

    def kill(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))
        if number == signal.SIGKILL or self.left[pid]:
            del self.left[pid]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def end(self, grace_s: float) -> int:
        return end_leftovers(
            lambda: list(self.left),
            grace_s=grace_s,
            kill=self.kill,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_leftovers_are_asked_once_and_killed_after_the_grace() -> None:
    timeline = Timeline(obeys=True, ignores=False)
    assert timeline.end(2.0) == 2
    assert timeline.signals == [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)]
    assert timeline.now_s == pytest.approx(2.0, abs=0.2)


def test_a_guard_without_a_controller_ends_nothing_as_it_may_be_of_the_next_run() -> None:
    assert found_before(lambda: True, lambda: [1, 2])() == []


def test_what_was_found_before_the_controller_went_is_ended_and_nothing_else() -> None:
    there, gone = [1, 2], False
    find = found_before(lambda: gone, lambda: there)
    assert find() == [1, 2]
    there, gone = [2, 3], True
    assert find() == [2]


def test_what_cannot_be_killed_is_not_waited_for_without_end() -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    assert (
        end_leftovers(lambda: [1], grace_s=1.0, kill=lambda *_: None, clock=lambda: now_s, sleep=sleep) == 1
    )
    assert now_s < 10


def test_only_processes_with_the_token_are_found() -> None:
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
    token = f"secret{os.getpid()}:a"
    environments = [{TOKEN: token, "STRETTO_START": "1"}, {TOKEN: f"{token}b"}, {"X": f"{TOKEN}={token}"}]
    started = [subprocess.Popen(sleeper, env=env, stdout=subprocess.PIPE) for env in environments]
    try:
        for one in started:
            assert one.stdout is not None
            one.stdout.readline()
        assert processes_of(token) == [started[0].pid]
        assert processes_of(token, but_start="1") == []
        assert processes_of(token, but_start="2") == [started[0].pid]
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_a_killed_guard_leaves_nothing_that_trains_beside_the_retry(tmp_path: Path) -> None:
    with Bench(tmp_path, retries=1, grace_s=0.2) as bench:
        substrate = bench.started(bench.code(TRAINS_IN_A_GRANDCHILD.format(folder=str(tmp_path))))
        pids = tmp_path / "pids"
        eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
        first = int(pids.read_text().split()[0])
        (tmp_path / "again").touch()
        (guard,) = [pid for pid in processes_of(token_of(bench)) if is_guard(pid)]
        os.kill(guard, signal.SIGKILL)
        events = all_events(substrate)
        assert isinstance(events[-1], JobFinished)
        assert first not in processes_of(token_of(bench)), "it was ended before the retry was begun"


def test_what_a_killed_guard_of_a_killed_controller_left_is_ended_before_a_start(tmp_path: Path) -> None:
    with Bench(tmp_path, grace_s=0.2) as bench:
        substrate = bench.started(bench.code("print('{\"work_done\": 1}', flush=True)"))
        assert isinstance(all_events(substrate)[-1], JobFinished)
        substrate.close()
        code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
        left = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            env={TOKEN: token_of(bench), "STRETTO_START": "before"},
            stdout=subprocess.PIPE,
        )
        assert left.stdout is not None
        left.stdout.readline()
        try:
            again = bench.started(bench.code("print('{\"work_done\": 1}', flush=True)"))
            eventually(lambda: left.poll() is not None)
            assert isinstance(all_events(again)[-1], JobFinished)
        finally:
            left.kill()
            left.communicate()


def test_a_guard_that_waited_until_its_controller_was_gone_leaves_the_next_run_alone(tmp_path: Path) -> None:
    token = f"secret{tmp_path}:a"
    names = {name: str(tmp_path / name) for name in ("log", "lock", "metrics")}
    options = {**names, "mode": 0o600, "token": token, "start": "old", "grace_s": 0.2}
    (tmp_path / "lock").touch()
    code = "import time; print(1, flush=True); time.sleep(600)"
    next_guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env={TOKEN: token, "STRETTO_START": "new"},
        stdout=subprocess.PIPE,
    )
    try:
        assert next_guard.stdout is not None
        next_guard.stdout.readline()
        controller, guard_end = socket.socketpair()
        controller.close()
        with guard_end:
            guard = [sys.executable, "-I", "-S", process_guard.__file__, str(guard_end.fileno())]
            subprocess.run(
                [*guard, json.dumps(options), "touch", str(tmp_path / "started")],
                pass_fds=(guard_end.fileno(),),
                check=True,
            )
        assert next_guard.poll() is None
        assert not (tmp_path / "started").exists()
    finally:
        next_guard.kill()
        next_guard.communicate()


@pytest.mark.parametrize("copy_file", [shutil.copy2, os.link], ids=["copied", "linked"])
def test_a_copy_of_a_run_has_other_tokens_and_a_moved_run_has_its_own(
    tmp_path: Path, copy_file: Callable[[str, str], object]
) -> None:
    original, copy, moved = (tmp_path / name for name in ("a", "copy", "moved"))
    original.mkdir()
    token = process_command.token_of(folder_identity(original), "a")
    shutil.copytree(original, copy, copy_function=copy_file)
    assert identity(copy) == identity(original), "it is the same run for its store"
    assert process_command.token_of(folder_identity(copy), "a") != token
    original.rename(moved)
    assert process_command.token_of(folder_identity(moved), "a") == token


def test_a_copy_of_a_run_leaves_the_training_of_the_original_alone(tmp_path: Path) -> None:
    folder, copied = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    with Bench(folder, grace_s=0.2) as bench, Bench(copied, grace_s=0.2) as other:
        trains = "print('{\"work_done\": 1}', flush=True)\ntime.sleep(600)"
        first = bench.started(bench.code(trains))
        assert isinstance(first.next_event(60.0), JobReported)
        training = processes_of(token_of(bench))
        assert training
        shutil.copytree(folder, copied, dirs_exist_ok=True)
        second = other.started(other.code("print('{\"work_done\": 1}', flush=True)"))
        assert isinstance(all_events(second)[-1], JobFinished)
        assert processes_of(token_of(bench)) == training


def token_of(bench: Bench) -> str:
    return process_command.token_of(folder_identity(bench.folder), "a")


def is_guard(pid: int) -> bool:
    return "elastic/guard.py" in Path(f"/proc/{pid}/cmdline").read_text()


SCARCE = """
import errno, os, subprocess
from stretto.system import limits
limits.FIRST_WAIT_S = 0.01
class Scarce(subprocess.Popen):
    def __init__(self, arguments, **options):
        with open({tries!r}, "a") as file:
            file.write("x")
        if os.path.getsize({tries!r}) <= {failures}:
            raise OSError({number}, os.strerror({number}))
        super().__init__(arguments, **options)
subprocess.Popen = Scarce
"""


@pytest.fixture
def scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Path]:
    """Has workers fail to start guards, the first so often; the file that grows with each try."""

    def make(failures: int, number: int) -> Path:
        tries, site = tmp_path / "tries", tmp_path / "site"
        site.mkdir()
        code = SCARCE.format(tries=str(tries), failures=failures, number=number)
        (site / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        return tries

    return make


Scarce = Callable[[int, int], Path]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.ENFILE])
def test_a_start_that_a_limit_prevents_is_tried_again_and_the_limit_named(
    tmp_path: Path, scarce: Scarce, number: int
) -> None:
    tries = scarce(2, number)
    with Bench(tmp_path / "run") as bench:
        events = all_events(bench.started(bench.code("print('{\"work_done\": 1}', flush=True)")))
    assert tries.read_text() == "xxx"
    assert [type(event) for event in events] == [JobNoted, JobReported, JobFinished]
    assert limit_text(number) in getattr(events[0], "text", "")


def test_another_error_at_a_start_is_no_reason_to_wait(tmp_path: Path, scarce: Scarce) -> None:
    tries = scarce(9, errno.EACCES)
    with Bench(tmp_path / "run") as bench:
        events = all_events(bench.started(bench.code("")))
    assert [type(event) for event in events] == [JobFailed]
    assert tries.read_text() == "x"


def test_a_start_is_not_tried_for_ever() -> None:
    retry: Retry | None = None
    now_s, tries = 5.0, 0
    while (retry := Retry.at(now_s, retry)) is not None:
        assert 0 < retry.again_s - now_s <= scarcity.LONGEST_WAIT_S
        now_s, tries = retry.again_s, tries + 1
    assert PATIENCE_S <= now_s - 5.0 <= PATIENCE_S + scarcity.LONGEST_WAIT_S
    assert tries < 40


def test_limits_are_named() -> None:
    assert "ulimit -n" in limit_text(errno.EMFILE)
    assert "ulimit -u" in limit_text(errno.EAGAIN)
    assert "memory" in limit_text(errno.ENOMEM)
    assert scarce_number(RuntimeError("can't start new thread")) == errno.EAGAIN
    assert scarce_number(OSError(errno.ENOENT, "")) is None


def test_a_job_that_waits_for_a_limit_can_be_parked(tmp_path: Path, scarce: Scarce) -> None:
    scarce(99, errno.EMFILE)
    with Bench(tmp_path / "run") as bench:
        substrate = bench.started(bench.code(""))
        assert isinstance(substrate.next_event(60.0), JobNoted)
        substrate.close()
        assert substrate.next_event(float("inf")) is None


def test_a_limit_is_known_by_what_a_library_says() -> None:
    said = "the group of 2 did not come together: socket: Too many open files"
    assert scarcity.scarce_in(said) == errno.EMFILE
    assert scarcity.scarce_in("connection reset by peer") is None
