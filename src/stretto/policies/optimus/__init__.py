"""Optimus: workers and parameter servers go to the job with the largest marginal gain."""

from stretto.policies.optimus.policy import Optimus

__all__ = ["Optimus"]
