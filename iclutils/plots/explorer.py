"""Explorers: pictures of attention and of information flow that answer to the reader's hand.

Like figures they draw arrays and never see a model. What they draw is a Vega-Lite specification
(Satyanarayan et al. 2017): data and rules, no program of ours. JupyterLab, VS Code and Colab draw
it, and so do the pages of this book, from disk; where nothing draws, the still picture beside it
shows its first state. Only weights that can be told apart on a screen are kept: three decimals,
and of a flow the strongest edges of every layer.

Example:
    >>> import torch
    >>> from iclutils.plots import explorer
"""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ..errors import IclError
from .figures import BLUE, GREEN, GREY, ORANGE, PINK

MIME = "application/vnd.vegalite.v5+json"  # what notebook programs know; version 6 reads it too
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
INK = "currentColor"  # the page's own, whether its ground is light or dark
FLAT = 24  # height in pixels of a row of short words; longer words stand upright
OTHER = "other tokens"
TOKENS, WEIGHTS, DOTS = {"attention": 100, "flow": 1000}, 250_000, 2000  # more make a page slow
Spec = dict[str, Any]


@dataclass(frozen=True)
class Explorer:
    """A specification that notebooks and pages draw. The last expression of a cell shows it."""

    spec: Spec
    name: str

    def __repr__(self) -> str:
        return self.name

    def still(self) -> bytes | None:
        """The first state as a PNG, or None where ``vl-convert-python`` is not installed."""
        if importlib.util.find_spec("vl_convert") is None:
            return None
        import vl_convert

        drawn = vl_convert.vegalite_to_png(self.spec | {"background": "white"}, scale=1.5)
        small = io.BytesIO()  # few colours: a third of the bytes, and no eye sees it
        Image.open(io.BytesIO(drawn)).convert("RGB").quantize(48).save(small, "PNG", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """What a notebook shows; Colab draws pages only, and Altair, which it has, makes one."""
        bundle: dict[str, Any] = {MIME: self.spec, "text/plain": self.name}
        if still := self.still():
            bundle["image/png"] = base64.b64encode(still).decode()
        if "google.colab" in sys.modules and importlib.util.find_spec("altair"):
            import altair

            bundle["text/html"] = altair.Chart.from_dict(self.spec).to_html()
        return bundle


def attention(
    tokens: Sequence[str],
    pattern: Float[Tensor, "layer head dest src"],
    layer: int = 0,
    head: int = 0,
    token: int | None = None,
) -> Explorer:
    """What every token looks at, and who looks at it, head by head: arcs from a chosen token, and
    the whole pattern below them. ``layer``, ``head`` and ``token`` (the last unless named) are
    what is chosen at first.

    Example:
        >>> even = torch.ones(3, 3).tril() / torch.arange(1, 4)[:, None]
        >>> explorer.attention(["A", "B", "A"], even.expand(2, 4, 3, 3))
        Attention of 2 x 4 heads over 3 tokens, to explore
    """
    n = _check(tokens, pattern, TOKENS["attention"])
    token = n - 1 if token is None else token
    layers, heads = pattern.shape[:2]
    if pattern.numel() > 2 * WEIGHTS:
        raise IclError(
            f"{layers} x {heads} heads over {n} tokens are too much for one picture. Show fewer "
            f"layers or a shorter prompt: at most {WEIGHTS} weights."
        )
    for what, at, count in (("layer", layer, layers), ("head", head, heads), ("token", token, n)):
        if not 0 <= at < count:
            raise IclError(f"There is no {what} {at}: they are numbered 0 to {count - 1}.")
    weights = [
        [[_rounded(row[: i + 1]) for i, row in enumerate(one)] for one in of_layer]
        for of_layer in pattern.detach().cpu()
    ]
    params: list[Spec] = [
        {"name": "weights", "value": weights},
        {"name": "words", "value": list(tokens)},
        {"name": "layer", "value": layer, "bind": _choice("layer", range(layers))},
        {"name": "head", "value": head, "bind": _choice("head", range(heads))},
        _picked("pointerover", ["cells", "map"], tokens, token),
        {"name": "t", "expr": f"isValid(token.i) ? token.i[0] : {token}"},
    ]
    spec = _frame(
        "'Layer ' + layer + ', head ' + head + ': “' + words[t] + '” at position ' + t",
        "blue: what it looks at · orange: who looks at it",
        params,
    )
    spec |= {"spacing": 10, "vconcat": [_arcs(tokens), _map(tokens)]}
    spec |= {"resolve": {"scale": {"fillOpacity": "independent"}}}
    return Explorer(spec, f"Attention of {layers} x {heads} heads over {n} tokens, to explore")


def _arcs(tokens: Sequence[str], step: int = 21, rise: int = 90, points: int = 16) -> Spec:
    """The prompt as a row of cells, arcs between the chosen one and the others above it.

    ``step`` and ``rise`` are in pixels: of a token, and of the widest arc.
    """
    n, top, room = len(tokens), rise + 3, _room(tokens)
    side = _when("datum.i <= t", BLUE, ORANGE)
    weight = _let(w="weights[layer][head][max(t, datum.i)][min(t, datum.i)]")
    arcs: Spec = {
        "data": _sequence(n * points),
        "transform": [
            *_row_and_column("i", "point", points),
            *weight,
            {"filter": "datum.i !== t && datum.w >= 0.01"},
            *_let(
                way=f"datum.point / {points - 1}",
                x="t + (datum.i - t) * datum.way",
                rise=f"0.15 + 0.85 * abs(datum.i - t) / {max(1, n - 1)}",
                y="datum.rise * sin(PI * datum.way)",
            ),
        ],
        "mark": {"type": "line", "strokeCap": "round", "opacity": 0.85},
        "encoding": {
            "x": _across("x", n),
            "y": {"field": "y", "axis": None, **_size([0, 1], [rise, 4])},
            "detail": {"field": "i"},
            "order": {"field": "point"},
            "stroke": side,
            "strokeWidth": _of_weight([0.3, 8]),
        },
    }
    cells = _cells(n, top, top + room, "cells")
    cells["transform"] += [*weight, *_named("max(t, datum.i)", "min(t, datum.i)")]
    cells["encoding"] |= {
        "fill": side,
        "fillOpacity": _of_weight([0.06, 0.7]),
        "stroke": _when("datum.i === t", INK, GREY),
        "strokeWidth": _when("datum.i === t", 2.5, 0.5),
        "tooltip": _tips("looks at"),
    }
    turn = {"angle": 270} if room > FLAT else {"fontSize": 12}
    words = _words(n, {"y": top + room / 2, **turn})
    numbers = _words(n, {"y": top + room + 9, "fontSize": 9})
    numbers["transform"] = [*weight, {"filter": "datum.w >= 0.05"}]
    numbers["encoding"]["text"] = {"field": "w", "format": ".1f"}
    layers = [arcs, cells, words, numbers]
    return {"width": step * n, "height": top + room + 16, "layer": layers}


def _map(tokens: Sequence[str], step: int = 21, row: int = 15) -> Spec:
    """The whole pattern: row by row what each token looks at."""
    n = len(tokens)
    every = {"values": list(range(n)), "labelExpr": "words[datum.value]", "labelOverlap": False}
    turned = {"labelAngle": 270, "labelAlign": "right", "labelBaseline": "middle"}
    turned = turned if _room(tokens) > FLAT else {"labelAngle": 0}
    down = _size([-0.5, n - 0.5], [0, row * n])
    blue, orange = (
        {"test": f"datum.{x} === t", "value": c} for x, c in (("i", BLUE), ("src", ORANGE))
    )
    return {
        "name": "map",
        "width": step * n,
        "height": row * n,
        "data": _sequence(n * n, "k"),
        "transform": [
            *_let(i=f"floor(datum.k / {n})", src=f"datum.k % {n}"),
            {"filter": "datum.src <= datum.i"},
            *_let(w="weights[layer][head][datum.i][datum.src]"),
            *_named("datum.i", "datum.src"),
            *_let(left="datum.src - 0.5", right="datum.src + 0.5"),
            *_let(upper="datum.i - 0.5", lower="datum.i + 0.5"),
        ],
        "mark": {"type": "rect", "cursor": "pointer"},
        "encoding": {
            "x": {**_across("left", n), "axis": _axis(**every, **turned, title="looks at")},
            "x2": {"field": "right"},
            "y": {"field": "upper", **down, "axis": _axis(**every, title="token")},
            "y2": {"field": "lower"},
            "fill": {"condition": [blue, orange], "value": GREY},
            "fillOpacity": _of_weight([0.06, 1]),
            "tooltip": _tips("looks at"),
        },
    }


def flow(
    tokens: Sequence[str],
    edges: Float[Tensor, "layer dest src"],
    groups: Mapping[str, Sequence[int]] | None = None,
    strongest: int = 16,
    token: int | None = None,
) -> Explorer:
    """What flows from token to token through the layers: the prompt across, depth upwards.

    A weight (for example a saliency) is shown as a share of the strongest edge of its layer. A
    chosen token keeps what flows into it, or out of it, through however many layers: an edge stays
    if a path of edges over the threshold joins it to the token, where every token also keeps what
    it has.

    Args:
        tokens: the prompt, token by token.
        edges: weight of every edge; the diagonal is left out.
        groups: sets of positions by name; edges into them have a colour of their own.
        strongest: how many edges of each layer are kept.
        token: the token chosen at first, all if omitted.

    Example:
        >>> edges = torch.rand(2, 3, 3).tril()
        >>> explorer.flow(["A", "B", "A"], edges, {"target": [2]})
        Flow over 3 tokens through 2 layers, to explore
    """
    n, layers = _check(tokens, edges, TOKENS["flow"]), len(edges)
    groups = groups or {}
    colours = dict(zip(groups, (BLUE, ORANGE, GREEN, PINK), strict=False))
    group = {i: name for name, members in groups.items() for i in members}
    if len(groups) > 4 or not {*group, token or 0} <= set(range(n)):
        raise IclError(f"At most four groups, of positions 0 to {n - 1}; got {groups}, {token}.")
    room, height = _room(tokens), min(62 * layers, 1200)
    reach = "t === null ? 1 : (direction === 'into' ? datum.into : datum.out)['' + t] || 0"
    level = _size([0, layers], [height, 0])
    middles = {"values": [i + 0.5 for i in range(layers)], "labelExpr": "floor(datum.value)"}
    legend = {"orient": "top", "title": "edges into", "symbolType": "stroke"}
    colour: Spec = {
        "field": "group",
        "type": "nominal",
        "scale": {"domain": [*colours, OTHER], "range": [*colours.values(), GREY]},
        "legend": legend if groups else None,
    }
    lines: Spec = {
        "data": {"name": "edges", "values": _strongest(edges, strongest, group)},
        "transform": [
            {"filter": f"datum.w >= threshold && ({reach}) >= threshold"},
            *_let(above="datum.layer + 1"),
            *_named("datum.dest", "datum.src"),
        ],
        "mark": {"type": "rule", "strokeCap": "round", "opacity": 0.8},
        "encoding": {
            "x": _across("src", n),
            "x2": {"field": "dest"},
            "y": {"field": "layer", **level, "axis": _axis(**middles, title="layer")},
            "y2": {"field": "above"},
            "strokeWidth": _of_weight([0.3, 6]),
            "color": colour,
            "tooltip": [*_tips("reads from"), {"field": "layer"}],
        },
    }
    dot = {"type": "point", "filled": True}
    dots: Spec = {
        "data": _sequence(min(n * (layers + 1), DOTS)),
        "transform": _row_and_column("level", "i", n),
        "mark": {**dot, "size": 7, "color": INK, "opacity": 0.6},
        "encoding": {"x": _across("i", n), "y": {"field": "level", **level}},
    }
    members: Spec = {
        "data": {"values": [{"i": i, "group": name} for i, name in group.items()]},
        "mark": {**dot, "size": 50, "opacity": 1, "y": height},
        "encoding": {"x": _across("i", n), "color": colour},
    }
    columns = _cells(n, 0, height + room, "columns")
    columns["encoding"]["fillOpacity"] = _when("datum.i === t", 0.25, 0)
    words = _words(n, {"y": height + 10, "angle": 270, "align": "right"})
    slider = {"input": "range", "min": 0, "max": 1, "step": 0.02, "name": "at least"}
    ways = _choice("what flows", ["into", "out of"])
    params = [
        {"name": "words", "value": list(tokens)},
        _picked("click", ["columns"], tokens, token, all_too=True),
        {"name": "direction", "value": "into", "bind": ways},
        {"name": "threshold", "value": 0.1, "bind": slider},
        {"name": "t", "expr": "isValid(token.i) ? token.i[0] : null"},
    ]
    spec = _frame(
        "t === null ? 'What flows where' : "
        "'What flows ' + direction + ' “' + words[t] + '” at position ' + t",
        "layers upwards, wide is strong; click a token to follow its paths",
        params,
    )
    spec |= {"width": 11 * n, "height": height + room}
    spec |= {"layer": [columns, lines, dots, members, words]}
    return Explorer(spec, f"Flow over {n} tokens through {layers} layers, to explore")


def _strongest(
    edges: Float[Tensor, "layer dest src"], count: int, group: Mapping[int, str]
) -> list[Spec]:
    """The strongest edges of each layer, with the tokens that their paths join.

    ``into[p]`` is the weight of the weakest edge on the best path through this edge to p at the
    top, ``out[p]`` that on the best path to it from p at the bottom.
    """
    kept: list[list[Spec]] = []
    for depth, layer in enumerate(edges.detach().cpu().float().tril(-1)):
        best = (layer / (layer.max().item() or 1.0)).flatten().topk(min(count, layer.numel()))
        shares = zip(_rounded(best.values), best.indices.tolist(), strict=True)
        found = [(share, *divmod(place, len(layer))) for share, place in shares if share]
        kept.append(
            [
                {"layer": depth, "dest": i, "src": j, "w": w, "group": group.get(i, OTHER)}
                for w, i, j in found
            ]
        )
    _follow(kept[::-1], "into", "dest", "src")
    _follow(kept, "out", "src", "dest")
    return [edge for layer in kept for edge in layer]


def _follow(layers: Sequence[list[Spec]], name: str, ahead: str, behind: str) -> None:
    """Note at each edge how well it is joined to every end, walking away from the ends."""
    joined: dict[int, dict[str, float]] = {}  # position: end: weakest edge of the best path
    for layer in layers:
        for edge in layer:
            place = edge[ahead]
            beyond = {str(place): 1.0} | joined.get(place, {})
            edge[name] = {end: min(edge["w"], width) for end, width in beyond.items()}
        for edge in layer:
            known = joined.setdefault(edge[behind], {})
            for end, width in edge[name].items():
                known[end] = max(width, known.get(end, 0.0))


def _check(tokens: Sequence[str], weights: Float[Tensor, "*rest dest src"], most: int) -> int:
    """The number of tokens."""
    n = weights.shape[-1]
    if len(tokens) != n or weights.shape[-2] != n or n == 0:
        raise IclError(
            f"{len(tokens)} tokens, but weights of the shape {tuple(weights.shape)}: its last two "
            "numbers must both be the number of tokens."
        )
    if not torch.isfinite(weights).all() or (weights < 0).any():
        raise IclError("A weight is negative or no number: give sizes, for example absolute ones.")
    if weights.triu(1).any():
        raise IclError("A token looks ahead: give weights of a model that reads left to right.")
    if n > most:
        raise IclError(f"{n} tokens are too many for one picture. Show at most {most} of them.")
    return n


# Pieces of Vega-Lite


def _frame(title: str, below: str, params: list[Spec]) -> Spec:
    """What both explorers have in common: title, choices, and the ink of the page."""
    ink = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal"}
    words = {**ink, "labelFontSize": 11, "aria": False}
    return {
        "$schema": SCHEMA,
        "usermeta": {"embedOptions": {"actions": False, "renderer": "svg"}},
        "background": "transparent",
        "padding": 4,
        "title": {"text": {"expr": title}, "subtitle": below, "anchor": "start"},
        "params": params,
        "config": {
            "title": {"color": INK, "subtitleColor": INK, "fontSize": 13, "subtitleFontSize": 11},
            "axis": words,
            "legend": words,
            "text": {"color": INK},
            "mark": {"aria": False},
            "view": {"stroke": None},
        },
    }


def _choice(name: str, options: Sequence[object]) -> Spec:
    """A native input: buttons for a few options, a list for many."""
    kind = "radio" if len(options) <= 6 else "select"
    return {"input": kind, "options": list(options), "name": name}


def _picked(
    event: str, views: list[str], tokens: Sequence[str], token: int | None, all_too: bool = False
) -> Spec:
    """The chosen token: by pointing at it, or from a list that the keyboard reaches."""
    options: list[int | None] = [*([None] if all_too else []), *range(len(tokens))]
    labels = [*(["all"] if all_too else []), *(f"{i}: {word}" for i, word in enumerate(tokens))]
    bound = {"input": "select", "options": options, "labels": labels, "name": "token"}
    select = {"type": "point", "fields": ["i"], "on": f"rect:{event}", "clear": False}
    param: Spec = {"name": "token", "select": select, "bind": {"i": bound}, "views": views}
    return param if token is None else param | {"value": [{"i": token}]}


def _cells(n: int, top: float | int, bottom: float | int, name: str) -> Spec:
    """One rectangle for each token, to point at."""
    word = "words[datum.i] + ' (' + datum.i + ')'"
    return {
        "name": name,
        "data": _sequence(n),
        "transform": _let(left="datum.i - 0.5", right="datum.i + 0.5", word=word),
        "mark": {"type": "rect", "fill": GREY, "cursor": "pointer"},
        "encoding": {
            "x": _across("left", n),
            "x2": {"field": "right"},
            "y": {"value": top},
            "y2": {"value": bottom},
            "tooltip": {"field": "word"},
        },
    }


def _words(n: int, style: Spec) -> Spec:
    """The prompt, token by token."""
    plain = {"type": "text", "align": "center", "baseline": "middle", "fontSize": 10}
    return {
        "data": _sequence(n),
        "transform": _let(word="words[datum.i]"),
        "mark": plain | style,
        "encoding": {"x": _across("i", n), "text": {"field": "word"}},
    }


def _room(tokens: Sequence[str]) -> int:
    """Height in pixels of a row of these words; ``FLAT`` if they are short enough to lie."""
    longest = max(map(len, tokens))
    return FLAT if longest <= 3 else 12 + 6 * longest


def _let(**expressions: str) -> list[Spec]:
    """New fields, each calculated from those before it."""
    return [{"calculate": text, "as": name} for name, text in expressions.items()]


def _sequence(count: int, name: str = "i") -> Spec:
    """The numbers from 0, as data: the rest is looked up in what the spec holds once."""
    return {"sequence": {"start": 0, "stop": count, "as": name}}


def _row_and_column(row: str, column: str, columns: int) -> list[Spec]:
    """A running number ``i`` as row and column of a table."""
    at = {row: f"floor(datum.running / {columns})", column: f"datum.running % {columns}"}
    return _let(running="datum.i", **at)


def _named(reader: str, source: str) -> list[Spec]:
    """The two tokens of an edge with their positions, for ``_tips``."""
    said = "words[{0}] + ' (' + {0} + ')'"
    return _let(reader=said.format(reader), source=said.format(source))


def _tips(verb: str) -> list[Spec]:
    """What stands beside the pointer: who, what, and how much."""
    weight = {"field": "w", "title": "weight", "format": ".3f"}
    return [{"field": "reader", "title": "token"}, {"field": "source", "title": verb}, weight]


def _size(domain: list[float | int], reach: list[float | int] | None = None) -> Spec:
    """A quantity on a plain linear scale."""
    plain: Spec = {"domain": domain, "nice": False, "zero": False}
    return {"type": "quantitative", "scale": plain | ({"range": reach} if reach else {})}


def _across(field: str, n: int) -> Spec:
    """Positions along the prompt, without an axis."""
    return {"field": field, "axis": None, **_size([-0.5, n - 0.5])}


def _of_weight(reach: list[float | int]) -> Spec:
    """A width or an opacity that grows with the weight."""
    return {"field": "w", "legend": None, **_size([0, 1], reach)}


def _axis(**options: Any) -> Spec:
    """An axis of words, without lines."""
    return {"ticks": False, "domain": False, "grid": False, "title": None} | options


def _when(test: str, then: object, other: object) -> Spec:
    """One value or another."""
    return {"condition": {"test": test, "value": then}, "value": other}


def _rounded(values: Float[Tensor, "value"]) -> list[float | int]:
    """Three decimals, which is all that a picture can show; a bare 0 is shorter."""
    return [round(value, 3) or 0 for value in values.tolist()]
