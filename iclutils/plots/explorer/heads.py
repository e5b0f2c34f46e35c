"""Attention, head by head: arcs from a chosen token, and the whole pattern below them.

Example:
    >>> import torch
    >>> from iclutils.plots import explorer
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ..figures import BLUE, GREY, ORANGE
from . import _parts as parts
from ._parts import INK, Explorer, Spec, across, named, scale, sequence, tips, when

TOKENS, WEIGHTS = 100, 250_000  # more of them make a page slow
STEP, ROW = 21, 15  # pixels per token across and down
ARC, RISE = 16, 90  # points of an arc, height in pixels of the widest
WEIGHT = "weights[layer][head][max(t, datum.i)][min(t, datum.i)]"


def attention(
    tokens: Sequence[str],
    pattern: Float[Tensor, "layer head dest src"],
    layer: int = 0,
    head: int = 0,
    token: int | None = None,
) -> Explorer:
    """What every token looks at, and who looks at it, head by head.

    Args:
        tokens: the prompt, token by token.
        pattern: attention of every layer and head; a token looks at itself and back.
        layer, head, token: what is chosen at first; the last token unless another is named.

    Example:
        >>> even = torch.ones(3, 3).tril() / torch.arange(1, 4)[:, None]
        >>> explorer.attention(["A", "B", "A"], even.expand(2, 4, 3, 3))
        Attention of 2 x 4 heads over 3 tokens, to explore
    """
    n = parts.check(tokens, pattern, TOKENS)
    token = n - 1 if token is None else token
    layers, heads = pattern.shape[:2]
    if pattern.numel() > 2 * WEIGHTS:
        raise IclError(
            f"{layers} x {heads} heads over {n} tokens are too much for one picture. Show fewer "
            f"layers or a shorter prompt: at most {WEIGHTS} weights."
        )
    chosen = {"layer": (layer, layers), "head": (head, heads), "token": (token, n)}
    for what, (at, count) in chosen.items():
        if not 0 <= at < count:
            raise IclError(f"There is no {what} {at}: they are numbered 0 to {count - 1}.")
    weights = [
        [[parts.rounded(row[: i + 1]) for i, row in enumerate(one)] for one in of_layer]
        for of_layer in pattern.detach().cpu()
    ]
    spec = parts.frame(
        "'Layer ' + layer + ', head ' + head + ': “' + words[t] + '” at position ' + t",
        "blue: what it looks at · orange: who looks at it",
        [
            {"name": "weights", "value": weights},
            {"name": "words", "value": list(tokens)},
            {"name": "layer", "value": layer, "bind": parts.choice("layer", range(layers))},
            {"name": "head", "value": head, "bind": parts.choice("head", range(heads))},
            parts.picked("pointerover", ["cells", "map"], tokens, token),
            {"name": "t", "expr": f"isValid(token.i) ? token.i[0] : {token}"},
        ],
    )
    spec |= {"spacing": 10, "vconcat": [_row(tokens), _map(tokens)]}
    spec |= {"resolve": {"scale": {"fillOpacity": "independent"}}}
    return Explorer(spec, f"Attention of {layers} x {heads} heads over {n} tokens, to explore")


def _row(tokens: Sequence[str]) -> Spec:
    """The prompt as a row of cells, arcs between the chosen one and the others above it."""
    n, top, room = len(tokens), RISE + 3, parts.room(tokens)
    way, weight = when("datum.i <= t", BLUE, ORANGE), {"calculate": WEIGHT, "as": "w"}
    up = {"type": "quantitative", "axis": None, **scale([0, 1], [RISE, 4])}
    arcs: Spec = {
        "data": sequence(n * ARC),
        "transform": [
            *parts.table("i", "point", ARC),
            weight,
            {"filter": "datum.i !== t && datum.w >= 0.01"},
            {"calculate": f"datum.point / {ARC - 1}", "as": "way"},
            {"calculate": "t + (datum.i - t) * datum.way", "as": "x"},
            {"calculate": f"0.15 + 0.85 * abs(datum.i - t) / {max(1, n - 1)}", "as": "rise"},
            {"calculate": "datum.rise * sin(PI * datum.way)", "as": "y"},
        ],
        "mark": {"type": "line", "strokeCap": "round", "opacity": 0.85},
        "encoding": {
            "x": across("x", n),
            "y": {"field": "y", **up},
            "detail": {"field": "i"},
            "order": {"field": "point"},
            "stroke": way,
            "strokeWidth": parts.width(8),
        },
    }
    cells = parts.cells(n, top, top + room, "cells")
    cells["transform"] += [weight, *named("max(t, datum.i)", "min(t, datum.i)")]
    cells["encoding"] |= {
        "fill": way,
        "fillOpacity": {"field": "w", "legend": None, **parts.size([0, 1], [0.06, 0.7])},
        "stroke": when("datum.i === t", INK, GREY),
        "strokeWidth": when("datum.i === t", 2.5, 0.5),
        "tooltip": tips("looks at"),
    }
    turn = {"angle": 270} if room > parts.FLAT else {"fontSize": 12}
    words = parts.words(n, {"y": top + room / 2, **turn})
    numbers = parts.words(n, {"y": top + room + 9, "fontSize": 9})
    numbers["transform"] = [weight, {"filter": "datum.w >= 0.05"}]
    numbers["encoding"]["text"] = {"field": "w", "format": ".1f"}
    layers = [arcs, cells, words, numbers]
    return {"width": STEP * n, "height": top + room + 16, "layer": layers}


def _map(tokens: Sequence[str]) -> Spec:
    """The whole pattern: row by row what each token looks at."""
    n = len(tokens)
    every = {"values": list(range(n)), "labelExpr": "words[datum.value]", "labelOverlap": False}
    turned = {"labelAngle": 270, "labelAlign": "right", "labelBaseline": "middle"}
    turned = turned if parts.room(tokens) > parts.FLAT else {"labelAngle": 0}
    row = parts.size([-0.5, n - 0.5], [0, ROW * n])
    return {
        "name": "map",
        "width": STEP * n,
        "height": ROW * n,
        "data": sequence(n * n, "k"),
        "transform": [
            {"calculate": f"floor(datum.k / {n})", "as": "i"},
            {"calculate": f"datum.k % {n}", "as": "src"},
            {"filter": "datum.src <= datum.i"},
            {"calculate": "weights[layer][head][datum.i][datum.src]", "as": "w"},
            *named("datum.i", "datum.src"),
            *parts.sides("src", "left", "right"),
            *parts.sides("i", "upper", "lower"),
        ],
        "mark": {"type": "rect", "cursor": "pointer"},
        "encoding": {
            "x": {**across("left", n), "axis": parts.axis(**every, **turned, title="looks at")},
            "x2": {"field": "right"},
            "y": {"field": "upper", **row, "axis": parts.axis(**every, title="token")},
            "y2": {"field": "lower"},
            "fill": {
                "condition": [
                    {"test": "datum.i === t", "value": BLUE},
                    {"test": "datum.src === t", "value": ORANGE},
                ],
                "value": GREY,
            },
            "fillOpacity": {"field": "w", "legend": None, **parts.size([0, 1], [0.06, 1])},
            "tooltip": tips("looks at"),
        },
    }
