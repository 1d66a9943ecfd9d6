"""Charts as inline SVG. Lines and text take their colours from the page, so that one drawing is
right in a light and in a dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raytest.report.agreement import Agreement
from raytest.report.timeline import PHASES, Span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

# Stand-ins that matplotlib draws with and the page's own colours replace.
INK = "#010203"
FAINT = "#040506"
SERIES = tuple(f"#a1000{i}" for i in range(8))
DASHES = ("-", "--", "-.", ":")
# Up to so many cells are drawn one by one, then classes; up to so many classes carry their names.
MOST_CELLS = 24
MOST_NAMES = 32
MOST_SPANS = 60
WIDTH = 7.2


def heat_map(agreement: Agreement, shares: npt.NDArray[np.float64], name: str, what: str) -> str:
    """Share of equal results of each two cells, ordered by class; where cells are many, of each two
    classes, drawn as wide as the root of their size."""
    import numpy as np

    counts = [len(c.cells) for c in agreement.classes]
    single = sum(counts) <= MOST_CELLS
    index = np.repeat(np.arange(len(counts)), counts) if single else np.arange(len(counts))
    matrix = shares[np.ix_(index, index)]
    labels = (
        [cell for c in agreement.classes for cell in c.cells]
        if single
        else [f"{c.name} ×{len(c.cells)}" for c in agreement.classes]
    )
    n = len(labels)
    edges = np.concatenate([[0.0], np.cumsum(np.ones(n) if single else np.sqrt(counts))])
    side = min(4.0, 1.4 + 0.32 * n)
    words = max(len(_cut(x)) for x in labels) if n <= MOST_NAMES else 0
    figure, axes = _figure(side + 1.0 + 0.07 * words, side)
    few = n <= MOST_NAMES
    mesh = axes.pcolormesh(
        edges,
        edges,
        matrix,
        cmap="cividis",
        vmin=0,
        vmax=1,
        edgecolors=FAINT if few else "none",
        linewidth=0.3,
        rasterized=not few,
    )
    centres = (edges[:-1] + edges[1:]) / 2
    if few:
        _label_cells(axes, matrix, centres)
        size = 8 if n <= 16 else 6
        numbered = [f"{_cut(x)}  {i + 1}" for i, x in enumerate(labels)]
        axes.set_yticks(centres, numbered, fontsize=size)
        axes.set_xticks(centres, [str(i + 1) for i in range(n)], fontsize=size)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"{n} classes of {sum(counts)} cells, the largest of each variant first")
    axes.set_aspect("equal")
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8)
    bar.outline.set_edgecolor(FAINT)
    bar.ax.tick_params(labelsize=7, color=FAINT, labelcolor=INK)
    return _svg(figure, name, what)


def _label_cells(
    axes: Axes, matrix: npt.NDArray[np.float64], centres: npt.NDArray[np.float64]
) -> None:
    if len(matrix) > 10:
        return
    for y, row in enumerate(matrix):
        for x, value in enumerate(row):
            if value == value:
                colour = "#000000" if value > 0.5 else "#ffffff"
                text = f"{100 * value:.0f}" if value in (0, 1) else f"{100 * value:.3g}"
                axes.text(
                    centres[x], centres[y], text, ha="center", va="center", color=colour, size=7
                )


def survival(axes_of: Sequence[Mapping[str, Any]]) -> str:
    """Share of comparisons still identical after t tokens, a line per axis; '' without any."""
    curves = {
        a["axis"]: sorted((int(t), s) for t, s in a["metrics"]["survival"].items() if s is not None)
        for a in axes_of
    }
    curves = {k: v for k, v in curves.items() if v}
    if not curves:
        return ""
    figure, axes = _figure(WIDTH, 2.9)
    whole = [k for k, v in curves.items() if v[-1][1] == 1.0]
    if whole:
        longest = max((curves[k] for k in whole), key=len)
        _line(axes, longest, INK, "-", f"{', '.join(whole)} (identical)")
    falling = [k for k in curves if k not in whole]
    for i, axis in enumerate(falling):
        _line(axes, curves[axis], SERIES[i % len(SERIES)], DASHES[i % len(DASHES)], axis)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low = min(s for v in curves.values() for _, s in v)
    axes.set_ylim(min(0.9, low - 0.1 * (1 - low)) if low > 0.5 else 0.0, 1.01)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share still identical")
    _legend(axes)
    return _svg(figure, "survival", "Share of comparisons identical after so many tokens, by axis")


def _line(
    axes: Axes, points: Sequence[tuple[int, float]], colour: str, dash: str, label: str
) -> None:
    x, y = [p[0] for p in points], [p[1] for p in points]
    axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=2.5, label=label)


def distribution(values: Mapping[str, Sequence[float]], name: str, label: str, what: str) -> str:
    """Histogram over powers of ten of positive values, a line per axis; '' without any."""
    import numpy as np

    shown = {k: np.array([x for x in v if x > 0 and np.isfinite(x)]) for k, v in values.items()}
    shown = {k: v for k, v in shown.items() if len(v)}
    if not shown:
        return ""
    everything = np.concatenate(list(shown.values()))
    low, high = np.floor(np.log10(everything.min())), np.ceil(np.log10(everything.max()))
    bins = np.logspace(low, max(high, low + 1), 30)
    figure, axes = _figure(WIDTH / 1.5, 2.5)
    for i, (axis, found) in enumerate(shown.items()):
        axes.hist(
            found,
            bins=bins.tolist(),
            histtype="step",
            color=SERIES[i % len(SERIES)],
            linestyle=DASHES[i % len(DASHES)],
            linewidth=1.4,
            label=f"{axis} ({len(found)})",
        )
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("divergences")
    axes.yaxis.set_major_locator(_whole_numbers())
    _legend(axes)
    return _svg(figure, name, what)


def timeline(found: Sequence[Span]) -> str:
    """A bar per attempt of a launch, in its phases; the longest where there are many."""
    if not found:
        return ""
    longest = sorted(found, key=lambda s: s.phases[0][1] - s.phases[-1][2])[:MOST_SPANS]
    shown = [s for s in found if s in longest]
    figure, axes = _figure(WIDTH, 0.9 + 0.17 * len(shown))
    for y, span in enumerate(shown):
        for phase, begin, end in span.phases:
            colour = SERIES[PHASES.index(phase)]
            axes.barh(y, max(end - begin, 1e-3), left=begin, height=0.7, color=colour)
        if span.outcome != "done":
            axes.text(span.phases[-1][2], y, f" {span.outcome}", va="center", size=7, color=INK)
    axes.set_yticks(range(len(shown)), [_cut(s.name) for s in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the plan")
    for i, phase in enumerate(PHASES):
        axes.barh(0, 0, color=SERIES[i], label=phase)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    return _svg(figure, "timeline", "When each launch was placed, loading and running")


def trend(
    runs: Sequence[str], series: Mapping[str, Sequence[float | None]], name: str, label: str
) -> str:
    """A value per run and axis over time, oldest first."""
    figure, axes = _figure(WIDTH, 2.6)
    for i, (axis, values) in enumerate(series.items()):
        points = [(x, v) for x, v in enumerate(values) if v is not None]
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            color=SERIES[i % len(SERIES)],
            linestyle=DASHES[i % len(DASHES)],
            marker="o",
            markersize=2.5,
            label=axis,
        )
    axes.set_xlabel(f"runs, oldest first ({len(runs)})")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.set_ylim(bottom=0)
    _legend(axes)
    return _svg(figure, name, f"{label} over {len(runs)} runs")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK, which="both")
    axes.xaxis.label.set(color=INK, fontsize=8)
    axes.yaxis.label.set(color=INK, fontsize=8)
    for side, spine in axes.spines.items():
        spine.set_color(FAINT)
        spine.set_visible(side in ("left", "bottom"))
    return figure, axes


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=6, integer=True)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _cut(text: str, most: int = 28) -> str:
    """matplotlib reads $ as mathematics, so it is taken literally."""
    shown = text if len(text) <= most else f"{text[: most - 9]}…{text[-8:]}"
    return shown.replace("$", r"\$")


def _svg(figure: Figure, name: str, what: str) -> str:
    """The figure as an SVG element whose ids are its own and whose colours are the page's."""
    from html import escape

    from matplotlib import rc_context

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    buffer = io.StringIO()
    with rc_context(settings), _quiet():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    for i, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--series-{i})")
    title = f'role="img" aria-label="{escape(what)}"'
    return text.replace("<svg ", f"<svg {title} ", 1).strip()


@contextmanager
def _quiet() -> Iterator[None]:
    """matplotlib warns where its own font has no glyph; the text is the page's to draw."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph.*")
        yield
