"""Learning curves: tables that are read, and formulas."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.core.seeds import child_rng
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.algoperf import read_algoperf
from stretto.worlds.curve_csv import read_curve_csv
from stretto.worlds.curve_files import load_curves
from stretto.worlds.curves import CIFAR, FAMILIES, RESNET, CurveTable, ToyFamily, make_table
from stretto.worlds.taskset import read_taskset

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("STRETTO_DATA", ROOT.parent / "shared" / "data"))

TASKSET: list[dict[str, Any]] = [
    {"hp": {"learning_rate": 0.1, "l2": 1e-3, "linear_decay": 1e-5}, "valid": {"loss": [9.0, 3.0, 2.0, 1.0]}},
    {
        "hp": {"learning_rate": 1.0, "l2": 1e-3, "linear_decay": 1e-6},
        "valid": {"loss": [9.0, 4.0, None, 5.0]},
    },
]
CSV = """trial,epoch,value,lr,kind,epoch_s
a,1,0.3,0.1,x,10
b,1,0.2,1,y,30
a,2,0.4,0.1,x,20
b,2,NaN,1,y,30
"""
RUNS = """run_id,submission,workload,metric,val_target,step_hint,hparams_json
r0,adam,w,accuracy,0.9,100,"{""lr"": 0.1, ""grid"": [1]}"
r1,adam,w,accuracy,0.9,100,"{""lr"": 0.2}"
r2,sgd,w,accuracy,0.9,100,{}
r3,sgd,v,loss,0.9,100,{}
"""
MEASURED = """run_id,global_step,train_time_s,val_accuracy,val_loss
r0,1,2,0.1,1
r0,60,120,0.5,1
r0,96,192,0.7,1
r1,1,1,0.2,1
r1,45,45,0.6,1
r1,100,100,,1
r2,1,1,0.3,1
r2,50,50,0.95,1
"""


def no_chance() -> np.random.Generator:
    return np.random.default_rng(0)


def curve_of(table: CurveTable, row: int) -> tuple[float, ...]:
    return table.curve(table.configs[row], table.most_epochs, no_chance())


@pytest.fixture
def algoperf(tmp_path: Path) -> Path:
    (tmp_path / "curves").mkdir()
    (tmp_path / "runs.csv.gz").write_bytes(gzip.compress(RUNS.encode()))
    (tmp_path / "curves" / "w.csv.gz").write_bytes(gzip.compress(MEASURED.encode()))
    return tmp_path


def test_divergence_is_for_ever() -> None:
    values = np.array([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0], [math.inf, 2.0, 3.0]])
    table = make_table(name="t", metric="m", direction=Direction.MAX, hyperparameters=[()] * 3, values=values)
    np.testing.assert_array_equal(table.values[0], [1.0, math.nan, math.nan])
    np.testing.assert_array_equal(table.values[1], [1.0, 2.0, 3.0])
    assert table.diverged == 2
    assert table.notes == ("2 of 3 runs diverged.",)
    with pytest.raises(ValueError, match="read-only"):
        table.values[0, 0] = 0.0


def test_taskset(tmp_path: Path) -> None:
    path = tmp_path / "task.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TASKSET).encode()))
    table = read_taskset(path)
    assert (table.name, table.direction, table.most_epochs) == ("task", Direction.MIN, 3)
    assert curve_of(table, 0) == (3.0, 2.0, 1.0)
    assert curve_of(table, 1)[0] == 4.0
    assert all(map(math.isnan, curve_of(table, 1)[1:]))
    assert table.configs[1][:2] == (("row", 1), ("learning_rate", 1.0))
    assert any("linear_decay" in note and "cut short" in note for note in table.notes)
    assert not any("l2" in note for note in table.notes)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(CSV)
    table = read_curve_csv(path, Direction.MAX)
    assert table.configs[0] == (("row", 0), ("trial", "a"), ("lr", 0.1), ("kind", "x"))
    assert table.configs[1] == (("row", 1), ("trial", "b"), ("lr", 1), ("kind", "y"))
    assert curve_of(table, 0) == (0.3, 0.4)
    assert math.isnan(curve_of(table, 1)[1])
    assert table.relative_time(table.configs[0]) == pytest.approx(15 / 22.5)
    assert table.relative_time(table.configs[1]) == pytest.approx(30 / 22.5)


@pytest.mark.parametrize(
    ("old", "new", "line", "complaint"),
    [
        ("a,2,", "a,3,", 4, "epoch 2 is due"),
        ("a,2,0.4,0.1", "a,2,0.4,0.2", 4, "lr of trial 'a' is 0.2 here and 0.1 in line 2"),
        ("0.3", "much", 2, "value 'much' is not a finite number"),
        ("b,2,NaN,1,y,30\n", "", 3, "ends after epoch 1"),
        ("trial,", "name,", 1, "no column trial"),
        ("value", "accuracy", 1, "no column value"),
        (",10\n", ",0\n", 2, "epoch_s '0' is not above 0"),
        ("0.1,x,10", "inf,x,10", 2, "lr 'inf' is not a finite number"),
    ],
)
def test_csv_slips_are_named(tmp_path: Path, old: str, new: str, line: int, complaint: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(CSV.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        read_curve_csv(path, Direction.MAX)
    assert refused.value.where == f"{path}:{line}"
    assert complaint in refused.value.problem
    assert refused.value.remedy


def test_csv_may_end_where_it_diverged(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("row,epoch,value\n7,1,nan\n8,1,1\n8,2,2\n")
    table = read_curve_csv(path, Direction.MIN)
    assert table.diverged == 1
    assert table.configs[0] == (("row", 0),)


def test_algoperf(algoperf: Path) -> None:
    table = read_algoperf(algoperf, "w", 4)
    assert (table.metric, table.direction) == ("accuracy", Direction.MAX)
    assert [dict(config)["run"] for config in table.configs] == ["r0", "r1"]  # r2 ends too early
    assert curve_of(table, 0) == (0.1, 0.1, 0.5, 0.7)  # at steps 25, 50, 75 and 100
    assert curve_of(table, 1)[:3] == (0.2, 0.6, 0.6)
    assert math.isnan(curve_of(table, 1)[3])
    assert dict(table.configs[0])["grid"] == "[1]"
    assert table.epoch_s is not None
    np.testing.assert_allclose(table.epoch_s, [50.0, 25.0])
    notes = " ".join(table.notes)
    assert "Left out: 1 runs that end more than 5% earlier, 1 at their target and 0 out of time" in notes
    assert "step hint" in notes


def test_algoperf_ends_where_most_runs_do(algoperf: Path) -> None:
    """Two of three runs end at 50 steps: 2 x 50 is no more than 2 x 100, but three of them are."""
    lines = MEASURED.replace("r0,60,120,0.5,1\nr0,96,192,0.7,1", "r0,50,100,0.5,1")
    (algoperf / "curves" / "w.csv.gz").write_bytes(gzip.compress(lines.encode()))
    table = read_algoperf(algoperf, "w", 2)
    assert len(table.configs) == 3
    assert curve_of(table, 0) == (0.1, 0.5)
    assert "end at 50 of 100 steps" in " ".join(table.notes)


def test_algoperf_needs_a_first_measurement(algoperf: Path) -> None:
    (algoperf / "curves" / "w.csv.gz").write_text(MEASURED.replace("r0,1,2,", "r0,30,60,"))
    table = read_algoperf(algoperf, "w", 4)
    assert [dict(config)["run"] for config in table.configs] == ["r1"]
    assert "Left out: 1 runs without a measurement" in " ".join(table.notes)


def test_algoperf_passes_over_steps_that_are_none(algoperf: Path) -> None:
    lines = MEASURED + "r9,1,1,0,1\n" + "r9,2,2000,0,1\n"
    (algoperf / "curves" / "w.csv.gz").write_bytes(gzip.compress(lines.encode()))
    (algoperf / "runs.csv.gz").write_text(RUNS + "r9,odd,w,accuracy,0.9,100,{}\n")
    table = read_algoperf(algoperf, "w", 4)
    assert [dict(config)["run"] for config in table.configs] == ["r0", "r1"]
    assert "Left out: 1 runs whose steps take over 10 times" in " ".join(table.notes)


@pytest.mark.parametrize(
    ("workload", "epochs", "complaint"),
    [("ww", 4, "no workload 'ww'"), ("v", 4, "cannot be read"), ("w", 0, "0 epochs")],
)
def test_algoperf_slips_are_named(algoperf: Path, workload: str, epochs: int, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_algoperf(algoperf, workload, epochs)


def test_one_door(tmp_path: Path, algoperf: Path) -> None:
    (tmp_path / "mine.csv").write_text(CSV)
    (tmp_path / "task.json").write_text(json.dumps(TASKSET))
    assert load_curves("builtin:resnet") is RESNET
    assert load_curves("mine.csv", folder=tmp_path, direction=Direction.MIN).direction is Direction.MIN
    assert load_curves("csv:mine.csv:min", folder=tmp_path).direction is Direction.MIN
    assert load_curves(f"csv:{tmp_path / 'mine.csv'}").direction is Direction.MAX
    assert load_curves("taskset:task.json", folder=tmp_path).name == "task"
    assert load_curves("algoperf:.:w:2", folder=algoperf).most_epochs == 2
    assert load_curves(f"algoperf:{algoperf}:w").most_epochs == 50


@pytest.mark.parametrize(
    "text",
    ["", "builtin:resnett", "csv:", "taskset:", "algoperf:here", "hdfs:x", "\0", "csv:\0", "x.parquet"],
)
def test_unknown_curves_are_refused(text: str) -> None:
    with pytest.raises(InputError) as refused:
        load_curves(text)
    assert refused.value.remedy


JUNK: list[Any] = [None, -1, 0, 2**2000, 1e308, "", "NaN", "\x00", [], {}, [None], True, math.nan, math.inf]


def spoil(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: spoil(rng, value[key])} if rng.random() < 0.9 else {}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], spoil(rng, value[index]), *value[index + rng.choice((0, 1, 1)) :]]
    return rng.choice(JUNK)


def spoil_text(rng: random.Random, text: str) -> str:
    cells = ["", "-5", "NaN", "inf", "1e400", "six", "0", "99999999999", '"', ",", "\x00", "2.5", "\n", "{"]
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(cells) + text[at + rng.choice((0, 1, 3)) :]


def answered(read: Callable[[], CurveTable]) -> bool:
    """Whether the file was read, rather than refused; what is read is sound."""
    table, refused = None, None
    try:
        table = read()
    except InputError as error:
        refused = error
    if table is None:
        assert refused is not None
        assert refused.where
        assert refused.remedy
        return False
    assert len(table.configs) == len(table.values)
    assert all(config[0] == ("row", row) for row, config in enumerate(table.configs))
    lost = np.isnan(table.values)
    assert not (lost[:, :-1] & ~lost[:, 1:]).any()
    assert not np.isinf(table.values).any()
    return True


def test_spoiled_files_are_read_or_refused(tmp_path: Path, algoperf: Path) -> None:
    rng = random.Random(1)
    plain, task = tmp_path / "mine.csv", tmp_path / "task.json"
    runs, points = algoperf / "runs.csv.gz", algoperf / "curves" / "w.csv.gz"
    good = 0
    for turn in range(250):
        plain.write_text(spoil_text(rng, CSV))
        good += answered(lambda: read_curve_csv(plain, Direction.MAX))
        spoiled = json.dumps(spoil(rng, copy.deepcopy(TASKSET)))
        task.write_text(spoiled if turn % 4 else spoil_text(rng, spoiled))
        good += answered(lambda: read_taskset(task))
        runs.write_text(spoil_text(rng, RUNS) if turn % 2 else RUNS)
        points.write_text(MEASURED if turn % 2 else spoil_text(rng, MEASURED))
        good += answered(lambda: read_algoperf(algoperf, "w", 4))
    assert 100 < good < 650


@pytest.mark.parametrize("data", [b"\x1f\x8bnot gzip", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"", b"[]"])
def test_what_is_no_taskset_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "task.json"
    path.write_bytes(data)
    with pytest.raises(InputError):
        read_taskset(path)


GRID: list[Config] = [
    (("lr", lr), ("wd", wd), ("momentum", momentum))
    for lr in (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0)
    for wd in (1e-4, 5e-4, 1e-3, 5e-3)
    for momentum in (0.9, 0.95, 0.99, 0.997)
]


def test_cifar_is_as_published() -> None:
    """B.3's grid: what the best of 14 reach; and curves cross, but not wildly."""
    values = np.array([CIFAR.curve(config, 200, child_rng(0, "c", str(i))) for i, config in enumerate(GRID)])
    rng = np.random.default_rng(0)
    drawn = [values[rng.choice(len(GRID), 14, replace=False)] for _ in range(200)]
    for epoch, expected in ((24, 0.833), (60, 0.88), (100, 0.908), (200, 0.93)):
        best = float(np.mean([np.nanmax(rows[:, epoch - 1]) for rows in drawn]))
        assert best == pytest.approx(expected, abs=0.015), epoch
    diverged = np.isnan(values[:, -1])
    assert 15 <= diverged.sum() <= 50
    fast = np.array([float(config[0][1]) >= 0.5 for config in GRID])
    assert diverged[fast].mean() > 0.5
    assert diverged[~fast].mean() < 0.25
    ranks = np.array([np.argsort(np.argsort(-values[~diverged, epoch - 1])) for epoch in (8, 200)])
    early, late = ranks - ranks.mean(axis=1, keepdims=True)
    assert 0.7 < (early @ late) / (late @ late) < 0.95


