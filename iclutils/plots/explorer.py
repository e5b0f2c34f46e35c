"""Explorers: pictures of attention and of information flow that answer to the reader's hand.

Like figures they draw arrays and never see a model. What they draw is a Vega-Lite specification
(Satyanarayan et al. 2017): data and rules, no program of ours. Notebooks draw it, and so do the
pages of this book, from disk; where nothing draws, the still picture beside it shows its first
state. Only what a screen can show is kept: three decimals, and the strongest edges of a flow.

Example:
    >>> import torch
    >>> from iclutils.plots import explorer
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError
from .figures import BLUE, GREEN, GREY, ORANGE, PINK, few_colours

MIME = "application/vnd.vegalite.v5+json"  # what notebook programs know; version 6 reads it too
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
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
        return few_colours(drawn, 48)

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
    first: int = 0,
) -> Explorer:
    """Explorer of attention, head by head: arcs between a chosen token and those that it looks at
    or that look at it, above the whole pattern. ``layer``, ``head`` and ``token`` (the last unless
    named) are what is chosen at first; ``first`` is the model's number of the first layer given.

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
        {"name": "first", "value": first},
        {"name": "layer", "value": layer, "bind": _choice("layer", range(layers), first)},
        {"name": "head", "value": head, "bind": _choice("head", range(heads))},
        _picked("pointerover", ["cells", "map"], tokens, token),
        {"name": "t", "expr": f"isValid(token.i) ? token.i[0] : {token}"},
    ]
    spec = _spec("attention", tokens, layers, params)
    return Explorer(spec, f"Attention of {layers} x {heads} heads over {n} tokens, to explore")


def flow(
    tokens: Sequence[str],
    edges: Float[Tensor, "layer dest src"],
    groups: Mapping[str, Sequence[int]] | None = None,
    strongest: int = 16,
    token: int | None = None,
) -> Explorer:
    """Explorer of what flows from token to token through layers: the prompt across, depth upwards.

    A weight (for example a saliency; the diagonal is left out) is shown as a share of the largest
    of its layer; so many of the ``strongest`` edges of each layer are kept. A chosen token
    (``token`` at first; all if omitted) keeps the edges that a path of edges over the threshold
    joins to it. ``groups`` are positions by name; edges into them have a colour of their own.

    Example:
        >>> edges = torch.rand(2, 3, 3).tril()
        >>> explorer.flow(["A", "B", "A"], edges, {"target": [2]})
        Flow over 3 tokens through 2 layers, to explore
    """
    n, layers = _check(tokens, edges, TOKENS["flow"]), len(edges)
    groups = groups or {}
    group = {i: name for name, members in groups.items() for i in members}
    if len(groups) > 4 or not {*group, token or 0} <= set(range(n)):
        raise IclError(f"At most four groups, of positions 0 to {n - 1}; got {groups}, {token}.")
    slider = {"input": "range", "min": 0, "max": 1, "step": 0.02, "name": "at least"}
    ways = _choice("what flows", ["into", "out of"])
    params: list[Spec] = [
        _picked("click", ["columns"], tokens, token, all_too=True),
        {"name": "direction", "value": "into", "bind": ways},
        {"name": "threshold", "value": 0.1, "bind": slider},
        {"name": "t", "expr": "isValid(token.i) ? token.i[0] : null"},
    ]
    spec = _spec("flow", tokens, layers, params)
    _, lines, _, members, _ = spec["layer"]
    lines["data"]["values"] = _strongest(edges, strongest, group)
    members["data"]["values"] = [{"i": i, "group": name} for i, name in group.items()]
    colours = dict(zip(groups, (BLUE, ORANGE, GREEN, PINK), strict=False)) | {OTHER: GREY}
    legend = {"orient": "top", "title": "edges into", "symbolType": "stroke"}
    colour = {"scale": {"domain": list(colours), "range": list(colours.values())}}
    for part in (lines, members):
        part["encoding"]["color"] |= colour | {"legend": legend if groups else None}
    return Explorer(spec, f"Flow over {n} tokens through {layers} layers, to explore")


def _spec(name: str, tokens: Sequence[str], layers: int, params: list[Spec]) -> Spec:
    """One of the pictures of ``explorer.yml``, with the sizes (in pixels) for this prompt."""
    n, longest = len(tokens), max(map(len, tokens))
    flat = longest <= 3  # longer words stand upright
    room, depth = 24 if flat else 12 + 6 * longest, min(62 * layers, 1200)
    turned = {"labelAngle": 270, "labelAlign": "right", "labelBaseline": "middle"}
    numbers = {
        **{"n": n, "layers": layers, "end": n - 0.5, "reach": max(1, n - 1), "cells": n * n},
        **{"arcs": 16 * n, "width": 21 * n, "map_height": 15 * n, "tokens": list(range(n))},
        **{"standing": {"fontSize": 12} if flat else {"fontSize": 10, "angle": 270}},
        **{"slanted": {"labelAngle": 0} if flat else turned},
        **{"cells_end": 93 + room, "words_at": 93 + room / 2, "weights_at": 102 + room},
        **{"arcs_height": 109 + room, "depth": depth, "words_below": depth + 10},
        **{"flow_width": 11 * n, "flow_height": depth + room, "dots": min(n * (layers + 1), DOTS)},
        **{"middles": [i + 0.5 for i in range(layers)]},
    }
    text = Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
    made = yaml.safe_load(Template(text).substitute({k: json.dumps(v) for k, v in numbers.items()}))
    params = [{"name": "words", "value": list(tokens)}, *params]
    return {"$schema": SCHEMA, "params": params, **made["frame"], **made[name]}


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
        edges_here = []
        for share, place in shares:
            to, source = divmod(place, len(layer))
            edge = {"layer": depth, "dest": to, "src": source, "w": share}
            edges_here += [edge | {"group": group.get(to, OTHER)}] if share else []
        kept.append(edges_here)
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


def _choice(name: str, options: Sequence[Any], first: int = 0) -> Spec:
    """A native input: buttons for a few options, a list for many; numbers are shown from
    ``first`` on."""
    kind = "radio" if len(options) <= 6 else "select"
    shown = {"labels": [str(option + first) for option in options]} if first else {}
    return {"input": kind, "options": list(options), "name": name} | shown


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


def _rounded(values: Float[Tensor, "value"]) -> list[float | int]:
    """Three decimals, which is all that a picture can show; a bare 0 is shorter."""
    return [round(value, 3) or 0 for value in values.tolist()]


class Specification:
    """MyST-NB's renderer of the specification (an entry point of the package)."""

    mime_priority_overrides: tuple[tuple[str, str, int | None], ...] = ()

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        """The specification as JSON in a script that no browser runs."""
        if data.mime_type != MIME:
            return None
        from docutils import nodes

        # Without its schema, which is an address, and not of the version of the library here.
        spec = {key: value for key, value in data.content.items() if key != "$schema"}
        content = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        text = content.replace("<", "\\u003c")  # nothing in it can end the script
        return [nodes.raw("", f'<script type="application/json">{text}</script>', format="html")]
