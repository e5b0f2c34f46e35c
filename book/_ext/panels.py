"""Figures on a narrow screen: the panels of a picture one below the other, in a size one can read.

A figure is one picture, drawn for a page of 7 inches. Beside each image of a page stand its parts,
which the style sheet shows in its place where the page is narrow: the words of the title, each
panel, the entries of a legend. All are cut from the same file; blank lines tell where.
"""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from docutils import nodes
from jaxtyping import Bool
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from sphinx.application import Sphinx

LINE = 26  # pixels: no line of text is higher
PANEL = 110  # pixels: no panel is narrower
WIDE = 440  # pixels: a wider panel does not fit
NAMES = 40  # pixels: names of rows are wider, and the numbers of half an axis narrower
IMAGE = re.compile(r'<img alt="([^"]*)"[^>]* src="([./]*_images/([^"]+\.png))"[^>]*/>')
CAPTION = re.compile(r"<figcaption>.*?</figcaption>", re.DOTALL)
SIDES = {"Left": "Above", "Right": "Below", "right": "below"}
SIDES |= {"(left)": "(above)", "(right)": "(below)"}
SIDE = re.compile(r"\b(?:Left|Right)\b(?=[:,])|(?<=; )right(?=,)|\((?:left|right)\)")
Ink = Bool[np.ndarray, "height width"]


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    right: int
    bottom: int


def stretches(inked: Bool[np.ndarray, " place"], blank: int) -> list[tuple[int, int]]:
    """Where there is ink: first place and the place after the last, ``blank`` and more between."""
    places = np.flatnonzero(inked)
    ends = np.flatnonzero(np.diff(places) > blank)
    first, last = places[[0, *ends + 1]], places[[*ends, -1]] + 1
    return [(int(a), int(b)) for a, b in zip(first, last, strict=True)]


def axis(ink: Ink, left: int, right: int) -> int | None:
    """How far from ``left`` the axis of a panel stands: a line down much of the picture."""
    down = np.flatnonzero(ink[:, left:right].mean(axis=0) > 0.4)
    return int(down[0]) if len(down) else None


def columns(ink: Ink) -> list[tuple[int, int]]:
    """Left and right of each panel, with the names and scales that stand nearest to it."""
    found = stretches(np.any(ink, axis=0), 4)
    some = any(axis(ink, *one) is not None for one in found)

    def alone(one: tuple[int, int]) -> bool:
        return one[1] - one[0] >= PANEL and not (some and axis(ink, *one) is None)

    while len(found) > 1 and not all(map(alone, found)):
        i = next(i for i, one in enumerate(found) if not alone(one))
        gaps = [right[0] - left[1] for left, right in pairwise(found)] + [ink.shape[1]]
        bar = axis(ink, *found[i]) is not None  # of colours: it stands after its map
        nearer = gaps[i] <= gaps[i - 1] + 2  # its label is nearly midway
        j = i if i == 0 or (nearer and not bar) else i - 1
        found[j : j + 2] = [(found[j][0], found[j + 1][1])]
    widths = [right - left for left, right in found]
    return found if max(widths) < 3 * min(widths) else [(found[0][0], found[-1][1])]


def folds(ink: Ink) -> list[int]:
    """Where the scale of a panel of bars ends and where the panel is cut, if it is too wide, so
    that each part fits with the scale before it and no more than level lines are cut."""
    width = ink.shape[1]
    if width <= WIDE:
        return []
    lines = [one for one in stretches(np.any(ink, axis=0), 4) if axis(ink, *one) is not None]
    solid = sliding_window_view(sliding_window_view(ink, 12, 0).all(2), 12, 1).all(2).any()
    clear = 3 + np.flatnonzero(sliding_window_view(ink, 7, 1).any(2).sum(0) <= 7)
    if not (solid and len(clear) and lines) or np.ptp(lines[-1]) < width / 2:
        return []  # a last line that stands alone is a scale of colours
    start = lines[-1][0] + (axis(ink, *lines[-1]) or 0) + 2
    for count in range(2, 5):
        ideal = np.linspace(start, width, count + 1)[1:-1]
        cuts = [start, *(int(min(clear, key=lambda x: abs(x - at))) for at in ideal)]
        if all(a < b <= a + WIDE - start for a, b in pairwise([*cuts, width])):
            return cuts
    return []