def test_low_rates_learn_late() -> None:
    """Averaged over what is particular to a configuration."""

    def mean_at(lr: float, epoch: int) -> float:
        draws = [
            RESNET.curve((("lr", lr * (1 + i * 1e-6)),), 2000, child_rng(0, "c", str(i))) for i in range(60)
        ]
        return float(np.nanmean([values[epoch - 1] for values in draws]))

    assert mean_at(0.1, 10) > mean_at(0.01, 10) + 0.1 > mean_at(0.001, 10) + 0.2
    assert mean_at(0.01, 2000) > mean_at(0.5, 2000)
    assert mean_at(0.1, 2000) > mean_at(0.01, 2000)


def test_toy_follows_its_formula() -> None:
    config: Config = (("b0", 0.2), ("b1", 0.5), ("b2", 1.0))
    values = np.array(ToyFamily().curve(config, 500, no_chance()))
    k = np.arange(1, 501)
    ideal = (2.0 - (1.0 / (0.002 * k + 0.55) + 0.01)) / 2.0
    shortfall = ideal - values
    assert shortfall.min() >= 0.0
    assert shortfall.mean() == pytest.approx(0.0025 * math.sqrt(2 / math.pi), rel=0.1)
    drawn = np.array([ToyFamily().curve((), 500, child_rng(0, "c", str(i)))[-1] for i in range(200)])
    assert np.median(drawn) == pytest.approx(0.44, abs=0.04)  # b0 = 0.1 ln 2


