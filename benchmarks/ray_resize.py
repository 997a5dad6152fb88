"""Figure: on a Ray cluster a resize stalls a job hardly longer than on one machine, and it starts as fast.

Resizes 1 -> 2 -> 1 of models of 4, 40 and 400 MB, once with both workers on this machine, once on two nodes
of a Ray cluster here. The stall is the time between the last step before a resize and the first after it,
less an ordinary step. It must be at most twice the local one.

Cold start: from the creation of the substrate, when nothing of the run exists, until two workers have taken
their first step together. It must take at most 1.5 times as long as two bare Ray actors with these imports.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from common import TEST_HELPERS, verdict
from resize import ENTRY, SIZES_MB, Steps

from torch_gang import wait_until

sys.path += TEST_HELPERS
from local_bench import BATCH, job_of
from ray_bench import small_cluster
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.instructions import Action, Instruction
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.elastic.substrate import ElasticSubstrate, JobFiles
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots
from stretto.substrate.ray.fleet import RayFleet
from stretto.substrate.ray.nodes import read_nodes
from stretto.substrate.ray.substrate import RaySubstrate

FILES = JobFiles(checkpoint_every_s=1e9)
Make = Callable[[Path, int], ElasticSubstrate]


def clock_from_now() -> Callable[[], float]:
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


def spec(folder: Path, mb: int) -> TrainingJob:
    return TrainingJob(entry=ENTRY, config={"mb": mb, "times": str(folder / "times")}, epochs=None)


def on_machine(folder: Path, mb: int) -> ElasticSubstrate:
    return LocalSubstrate(
        spec_of=lambda _: spec(folder, mb),
        run_dir=folder,
        slots=Slots(("", "")),
        clock=clock_from_now(),
        files=FILES,
    )


def on_ray(folder: Path, mb: int) -> ElasticSubstrate:
    return RaySubstrate(
        fleet=RayFleet(),
        slots=2,
        spec_of=lambda _: spec(folder, mb),
        run_dir=folder,
        clock=clock_from_now(),
        files=FILES,
    )


@contextmanager
def training(make: Make, mb: int) -> Iterator[tuple[Steps, Callable[[Action, Allocation], None]]]:
    """A job's steps, and the function that instructs its substrate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        substrate = make(folder, mb)
        substrate.admit(job_of("a"))
        numbers = iter(range(1, 1_000_000))

        def tell(action: Action, allocation: Allocation) -> None:
            substrate.apply([Instruction(next(numbers), action, "a", allocation, BATCH)])

        try:
            yield Steps(folder / "times"), tell
        finally:
            substrate.stop_now()


def stalls_s(make: Make, mb: int, one: Allocation, two: Allocation, rounds: int) -> list[float]:
    found = []
    with training(make, mb) as (steps, tell):
        tell(Action.START, one)
        for allocation in (two, one) * rounds:
            before = steps.train_on()
            tell(Action.RESIZE, allocation)
            wait_until(functools.partial(has_workers, steps, allocation.worker_count), within_s=120)
            steps.train_on()
            found.append(steps.stall_s(before))
    return found


def has_workers(steps: Steps, count: int) -> bool:
    return steps.all()[-1].workers == count


def cold_start_s(two: Allocation) -> float:
    began_s = time.monotonic()
    with training(on_ray, SIZES_MB[0]) as (steps, tell):
        tell(Action.START, two)
        wait_until(lambda: bool(steps.all()), within_s=120)
        return steps.all()[0].t_s - began_s


class Bare:
    """An actor that only imports what a worker imports."""

    def __init__(self) -> None:
        import torch._dynamo  # noqa: F401, PLC0415

        import stretto.torch  # noqa: F401, PLC0415

    def ready(self) -> bool:
        return True


def bare_start_s() -> float:
    began_s = time.monotonic()
    actors: list[Any] = [ray.remote(Bare).options(num_cpus=0, num_gpus=1).remote() for _ in range(2)]
    ray.get([actor.ready.remote() for actor in actors])
    took_s = time.monotonic() - began_s
    for actor in actors:
        ray.kill(actor)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with small_cluster((1, 1)):
        first, second = (node.name for node in read_nodes())
        one, two = on_nodes({first: 1}), on_nodes({first: 1, second: 1})
        print("Resize 1 -> 2 -> 1: median stall of those who train")
        reached = True
        for mb in SIZES_MB:
            local = (on_nodes({"local": 1}), on_nodes({"local": 2}))
            here_s = statistics.median(stalls_s(on_machine, mb, *local, rounds))
            there_s = statistics.median(stalls_s(on_ray, mb, one, two, rounds))
            reached &= there_s <= 2 * here_s
            print(
                f"{mb:>5} MB  this machine {here_s * 1e3:5.0f} ms   "
                f"Ray {there_s * 1e3:5.0f} ms   {there_s / here_s:.2f}"
            )
        print(f"at most 2.00: {verdict(reached)}")
        pairs = [(cold_start_s(two), bare_start_s()) for _ in range(rounds)]
    ours_s, bare_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"Cold start of two workers {ours_s:.1f} s, two bare actors {bare_s:.1f} s: {ours_s / bare_s:.2f}")
    print(f"at most 1.50: {verdict(ours_s <= 1.5 * bare_s)}")


if __name__ == "__main__":
    main()
