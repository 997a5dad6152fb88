"""Checkpoints: what was saved is there, whatever happens while the next one is written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from stretto.core.errors import InputError
from stretto.torch.checkpoint import CheckpointStore
from stretto.wire.checkpoints import BestCheckpoint, CorruptError, meta_text, parse_meta, read_meta


class Opened:
    """A store, and what it noted and saved."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.notes: list[str] = []
        self.saved: list[tuple[Path, bool]] = []
        self.store = CheckpointStore(folder, keep=keep, note=self.notes.append)

    def save(self, number: int, *, best: bool = False, wait: bool = True) -> bool:
        def on_saved(path: Path, was_best: bool) -> None:
            self.saved.append((path, was_best))

        state = {"number": number, "weights": torch.full((1000,), float(number))}
        return self.store.save(state, progress=number, best=best, wait=wait, on_saved=on_saved)

    def number(self) -> int | None:
        loaded = self.store.load()
        if loaded is None:
            return None
        assert loaded.progress == loaded.state["number"]
        assert bool((loaded.state["weights"] == loaded.state["number"]).all())
        number: int = loaded.state["number"]
        return number


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_a_training_state_comes_back_and_is_an_ordinary_file(tmp_path: Path) -> None:
    model, optimizer, schedule = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "best": float("inf"),
        "size": torch.Size([1]),
    }
    opened = Opened(tmp_path)
    assert opened.store.save(state, progress=2.5, wait=True)
    loaded = Opened(tmp_path).store.load()
    assert loaded is not None
    assert loaded.progress == 2.5
    other, other_optimizer, other_schedule = trained()
    other.load_state_dict(loaded.state["model"])
    other_optimizer.load_state_dict(loaded.state["optimizer"])
    other_schedule.load_state_dict(loaded.state["schedule"])
    assert torch.equal(other.weight, model.weight)
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert other_schedule.state_dict() == schedule.state_dict()
    assert (loaded.state["best"], loaded.state["size"]) == (float("inf"), torch.Size([1]))
    assert torch.equal(torch.load(loaded.path, weights_only=True)["model"]["bias"], model.bias)


def test_nothing_saved_is_nothing_to_load(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "not" / "there")
    assert opened.store.load() is None
    assert opened.store.best() is None
    assert opened.save(1)
    assert opened.number() == 1
    assert opened.notes == []


def test_later_changes_of_the_tensors_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = torch.save

    def slow(*given: Any) -> None:
        assert go_on.wait(10)
        write(*given)

    monkeypatch.setattr(torch, "save", slow)
    opened = Opened(tmp_path)
    state: dict[str, Any] = {"number": 0, "weights": torch.zeros(1000), "list": [1]}
    assert opened.store.save(state, progress=0.0)
    state["weights"].add_(5)
    state["list"].append(2)
    go_on.set()
    opened.store.close()
    loaded = Opened(tmp_path).store.load()
    assert loaded is not None
    assert loaded.state["list"] == [1]
    assert not loaded.state["weights"].any()