values_of_any_kind = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.booleans(), st.text(max_size=5)
)
configs = st.dictionaries(
    st.one_of(st.sampled_from(["lr", "momentum", "wd", "b0", "weight_decay"]), st.text(max_size=5)),
    values_of_any_kind,
    max_size=5,
).map(lambda chosen: tuple(chosen.items()))


@given(configs, st.sampled_from(FAMILIES), st.integers(1, 60))
@example((("b0", 8.98846567431158e307),), ToyFamily(), 2)
def test_any_configuration_has_a_curve(config: Config, family: ToyFamily, epochs: int) -> None:
    values = family.curve(config, epochs, no_chance())
    again = family.curve(config, epochs, no_chance())
    np.testing.assert_array_equal(values, again)
    assert len(values) == epochs
    known = [value for value in values if not math.isnan(value)]
    assert all(map(math.isnan, values[len(known) :]))
    assert all(-3.0 <= value <= 1.0 for value in known)


def test_unknown_hyperparameters_matter_a_little() -> None:
    def end(*extra: tuple[str, float | str]) -> float:
        draws = [
            CIFAR.curve((("lr", 0.1), ("copy", i), *extra), 200, child_rng(0, "c", str(i))) for i in range(30)
        ]
        return float(np.mean([values[-1] for values in draws]))

    plain = end()
    assert all(0.0 < abs(end(extra) - plain) < 0.02 for extra in (("depth", 18.0), ("kind", "x")))


