"""Resources: what a node has and what a task needs, as vectors."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-9
"""A sum of demands may exceed a capacity by this much, which is float noise."""


@dataclass(frozen=True, slots=True)
class Resources:
    """A vector of resources. `gpu` counts slots, the unit of capacity of GPU jobs.

    A slot is a whole GPU, or a k-th of a GPU that is shared k ways.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    memory_gib: float = 0.0
    bandwidth_gbps: float = 0.0

    def amounts(self) -> tuple[float, float, float, float]:
        return (self.gpu, self.cpu, self.memory_gib, self.bandwidth_gbps)

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.gpu + other.gpu,
            self.cpu + other.cpu,
            self.memory_gib + other.memory_gib,
            self.bandwidth_gbps + other.bandwidth_gbps,
        )

    def __sub__(self, other: Resources) -> Resources:
        return self + other * -1.0

    def __mul__(self, times: float) -> Resources:
        return Resources(
            self.gpu * times, self.cpu * times, self.memory_gib * times, self.bandwidth_gbps * times
        )

    def fits_in(self, free: Resources) -> bool:
        return all(
            need <= have + TOLERANCE for need, have in zip(self.amounts(), free.amounts(), strict=True)
        )

    def dominant_share(self, total: Resources) -> float:
        """Largest share of any one resource of `total`; infinite if `total` lacks a needed resource."""
        shares = [
            need / have if have > 0 else float("inf")
            for need, have in zip(self.amounts(), total.amounts(), strict=True)
            if need > 0
        ]
        return max(shares, default=0.0)


def total_of(parts: list[Resources]) -> Resources:
    return sum(parts, start=Resources())
