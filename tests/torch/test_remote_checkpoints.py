"""Checkpoints in a store: whole or not there, for every node, whatever the store does meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("fsspec")
import fsspec  # type: ignore[import-untyped]
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from stretto.core.errors import InputError
from stretto.torch.checkpoint import CheckpointStore, FileDigest, measured
from stretto.torch.persistence import Persistence, SavingSettings
from stretto.torch.remote_checkpoints import RemoteCheckpoints, RemoteStore, StoreError
from stretto.wire.checkpoints import UNCOPIED
from stretto.wire.messages import Saved


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """A folder behind a bad line. What it does with a file is set by the test, on the class."""

    protocol = "flaky"
    cachable = False
    on_put: ClassVar[Callable[[str], str]] = staticmethod(lambda _: "")
    """Told the file's name before it is written: "fail", "cut" or nothing."""
    is_down: ClassVar[bool] = False

    def put_file(self, path1: str, path2: str, callback: object = None, **options: Any) -> None:
        what = Flaky.on_put(path2.rpartition("/")[2])
        if what == "fail" or Flaky.is_down:
            raise ConnectionError("the line is dead\nand more")
        super().put_file(path1, path2, callback, **options)
        if what == "cut":
            os.truncate(path2, 20)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if Flaky.is_down:
            raise ConnectionError("the line is dead")
        return super().ls(path, detail, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def good_line() -> Iterator[None]:
    yield
    Flaky.is_down = False
    Flaky.on_put = staticmethod(lambda _: "")


class Site:
    """A node's folder with a mirror in a store, and what was noted and told."""

    def __init__(self, folder: Path, store: Path, *, keep: int = 2, protocol: str = "flaky") -> None:
        self.notes: list[str] = []
        self.told: list[Saved] = []
        self.away = store
        self.mirror = RemoteCheckpoints(
            RemoteStore(f"{protocol}://{store}"),
            keep=keep,
            note=self.notes.append,
            on_saved=self.told.append,
            pauses_s=(0.0, 0.0),
        )
        self.store = CheckpointStore(folder, keep=keep, note=self.notes.append, in_use=self.mirror.in_use)

    def write(self, number: int, *, best: bool = False, noise: int = 0) -> None:
        def offer(path: Path, was_best: bool) -> None:
            self.mirror.offer(path.parent, best=was_best)

        state = {"number": number, "weights": torch.full((100,), float(number)), "noise": noise}
        assert self.store.save(state, progress=number / 4, best=best, wait=True, on_saved=offer)

    def save(self, number: int, *, best: bool = False, noise: int = 0) -> bool:
        self.write(number, best=best, noise=noise)
        return self.mirror.flush()

    def number(self) -> int | None:
        loaded = self.store.load(self.mirror.found())
        if loaded is None:
            return None
        number: int = loaded.state["number"]
        assert loaded.progress == number / 4
        assert loaded.path.is_file()
        return number

    def names(self) -> list[str]:
        """The progress of what is in the store."""
        return [path.name.partition("-")[0].strip("0") for path in sorted(self.away.iterdir())]

    def entry(self, number: int) -> Path:
        (path,) = [path for path in self.away.iterdir() if float(path.name.partition("-")[0]) == number / 4]
        return path


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "here", tmp_path / "away")


def elsewhere(site: Site, *, keep: int = 2) -> Site:
    """Another node, which has nothing yet."""
    return Site(Path(tempfile.mkdtemp(dir=site.away.parent)) / "there", site.away, keep=keep)


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_another_node_goes_on_from_the_store(tmp_path: Path, protocol: str) -> None:
    told: list[Saved] = []
    notes: list[str] = []

    def keeper(node: str) -> Persistence:
        store = f"{protocol}://{tmp_path}/jobs/a/"
        keeping = SavingSettings(folder=tmp_path / node, every_s=60.0, checkpoints=1, store=store)
        return Persistence(keeping, note=notes.append, on_saved=told.append)

    first = keeper("node-1")
    assert first.load() is None
    assert first.save(lambda: {"weights": torch.ones(3)}, 1.0, best=True, wait=True)
    assert first.save(lambda: {"weights": torch.full((3,), 2.0)}, 2.5, wait=True)
    first.finish()
    first.finish()
    assert [(one.progress, one.best) for one in told] == [(1.0, True), (2.5, False)]
    assert all(one.path.startswith(f"{protocol}://{tmp_path}/jobs/a/0") for one in told)
    with fsspec.open(told[1].path) as file:
        assert torch.load(file, weights_only=True)["weights"].tolist() == [2.0] * 3

    second = keeper("node-2")
    state = second.load()
    second.finish()
    assert state is not None
    assert state["weights"].tolist() == [2.0] * 3
    assert told[2:] == [told[0]], "the best one is told again"
    assert [path.name for path in (tmp_path / "node-2" / "checkpoints").iterdir()] == ["00000001"]
    assert notes == []