def test_while_one_is_written_others_are_left_out_but_the_best_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = torch.save

    def slow(*given: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        write(*given)

    monkeypatch.setattr(torch, "save", slow)
    opened = Opened(tmp_path, keep=5)
    assert opened.save(1, wait=False)
    assert begun.wait(10)
    assert not opened.save(2, wait=False)
    assert opened.save(3, wait=False, best=True)
    assert opened.save(4, wait=False, best=True)
    assert not opened.save(5, wait=False)
    threading.Timer(0.05, go_on.set).start()
    assert opened.save(6)
    numbers = [torch.load(path, weights_only=True)["number"] for path, _ in opened.saved]
    assert numbers == [1, 4, 6]
    assert [best for _, best in opened.saved] == [False, True, False]


def test_the_newest_and_the_newest_best_are_kept(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    for number in range(1, 9):
        assert opened.save(number, best=number in {2, 4})
        assert len(names(tmp_path)) <= 3
    assert names(tmp_path) == ["00000004", "00000007", "00000008"]
    assert opened.store.best() == BestCheckpoint(tmp_path / "00000004" / "state.pt", 4.0)
    again = Opened(tmp_path, keep=1)
    assert again.number() == 8
    assert again.save(9)
    assert names(tmp_path) == ["00000004", "00000009"]


def cut(folder: Path) -> None:
    os.truncate(folder / "state.pt", 700)


def flip(folder: Path) -> None:
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(content)


def lose_state(folder: Path) -> None:
    (folder / "state.pt").unlink()


def lose_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def spoil_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format": 1')


def nest_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("[" * 100_000)


def enlarge_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format": 2, "progress": ' + "9" * 10_000 + "}")


def change_meta(folder: Path) -> None:
    file = folder / "meta.json"
    file.write_text(file.read_text().replace('"progress": 2', '"progress": 3'))


def replace_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()
    (folder / "meta.json").mkdir()


def renumber_meta(folder: Path) -> None:
    file = folder / "meta.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))


def age_meta(folder: Path) -> None:
    meta = read_meta(folder)
    (folder / "meta.json").write_text(meta_text(dataclasses.replace(meta, format=99)))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "has 700 bytes instead of"),
        (flip, "does not match its checksum"),
        (lose_state, "state.pt is missing"),
        (lose_meta, "meta.json is missing"),
        (spoil_meta, "meta.json cannot be read"),
        (nest_meta, "nested too deeply"),
        (enlarge_meta, "a number has 10000 digits"),
        (change_meta, "meta.json does not match its checksum"),
        (renumber_meta, "meta.json does not match its checksum"),
        (replace_meta, "meta.json cannot be read, Is a directory"),
    ],
)
def test_a_corrupt_one_is_reported_and_the_one_before_it_used(tmp_path: Path, spoil: Any, said: str) -> None:
    opened = Opened(tmp_path)
    opened.save(1)
    opened.save(2)
    spoil(tmp_path / "00000002")
    again = Opened(tmp_path)
    assert again.number() == 1
    (note,) = again.notes
    assert said in note
    assert str(tmp_path / "00000002") in note
    assert f"{tmp_path / '00000001'} is used instead" in note
    assert names(tmp_path) == ["00000001", "00000002.corrupt"]
    again.save(3)
    assert names(tmp_path) == ["00000001", "00000002.corrupt", "00000003"]


@pytest.mark.parametrize(
    ("where", "trouble"),
    [
        ("torch.load", RuntimeError("not enough memory: you tried to allocate 4 bytes")),
        ("torch.load", MemoryError()),
        ("stretto.torch.checkpoint.measured", OSError(errno.EMFILE, "Too many open files")),
        ("pathlib.Path.read_bytes", OSError(errno.EIO, "Input/output error")),
    ],
)
def test_a_good_one_that_cannot_be_read_now_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, trouble: Exception
) -> None:
    Opened(tmp_path).save(1)

    def fail(*_: Any, **__: Any) -> None:
        raise trouble

    with monkeypatch.context() as patched:
        patched.setattr(where, fail)
        with pytest.raises(type(trouble)):
            Opened(tmp_path).store.load()
    again = Opened(tmp_path)
    assert again.number() == 1
    assert again.notes == []


def test_one_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.save(1)
    opened.save(2)
    age_meta(tmp_path / "00000002")
    again = Opened(tmp_path)
    with pytest.raises(InputError, match="format 99"):
        again.store.load()
    assert names(tmp_path) == ["00000001", "00000002"]
    assert again.notes == []


def test_one_of_version_0_1_is_read(tmp_path: Path) -> None:
    Opened(tmp_path).save(1)
    meta = dataclasses.asdict(read_meta(tmp_path / "00000001"))
    (tmp_path / "00000001" / "meta.json").write_text(json.dumps({**meta, "format": 1}))
    again = Opened(tmp_path)
    assert again.number() == 1
    assert again.notes == []


