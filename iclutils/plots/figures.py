"""Figures: they draw arrays and never see a model.

Colours come from the Okabe-Ito palette (safe for colour-blind readers), with a violet for its
amber, and from two colour maps in which zero is the ground. The ground is white; a dark page of the
book turns lightness over and keeps the hues, so that a dark colour would be nearly white there.
"""

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import ColorType
from torch import Tensor

# A stale font list names fonts that are gone; the figures then use another, without a word.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#6b6b6b"
VIOLET = "#8657CF"
RISING = "YlGnBu"
SIGNED = LinearSegmentedColormap.from_list("signed", [BLUE, "white", ORANGE])
Values = Sequence[float] | Sequence[int] | Num[Tensor, "point"]
Line = Sequence[Values]  # x and y, perhaps a band: low and high
COLOURS = (BLUE, ORANGE, GREEN, PINK, VIOLET, "#56B4E9")
STROKES = ("o-",) * 4 + ("s--", "^:")  # of the lines in these colours, marks first
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue light
FEW, SHORT = 5, 20  # lines of a panel that carry their names, and letters of a name
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "none",
    "svg.hashsalt": "iclutils",
}


def canvas(
    columns: int = 1, width: float = 7.0, height: float = 3.2, rows: int = 1, **ratios: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure in the book's style with ``rows`` of ``columns`` axes, row by row."""
    plt.rcParams.update(STYLE)
    style: dict[str, Any] = {"layout": "constrained", "squeeze": False, **ratios}
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), **style)
    return figure, list(axes.flat)


def add_title(figure: Figure, finding: str) -> Figure:
    """Put a title over the figure that states the finding, with its number."""
    lines = fill(finding, int(12 * figure.get_figwidth()))
    figure.suptitle(lines, x=0.02, ha="left", size=11, weight="bold")
    return figure


def show_table(*rows: Sequence[object]) -> None:
    """Show rows of text in the notebook and on the page; the first names the columns."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    display(Markdown(real_minus("\n".join(lines))))


def real_minus(text: str) -> str:
    """Write a real minus sign before numbers, and keep the hyphens of words and ranges."""
    return re.sub(r"(?<![\w-])-(?=\d)", "\N{MINUS SIGN}", text)


def ink(colour: ColorType) -> tuple[float, float, float]:
    """Darken a colour for text until its contrast on white is 4.5, as WCAG asks of small type."""
    rgb = np.array(to_rgb(colour))
    while (
        np.where(rgb > 0.03928, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92) @ LUMINANCE
    ) > 0.183:
        rgb = 0.97 * rgb
    red, green, blue = rgb.tolist()
    return red, green, blue


def name_lines(axes: Axes) -> None:
    """Write the name of every line at its right end, in its colour, in the place of a legend; names
    that would meet are moved apart. Call it last."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    low, high = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    step = 12 * axes.figure.dpi / 72 / (high - low)  # of a line of text, share of the height
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    place = axes.transScale + axes.transLimits  # shares of width and height
    ends = {line: float(place.transform(line.get_xydata())[-1, 1]) for line in named}
    order = sorted(named, key=lambda line: ends[line])
    floor, ceiling = -math.inf, 1.0 + step
    for line in order:
        ends[line] = floor = max(ends[line], floor + step)
    for line in reversed(order):
        ends[line] = ceiling = min(ends[line], ceiling - step)
        at, colour = (1.02, ends[line]), ink(line.get_color())
        axes.annotate(str(line.get_label()), at, xycoords="axes fraction", size=9,
                      color=colour, va="center", annotation_clip=False)  # fmt: skip