def parts(picture: Image.Image) -> list[list[Box]]:
    """The parts of a picture row by row: lines of the title in words, panels, entries of a legend.

    A panel whose rows have no names, for they stand at the first, has these before it; so has the
    rest of one that is folded its scale.
    """
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    ink = pixels.min(2) < 245
    height, width = ink.shape
    if not ink.any():
        return [[Box(0, 0, width, height)]]
    lines = stretches(ink.any(1), 3)

    def row(top: int, bottom: int, blank: int) -> list[Box]:
        found = stretches(ink[top:bottom].any(0), blank)
        return [Box(left, top, right, bottom) for left, right in found]

    title: list[list[Box]] = []
    while len(lines) > 1 and lines[0][1] - lines[0][0] < LINE:
        whole = row(*lines[0], blank=12)
        if len(whole) > 1 or not 8 < whole[0].left < 30 or whole[0].right < width / 8:
            break
        title.append(row(*lines.pop(0), blank=4))
    legend: list[list[Box]] = []
    if len(lines) > 1 and lines[-1][1] - lines[-1][0] < LINE:
        last = pixels[slice(*lines[-1])]
        if np.ptp(last, axis=2).max() > 60:  # in colour
            legend.append(row(*lines.pop(), blank=25))
    top = lines[0][0]
    body = ink[top : lines[-1][1]]
    panels = columns(body)
    first, names, shown = panels[0][0], axis(body, *panels[0]) or 0, []
    for left, right in panels:
        lacks = names > NAMES and axis(body, left, right) in range(NAMES // 2)
        low = top + stretches(body[:, left:right].any(1), height)[0][1]
        before = [Box(first, top, first + names, low)] if lacks else []
        start, *cuts = folds(body[:, left:right]) or [0]
        places = [left, *(left + cut for cut in cuts), right]
        for i, (a, b) in enumerate(pairwise(places)):
            scale = [Box(left, top, left + start, low)] if i else before
            shown.append([*scale, Box(a, top, b, low)])
    return [*title, *shown, *legend]


def markup(picture: Image.Image, source: str, alt: str) -> str:
    """The parts of a picture as HTML."""
    width, height = picture.size
    rows = []
    for boxes in parts(picture):
        flows = max(box.bottom - box.top for box in boxes) < LINE  # as words do
        cut = "".join(
            f'<svg viewBox="{a - 1} {b - 1} {c - a + 2} {d - b + 2}" style="--width: {c - a + 2}">'
            f'<image href="{source}" width="{width}" height="{height}"/></svg>'
            for a, b, c, d in boxes
        )
        wide = sum(box.right - box.left for box in boxes)
        kind = "panel-words" if flows else "panel"
        rows.append(f'<span class="{kind}" style="--width: {wide}">{cut}</span>')
    return f'<span class="panels" role="img" aria-label="{alt}">{"".join(rows)}</span>'


def sided(caption: str) -> str:
    """A caption that says where a panel is on a wide page, and where on a narrow one."""

    def both(found: re.Match[str]) -> str:
        side = found[0]
        return f'<span class="beside">{side}</span><span class="below">{SIDES[side]}</span>'

    return SIDE.sub(both, caption)


def stack(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add to each picture of a page its parts, and to its caption where they stand."""
    if doctree is None or app.builder.format != "html":
        return
    files = {file: Path(app.srcdir, kept) for kept, file in app.builder.images.items()}

    def beside(found: re.Match[str]) -> str:
        alt, source, file = found.groups()
        with Image.open(files[file]) as picture:
            return found[0] + markup(picture, escape(source), alt)

    body = IMAGE.sub(beside, context["body"])
    context["body"] = CAPTION.sub(lambda found: sided(found[0]), body)
