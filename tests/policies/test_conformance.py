"""Every built-in policy keeps the contract of all policies."""

from __future__ import annotations

from typing import Any

from stretto.policies.base import Oracle, Policy
from stretto.policies.registry import BUILT_IN, make_policy
from stretto.testing.policies import PolicyConformance
from tuning_world import TUNING_POLICIES

GPU_ONLY = {"pollux", "tiresias", "optimus-oracle"}
OPTIONS: dict[str, dict[str, str]] = {
    "pollux-average": {"p": "1", "interference": "false"},
    "pollux-worst-off": {"p": "-inf", "hysteresis": "0.05"},
    "fifo-backfill": {"backfill": "true"},
}
"""Variants with other options, by the policy's name and a word."""


def suite(policy_name: str, options: dict[str, str]) -> type[PolicyConformance]:
    class Suite(PolicyConformance):
        with_servers = policy_name not in GPU_ONLY

        def policy(self, oracle: Oracle) -> Policy:
            return make_policy(policy_name, options=options, oracle=oracle)

    return Suite


def add_suites(module: dict[str, Any]) -> None:
    for name in BUILT_IN:
        if name in TUNING_POLICIES:
            continue  # they start nothing but trials; their own tests have what applies
        variants = {
            name: {},
            **{word: given for word, given in OPTIONS.items() if word.startswith(f"{name}-")},
        }
        for word, options in variants.items():
            title = "Test" + "".join(part.title() for part in word.split("-"))
            module[title] = type(title, (suite(name, options),), {"__module__": __name__})


add_suites(globals())
