"""HyperSched: the best model by a deadline on a fixed cluster."""

from stretto.policies.hypersched.policy import HyperSched

__all__ = ["HyperSched"]