def test_the_newest_and_the_best_are_kept_there(site: Site) -> None:
    for number in range(1, 9):
        assert site.save(number, best=number in {2, 4})
        assert len(site.names()) <= 3
    assert site.names() == ["1.", "1.75", "2."]
    assert elsewhere(site).number() == 8


def test_what_a_killed_worker_left_is_not_a_checkpoint_and_goes(site: Site) -> None:
    site.save(1)
    (site.entry(1) / "meta.json").unlink()
    assert elsewhere(site).number() is None
    for number in (2, 3):
        site.save(number)
    assert site.names() == [".5", ".75"]
    assert site.notes == []


def test_one_that_arrives_damaged_is_not_there_and_the_next_one_is_tried(site: Site) -> None:
    site.save(1)
    Flaky.on_put = staticmethod(lambda name: "cut" if name == "state.pt" else "")
    assert not site.save(2)
    assert not site.save(3)
    assert elsewhere(site).number() == 1
    assert [one.progress for one in site.told] == [0.25]
    (note,) = site.notes
    assert "has 20 bytes instead of" in note
    Flaky.on_put = staticmethod(lambda _: "")
    assert site.save(4)
    assert elsewhere(site).number() == 4
    assert [one.progress for one in site.told] == [0.25, 1.0], "what a newer one replaces is left out"


def test_half_a_manifest_is_no_checkpoint(site: Site) -> None:
    site.save(1)
    Flaky.on_put = staticmethod(lambda name: "cut" if name == "meta.json" else "")
    assert not site.save(2)
    other = elsewhere(site)
    assert other.number() == 1
    (note,) = other.notes
    assert "meta.json cannot be read" in note
    Flaky.on_put = staticmethod(lambda _: "")
    assert site.mirror.flush(), "the same name is used again"
    assert elsewhere(site).number() == 2


def test_an_outage_is_noted_once_and_so_is_the_next(site: Site) -> None:
    for _ in range(2):
        Flaky.is_down = True
        assert [site.save(1), site.save(2)] == [False, False]
        Flaky.is_down = False
        assert site.save(3)
    assert len(site.notes) == 2
    assert all("ConnectionError: the line is dead. It stays" in note for note in site.notes)


def test_where_somebody_waits_the_store_is_asked_a_few_times(site: Site) -> None:
    calls: list[str] = []

    def twice_bad(name: str) -> str:
        calls.append(name)
        return "fail" if len(calls) <= 3 else ""

    Flaky.on_put = staticmethod(twice_bad)
    assert site.save(1), "once in the background, and then three times"
    assert len(site.told) == 1


def test_the_best_one_that_an_outage_held_up_is_copied_before_the_newest(site: Site) -> None:
    Flaky.is_down = True
    site.save(1, best=True)
    site.save(2)
    Flaky.is_down = False
    assert site.save(3)
    assert [(one.progress, one.best) for one in site.told] == [(0.25, True), (0.75, False)]
    assert site.names() == [".25", ".75"]


def test_a_slow_store_gets_the_newest_and_training_does_not_wait(site: Site) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: str) -> str:
        begun.set()
        assert go_on.wait(30)
        return ""

    Flaky.on_put = staticmethod(slow)
    site.write(1)
    assert begun.wait(30)
    for number in range(2, 7):
        site.write(number, best=number == 3)
    assert site.told == []
    go_on.set()
    assert site.mirror.flush()
    assert [one.progress * 4 for one in site.told] == [1, 3, 6]
    assert site.notes == []


def test_the_newer_one_of_here_and_there_is_used(site: Site) -> None:
    site.save(1)
    Flaky.is_down = True
    site.save(2)
    Flaky.is_down = False
    other = elsewhere(site)
    assert other.number() == 1
    assert site.number() == 2, "it is here only"
    for number in (3, 4, 5):
        other.save(number)
    assert site.number() == 5
    assert site.save(6)
    assert other.number() == 6
    assert site.notes[1:] == other.notes == []


def keeper_of(tmp_path: Path, told: list[Saved]) -> Persistence:
    store = f"flaky://{tmp_path}/away"
    keeping = SavingSettings(folder=tmp_path / "here", every_s=60.0, checkpoints=2, store=store)
    return Persistence(keeping, note=lambda _: None, on_saved=told.append)


