"""How long a step takes: the all-reduce model of Pollux, and its online fit.

One optimisation step of a job with K workers on N nodes, each processing m examples, takes

    T_grad = alpha_c + beta_c m                                  one forward and backward pass
             (T_grad^10 + floor_c^10)^(1/10)                     with a floor: the time of launching the work,
                                                                 which small batches take whatever m is
    T_sync = 0                                K = 1
             alpha_r + beta_r (K - 2)         K > 1, N = 1      (within a node)
             alpha_n + beta_n (K - 2)         N > 1             (across nodes)
    T_step = (T_grad^gamma + T_sync^gamma)^(1/gamma)             gamma = 1: no overlap; large: full overlap

and s accumulation passes before it add s T_grad.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.core.observations import SpeedSample

Floats = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""A number or an array of them; arrays broadcast against each other."""

TINY = 1e-8
"""Lower bound of every time constant; also the synchronisation time of a single worker."""
MAX_OVERLAP = 10.0
"""The p-norm at 10 is within 7 % of the maximum. The floor of a pass uses the same norm."""
FLOOR_SIZES = 4
"""Distinct batch sizes needed to fit a line with a floor; fewer would fit anything."""
GOOD_LINE = 0.02
"""A line with a smaller error needs no floor."""
FLOOR_WORTH = 0.5
"""A floor is used only if it reduces the error of the line to this share."""
TOLERANCE = 1e-6
"""Tolerance of the fit; parameters are accurate to a few percent at best."""
CORNERS = (0.03, 0.0)
"""A root mean square has a corner at 0, where the search gets stuck once passes fit exactly. So we first fit
sqrt(mean + corner^2) - corner, and then the root mean square itself."""
NETWORK_PENALTY = 1.1
"""Until a job has spanned nodes, the network is assumed to be at least this much slower than one node."""


@dataclass(frozen=True, slots=True)
class AllReduceSpeed:
    """The seven parameters of the model, and an optional floor; times in seconds."""

    alpha_c: float
    """Constant part of a pass."""
    beta_c: float
    """Time per example of a pass."""
    alpha_n: float
    """Synchronisation of two workers across nodes."""
    beta_n: float
    """Synchronisation added by each further worker across nodes."""
    alpha_r: float
    """Synchronisation of two workers within a node."""
    beta_r: float
    """Synchronisation added by each further worker within a node."""
    gamma: float
    """Overlap of computation and communication, 1 (none) to 10 (nearly full)."""
    floor_c: float = 0.0
    """The least time of a pass, however small its batch is."""

    def parameters(self) -> tuple[float, float, float, float, float, float, float]:
        """All seven, in the order of the published artifact."""
        return (self.alpha_c, self.beta_c, self.alpha_n, self.beta_n, self.alpha_r, self.beta_r, self.gamma)

    def pass_s(self, atomic: Numbers) -> Floats:
        line = self.alpha_c + self.beta_c * np.asarray(atomic, dtype=float)
        return p_norm(line, np.asarray(self.floor_c), MAX_OVERLAP)

    def sync_s(self, nodes: Numbers, workers: Numbers) -> Floats:
        nodes, workers = np.asarray(nodes), np.asarray(workers)
        further = np.maximum(workers - 2, 0)
        across = self.alpha_n + self.beta_n * further
        within = self.alpha_r + self.beta_r * further
        return np.where(nodes > 1, across, np.where(workers > 1, within, TINY))

    def step_s(self, nodes: Numbers, workers: Numbers, atomic: Numbers, accumulation: Numbers = 0) -> Floats:
        """Time of one optimisation step, accumulation passes included."""
        one_pass = self.pass_s(atomic)
        return np.asarray(accumulation) * one_pass + p_norm(one_pass, self.sync_s(nodes, workers), self.gamma)

    def throughput(
        self, nodes: Numbers, workers: Numbers, atomic: Numbers, accumulation: Numbers = 0
    ) -> Floats:
        """Examples per second."""
        batch = np.asarray(workers) * np.asarray(atomic) * (np.asarray(accumulation) + 1)
        return np.asarray(batch / self.step_s(nodes, workers, atomic, accumulation))


