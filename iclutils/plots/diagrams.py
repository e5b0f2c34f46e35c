"""Diagrams of mechanisms: what a circuit does, drawn on the tokens of a prompt.

Like figures they draw arrays and never see a model. Lengths are in inches. Blue is what is looked
up or gathered, orange what is copied or answered, grey the rest.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from .figures import BLUE, GREY, ORANGE, STYLE, canvas

PALE = "#d9d9d9"
BANDS, STRONGEST = 6, 14  # bands of layers, and edges of each, in ``gathering``
PAIR = ("previous-token head", "induction head")
Point = tuple[float, float]


def induction_pair(
    tokens: Sequence[str], previous: Float[Tensor, "dest src"], induction: Float[Tensor, "dest src"]
) -> Figure:
    """Draw a previous-token head and an induction head at work (Olsson et al. 2022): tokens below,
    the first head's output in the middle, the second's on top. The last token is continued;
    attention under 0.05 is left out."""
    n = len(tokens)
    at, after = n - 1, int(induction[-1].argmax())
    before = int(previous[after].argmax())
    across = max(0.68, 0.3 + 0.095 * max(map(len, tokens)))
    width = max(6.0, across * n + 1.2)
    axes = _sheet(width, 3.1)
    xs = [(width + 1.1 - across * (n - 1)) / 2 + across * i for i in range(n)]
    low, middle, top = 0.2, 1.2, 2.25
    for i, token in enumerate(tokens):
        _box(axes, (xs[i], low), token, across - 0.1, size=11)
        for y in (middle, top):
            axes.plot(xs[i], y, "o", ms=3, color=GREY)
    for to, source in torch.nonzero(previous.tril() > 0.05).tolist():
        chosen = (to, source) == (after, before)
        weight = float(previous[to, source])
        _line(axes, (xs[source], low + 0.14), (xs[to], middle), weight, BLUE if chosen else PALE)
    for to, source in torch.nonzero(induction.tril() > 0.05).tolist():
        chosen = (to, source) == (at, after)
        weight = float(induction[to, source])
        _line(axes, (xs[source], middle), (xs[to], top), weight, ORANGE if chosen else PALE)
    note = f"after “{tokens[before]}”"
    _box(axes, (xs[after], middle), note, 0.16 + 0.08 * len(note), BLUE, 11)
    _box(axes, (xs[at], top + 0.2), tokens[after], across - 0.1, ORANGE, 11)
    say = partial(_say, axes, size=11)
    say((xs[at] - across / 2 - 0.05, top + 0.2), "predicted next:", "right")
    look = f"{previous[after, before]:.2f}", f"{induction[at, after]:.2f}"
    say(((xs[before] + xs[after]) / 2 - 0.1, middle - 0.35), look[0], "right", color=BLUE)
    say(((xs[after] + xs[at]) / 2, middle + 0.33), look[1], "left", color=ORANGE)
    for y, name in zip((low + 0.5, middle + 0.62), PAIR, strict=True):
        axes.text(0.1, y, fill(name, 12), va="center", size=11, color=GREY, linespacing=1.0)
    return axes.figure  # type: ignore[return-value]


def gathering(
    tokens: Sequence[str],
    saliency: Float[Tensor, "layer dest src"],
    labels: Sequence[int],
    target: int,
) -> Figure:
    """Draw information gathered in label words, then read by the target (Wang et al. 2023): left,
    the strongest edges, layer by layer upwards; right, the share of a layer's saliency that flows
    into the labels, to the target, and elsewhere. More than six layers become six bands."""
    n = len(tokens)
    flow = saliency.detach().cpu().float().abs().tril(-1)
    count = min(BANDS, len(flow))
    parts = torch.tensor_split(flow, count)
    starts = [int(part[0]) for part in torch.tensor_split(torch.arange(len(flow)), count)]
    into, out = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    into[list(labels)] = True
    out[target, list(labels)] = True
    kinds = {"text to label": (into, BLUE), "label to target": (out, ORANGE)}
    width, rise = 7.0, 0.52
    across = 4.9 / n
    low = 0.2 + 0.072 * max(map(len, tokens))
    height = low + rise * count + 0.75
    axes = _sheet(width, height)
    xs = [0.75 + across * i for i in range(n)]
    left, room = xs[-1] + 0.3, width - xs[-1] - 0.45
    for i, token in enumerate(tokens):
        colour = BLUE if i in labels else ORANGE if i == target else "black"
        face = "normal" if colour == "black" else "bold"
        axes.text(xs[i], low - 0.08, token, rotation=90, ha="center", va="top", size=8,
                  color=colour, weight=face)  # fmt: skip
    for band, part in enumerate(parts):
        y, mean = low + rise * band, part.mean(0)
        total, peak = float(mean.sum()) or 1.0, float(mean.max()) or 1.0
        for at in mean.flatten().topk(min(STRONGEST, mean.numel())).indices.tolist():
            to, source = divmod(at, n)
            weight = float(mean[to, source]) / peak
            hues = [colour for mask, colour in kinds.values() if mask[to, source]]
            if weight > 0.02:
                ends = (xs[source], y), (xs[to], y + rise)
                _line(axes, *ends, weight, hues[0] if hues else PALE, 1 + bool(hues))
        x = left
        for mask, colour in kinds.values():
            share = float(mean[mask].sum()) / total
            axes.barh(y + rise / 2, share * room, rise * 0.6, left=x, color=colour)
            x += share * room
        axes.barh(y + rise / 2, left + room - x, rise * 0.6, left=x, color=PALE)
        last = starts[band + 1] - 1 if band + 1 < count else len(flow) - 1
        name = f"layer {starts[band]}" if last == starts[band] else f"{starts[band]} to {last}"
        _say(axes, (0.58, y + rise / 2), name, "right", size=8)
    for band in range(count + 1):
        axes.plot(xs, [low + rise * band] * n, ".", color=GREY, ms=3)
    top = low + rise * count
    for y, (name, (_, colour)) in zip((0.44, 0.22), kinds.items(), strict=True):
        _say(axes, (xs[n // 2], top + y), name, color=colour, weight="bold")
    _say(axes, (left + room / 2, top + 0.3), "share of the layer", size=8)
    return axes.figure  # type: ignore[return-value]


def descent_step(
    x: Float[Tensor, "example"], y: Float[Tensor, "example"], query: float, rate: float
) -> Figure:
    """Draw a context as a data set, and linear attention as one step of descent on it: from the
    weight 0, w = rate * sum(x y). Its answer at the query, w * query, is a sum over examples, value
    y times rate * x * query, which a head of linear attention adds up (von Oswald et al. 2023)."""
    figure, (data, shares) = canvas(2, 6.8, 3.0)
    after, parts = rate * float(x @ y), rate * query * x * y
    reach = 1.15 * max(float(x.abs().max()), abs(query))
    data.axline((0, 0), slope=0, color=GREY, lw=1, ls="--")
    data.axline((0, 0), slope=after, color=BLUE, lw=2)
    data.plot(x, y, "o", color="black", ms=5)
    for number, spot in enumerate(zip(x.tolist(), y.tolist(), strict=True), 1):
        data.annotate(str(number), spot, (-11, -3), textcoords="offset points", size=8)
    data.plot(query, after * query, "o", color=ORANGE, ms=8)
    high = 1.25 * max(float(y.abs().max()), abs(after * query))
    data.set(xlim=(-reach, reach), ylim=(-high, high), xlabel="x", ylabel="y")
    data.set_title("the prompt is a data set")
    spot = (query, after * query)
    data.annotate("answer", spot, (-7, 7 if after > 0 else -14), textcoords="offset points",
                  ha="right", color=ORANGE, size=9)  # fmt: skip
    data.text(-0.95 * reach, 0.05 * high, "before: w = 0", color=GREY, size=8)
    data.text(-0.95 * reach, 0.86 * high, f"after one step: w = {after:.2f}", color=BLUE, size=9)
    names = [f"example {i + 1}" for i in range(len(x))] + ["answer"]
    values = [*parts.tolist(), float(parts.sum())]
    shares.barh(names, values, color=[BLUE] * len(x) + [ORANGE])
    shares.axvline(0, color="black", lw=0.8)
    shares.invert_yaxis()
    shares.set(xlabel="value y × attention (η/N · x · query)")
    shares.set_title("attention adds up the same step")
    return figure


def dual_head(
    shares: Mapping[str, tuple[float, float]], is_start: Sequence[bool], columns: tuple[str, str]
) -> Figure:
    """Draw a head as a kernel smoother and as its dual model (Ren & Liu 2024), a row for each group
    of tokens: its share of the attention, and its share of the output; the start is grey."""
    figure, axes = canvas(2, 5.2, 0.9 + 0.3 * len(shares), sharey=True)
    colours = [GREY if start else BLUE for start in is_start]
    for column, parts, title in zip(axes, zip(*shares.values(), strict=True), columns, strict=True):
        column.barh(range(len(shares)), parts, 0.6, color=colours)
        for row, part in enumerate(parts):
            said = f"{100 * part:.0f} %".replace("-", "\N{MINUS SIGN}")
            column.text(max(part, 0) + 0.01, row, said, va="center", size=9)
        column.set(xlim=(min(0, *parts), 1.3 * max(parts)), xticks=[])
        column.spines["bottom"].set_visible(False)
        column.spines["left"].set_position(("data", 0))
        column.tick_params(length=0, labelsize=9)
        column.set_title(title, size=9, loc="left")
    axes[0].set_yticks(range(len(shares)), list(shares))
    axes[0].invert_yaxis()
    return figure


def _sheet(width: float, height: float) -> Axes:
    """Make a page without axes whose coordinates are inches."""
    plt.rcParams.update(STYLE)
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def _box(
    axes: Axes, at: Point, text: str, width: float, colour: str = "black", size: int = 9
) -> None:
    """Draw a word in a round box, white inside."""
    box = FancyBboxPatch(
        (at[0] - width / 2 + 0.04, at[1] - 0.08), width - 0.08, 0.16, boxstyle="round,pad=0.04",
        fc="white", ec=colour, lw=1.2, zorder=3,
    )  # fmt: skip
    axes.add_patch(box)
    axes.text(*at, text, ha="center", va="center", size=size, color=colour, zorder=4)


def _say(axes: Axes, at: Point, text: str, ha: str = "center", **style: Any) -> None:
    axes.text(*at, text, ha=ha, va="center", **{"size": 9, "linespacing": 1.3} | style)


def _line(
    axes: Axes, start: Point, end: Point, weight: float, colour: str = GREY, order: int = 1
) -> None:
    """Draw a line from below to above, the wider the stronger."""
    order += colour not in (PALE, GREY)
    axes.plot(*zip(start, end, strict=True), color=colour, lw=0.5 + 4 * weight, alpha=0.9,
              solid_capstyle="round", zorder=order)  # fmt: skip
