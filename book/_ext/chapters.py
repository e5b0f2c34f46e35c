"""Numbers and drawers of the chapters.

Chapters have their numbers in titles and contents; figures and exercises are counted page by page
(``Figure 1.3``, in an appendix ``Figure 1A.3``, on the page of faults ``Figure 6F.1``). A cell of a
notebook gives its figure a caption and a ``name`` in its metadata, as ``mystnb``: ``figure``. A
section with the label ``(NN-drawer)=`` is closed on the page, and opened by a click: it holds what
a first reading does not need. Browsers find text in it and print it; a link to something inside
opens it (``access.js``).

A bet is an admonition with the title *A bet*, its answer one with the title *Answer*, which begins
with the letter of the right choice: choices, "(a) one; (b) two", become buttons (``access.js``).
A cell with the tag ``hide-cell`` between both is shown inside the answer: text, output, folded
code. The paragraph after an answer says the finding. ``custom.css`` hides it while the answer is
closed, and so it hides a table right below, with the sentence that says what the table shows. What
stands under a heading *What we know* waits for all bets above it (``access.js``), so does a cell
with the tag ``waits-for-all``; one with the tag ``waits`` waits for the last bet.

An exercise is one closed box: its task, the cell to be filled in, the check, and its solution,
wherever in the notebook that stands. The cells at the head of a page that only run it are one bar.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx_exercise.nodes import exercise_node, exercise_subtitle, solution_node

from iclutils.plots.figures import real_minus

CHAPTER = re.compile(r"notebooks/(\d\d)_(appendix|faults)?")
OPENING = (
    '<details class="drawer printed"><summary>Every number with its spread, the checks, and '
    "what was left out above</summary>"
)


class Numbered(SphinxTransform):
    """Put the number before the title of a chapter, and give every figure a name and a text."""

    default_priority = 700  # names and targets are made

    def apply(self) -> None:
        title = next(self.document.findall(nodes.title), None)
        chapter = CHAPTER.match(self.env.docname)
        if chapter and title is not None and not chapter[2]:
            title.insert(0, nodes.Text(f"{chapter[1]} "))
        for figure in self.document.findall(nodes.figure):
            if not figure["ids"]:
                self.document.set_id(figure)
            for caption in figure.findall(nodes.caption):
                for image in figure.findall(nodes.image):
                    image["alt"] = image.get("alt") or caption.astext()


def count_by_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Count figures and exercises anew on each page, after the number of its chapter."""
    for page, kinds in env.toc_fignumbers.items():
        chapter = CHAPTER.match(page)
        before = (f"{int(chapter[1])}{(chapter[2] or '')[:1].upper()}",) if chapter else ()
        for numbers in kinds.values():
            numbers.update({name: (*before, i) for i, name in enumerate(numbers, 1)})
    return []


def stay_in_part(app: Sphinx, page: str, template: str, context: Any, doctree: Any) -> None:
    """Leave out the links from the last page of a part to the first of the next, and back."""
    if "external_site_map" not in app.config:
        return  # a single page, in tests
    firsts = {part.files()[0] for part in app.config.external_site_map.root.subtrees[1:]}
    if page in firsts:
        context["prev"] = None
    if app.builder.relations.get(page, [None])[-1] in firsts:
        context["next"] = None


class Bets(SphinxTransform):
    """Fold with the answer to a bet what the hidden cells between both show, then their code."""

    default_priority = 705

    def apply(self) -> None:
        for bet in list(self.document.findall(nodes.admonition)):
            if bet[0].astext() != "A bet" or bet.parent is None:
                continue
            bet["classes"] = ["bet"]
            cells: list[nodes.Element] = []
            answered = False
            for node in bet.parent[bet.parent.index(bet) + 1 :]:
                if isinstance(node, nodes.admonition) and node[0].astext() == "Answer":
                    node["classes"] = ["dropdown", "answer"]
                    _fold(node, cells)
                    answered = True
                elif node.get("hide_mode") == "all":
                    cells.append(node)
                elif (cells or answered) and not node.get("hide_mode"):
                    _hide(node)
                    break


def _fold(answer: nodes.admonition, cells: list[nodes.Element]) -> None:
    for cell in cells:
        cell.parent.remove(cell)
        shown = nodes.container("", *cell[1:], classes=cell["classes"])
        cell[:] = cell[:1]
        cell.attributes |= {"hide_mode": "input", "prompt_show": "Show the code"}
        cell["prompt_hide"] = "Hide the code"
        answer += [shown, cell]


def _hide(first: nodes.Element) -> None:
    """Put what a closed answer hides into a box of its own."""
    parent, finding = first.parent, list[nodes.Node]()
    for node in parent[parent.index(first) :]:
        below_table = finding and isinstance(finding[-1], nodes.table)
        kind = nodes.paragraph if below_table or not finding else nodes.table
        if not isinstance(node, kind):
            break
        finding.append(node)
    if finding:
        _gather(["after-answer"], finding)


