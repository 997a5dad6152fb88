"""The ideas behind Optimus, drawn from the built-in parameter-server jobs: convergence and speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.observations import LossPoint, SpeedSample
from stretto.core.seeds import child_rng
from stretto.models.convergence import ConvergenceFit, fit_convergence
from stretto.models.parameter_server import ServerSpeedFit, fit_server_speed
from stretto.models.speed import Floats
from stretto.report.plotting import LineStyle, graph_objects, line_style, panels, styled
from stretto.worlds.servers import (
    CRITERION,
    MAX_EPOCHS,
    TYPES,
    ServerJobType,
    ServerTruth,
    server_workload,
)

TASKS = 20
"""Workers and servers together, as in the published figure."""
SAMPLED = ((4, 4), (4, 8), (8, 4), (12, 8), (10, 10), (2, 8))
"""(servers, workers) that a job tries before its speed is fitted."""
SEEN = (0.2, 0.5)
"""Fractions of training at which convergence is predicted."""


def loss_curves() -> Any:
    """Losses that jobs of the nine types report, each relative to its first, over their own length."""
    figure = graph_objects().Figure()
    for index, (name, losses) in enumerate(sorted(_losses_by_type().items())):
        progress = 100.0 * np.arange(1, losses.size + 1) / losses.size
        style = line_style(index)
        figure.add_scatter(
            x=progress.round(2).tolist(),
            y=(losses / losses.max()).round(4).tolist(),
            name=name,
            mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 1.8},
            hovertemplate="%{x:.0f} %: %{y:.2f}",
        )
    figure.update_xaxes(title_text="progress of training (%)", range=[0, 101])
    figure.update_yaxes(title_text="loss / largest loss", range=[0, 1.05])
    return styled(figure, 400)


def convergence_prediction() -> Any:
    """The curve 1 / (b0 k + b1) + b2 fitted to the losses so far, and the convergence it predicts."""
    losses = _losses_by_type()["resnet-50"]
    titles = [f"After {round(share * losses.size)} of {losses.size} epochs" for share in SEEN]
    figure = panels(1, 2, titles, horizontal_spacing=0.09, shared_yaxes=True)
    for column, share in enumerate(SEEN, start=1):
        seen = round(share * losses.size)
        fit = fit_convergence([LossPoint(k + 1, loss) for k, loss in enumerate(losses[:seen].tolist())])
        assert fit is not None, "a fifth of training is more than three epochs"
        _draw_prediction(figure, column, losses, seen, fit)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="training loss", rangemode="tozero", col=1)
    return styled(figure, 420)


def server_speed() -> Any:
    """How fast a synchronous job steps for a split of 20 tasks, and as workers and servers grow together."""
    titles = (f"{TASKS} tasks: workers against servers", "As many servers as workers")
    figure = panels(1, 2, titles, horizontal_spacing=0.1)
    tasks = np.arange(1, TASKS)
    for index, name in enumerate(("resnet-50", "inception-bn", "kaggle-ndsb")):
        kind = next(one for one in TYPES if one.name == name)
        style, fit = line_style(index), _fit(kind)
        for column, (servers, workers) in enumerate(((TASKS - tasks, tasks), (tasks, tasks)), start=1):
            true = [1.0 / _step_s(kind, int(p), int(w)) for p, w in zip(servers, workers, strict=True)]
            fitted = fit.model.steps_per_s(servers, workers).tolist()
            _draw_speed(figure, column, name=name, style=style, workers=tasks, true=true, fitted=fitted)
    figure.update_xaxes(title_text="workers")
    figure.update_yaxes(title_text="steps per second", rangemode="tozero")
    return styled(figure, 400)


def _losses_by_type() -> dict[str, Floats]:
    """Reported losses of the first job of each type in a drawn workload."""
    workload = server_workload(child_rng(0, "figures"), jobs=60)
    found: dict[str, Floats] = {}
    for job in workload.jobs:
        truth = workload.truths[job.id]
        if isinstance(truth, ServerTruth):
            found.setdefault(truth.kind.name, np.array(truth.losses))
    return found


def _draw_prediction(figure: Any, column: int, losses: Floats, seen: int, fit: ConvergenceFit) -> None:
    predicted = fit.epochs_to_converge(CRITERION, MAX_EPOCHS)
    place = {"row": 1, "col": column}
    shared: dict[str, Any] = {"showlegend": column == 1, **place}
    epochs = np.arange(1, max(losses.size, predicted.high) + 1)
    # Each is normalised by itself: all are drawn from the fitted loss at the first epoch.
    likely = np.array([fit.scale * curve.loss(epochs) for curve in fit.plausible])
    figure.add_scatter(
        x=[*epochs.tolist(), *epochs[::-1].tolist()],
        y=[*likely.max(axis=0).tolist(), *likely.min(axis=0)[::-1].tolist()],
        fill="toself",
        fillcolor="rgba(0,114,178,0.15)",
        line={"width": 0},
        hoverinfo="skip",
        name="curves not ruled out (80 %)",
        **shared,
    )
    figure.add_scatter(
        x=epochs.tolist(),
        y=fit.loss(epochs).tolist(),
        name="fit",
        mode="lines",
        line={"color": "#0072B2", "width": 2},
        hovertemplate="epoch %{x}: %{y:.3f}",
        **shared,
    )
    for part, colour, name in (
        (slice(0, seen), "#24292f", "seen"),
        (slice(seen, None), "#c0c4c9", "to come"),
    ):
        figure.add_scatter(
            x=np.arange(1, losses.size + 1)[part].tolist(),
            y=losses[part].tolist(),
            mode="markers",
            marker={"color": colour, "size": 6},
            name=name,
            hovertemplate="epoch %{x}: %{y:.3f}",
            **shared,
        )
    figure.add_vrect(
        x0=predicted.low, x1=predicted.high, fillcolor="#D55E00", opacity=0.12, line_width=0, **place
    )
    figure.add_vline(x=predicted.expected, line={"color": "#D55E00", "dash": "dash", "width": 1.6}, **place)
    figure.add_annotation(
        x=predicted.expected,
        y=1,
        yref="y domain" if column == 1 else "y2 domain",
        yanchor="top",
        xanchor="right",
        xshift=-6,
        yshift=-4,
        showarrow=False,
        text=f"ends at {predicted.expected}<br>({predicted.low} to {predicted.high})",
        align="right",
        **place,
    )


def _draw_speed(
    figure: Any,
    column: int,
    *,
    name: str,
    style: LineStyle,
    workers: Floats | Any,
    true: list[float],
    fitted: list[float],
) -> None:
    for values, mode, what in ((true, "markers", ""), (fitted, "lines", ", fitted")):
        figure.add_scatter(
            x=workers.tolist(),
            y=values,
            mode=mode,
            name=name + what,
            legendgroup=name + what,
            showlegend=column == 1,
            marker={"color": style.colour, "size": 6},
            line={"color": style.colour, "width": 1.6},
            hovertemplate="workers: %{x}, %{y:.3f} steps/s",
            row=1,
            col=column,
        )


def _fit(kind: ServerJobType) -> ServerSpeedFit:
    """What Optimus learns from a few configurations."""
    samples = [
        SpeedSample(2, workers, servers, round(kind.batch / workers), _step_s(kind, servers, workers), 0.0)
        for servers, workers in SAMPLED
    ]
    fit = fit_server_speed(samples, synchronous=True, total_batch=kind.batch)
    assert fit is not None, "there are samples"
    return fit


def _step_s(kind: ServerJobType, servers: int, workers: int) -> float:
    """Time of a synchronous step with workers and servers on different nodes."""
    truth = ServerTruth(
        kind=kind, synchronous=True, worker_batch=kind.batch, units_per_epoch=1.0, losses=(1.0,)
    )
    apart = Allocation((("workers", workers),), (("servers", servers),))
    return truth.step_time(apart, max(round(kind.batch / workers), 1)).step_s