def test_what_an_outage_left_here_is_copied_by_whoever_goes_on_from_it(tmp_path: Path) -> None:
    told: list[Saved] = []
    Flaky.on_put = staticmethod(lambda _: "fail")
    for progress in (1.0, 2.0):
        first = keeper_of(tmp_path, told)
        assert first.save(lambda: {"weights": torch.zeros(3)}, progress, best=progress == 1.0)
        first.finish()
    assert told == []
    Flaky.on_put = staticmethod(lambda _: "")
    second = keeper_of(tmp_path, told)
    assert second.load() is not None
    second.finish()
    assert [(one.progress, one.best) for one in told] == [(1.0, True), (2.0, False)]


def test_who_waits_hears_whether_the_store_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    told: list[Saved] = []
    keeper = keeper_of(tmp_path, told)
    Flaky.is_down = True
    assert keeper.save(lambda: {"weights": torch.zeros(3)}, 1.0), "it is on its way"
    assert not keeper.save(lambda: {"weights": torch.zeros(3)}, 2.0, wait=True)
    Flaky.is_down = False
    assert keeper.save(lambda: {"weights": torch.zeros(3)}, 3.0, wait=True)
    assert [one.progress for one in told] == [3.0]
    keeper.finish()


def spoil_state(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def cut_state(path: Path) -> None:
    os.truncate(path / "state.pt", 100)


def lose_state(path: Path) -> None:
    (path / "state.pt").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_state, "does not match its checksum"),
        (cut_state, "has 100 bytes instead of"),
        (lose_state, "state.pt is missing"),
    ],
)
def test_a_spoilt_one_in_the_store_is_reported_and_the_one_before_it_used(
    site: Site, spoil: Callable[[Path], None], said: str
) -> None:
    site.save(1)
    site.save(2)
    spoil(site.entry(2))
    other = elsewhere(site, keep=1)
    assert other.number() == 1
    (note,) = other.notes
    assert said in note
    assert f"{site.entry(2)} cannot be used" in note
    assert f"{site.entry(1)} is used instead" in note
    assert other.save(2), "training anew comes to the very same state"
    assert elsewhere(site).number() == 2
    assert len(other.names()) == 1


def test_what_is_newer_than_a_spoilt_one_here_comes_from_the_store(site: Site, tmp_path: Path) -> None:
    site.save(1)
    site.save(2)
    spoil_state(tmp_path / "here" / "00000002")
    again = Site(tmp_path / "here", tmp_path / "away")
    assert again.number() == 2
    (note,) = again.notes
    assert "00000002 cannot be used" in note
    assert f"{site.entry(2)} is used instead" in note


def test_one_just_copied_is_kept_though_a_spoilt_one_seems_newer(site: Site) -> None:
    for number in (2, 4, 8):
        site.save(number)
    cut_state(site.entry(8))
    other = elsewhere(site, keep=1)
    assert other.number() == 4
    for number in (5, 6):
        assert other.save(number)
        assert elsewhere(site).number() == number
    assert other.save(9)
    assert other.names() == ["2.25"]


def test_a_store_that_cannot_be_read_is_no_reason_to_start_anew(site: Site) -> None:
    site.save(1)
    Flaky.is_down = True
    other = elsewhere(site)
    with pytest.raises(InputError, match="cannot be read: ConnectionError: the line is dead"):
        other.number()
    Flaky.is_down = False
    assert other.number() == 1


def test_two_that_believe_to_be_the_leader_do_not_mix_their_files(site: Site) -> None:
    other = elsewhere(site)
    begun, go_on = threading.Event(), threading.Event()

    def slow(name: str) -> str:
        if name == "meta.json" and not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        return ""

    Flaky.on_put = staticmethod(slow)
    site.write(1, noise=1)
    assert begun.wait(30)
    assert other.save(1, noise=2)
    go_on.set()
    assert site.mirror.flush()
    third = elsewhere(site)
    assert len(third.mirror.found()) == 2
    assert third.number() == 1
    assert third.notes == []


