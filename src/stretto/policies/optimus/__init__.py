"""Optimus: marginal gain decides who gets one more worker or parameter server."""

from stretto.policies.optimus.policy import Optimus

__all__ = ["Optimus"]
