"""What explorers are made of: the object that a notebook shows, and pieces of Vega-Lite."""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ...errors import IclError
from ..figures import GREY

MIME = "application/vnd.vegalite.v5+json"  # what notebook programs know; version 6 reads it too
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
INK = "currentColor"  # the page's own, whether its ground is light or dark
FLAT = 24  # height in pixels of a row of short words; longer words stand upright
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


def check(tokens: Sequence[str], weights: Float[Tensor, "*rest dest src"], most: int) -> int:
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


def frame(title: str, below: str, params: list[Spec]) -> Spec:
    """What both explorers have in common: title, choices, and the ink of the page."""
    ink = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal"}
    return {
        "$schema": SCHEMA,
        "usermeta": {"embedOptions": {"actions": False, "renderer": "svg"}},
        "background": "transparent",
        "padding": 4,
        "title": {"text": {"expr": title}, "subtitle": below, "anchor": "start"},
        "params": params,
        "config": {
            "title": {"color": INK, "subtitleColor": INK, "fontSize": 13, "subtitleFontSize": 11},
            "axis": {**ink, "labelFontSize": 11, "aria": False},
            "legend": {**ink, "labelFontSize": 11, "aria": False},
            "text": {"color": INK},
            "mark": {"aria": False},
            "view": {"stroke": None},
        },
    }


def choice(name: str, options: Sequence[object]) -> Spec:
    """A native input: buttons for a few options, a list for many."""
    kind = "radio" if len(options) <= 6 else "select"
    return {"input": kind, "options": list(options), "name": name}


def picked(
    event: str, views: list[str], tokens: Sequence[str], token: int | None, all_too: bool = False
) -> Spec:
    """The chosen token: by pointing at it, or from a list that the keyboard reaches."""
    options: list[int | None] = [*([None] if all_too else []), *range(len(tokens))]
    labels = [*(["all"] if all_too else []), *(f"{i}: {word}" for i, word in enumerate(tokens))]
    bound = {"input": "select", "options": options, "labels": labels, "name": "token"}
    select = {"type": "point", "fields": ["i"], "on": f"rect:{event}", "clear": False}
    param: Spec = {"name": "token", "select": select, "bind": {"i": bound}, "views": views}
    return param if token is None else param | {"value": [{"i": token}]}


def cells(n: int, top: float | int, bottom: float | int, name: str) -> Spec:
    """One rectangle for each token, to point at."""
    return {
        "name": name,
        "data": sequence(n),
        "transform": [
            *sides("i", "left", "right"),
            {"calculate": "words[datum.i] + ' (' + datum.i + ')'", "as": "word"},
        ],
        "mark": {"type": "rect", "fill": GREY, "cursor": "pointer"},
        "encoding": {
            "x": across("left", n),
            "x2": {"field": "right"},
            "y": {"value": top},
            "y2": {"value": bottom},
            "tooltip": {"field": "word"},
        },
    }


def words(n: int, style: Spec) -> Spec:
    """The prompt, token by token."""
    plain = {"type": "text", "align": "center", "baseline": "middle", "fontSize": 10}
    return {
        "data": sequence(n),
        "transform": [{"calculate": "words[datum.i]", "as": "word"}],
        "mark": plain | style,
        "encoding": {"x": across("i", n), "text": {"field": "word"}},
    }


def room(tokens: Sequence[str]) -> int:
    """Height in pixels of a row of these words; ``FLAT`` if they are short enough to lie."""
    longest = max(map(len, tokens))
    return FLAT if longest <= 3 else 12 + 6 * longest


def sequence(count: int, name: str = "i") -> Spec:
    """The numbers from 0, as data: the rest is looked up in what the spec holds once."""
    return {"sequence": {"start": 0, "stop": count, "as": name}}


def table(row: str, column: str, columns: int) -> list[Spec]:
    """A running number ``i`` as row and column of a table."""
    return [
        {"calculate": "datum.i", "as": "running"},
        {"calculate": f"floor(datum.running / {columns})", "as": row},
        {"calculate": f"datum.running % {columns}", "as": column},
    ]


def sides(field: str, low: str, high: str) -> list[Spec]:
    """The two sides of a cell around a position."""
    signs = {low: "-", high: "+"}
    return [{"calculate": f"datum.{field} {sign} 0.5", "as": name} for name, sign in signs.items()]


def named(reader: str, source: str) -> list[Spec]:
    """The two tokens of an edge with their positions, for ``tips``."""
    return [
        {"calculate": f"words[{place}] + ' (' + {place} + ')'", "as": name}
        for name, place in (("reader", reader), ("source", source))
    ]


def tips(verb: str) -> list[Spec]:
    """What stands beside the pointer: who, what, and how much."""
    return [
        {"field": "reader", "title": "token"},
        {"field": "source", "title": verb},
        {"field": "w", "title": "weight", "format": ".3f"},
    ]


def scale(domain: list[float | int], reach: list[float | int] | None = None) -> Spec:
    """A plain linear scale."""
    plain: Spec = {"domain": domain, "nice": False, "zero": False}
    return {"scale": plain | ({"range": reach} if reach else {})}


def size(domain: list[float | int], reach: list[float | int] | None = None) -> Spec:
    """A quantity on a plain linear scale."""
    return {"type": "quantitative", **scale(domain, reach)}


def across(field: str, n: int) -> Spec:
    """Positions along the prompt, without an axis."""
    return {"field": field, "axis": None, **size([-0.5, n - 0.5])}


def width(most: float | int) -> Spec:
    """Lines as wide as their weight."""
    return {"field": "w", "legend": None, **size([0, 1], [0.3, most])}


def axis(**options: Any) -> Spec:
    """An axis of words, without lines."""
    return {"ticks": False, "domain": False, "grid": False, "title": None} | options


def when(test: str, then: object, other: object) -> Spec:
    """One value or another."""
    return {"condition": {"test": test, "value": then}, "value": other}


def rounded(values: Float[Tensor, "value"]) -> list[float | int]:
    """Three decimals, which is all that a picture can show; a bare 0 is shorter."""
    return [round(value, 3) or 0 for value in values.tolist()]
