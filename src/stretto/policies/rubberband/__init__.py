"""RubberBand: a tuning job done by its deadline at the least cost."""

from stretto.policies.rubberband.policy import RubberBand

__all__ = ["RubberBand"]
