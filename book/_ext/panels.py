"""Figures on a narrow screen: the panels of a picture one below the other, in a size one can read.

A figure is one picture, drawn for a page of 7 inches. Beside each image of a page stand its parts,
which the style sheet shows in its place where the page is narrow: the words of the title, each
panel, the entries of a legend. All are cut from the same file; blank lines tell where.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from itertools import pairwise, product
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
LOW = 60  # pixels: no panel is lower
WIDE = 440  # pixels: a wider panel does not fit
NAMES, LONG = 40, 220  # pixels: names of rows are wider than numbers, and no longer
TICKS = 8  # pixels: an axis without numbers has no more before it
LEAN = 1.19  # of names turned by 40 degrees: so far to the left for each pixel down
IMAGE = re.compile(r'<img alt="([^"]*)"[^>]* src="([./]*_images/([^"]+\.png))"[^>]*/>')
CAPTION = re.compile(r"<figcaption>.*?</figcaption>", re.DOTALL)
SIDES = {"Left": "Above", "Right": "Below", "right": "below"}
SIDES |= {"(left)": "(above)", "(right)": "(below)"}
SIDE = re.compile(r"\b(?:Left|Right)\b(?=[:,])|(?<=; )right(?=,)|\((?:left|right)\)")
Ink = Bool[np.ndarray, "height width"]


class Box(NamedTuple):
    """A part of a picture, in pixels. Below ``bend`` its sides lean, as turned names do: the left
    one ``over`` so many pixels."""

    left: int
    top: int
    right: int
    bottom: int
    bend: int = 0
    over: int = 0


def stretches(inked: Bool[np.ndarray, " place"], blank: int) -> list[tuple[int, int]]:
    """Where there is ink: first place and the place after the last, ``blank`` and more between."""
    places = np.flatnonzero(inked)
    ends = np.flatnonzero(np.diff(places) > blank)
    first, last = places[[0, *ends + 1]], places[[*ends, -1]] + 1
    return [(int(a), int(b)) for a, b in zip(first, last, strict=True)]


def lines(ink: Ink, least: int = PANEL) -> Bool[np.ndarray, " height"]:
    """Where level lines are, as of axes and maps: longer than those of letters."""
    if ink.shape[1] < least:
        return np.zeros(len(ink), dtype=bool)
    return np.any(sliding_window_view(ink, least, 1).all(2), axis=1)


def foot(ink: Ink) -> int:
    """Where the lowest level line is: below it are names and numbers."""
    return int(np.flatnonzero([True, *lines(ink)[1:]])[-1])


def axis(ink: Ink, left: int, right: int) -> int | None:
    """How far from ``left`` the axis of a panel stands: a line down much of the picture."""
    down = np.flatnonzero(lines(ink[:, left:right].T, int(0.4 * len(ink))))
    return int(down[0]) if len(down) else None


def apart(
    inked: Bool[np.ndarray, " place"], lined: Callable[[int, int], bool], least: int, midway: int
) -> list[tuple[int, int]]:
    """First and last place of each panel, with the names and scales that stand nearest to it.

    A panel is known by its axis, which ``lined`` finds, where any has one; what stands midway, by
    so many pixels, goes with the next.
    """
    found = stretches(inked, 4)
    some = any(lined(*one) for one in found)

    def alone(one: tuple[int, int]) -> bool:
        return one[1] - one[0] >= least and (lined(*one) or not some)

    while len(found) > 1 and not all(map(alone, found)):
        i = next(i for i, one in enumerate(found) if not alone(one))
        gaps = [right[0] - left[1] for left, right in pairwise(found)] + [len(inked)]
        bar = lined(*found[i])  # of colours: it stands after its map
        nearer = gaps[i] <= gaps[i - 1] + midway
        j = i if i == 0 or (nearer and not bar) else i - 1
        found[j : j + 2] = [(found[j][0], found[j + 1][1])]
    widths = [right - left for left, right in found]
    return found if max(widths) < 3 * min(widths) else [(found[0][0], found[-1][1])]


def columns(ink: Ink) -> list[tuple[int, int]]:
    """Left and right of each panel of a row."""
    return apart(np.any(ink, axis=0), lambda *one: axis(ink, *one) is not None, PANEL, 2)


def rows(ink: Ink) -> list[tuple[int, int]]:
    """Top and bottom of each row of panels, which is known by its level lines."""
    level = lines(ink)
    if not level.any():
        return [(0, len(ink))]
    return apart(np.any(ink, axis=1), lambda *one: bool(level[slice(*one)].any()), LOW, -1)


def folds(ink: Ink, wide: int = 9) -> list[int]:
    """Where the scale of a panel of bars ends and where the panel is cut, if it is too wide, so
    that each part fits with the scale before it, in blanks so many pixels ``wide`` but for level
    lines, between two marks of the axis if there are such."""
    width = ink.shape[1]
    if width <= WIDE:
        return []
    lined = [one for one in stretches(np.any(ink, axis=0), 4) if axis(ink, *one) is not None]
    solid = sliding_window_view(sliding_window_view(ink, 12, 0).all(2), 12, 1).all(2).any()
    clear = wide // 2 + np.flatnonzero(sliding_window_view(ink, wide, 1).any(2).sum(0) <= 7)
    if not (solid and len(clear) and lined) or np.ptp(lined[-1]) < width / 2:
        return []  # a last line that stands alone is a scale of colours
    ticks = np.flatnonzero(ink[min(foot(ink) + 2, len(ink) - 1)])
    between = (ticks[1:] + ticks[:-1]) / 2
    near = [int(x) for x in clear if len(between) and min(abs(between - x)) <= 5]
    start = lined[-1][0] + (axis(ink, *lined[-1]) or 0) + 2
    for places, count in product(filter(None, [near, clear.tolist()]), range(2, 5)):
        ideal = np.linspace(start, width, count + 1)[1:-1]
        cuts = [start, *(int(min(places, key=lambda x: abs(x - at))) for at in ideal)]
        if all(a < b <= a + WIDE - start for a, b in pairwise([*cuts, width])):
            return cuts
    return []


def texts(ink: Ink, panel: Box) -> list[Box]:
    """What blank lines part, from the top."""
    left, top, right, low, *_ = panel
    found = stretches(np.any(ink[top:low, left:right], axis=1), 1)
    return [Box(left, top + a, right, top + b) for a, b in found]


def row(ink: Ink, line: Box, blank: int) -> list[Box]:
    """Words of a line, entries of a legend: what so many blank pixels part."""
    inside = ink[line.top : line.bottom, line.left : line.right]
    found = stretches(np.any(inside, axis=0), blank)
    return [line._replace(left=line.left + a, right=line.left + b) for a, b in found]


def folded(ink: Ink, panel: Box) -> list[list[Box]]:
    """A panel; one too wide is folded with its scale before each part, or has its names apart, and
    its title and the name of its axis are in words."""
    if panel.right - panel.left <= WIDE:
        return [[panel]]
    found = texts(ink, panel)

    def said(line: Box) -> list[list[Box]]:
        alone = line.bottom - line.top < LINE and len(row(ink, line, 12)) == 1
        return [row(ink, line, 4)] if alone else []

    second = len(found) > 1 and found[-1].top - found[-2].bottom < 6  # line of the names above it
    title, label = said(found[0]), [] if second else said(found[-1])
    left, right = panel.left, panel.right
    top, low = found[len(title)].top, found[-1 - len(label)].bottom
    inside = ink[top:low, left:right]
    level = foot(inside)
    turned = [np.roll(line, round(LEAN * max(0, y - level))) for y, line in enumerate(inside)]
    upright = np.stack(turned)
    blanks = [int((~each[level + 1 :].any(0)).sum()) for each in (inside, upright)]
    leans = blanks[1] > 1.2 * blanks[0]  # the names do, so that they part where they are upright
    names = axis(inside, 0, right - left) or 0
    cuts = folds(upright, 3) if leans else folds(inside)
    if NAMES < names < LONG and not inside[: level + LINE // 2, names - TICKS : names - 6].any():
        cuts = cuts or [names - 1]
    if not cuts:
        return [[panel]]
    start, *inner = cuts
    bend, over = (top + level, round(LEAN * (low - top - level))) if leans else (0, 0)
    scale = Box(left, top, left + start, bend + LINE // 2 if leans else low)
    ends = pairwise([*cuts, right - left])
    shown = [[scale, Box(left + a, top, left + b, low, bend, over)] for a, b in ends]
    if inner:
        shown[0] = [Box(left, top, left + inner[0], low, bend)]
    return [*title, *shown, *label]


def parts(picture: Image.Image) -> list[list[Box]]:
    """The parts of a picture row by row: words of the title, panels, words or a legend below.

    A panel whose rows have no names, for they stand at the first, has these before it; so has the
    rest of one that is folded its scale.
    """
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    ink = pixels.min(2) < 245
    height, width = ink.shape
    whole = Box(0, 0, width, height)
    if not ink.any():
        return [[whole]]
    body = texts(ink, whole)
    title: list[list[Box]] = []
    while len(body) > 1 and body[0].bottom - body[0].top < LINE:
        said = row(ink, body[0], 12)
        if len(said) > 1 or not 8 < said[0].left < 80 or said[0].right < width / 8:
            break
        title.append(row(ink, body.pop(0), 4))
    below: list[list[Box]] = []
    while len(body) > 1 and body[-1].bottom - body[-1].top < LINE:
        if np.ptp(pixels[body[-1].top : body[-1].bottom], axis=2).max() <= 60:  # in grey
            break
        line = body.pop()
        entries = row(ink, line, 25)
        words = len(entries) == 1 and entries[0].left < 40
        below.insert(0, row(ink, line, 4) if words else entries)
    start, shown = body[0].top, []
    for high, low in rows(ink[start : body[-1].bottom]):
        top, inside = start + high, ink[start + high : start + low]
        panels = columns(inside)
        first, names = panels[0][0], axis(inside, *panels[0]) or 0
        for left, right in panels:
            lacks = NAMES < names < LONG and axis(inside, left, right) in range(TICKS)
            end = top + stretches(inside[:, left:right].any(1), height)[0][1]
            before = [Box(first, top, first + names, end)] if lacks else []
            part, *rest = folded(ink, Box(left, top, right, end))
            shown += [[*before, *part], *rest]
    return [*title, *shown, *below]


def markup(picture: Image.Image, source: str, alt: str) -> str:
    """The parts of a picture as HTML."""
    width, height = picture.size
    found = []
    for boxes in parts(picture):
        flows = max(box.bottom - box.top for box in boxes) < LINE  # as words do
        room = boxes[0].right - boxes[0].left  # for names, below the scale
        wide = sum(c - a + max(0, over - room) for a, _, c, _, _, over in boxes)
        cut = ""
        for a, b, c, d, bend, over in boxes:
            style, clip = f"--width: {c - a + over + 2}", ""
            if bend:
                style += f"; margin-left: {-100 * min(over, room) / wide:.2f}%"
                end = round(c - LEAN * (d - bend))
                sides = [(a, b), (c, b), (c, bend), (end, d), (a - over, d), (a, bend)]
                corners = ", ".join(f"{x}px {y}px" for x, y in sides)
                clip = f' style="clip-path: polygon({corners})"'
            seen = f"{a - over - 1} {b - 1} {c - a + over + 2} {d - b + 2}"
            cut += (
                f'<svg viewBox="{seen}" style="{style}">'
                f'<image href="{source}" width="{width}" height="{height}"{clip}/></svg>'
            )
        kind = "panel-words" if flows else "panel"
        found.append(f'<span class="{kind}" style="--width: {wide}">{cut}</span>')
    return f'<span class="panels" role="img" aria-label="{alt}">{"".join(found)}</span>'


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