def halves(
    mean: Float[Tensor, "place"], se: Float[Tensor, "place"], length: int, even: float
) -> Figure:
    """Draw the loss of the next token by place, the two copies in two colours; ``even`` is the
    loss of an even guess."""
    figure, (axes,) = canvas(width=4.2)
    spans = {"first copy": range(length), "second copy": range(length, len(mean))}
    for (name, span), colour in zip(spans.items(), (BLUE, ORANGE), strict=True):
        axes.errorbar(span, mean[span], se[span], fmt="o-", ms=3, lw=1, color=colour)
        axes.text(span[len(span) // 2], even / 2, name, color=ink(colour), ha="center")
    axes.axhline(even, color=GREY, ls="--", lw=1)
    axes.text(len(mean) - 1, even, "even guess", color=GREY, ha="right", va="bottom", size=9)
    axes.set(xlabel="place in the row", ylabel="loss of the next token (nats)", ylim=(-0.3, None))
    return figure


def _map(
    axes: Axes,
    values: Float[Tensor, "row column"],
    low: float,
    high: float,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    turn: int = 40,
    digits: int | None = None,
    **style: Any,
) -> AxesImage:
    """Draw a heat map, zero in the middle where ``low`` is below it; names of columns turned by so
    many degrees, values written in with so many digits, NaN left out."""
    image = axes.imshow(values, vmin=low, vmax=high, cmap=SIGNED if low < 0 else RISING, **style)
    if len(rows):
        axes.set_yticks(range(len(rows)), rows)
    if len(columns):
        ha = "right" if 0 < turn < 90 else "center"
        named = [i for i, name in enumerate(columns) if name]  # an empty column has no tick
        axes.set_xticks(named, [columns[i] for i in named], rotation=turn, ha=ha)
    for row, line in enumerate(values.tolist() if digits is not None else ()):
        for column, value in enumerate(line):
            if not math.isnan(value):
                dark = value < 0.75 * low if low < 0 else value > (low + high) / 2  # no orange is
                written = "white" if dark else "black"
                text = f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.00
                axes.text(column, row, text, ha="center", va="center", color=written, size=8)
    return image


def head_maps(scores: Mapping[str, Float[Tensor, "layer head"]]) -> Figure:
    """Draw one layer x head map per score, from 0 to 1, at most five in a row, values written in
    where they fit. In a place that is left over stands the colour bar."""
    rows = math.ceil(len(scores) / 5)
    columns = math.ceil(len(scores) / rows)
    figure, axes = canvas(columns, width=2.4 * columns + 0.6, height=2.6 * rows, rows=rows)
    for ax, (name, values) in zip(axes, scores.items(), strict=False):
        image = _map(
            ax, values, 0.0, 1.0, digits=2 if values.numel() <= 16 else None, aspect="auto"
        )
        ax.set(title=name, xlabel="head", xticks=range(values.shape[1]))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes[0].set_ylabel("layer")
    if left := axes[len(scores) :]:
        left[0].set(box_aspect=10, anchor="W")
        figure.colorbar(image, cax=left[0])
        for ax in left[1:]:
            ax.set_axis_off()
    else:
        figure.colorbar(image, ax=axes)
    return figure


def attention(pattern: Float[Tensor, "dest src"], words: Sequence[str]) -> Figure:
    """Draw one attention pattern with its tokens: destination down, source across."""
    side = max(3.6, 0.22 * len(words))
    figure, (axes,) = canvas(width=side + 0.8, height=side)
    image = _map(axes, pattern, 0.0, 1.0, words, words, turn=90)
    axes.tick_params(labelsize=8)
    axes.set(xlabel="source", ylabel="destination")
    figure.colorbar(image, label="attention")
    return figure


def signed(
    named: Mapping[str, Float[Tensor, "row column"]],
    xlabel: str,
    ylabel: str,
    rows_named: Sequence[str] = (),
    columns_named: Sequence[str] = (),
) -> Figure:
    """Draw maps side by side, zero in the middle of their common scale; values are written in where
    they fit. For shares use ``shares``."""
    width, height = (7.6, 2.5) if len(named) > 1 else (5.0, 3.6)
    figure, axes = canvas(len(named), width, height)
    turn = 40 if len(columns_named) < 10 else 90
    reach = max(float(values.abs().max()) for values in named.values()) or 1.0
    for ax, (name, values) in zip(axes, named.items(), strict=True):
        digits = 1 if values.numel() <= 16 else None
        image = _map(ax, values, -reach, reach, rows_named, columns_named, turn, digits)
        ax.set(title=name, xlabel=xlabel)
    axes[0].set_ylabel(ylabel)
    figure.colorbar(image, ax=axes)
    return figure


def shares(
    values: Float[Tensor, "row column"],
    rows: Sequence[str],
    columns: Sequence[str],
    xlabel: str = "",
    ylabel: str = "",
) -> Figure:
    """Draw a map from 0 to 1, rows and columns named, values written in; NaN is left out."""
    figure, (axes,) = canvas(width=1.2 + 0.6 * len(columns), height=1.2 + 0.36 * len(rows))
    turn = 40 if max(map(len, columns)) > 9 else 0
    _map(axes, values, 0.0, 1.0, rows, columns, turn, 2, aspect="auto")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure


def dots(panels: Mapping[str, Mapping[str, Values]]) -> Figure:
    """Draw rows of dots, the first on top: a panel for each quantity, in it a row for each name.
    The dots of a row stand one below the other, the lowest value on top: equal ones are seen.
    """
    tall = 1.0 + 0.42 * max(map(len, panels.values()))
    figure, axes = canvas(len(panels), 7.0 if len(panels) > 1 else 4.2, tall)
    for ax, (quantity, rows) in zip(axes, panels.items(), strict=True):
        for row, values in enumerate(rows.values()):
            middle = (len(values) - 1) / 2
            heights = [row + 0.16 * (i - middle) for i in range(len(values))]
            ax.plot(sorted(values), heights, "o", ms=4.5, mew=0, color=ORANGE)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set(xlabel=quantity, ylim=(len(rows) - 0.5, -0.5))
        for between in range(1, len(rows)):
            ax.axhline(between - 0.5, color=GREY, lw=0.8, alpha=0.25)
    return figure


def dot_pairs(
    rows: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    finding: str,
    xlabel: str,
    high: float | int = 1,
    last: Collection[str] = (),
    as_given: bool = False,
) -> Figure:
    """Draw two joined dots a row, the row that loses most on top (or the first, ``as_given``), and
    there the names of both; a third dot is hollow, and no dot exceeds ``high``. The rows of
    ``last`` stand below a line. For more dots a row, or several panels, see ``dots``."""
    order = sorted(rows, key=lambda x: (x in last, not as_given and rows[x][1] - rows[x][0]))
    figure, (ax,) = canvas(width=4.2, height=1.4 + 0.3 * len(rows))
    edges = [*colours.values()]
    fills = [*edges[:2], *["white"] * len(edges[2:])]
    lowest = rows[order[-1]][-1] + 0.03 * high, len(rows) - 1
    for y, row in enumerate(map(rows.__getitem__, order)):
        ax.plot(row, [y] * len(row), color=GREY, lw=1, zorder=1)
        inside, around = (x[: len(row)][::-1] for x in (fills, edges))
        sizes = [70] * (len(row) - 2) + [36, 9 if abs(row[1] - row[0]) < 0.015 * high else 36]
        ax.scatter(row[::-1], [y] * len(row), sizes, fc=inside, ec=around, clip_on=False)
        if len(row) > 2 and row[2] > max(row[:2]) + 0.02:
            lowest = row[2] + 0.03 * high, y  # has the name of the third dot
    for name, colour in [*colours.items()][2:]:
        ax.text(*lowest, name, va="center", color=colour, size=9)
    first = rows[order[0]][:2]
    apart = abs(first[1] - first[0]) > 0.7 * high
    for x, (name, colour) in zip(first, colours.items(), strict=False):
        side = "right" if (x == max(first)) == apart else "left"
        text = name.replace("without ", "without\n")
        ax.text(x, -0.5, text, ha=side, ma=side, color=ink(colour), size=9)
    if last:
        ax.axhline(len(rows) - len(last) - 0.5, color=GREY, lw=0.8)
    ax.set_yticks(range(len(rows)), order)
    ax.spines.left.set_visible(False)
    ax.tick_params("y", length=0, pad=8)  # a mark would look like part of a dot at 0
    ax.set(xlabel=xlabel, xlim=(0, high), ylim=(len(rows) - 0.5, -1.9))
    return add_title(figure, finding)


def curves(
    panels: Mapping[str, Mapping[str, Line]],
    xlabel: str | Sequence[str],
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draw one panel per quantity, one line per series: (x, y), or (x, y, low, high) with a band;
    ``xlabel`` is one for all, or for each. Few lines carry their names. A logarithmic x axis that
    starts at 0 (training steps) is linear up to 100."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = canvas(columns, 7.0 if columns > 1 else 4.2, 2.6 * rows, rows)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    below = [xlabel] * len(panels) if isinstance(xlabel, str) else xlabel
    for ax, (title, lines), under in zip(axes, panels.items(), below, strict=False):
        styles = cycle(zip(COLOURS, STROKES, strict=True))
        for (name, (x, y, *band)), (colour, stroke) in zip(lines.items(), styles, strict=False):
            stroke = stroke[1:] if band else stroke
            label = re.sub(r"^([A-Z])_([a-z]{2})$", r"$\1_{\2}$", name)  # S_pq as in the text
            ax.plot(x, y, stroke, ms=3, lw=1, color=colour, label=label)
            if band:
                ax.fill_between(x, band[0], band[1], color=colour, alpha=0.2, lw=0)
        if log_y:
            ax.set_yscale("log")
        if log_x and min(min(x) for x, *_ in lines.values()) > 0:
            ax.set_xscale("log")
        elif log_x:
            ax.set_xscale("symlog", linthresh=100)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        ax.set(title=title, xlabel=under)
    series = [list(lines) for lines in panels.values()]
    shared = all(names == series[0] for names in series)
    if all(len(names) <= FEW and max(map(len, names)) <= SHORT for names in series):
        for i, ax in enumerate(axes[: len(panels)]):
            if not shared or i % columns == columns - 1 or i == len(panels) - 1:
                name_lines(ax)
    elif all(set(names) <= set(series[0]) for names in series):
        names = axes[0].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower center", ncols=min(4, 2 * columns))
    else:
        for ax in axes[: len(panels)]:
            ax.legend(fontsize=8)
    return figure