def p_norm(a: Floats, b: Floats, p: Numbers) -> Floats:
    """(a^p + b^p)^(1/p) for positive a and b, without overflow."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    return np.asarray(high * (1.0 + (low / high) ** p) ** (1.0 / np.asarray(p, dtype=float)))


def fit_all_reduce(samples: Iterable[SpeedSample]) -> AllReduceSpeed:
    """Parameters that fit the samples best, optimistic about what was never tried.

    Minimises RMSLE(T_grad) + RMSLE(T_step) + 1e-3 (gamma - 1)^2 + 1e-2 ((beta_n/alpha_n)^2 +
    (beta_r/alpha_r)^2) by L-BFGS-B. Parameters that the samples do not determine are fixed:

    - with one batch size, half of the pass is constant;
    - synchronisation costs nothing until two workers, two nodes, or more than two workers were seen;
    - there is no floor unless a line alone fits clearly worse.
    """
    rows = list(samples)
    if not rows:
        raise ValueError("fit_all_reduce needs at least one sample")
    data = _Data.of(rows)
    start, bounds = _start_and_bounds(data)
    theta = _fitted(data, start, bounds)
    if data.sizes >= FLOOR_SIZES:
        theta = _with_floor(data, theta, bounds)
    if not data.spans_nodes:
        theta[2] = max(theta[2], NETWORK_PENALTY * theta[4])
        theta[3] = max(theta[3], NETWORK_PENALTY * theta[5])
    return AllReduceSpeed(*(float(value) for value in theta))


Bounds = list[tuple[float, float | None]]


def _fitted(data: _Data, start: Floats, bounds: Bounds) -> Floats:
    from scipy.optimize import minimize  # noqa: PLC0415  (half a second that most commands never need)

    theta = start
    for corner in CORNERS:
        theta = minimize(
            data.loss_and_gradient,
            theta,
            args=(corner,),
            jac=True,
            bounds=bounds,
            method="L-BFGS-B",
            tol=TOLERANCE,
        ).x
    return np.asarray(theta)


def _with_floor(data: _Data, line: Floats, bounds: Bounds) -> Floats:
    """The line, or a line with a floor if that fits far better.

    The fit starts with a floor as high as the fastest pass, and a line through the slower half of the passes.
    """
    error = data.pass_error(line)
    if error < GOOD_LINE:
        return line
    passes_s = np.exp(data.log_pass)
    slower = passes_s >= np.median(passes_s)
    start = np.append(line, passes_s.min())
    start[:2] = np.maximum(np.linalg.lstsq(data.compute[slower], passes_s[slower])[0], TINY)
    bent = _fitted(data, start, [*bounds, (0.0, None)])
    return bent if data.pass_error(bent) < FLOOR_WORTH * error else line


@dataclass(frozen=True, slots=True)
class _Data:
    """Samples as columns, and the fit's objective. T_sync is linear, and so is T_grad without the floor."""

    compute: Floats
    """T_grad = compute @ (alpha_c, beta_c), without a floor."""
    exchange: Floats
    """T_sync = exchange @ (alpha_n, beta_n, alpha_r, beta_r) + alone."""
    alone: Floats
    log_pass: Floats
    log_step: Floats

    @staticmethod
    def of(rows: list[SpeedSample]) -> _Data:
        nodes = np.array([row.nodes for row in rows])
        workers = np.array([row.workers for row in rows])
        step_s = np.array([row.step_s for row in rows])
        pass_s = np.maximum(step_s - np.array([row.sync_s for row in rows]), TINY)
        across = (nodes > 1).astype(float)
        within = ((nodes == 1) & (workers > 1)).astype(float)
        further = np.maximum(workers - 2, 0)
        return _Data(
            compute=np.stack([np.ones(len(rows)), [float(row.atomic) for row in rows]], axis=1),
            exchange=np.stack([across, across * further, within, within * further], axis=1),
            alone=TINY * (1.0 - across - within),
            log_pass=np.log(pass_s),
            log_step=np.log(np.maximum(step_s, TINY)),
        )

    @property
    def spans_nodes(self) -> bool:
        return bool(self.exchange[:, 0].any())

    @property
    def sizes(self) -> int:
        """Distinct batch sizes."""
        return int(np.unique(self.compute[:, 1]).size)

    def pass_error(self, theta: Floats) -> float:
        """RMSLE(T_grad)."""
        return _rms(np.log(AllReduceSpeed(*theta).pass_s(self.compute[:, 1])) - self.log_pass, 0.0)[0]

    def loss_and_gradient(self, theta: Floats, corner: float = 0.0) -> tuple[float, Floats]:
        """The objective and its gradient, for seven parameters, or eight with a floor."""
        gamma = theta[6]
        floor = theta[7:].sum()
        line = self.compute @ theta[:2]
        one_pass = p_norm(line, floor, MAX_OVERLAP)
        sync = self.exchange @ theta[2:6] + self.alone

        # With u = log T_grad and v = log T_sync, log T_step is log(e^(gamma u) + e^(gamma v)) / gamma.
        u, v = np.log(one_pass), np.log(sync)
        log_step = np.logaddexp(gamma * u, gamma * v) / gamma
        weight_u = np.exp(gamma * (u - log_step))

        loss_pass, d_pass = _rms(u - self.log_pass, corner)
        loss_step, d_step = _rms(log_step - self.log_step, corner)
        ratios = theta[3:6:2] / theta[2:5:2]
        loss = loss_pass + loss_step + 1e-3 * (gamma - 1.0) ** 2 + 1e-2 * float(ratios @ ratios)

        by_u = d_step * weight_u
        by_v = d_step - by_u
        by_pass = (d_pass + by_u) / one_pass
        gradient = np.empty(theta.size)
        gradient[:2] = (by_pass * (line / one_pass) ** (MAX_OVERLAP - 1.0)) @ self.compute
        gradient[2:6] = (by_v / sync) @ self.exchange
        gradient[2:5:2] -= 2e-2 * ratios**2 / theta[2:5:2]
        gradient[3:6:2] += 2e-2 * ratios / theta[2:5:2]
        gradient[6] = (by_u @ u + by_v @ v - d_step @ log_step) / gamma + 2e-3 * (gamma - 1.0)
        gradient[7:] = by_pass @ (floor / one_pass) ** (MAX_OVERLAP - 1.0)
        return loss, gradient


def _rms(errors: Floats, corner: float) -> tuple[float, Floats]:
    """Root mean square with a rounded corner at 0, and its derivative by each error."""
    rms = math.sqrt(float(errors @ errors) / errors.size + corner**2)
    return rms - corner, errors / (errors.size * rms) if rms else errors


def _start_and_bounds(data: _Data) -> tuple[Floats, Bounds]:
    start = np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001])
    bounds: Bounds = [(TINY, None)] * 6 + [(1.0, MAX_OVERLAP)]

    def pin(index: int, value: float = TINY) -> None:
        start[index] = value
        bounds[index] = (value, value)

    if data.sizes == 1:
        pin(0, float(np.exp(data.log_pass).mean()) / 2)
    across, more_across, within, more_within = (bool(column.any()) for column in data.exchange.T)
    if not across:
        pin(2)
        pin(3)
    if not within:
        pin(4)
        pin(5)
    if not (more_across or more_within):
        pin(3)
        pin(5)
    return start, bounds