@pytest.mark.skipif(not (DATA / "taskset").is_dir(), reason=f"no TaskSet at {DATA} (set STRETTO_DATA)")
def test_published_taskset() -> None:
    diverged = {}
    for path in sorted((DATA / "taskset").glob("*.json.gz")):
        table = read_taskset(path)
        assert table.values.shape == (1000, 50)
        diverged[path.name.split("imdb_")[1].removesuffix(".json.gz")] = table.diverged
    assert diverged == {
        "patch128_LSTM128_avg_bs64": 84,
        "patch128_LSTM128_embed128_bs64": 78,
        "patch32_GRU64_avg_bs128": 0,
        "patch32_IRNN64_relu_last_bs128": 245,
        "patch32_LSTM128_bs128": 3,
        "patch32_VRNN64_relu_avg_bs128": 171,
    }


@pytest.mark.skipif(not (DATA / "algoperf").is_dir(), reason=f"no AlgoPerf at {DATA} (set STRETTO_DATA)")
@pytest.mark.parametrize(
    ("workload", "rows", "diverged", "best"),
    [
        ("criteo1tb_jax", 103, 5, 0.1236),
        ("librispeech_deepspeech_jax", 142, 0, 0.1184),
        ("ogbg_jax", 91, 0, 0.3002),
    ],
)
def test_published_algoperf(workload: str, rows: int, diverged: int, best: float) -> None:
    table = read_algoperf(DATA / "algoperf", workload)
    assert table.values.shape == (rows, 50)
    assert table.diverged == diverged
    pick = np.nanmax if table.direction is Direction.MAX else np.nanmin
    assert pick(table.values[:, -1]) == pytest.approx(best, abs=1e-4)
    assert table.epoch_s is not None
    assert table.epoch_s.std() < table.epoch_s.mean()