def test_a_store_that_removes_nothing_is_noted_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Flaky, "rm", refuse)
    assert all(site.save(number) for number in range(1, 6))
    (note,) = site.notes
    assert "Old checkpoints stay in" in note
    assert "PermissionError: not yours" in note


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "", "fail", "cut"])), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_what_is_told_can_be_loaded_whatever_the_line_did(steps: list[tuple[bool, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "here", Path(folder) / "away")
        for number, (best, what) in enumerate(steps, 1):
            Flaky.on_put = staticmethod(lambda _, what=what: what)
            assert site.save(number, best=best) == (not what)
            told = max((one.progress * 4 for one in site.told), default=None)
            assert elsewhere(site).number() == told
            best_told = [one.path for one in site.told if one.best][-1:]
            assert all(Path(path.removeprefix("flaky://")).is_file() for path in best_told)
            if site.told:
                assert len(elsewhere(site).mirror.found()) <= 3
        Flaky.on_put = staticmethod(lambda _: "")
        site.mirror.close()
        site.store.close()


def test_what_cannot_work_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no protocol 'nowhere'"):
        RemoteStore("nowhere://bucket")
    fsspec.register_implementation("lacking", "no_such_package.Files", errtxt="Install lackingfs")
    with pytest.raises(InputError, match="fsspec says: Install lackingfs"):
        RemoteStore("lacking://bucket")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match=r"pip install 'stretto\[store\]'"):
        RemoteStore("s3://bucket")


def test_files_by_name(tmp_path: Path) -> None:
    store = RemoteStore(f"memory://{tmp_path.name}/")
    source = tmp_path / "source"
    source.write_bytes(b"content")
    with source.open("rb") as file:
        content = measured(file)
    assert store.names() == []
    store.put("a/b", source, content)
    assert (store.names(), store.read("a/b")) == (["a"], b"content")
    assert store.has("a/b", content)
    assert not store.has("a/b", FileDigest(7, ""))
    assert not store.has("a/c", content)
    store.get("a/b", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"content"
    with pytest.raises(StoreError, match=r"a/b has 7 bytes instead of 8"):
        store.put("a/b", source, FileDigest(8, ""))
    for _ in range(2):
        store.delete("a")
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.read("a/b")
    with pytest.raises(FileNotFoundError):
        store.get("a/b", tmp_path / "target")


KILLED = """
    import os, sys
    from pathlib import Path
    import torch
    from stretto.torch.persistence import Persistence, SavingSettings

    def write(folder, begin):
        def told(saved):
            sys.stdout.write(f"saved {saved.progress:.0f}\\n")  # in one piece, whenever it is killed
            sys.stdout.flush()
        keeping = SavingSettings(folder=Path(folder) / "here", every_s=1.0, checkpoints=2, store=f"file://{folder}/away")
        keeper = Persistence(keeping, note=lambda text: print("note", text, flush=True), on_saved=told)
        for number in range(begin, begin + 10_000):
            state = {"number": number, "weights": torch.full((50_000,), float(number))}
            keeper.save(lambda: state, number, best=number % 5 == 0, wait=True)

    while line := sys.stdin.readline():  # a child for every line, so that torch is imported once
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(tell)
            os.read(told, 1)  # until its number was said
            write(sys.argv[1], int(line))
        print("pid", child, flush=True)
        os.close(tell)
        os.close(told)
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


def test_a_worker_killed_while_it_copies_loses_nothing_it_said_was_saved(tmp_path: Path) -> None:
    rng = random.Random(5)
    acknowledged = 0
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for attempt in range(12):
            print(acknowledged + 1, file=parent.stdin, flush=True)
            pid = int(parent.stdout.readline().split()[1])
            for _ in range(attempt % 3):  # however busy the machine is, some were saved
                acknowledged = int(parent.stdout.readline().split()[1])
            threading.Timer(rng.uniform(0.0, 0.1), os.kill, [pid, signal.SIGKILL]).start()
            while (said := parent.stdout.readline().split())[0] != "dead":
                assert said[0] == "saved", said
                acknowledged = int(said[1])
            notes: list[str] = []
            other = CheckpointStore(tmp_path / f"there-{attempt}", keep=1, note=notes.append)
            mirror = RemoteCheckpoints(
                RemoteStore(f"file://{tmp_path}/away"), keep=2, note=notes.append, on_saved=lambda _: None
            )
            loaded = other.load(mirror.found())
            number = 0 if loaded is None else loaded.state["number"]
            assert number in {acknowledged, acknowledged + 1}
            assert all("meta.json" in note for note in notes), "a manifest cut short is seen as such"
            acknowledged = number
        parent.stdin.close()
    assert acknowledged > 0
    assert len(list((tmp_path / "away").iterdir())) <= 5, "two, the best, what was just copied or begun"


def test_checkpoints_that_are_nowhere_else_are_marked_until_the_store_has_them(
    site: Site, tmp_path: Path
) -> None:
    assert site.save(1)
    assert not (tmp_path / "here" / UNCOPIED).exists()
    Flaky.is_down = True
    assert not site.save(2)
    assert (tmp_path / "here" / UNCOPIED).exists()
    Flaky.is_down = False
    assert site.save(3)
    assert not (tmp_path / "here" / UNCOPIED).exists()
