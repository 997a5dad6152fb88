"""A thousand random malformed inputs: each is answered or refused, none ends in a traceback."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from inputs import SNAPSHOT, WORKLOAD
from stretto.app.decide import decide
from stretto.app.simulate import Setup, simulate
from stretto.app.snapshot import read_snapshot
from stretto.core.cluster import gpu_nodes
from stretto.core.errors import InputError
from stretto.core.seeds import child_rng
from stretto.worlds.catalogue import builtin_catalogue
from stretto.worlds.load import load_workload

SNAPSHOTS, FILES = 600, 400
JUNK: list[Any] = [None, -1, 0, 1, 2**70, 0.5, 1e308, -1e-300, "", "a", "NaN", "\x00", [], {}, [None], True]
CELLS = ["", "-5", "NaN", "inf", "1e400", "six", "0", "99999999999", '"', "cifar10", ",", "\x00", "2.5"]


def mutate(rng: random.Random, value: Any) -> Any:
    """The value with one random part of it replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        turn = rng.random()
        if turn < 0.15:
            del value[key]
        elif turn < 0.25:
            value[key + "x"] = rng.choice(JUNK)
        else:
            value[key] = mutate(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        if rng.random() < 0.2:
            value.append(copy.deepcopy(value[index]))
        else:
            value[index] = mutate(rng, value[index])
        return value
    return rng.choice(JUNK)


@pytest.mark.parametrize("batch", range(4))
def test_random_snapshots(tmp_path: Path, batch: int) -> None:
    rng = random.Random(batch)
    path = tmp_path / "cluster.json"
    refused = 0
    for turn in range(SNAPSHOTS // 4):
        snapshot: Any = copy.deepcopy(SNAPSHOT)
        for _ in range(rng.choice((1, 1, 2, 4))):
            snapshot = mutate(rng, snapshot)
        text = json.dumps(snapshot)
        if turn % 5 == 0:
            text = text[: rng.randrange(len(text) + 1)]
        path.write_text(text)
        policy = rng.choice(("pollux", "optimus", "tiresias", "drf", "tetris", "srtf", "fifo"))
        try:
            answer = decide(read_snapshot(path), policy)
        except InputError:
            refused += 1
        else:
            assert answer.objective is None or math.isfinite(answer.objective)
    assert 0 < refused < SNAPSHOTS // 4


@pytest.mark.parametrize("batch", range(4))
def test_random_workloads(tmp_path: Path, batch: int) -> None:
    rng = random.Random(100 + batch)
    path = tmp_path / "jobs.csv"
    catalogue = builtin_catalogue()
    refused = 0
    for _ in range(FILES // 4):
        lines = [line.split(",") for line in WORKLOAD.splitlines()]
        for _ in range(rng.choice((1, 1, 2, 4))):
            line = rng.choice(lines)
            turn = rng.random()
            if turn < 0.1:
                line.pop()
            elif turn < 0.2:
                lines.append(list(line))
            elif line:
                line[rng.randrange(len(line))] = rng.choice(CELLS)
        path.write_text("\n".join(",".join(line) for line in lines))
        try:
            workload = load_workload(path, catalogue, child_rng(0, "fuzz"))
        except InputError:
            refused += 1
            continue
        run = simulate(workload, "fifo", Setup(nodes=gpu_nodes(4, 4)))
        assert run.metrics.jobs == len(workload.jobs)
    assert 0 < refused < FILES // 4
