"""How a difference grows from module to module, as one SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from raytest.explain.growth import Growth
from raytest.explain.localize import Localization, layer_of

MOST_LABELS = 40


def growth_svg(localization: Localization, pair: Sequence[str]) -> str:
    """Largest and mean distance of each module's output at the last position, in units in the last
    place, by execution order; the first module that differs is marked."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    growth = localization.growth
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "raytest", "text.parse_math": False}):
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        axes = figure.add_subplot()
        x = [g.index for g in growth]
        axes.plot(x, [_value(g.distance.max_ulp) for g in growth], ".", color="#a63603",
                  label="largest of all elements")  # fmt: skip
        axes.plot(x, [_value(g.distance.mean_ulp) for g in growth], "-", color="#08519c",
                  linewidth=1, label="mean")  # fmt: skip
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("units in the last place")
        first = next((g for g in growth if g.module == localization.module), None)
        if first is not None:
            axes.axvline(first.index, color="#636363", linewidth=0.8, linestyle="--",
                         label=f"first: {first.module}")  # fmt: skip
        _label_layers(axes, growth)
        axes.set_title(f"a: {pair[0]}\nb: {pair[1]}", fontsize=8, loc="left")
        axes.legend(fontsize=8, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _label_layers(axes: object, growth: Sequence[Growth]) -> None:
    """Ticks where a layer begins, as many as can be read."""
    starts: dict[str, int] = {}
    for g in growth:
        layer = layer_of(g.module)
        starts.setdefault(g.module if layer is None else f"layer {layer}", g.index)
    every = max(1, math.ceil(len(starts) / MOST_LABELS))
    shown = list(starts.items())[::every]
    axes.set_xticks(  # type: ignore[attr-defined]
        [at for _, at in shown], [name for name, _ in shown], rotation=90, fontsize=7
    )


def _value(value: float | None) -> float:
    return math.nan if value is None else value