def _gather(classes: list[str], inside: list[nodes.Element]) -> nodes.container:
    """Move nodes into a box of their own, in the place of the first."""
    box, parent = nodes.container("", classes=classes), inside[0].parent
    parent.insert(parent.index(inside[0]), box)
    for node in inside:
        node.parent.remove(node)
    box += inside
    return box


class Exercises(SphinxTransform):
    """Put each exercise with its cells and its solution into one closed box, and leave out a
    section *Solutions* that has none left."""

    default_priority = 704

    def apply(self) -> None:
        solutions = {node["target_label"]: node for node in self.document.findall(solution_node)}
        for exercise in list(self.document.findall(exercise_node)):
            following = exercise.parent[exercise.parent.index(exercise) + 1 :]
            own = takewhile(lambda node: "tag_exercise" in node.get("classes", ()), following)
            name, effort = (exercise.next_node(x) for x in (exercise_subtitle, nodes.emphasis))
            effort.parent.remove(effort)  # "Easy, 10 minutes. By hand."
            says = nodes.paragraph("", "Exercise: ", *name.deepcopy().children, nodes.Text(" "))
            says += nodes.inline("", effort.astext(), classes=["effort"])
            solved = [solutions[x] for x in [exercise["label"]] if x in solutions]
            _close("exercise-box printed", says, [exercise, *own, *solved])
        for section in list(self.document.findall(nodes.section)):
            if section[0].astext() == "Solutions" and not section.next_node(solution_node):
                section.parent.remove(section)


class Head(SphinxTransform):
    """Put the closed cells at the head of a page, which only run it, into one bar."""

    default_priority = 704

    def apply(self) -> None:
        hidden = [c for c in self.document.findall(nodes.container) if c.get("hide_mode")]
        for cell in (c for c in hidden if "tag_parameters" in c["classes"]):
            siblings = cell.parent[cell.parent.index(cell) :]
            own = list(takewhile(lambda node: node.get("hide_mode"), siblings))
            says = nodes.paragraph("", cell["prompt_show"].partition(":")[0])
            for node in own:
                del node["hide_mode"]
            _close("run", says, own)


def _close(classes: str, says: nodes.paragraph, inside: list[nodes.Element]) -> None:
    """Put nodes into a closed part of the page, in the place of the first, below what it says."""
    box = _gather([classes.split()[0], "closed"], inside)
    tags = f'<details class="{classes}"><summary>', "</summary>", "</details>"
    first, below, last = (nodes.raw("", tag, format="html") for tag in tags)
    box[:0] = [first, says, below]
    box += last


class Minus(SphinxTransform):
    """Write what cells print with a real minus sign before a number."""

    default_priority = 704

    def apply(self) -> None:
        for block in self.document.findall(nodes.literal_block):
            if "stream" in block["classes"]:
                block.rawsource = real_minus(block.astext())
                block[:] = [nodes.Text(block.rawsource)]


class Takeaways(SphinxTransform):
    """Put what a section *What we know* says into a box of its own, which waits for the bets; also
    cells with the tag ``waits`` (for the last bet) or ``waits-for-all``, and the paragraphs below
    each."""

    default_priority = 706

    def apply(self) -> None:
        for section in self.document.findall(nodes.section):
            if not section[0].astext().startswith("What we know"):
                continue
            told = [n for n in section[1:] if not isinstance(n, nodes.section | nodes.target)]
            rest = [n for n in section[1:] if n not in told]
            section[1:] = [nodes.container("", *told, classes=["after-bets"]), *rest]
        for cell in [cell for cell in self.document.findall(nodes.container) if _tags(cell)]:
            if "after-bets" in cell.parent["classes"]:
                continue  # with the cell above it
            below = cell.parent[cell.parent.index(cell) + 1 :]
            own = takewhile(lambda node: isinstance(node, nodes.paragraph) or _tags(node), below)
            last = ["of-last"] if "tag_waits" in cell["classes"] else []
            _gather(["after-bets", *last], [cell, *own])


def _tags(node: nodes.Element) -> set[str]:
    """Return the tags by which a cell waits for bets."""
    return {"tag_waits", "tag_waits-for-all"} & {*node.get("classes", ())}


class Drawers(SphinxTransform):
    """Put ``<details>`` around all that such a section holds below its heading."""

    default_priority = 710  # labels have become names of their sections

    def apply(self) -> None:
        for section in self.document.findall(nodes.section):
            if any(name.endswith("-drawer") for name in section["names"]):
                section.insert(1, nodes.raw("", OPENING, format="html"))
                for image in section.findall(nodes.image):
                    image["loading"] = "lazy"  # when the drawer is opened, or printed
                section += nodes.raw("", "</details>", format="html")


TRANSFORMS = Numbered, Head, Exercises, Minus, Bets, Takeaways, Drawers
