"""Policies by name, and what is said about options that are wrong."""

from __future__ import annotations

import math

import pytest

from stretto.core.errors import InputError
from stretto.policies.optimus.oracle import OptimusOracle
from stretto.policies.pollux import Pollux
from stretto.policies.registry import (
    BUILT_IN,
    check_policies,
    check_targets,
    make_policy,
    parse_options,
    policy_names,
)
from stretto.testing.policies import FormulaOracle
from tuning_world import TUNING_POLICIES, tuning

STUDY = tuning(trials=4, rungs=(1,), max_epochs=2)


def refusal(name: str, **options: str) -> InputError:
    with pytest.raises(InputError) as caught:
        make_policy(name, options=options)
    return caught.value


def test_every_built_in_policy_has_the_name_it_is_found_by() -> None:
    assert set(BUILT_IN) <= set(policy_names())
    for name in BUILT_IN:
        policy = make_policy(name, oracle=FormulaOracle(), tuning=STUDY, interval_s=17.0)
        assert policy.name == name
        assert policy.interval_s == 17.0
        assert make_policy(name, oracle=FormulaOracle(), tuning=STUDY).interval_s >= 60.0


@pytest.mark.parametrize("name", sorted(TUNING_POLICIES))
def test_a_policy_that_tunes_must_be_given_a_study(name: str) -> None:
    assert "study" in refusal(name).problem
    assert "For jobs there are pollux, optimus, tiresias, drf, tetris, srtf, fifo;" in refusal(name).remedy


def test_options_are_written_as_policy_dot_option() -> None:
    options = parse_options(["pollux.p=-1", "pollux.interference=true", "fifo.backfill=a=b"])
    assert options == {"pollux": {"p": "-1", "interference": "true"}, "fifo": {"backfill": "a=b"}}
    assert parse_options([]) == {}


@pytest.mark.parametrize("text", ["p=-1", "pollux.p", "pollux", ".p=1", "pollux.=1", ""])
def test_options_written_otherwise_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options([text])
    assert repr(text) in caught.value.problem
    assert "POLICY.OPTION=VALUE" in caught.value.remedy


def test_values_have_the_types_of_the_fields() -> None:
    policy = make_policy("pollux", options={"p": "-inf", "interference": "FALSE", "max_nodes": "4"})
    assert policy == Pollux(p=-math.inf, interference=False, max_nodes=4)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("p", "low", "a number"),
        ("p", "nan", "a number"),
        ("p", "", "a number"),
        ("interference", "yes", "true or false"),
        ("max_nodes", "2.5", "a whole number"),
        ("max_nodes", "many", "a whole number"),
    ],
)
def test_wrong_values_name_the_value_and_the_rule(option: str, value: str, rule: str) -> None:
    error = refusal("pollux", **{option: value})
    assert f"pollux.{option}={value}" in error.problem
    assert rule in error.remedy


def test_choices_are_listed() -> None:
    error = refusal("optimus", placement="scattered")
    assert "optimus.placement=scattered" in error.problem
    assert "theorem, packed" in error.remedy


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("pollux", "max_nodes", "0"),
        ("pollux", "max_nodes", "-1"),
        ("pollux", "explore", "-2"),
        ("pollux", "p", "inf"),
        ("tiresias", "threshold_gpu_h", "-1"),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, option: str, value: str) -> None:
    assert refusal(name, **{option: value}).remedy


def test_unknown_policies_are_refused_with_what_was_meant() -> None:
    error = refusal("polux")
    assert "'polux'" in error.problem
    assert "Did you mean pollux?" in error.remedy
    assert all(name in error.remedy for name in BUILT_IN)
    assert "Did you mean" not in refusal("zzz").remedy
    with pytest.raises(InputError, match=r"Did you mean pollux\?"):
        check_policies("fifo,polux")


def test_unknown_options_are_refused_with_those_there_are() -> None:
    error = refusal("pollux", fairness="1")
    assert "pollux has no option 'fairness'" in error.problem
    assert "p, interference, explore, max_nodes, hysteresis" in error.remedy
    assert "Did you mean explore?" in refusal("pollux", explor="1").remedy
    assert "Its options: none" in refusal("drf", p="1").remedy
    assert "no option 'interval_s'" in refusal("pollux", interval_s="5").problem


def test_options_of_a_policy_that_is_not_run_are_refused() -> None:
    options = parse_options(["fifo.backfill=true", "pollux.p=1"])
    check_targets(options, ["pollux", "fifo"])
    with pytest.raises(InputError) as caught:
        check_targets(options, ["pollux", "tiresias"])
    assert "fifo.backfill" in caught.value.problem
    assert "pollux, tiresias" in caught.value.remedy
    with pytest.raises(InputError, match=r"Did you mean pollux\?"):
        check_targets(parse_options(["polux.p=1"]), ["pollux", "tiresias"])


def test_a_policy_that_is_told_the_truth_needs_somebody_who_knows_it() -> None:
    assert "only a simulation knows" in refusal("optimus-oracle").problem
    assert "no option 'oracle'" in refusal("optimus-oracle", oracle="me").problem
    assert isinstance(make_policy("optimus-oracle", oracle=FormulaOracle()), OptimusOracle)
