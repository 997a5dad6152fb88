"""The ideas behind Pollux, drawn from the built-in applications: speed, efficiency, and their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.job import BatchLimits
from stretto.models.batch import split_batch
from stretto.models.noise import GradientNoise
from stretto.models.speed import Floats
from stretto.report.plotting import Palette, doubling_axis, graph_objects, panels, ramp, styled
from stretto.worlds.applications import Application, builtin_catalogue

GPUS_PER_NODE = 4
GPUS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHOWN = (("cifar10", "ResNet-18 on CIFAR-10"), ("imagenet", "ResNet-50 on ImageNet"))
POINTS_OF_TRAINING = (0.0, 0.25, 0.5, 0.75, 1.0)


def throughput_by_gpus() -> Any:
    """More GPUs help a small batch little: each does less, and synchronising costs the same."""
    figure = panels(1, 2, [title for _, title in SHOWN], horizontal_spacing=0.1)
    for column, (name, _) in enumerate(SHOWN, start=1):
        app = builtin_catalogue().get(name)
        batches = [app.initial_batch * 4**i for i in range(4) if app.initial_batch * 4**i <= app.max_batch]
        for batch, colour in zip(batches, ramp(len(batches)), strict=True):
            points = [(gpus, batch / step_s) for gpus in GPUS if (step_s := _step_s(app, gpus, batch))]
            figure.add_scatter(
                x=[gpus for gpus, _ in points],
                y=[speed for _, speed in points],
                name=f"batch {batch:,}",
                mode="lines+markers",
                marker={"size": 5},
                line={"color": colour, "width": 2},
                hovertemplate="%{x} GPUs: %{y:.4~s} examples/s",
                legend="legend" if column == 1 else "legend2",
                row=1,
                col=column,
            )
    figure.update_xaxes(**doubling_axis("GPUs"))
    figure.update_yaxes(title_text="examples per second", rangemode="tozero")
    return styled(figure, 380, legend2=_second_legend())


def efficiency_by_batch() -> Any:
    """Large batches waste examples early in training and hardly any late."""
    figure = panels(1, 2, [title for _, title in SHOWN], horizontal_spacing=0.1)
    for column, (name, _) in enumerate(SHOWN, start=1):
        app = builtin_catalogue().get(name)
        batches = np.geomspace(app.initial_batch, app.max_batch, 40).round()
        colours = ramp(len(POINTS_OF_TRAINING))
        for point, colour in zip(POINTS_OF_TRAINING, colours, strict=True):
            figure.add_scatter(
                x=batches.tolist(),
                y=[100.0 * _efficiency(app, int(batch), point) for batch in batches],
                name=_point_name(point),
                legendgroup=str(point),
                showlegend=column == 1,
                mode="lines",
                line={"color": colour, "width": 2},
                hovertemplate="batch %{x:,}: %{y:.0f} %",
                row=1,
                col=column,
            )
    figure.update_xaxes(**doubling_axis("total batch size (examples)"))
    figure.update_yaxes(title_text="statistical efficiency (%)", range=[0, 103])
    return styled(figure, 380)


def noise_over_training(palette: Palette) -> Any:
    """The gradient noise scale grows during training, and the best batch size with it."""
    figure = graph_objects().Figure()
    for name, app in sorted(builtin_catalogue().entries.items()):
        progress = np.linspace(0.0, 1.0, app.truth.epochs)
        figure.add_scatter(
            x=(100.0 * progress).tolist(),
            y=[_noise(app, app.initial_batch, point).noise_scale for point in progress],
            name=f"{name} (batch {app.initial_batch})",
            mode="lines",
            line={"color": palette.application(name), "width": 2},
            hovertemplate="%{x:.0f} % of training: %{y:.3~s} examples",
        )
    figure.update_xaxes(title_text="progress of training (%)")
    figure.update_yaxes(title_text="noise scale (examples)", type="log", dtick=1, exponentformat="power")
    return styled(figure, 380)


def goodput_by_gpus_and_batch() -> Any:
    """Goodput of every choice in the middle of training, and the best batch for a number of GPUs."""
    app = builtin_catalogue().get("cifar10")
    batches = np.geomspace(app.initial_batch, app.max_batch, 31).round().astype(int)
    titles = ("ResNet-18 on CIFAR-10, half-way: goodput", "Batch size of the highest goodput")
    figure = panels(1, 2, titles, horizontal_spacing=0.16)
    surface = _goodputs(app, batches, 0.5)
    figure.add_heatmap(
        x=[str(gpus) for gpus in GPUS],
        y=batches.tolist(),
        z=np.where(surface > 0, surface / surface[0, 0], np.nan).round(3).tolist(),
        colorscale="Viridis",
        colorbar={"title": {"text": "times 1 GPU", "side": "right"}, "x": 0.43, "len": 1, "thickness": 12},
        hovertemplate="%{x} GPUs, batch %{y:,}: %{z:.2f} times<extra></extra>",
        row=1,
        col=1,
    )
    for point, colour in zip(POINTS_OF_TRAINING, ramp(len(POINTS_OF_TRAINING)), strict=True):
        goodputs = _goodputs(app, batches, point)
        figure.add_scatter(
            x=[str(gpus) for gpus in GPUS],
            y=batches[goodputs.argmax(axis=0)].tolist(),
            name=_point_name(point),
            mode="lines+markers",
            marker={"size": 5},
            line={"color": colour, "width": 2},
            hovertemplate="%{x} GPUs: batch %{y:,}",
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="GPUs", type="category")
    figure.update_yaxes(**doubling_axis("total batch size (examples)"))
    return styled(figure, 400, legend=_second_legend())


def _second_legend() -> dict[str, Any]:
    return {"orientation": "h", "x": 0.53, "y": 1, "yref": "container", "yanchor": "top", "xanchor": "left"}


def _point_name(point: float) -> str:
    return {0.0: "start of training", 1.0: "end"}.get(point, f"{point:.0%}")


def _limits(app: Application) -> BatchLimits:
    return BatchLimits(
        initial=app.initial_batch,
        requested=app.initial_batch,
        max=app.max_batch,
        per_gpu_min=app.per_gpu_min,
        per_gpu_max=app.per_gpu_max,
    )


def _step_s(app: Application, gpus: int, batch: int) -> float | None:
    """Time of a step with GPUs packed on nodes; None where a GPU would get too few examples."""
    choice = split_batch(_limits(app), batch, gpus)
    if choice.atomic < app.per_gpu_min:
        return None
    full, rest = divmod(gpus, GPUS_PER_NODE)
    shape = [GPUS_PER_NODE] * full + ([rest] if rest else [])
    packed = Allocation(tuple((str(node), count) for node, count in enumerate(shape)))
    step = app.truth.step_time(packed, choice.atomic)
    return step.step_s + choice.accumulation * (step.step_s - step.sync_s)


def _noise(app: Application, batch: int, progress: float) -> GradientNoise:
    noise = app.truth.noise_at(batch, round(progress * (app.truth.epochs - 1)))
    assert noise is not None, "the built-in applications all have noise curves"
    return GradientNoise(noise.sqr, noise.var, app.initial_batch)


def _efficiency(app: Application, batch: int, progress: float) -> float:
    return float(_noise(app, batch, progress).efficiency(batch))


def _goodputs(app: Application, batches: Sequence[int] | Floats, progress: float) -> Floats:
    """Rows are batches, columns numbers of GPUs; 0 where a choice is impossible."""
    return np.array(
        [
            [
                int(batch) * _efficiency(app, int(batch), progress) / step_s
                if (step_s := _step_s(app, gpus, int(batch)))
                else 0.0
                for gpus in GPUS
            ]
            for batch in batches
        ]
    )