def test_a_changed_byte_of_meta_is_seen_or_means_nothing(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.save(1, best=True)
    file = tmp_path / "00000001" / "meta.json"
    written, whole = read_meta(file.parent), file.read_bytes()
    for place in range(len(whole)):
        for byte in (whole[place] ^ 1, whole[place] ^ 0x80, ord(" "), ord("9")):
            changed = whole[:place] + bytes([byte]) + whole[place + 1 :]
            with contextlib.suppress(CorruptError):
                assert parse_meta(changed, "here") == written


def test_none_is_removed_while_it_cannot_be_told_which_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(tmp_path, keep=1)
    opened.save(1, best=True)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        assert opened.save(2)
    assert names(tmp_path) == ["00000001", "00000002"]
    assert opened.save(3)
    assert names(tmp_path) == ["00000001", "00000003"]


def test_when_all_are_corrupt_it_says_so_and_keeps_few(tmp_path: Path) -> None:
    opened = Opened(tmp_path, keep=4)
    for number in range(1, 5):
        opened.save(number)
        cut(tmp_path / f"{number:08d}")
    again = Opened(tmp_path, keep=4)
    assert again.number() is None
    assert len(again.notes) == 4
    assert all("There is no earlier one" in note for note in again.notes)
    assert names(tmp_path) == ["00000003.corrupt", "00000004.corrupt"]
    assert again.save(5)
    assert again.number() == 5


def test_leftovers_of_a_killed_writer_are_removed_on_opening(tmp_path: Path) -> None:
    Opened(tmp_path).save(1)
    shutil.copytree(tmp_path / "00000001", tmp_path / ".new-00000002")
    shutil.copytree(tmp_path / "00000001", tmp_path / ".old-00000000")
    again = Opened(tmp_path)
    assert names(tmp_path) == ["00000001"]
    assert again.save(2)
    assert again.number() == 2


def test_a_failing_disk_is_noted_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(tmp_path)
    assert opened.save(1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert [opened.save(number) for number in (2, 3)] == [False, False]
        assert opened.save(4, wait=False), "it is only known later that it fails"
        opened.store.close()
    assert len(opened.notes) == 1
    assert "No space left on device" in opened.notes[0]
    again = Opened(tmp_path)
    assert again.number() == 1
    assert again.save(5)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert not again.save(6)
        assert not again.save(7)
    assert len(again.notes) == 1
    assert names(tmp_path) == ["00000001", "00000002"]


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    opened = Opened(tmp_path / "file" / "checkpoints")
    assert not opened.save(1)
    assert "Not a directory" in opened.notes[0]
    assert opened.store.load() is None


def test_what_cannot_be_saved_and_a_wrong_keep_are_refused(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    with pytest.raises(InputError, match="extra is a set"):
        opened.store.save({"extra": {1}}, progress=0)
    with pytest.raises(InputError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0, note=print)


CHILD = """
    import resource, signal, sys
    from pathlib import Path
    import torch
    from stretto.torch.checkpoint import CheckpointStore

    def writer(folder, begin):
        store = CheckpointStore(Path(folder), keep=2, note=lambda text: print("note", text, flush=True))
        def saved(path, best):
            sys.stdout.write(f"saved {number}\\n")  # in one piece, whenever it is killed
            sys.stdout.flush()
        for number in range(begin, begin + 10_000):
            state = {"number": number, "weights": torch.full((50_000,), float(number))}
            store.save(state, progress=number, best=number % 7 == 0, wait=True, on_saved=saved)
"""
KILLED = (
    CHILD
    + """
    import os
    while line := sys.stdin.readline():  # a child for every line, so that torch is imported once
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(tell)
            os.read(told, 1)  # until its number was said
            writer(sys.argv[1], int(line))
        print("pid", child, flush=True)
        os.close(tell)
        os.close(told)
        os.waitpid(child, 0)
        print("dead", flush=True)
"""
)
LIMITED = (
    CHILD
    + """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = CheckpointStore(Path(sys.argv[1]), keep=2, note=lambda text: print("note", text, flush=True))
    print(store.save({"number": 1, "weights": torch.ones(1000)}, progress=1, wait=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    print(store.save({"number": 2, "weights": torch.ones(100_000)}, progress=2, wait=True))
    print(store.save({"number": 3, "weights": torch.ones(100_000)}, progress=3, wait=True))
    print(store.save({"number": 4, "weights": torch.full((1000,), 4.0)}, progress=4, wait=True))
    store.close()
"""
)


def child(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_writer_killed_at_any_moment_loses_nothing_it_said_was_saved(tmp_path: Path) -> None:
    rng = random.Random(5)
    acknowledged = 0
    with child(KILLED, tmp_path) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for attempt in range(20):
            print(acknowledged + 1, file=parent.stdin, flush=True)
            pid = int(parent.stdout.readline().split()[1])
            for _ in range(attempt % 3):  # however busy the machine is, some were saved
                acknowledged = int(parent.stdout.readline().split()[1])
            threading.Timer(rng.uniform(0.0, 0.06), _kill, [pid]).start()
            while (said := parent.stdout.readline().split())[0] != "dead":
                assert said[0] == "saved", said
                acknowledged = int(said[1])
            opened = Opened(tmp_path)
            number = opened.number()
            assert opened.notes == []
            assert (number or 0) in {acknowledged, acknowledged + 1}
            acknowledged = number or 0
            assert len(names(tmp_path)) <= 4, "two, the best, and one that was not yet removed"
        parent.stdin.close()
    assert acknowledged > 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_file_that_may_not_grow_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    with child(LIMITED, tmp_path) as process:
        said, _ = process.communicate(timeout=60)
    lines = said.splitlines()
    assert [line for line in lines if not line.startswith("note")] == ["True", "False", "False", "True"]
    (note,) = [line for line in lines if line.startswith("note")]
    assert "File too large" in note
    assert Opened(tmp_path).number() == 4
    assert names(tmp_path) == ["00000001", "00000004"]
