"""What a nursery does to the threads of libraries, in this process and with a torch that only takes note."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
from stretto.torch.fork_server import LibraryThreads

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


class Library:
    """As threadpoolctl shows one."""

    def __init__(self, internal_api: str, num_threads: int = 1) -> None:
        self.internal_api = internal_api
        self.num_threads = num_threads

    def set_num_threads(self, number: int) -> None:
        self.num_threads = number


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Library]:
    """Those that are loaded; torch is one of them. The environment gives each its three threads."""
    loaded = [Library("openmp"), Library("openblas")]
    fake = ModuleType("torch")
    fake.asked = []  # type: ignore[attr-defined]
    fake.set_num_threads = fake.asked.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    found = SimpleNamespace(lib_controllers=loaded)
    monkeypatch.setattr("threadpoolctl.ThreadpoolController", lambda: found)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return loaded


def torch() -> Any:
    return sys.modules["torch"]


def test_libraries_have_one_thread_until_a_worker_is_given_its_own(libraries: list[Library]) -> None:
    threads = LibraryThreads()
    assert {int(os.environ[name]) for name in NAMES} == {1}
    with threads.noting_choices():
        pass
    threads.restore_environment()
    threads.give()
    assert [os.environ.get(name) for name in NAMES] == ["3", None, None, None]
    assert [library.num_threads for library in libraries] == [3, 3]
    assert torch().asked == [3]


def test_what_training_code_chooses_while_it_is_imported_holds(libraries: list[Library]) -> None:
    threads = LibraryThreads()
    with threads.noting_choices():
        torch().set_num_threads(1)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        libraries[0].num_threads = 5
    threads.restore_environment()
    threads.give()
    assert torch().asked == [1, 1]
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert [library.num_threads for library in libraries] == [5, 1]


@pytest.mark.parametrize(("text", "number"), [("4,2", 4), ("all", len(os.sched_getaffinity(0)))])
def test_numbers_are_read_as_libraries_read_them(
    libraries: list[Library], monkeypatch: pytest.MonkeyPatch, text: str, number: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    threads = LibraryThreads()
    with threads.noting_choices():
        pass
    threads.restore_environment()
    threads.give()
    assert [library.num_threads for library in libraries] == [number, number]
