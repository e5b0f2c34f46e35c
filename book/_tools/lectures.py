"""Lectures from the built book: chapters for the person in front of the class, and slides.

What both add to a chapter stands in the tables of ``book/lectures.md``. All else is in the built
pages, with every number in its place, and in the record of the chapter's last run.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from iclutils.errors import IclError
from iclutils.files import read_json, write_text

from .._ext.live import SCRIPTS
from . import run

# Of bs4, whose types say that all it finds may be missing.
Tag: TypeAlias = Any
BeautifulSoup: TypeAlias = Any
LECTURE = 90  # minutes
WORDS = 100  # words that are told in a minute
LINE, FORMULA, FIGURE, QUESTION = 1 / 6, 2, 2, 3  # minutes for each
SHOW = {"width": 1280, "height": 720, "margin": 0.03, "slideNumber": "c/t", "transition": "none"}
SLIDES: dict[str, Any] = {  # settings of Sphinx
    "extensions": ["myst_parser", "sphinx_revealjs"],
    "source_suffix": {".md": "markdown"},
    "html_copy_source": False,
    "revealjs_style_theme": "white",
    "revealjs_css_files": ["slides.css"],
    "revealjs_script_conf": SHOW,
    "revealjs_script_plugins": [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}],
}
KINDS = {1: "the mechanism, and the method by hand", 2: "at scale, controls, what to believe"}
LIVE = """
<link rel="stylesheet" href="_static/live/live.css">{scripts}
<script>for (const figure of document.querySelectorAll(".live-figure")) // their keys turn no slide
  figure.addEventListener("keydown", (event) => event.stopPropagation());</script>"""
FOLDED = ("hide-", "remove-", "exercise", "solution")  # tags of cells that are not shown in class


@dataclass
class Part:
    """A row of a chapter's table: a section or an exercise, and what the book knows of it."""

    lecture: int
    anchor: str
    ask: Tag
    answer: Tag
    place: Tag  # in the chapter's page
    minutes: float = 0.0
    seconds: float = 0.0  # of its cells
    wrong: list[str] = field(default_factory=list)  # misconceptions, each with what to ask

    @property
    def is_exercise(self) -> bool:
        return self.place.name != "section"

    @property
    def time(self) -> str:
        ran = f", of which {self.seconds:.0f} s are for cells to run" if self.seconds >= 1 else ""
        return f"{self.minutes:.0f} minutes{ran}"

    @property
    def title(self) -> str:
        if self.is_exercise:
            title = self.place.find(class_="admonition-title").get_text()
            return re.sub(r"^Exercise\s*\((.*)\)$", r"\1", title.strip())
        return _title(self.place)


@dataclass
class Chapter:
    """A chapter's built page, its parts, and its notebook."""

    name: str
    page: BeautifulSoup
    parts: list[Part]
    notebook: dict[str, Any]

    @property
    def title(self) -> str:
        return self.heading.get_text().rstrip("#")

    @property
    def heading(self) -> Tag:
        return self.page.select_one("article h1")

    def lectures(self) -> Iterator[tuple[int, list[Part], float]]:
        """Number, parts and minutes of each lecture."""
        for number in sorted({part.lecture for part in self.parts}):
            parts = [part for part in self.parts if part.lecture == number]
            yield number, parts, sum(part.minutes for part in parts)


def read(html: Path, wanted: list[str], build: Path) -> list[Chapter]:
    """The chapters of these names, or all that have a table, from the built book in ``html``."""
    plan = _page(html / "book/lectures.html")
    links = _misconceptions(_page(html / "book/instructor.html"))
    found = []
    for table in plan.find_all("table"):
        rows = [row.find_all("td") for row in table.find_all("tr")[1:]]
        name = Path(rows[0][1].a["href"].partition("#")[0]).stem
        if wanted and name not in wanted:
            continue
        page, notebook = _page(html / f"notebooks/{name}.html"), run.NOTEBOOKS / f"{name}.ipynb"
        parts = []
        for lecture, where, ask, answer in rows:
            anchor = where.a["href"].partition("#")[2]
            place = page.find(id=anchor)
            place = place if "exercise" in place.get("class", ()) else _section(place)
            parts.append(Part(int(lecture.get_text()), anchor, ask, answer, place))
        chapter = Chapter(name, page, parts, read_json(notebook))
        _time(chapter, build)
        _wrong(chapter, links)
        found.append(chapter)
    return found


def _page(path: Path) -> BeautifulSoup:
    try:
        from bs4 import BeautifulSoup
    except ImportError:
        raise IclError('Lectures need beautifulsoup4: pip install -e ".[teach]"') from None
    if not path.is_file():
        raise IclError(f"There is no page {path}. Run: make book")
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def _section(place: Tag) -> Tag:
    return place if place.name == "section" else place.find_parent("section")


def _title(section: Tag) -> str:
    return section.find(re.compile("^h[1-6]$")).get_text().rstrip("#")


def _text(tag: Tag) -> str:
    """What an element holds, without links, which lead out of the slides."""
    for link in tag.find_all("a"):
        link.unwrap()
    return tag.decode_contents().strip()


def _paragraphs(section: Tag) -> str:
    """The text of a section, in small letters, without code, figures and boxes."""
    told = section.find_all(["p", "ul", "ol"], recursive=False)
    body = "".join(f"<{tag.name}>{_text(tag)}</{tag.name}>" for tag in told)
    return f'<div class="small">{body}</div>'


def _time(chapter: Chapter, build: Path) -> None:
    """Count each section's words, code, figures and the seconds of its cells; what stands between
    two sections of the table belongs to the first of them."""
    from docutils.nodes import make_id

    spent = (run.Run(chapter.name, {}, build).last() or {}).get("cells", {})
    sections = {part.anchor: part for part in chapter.parts if not part.is_exercise}
    now = next(iter(sections.values()))
    for cell in chapter.notebook["cells"]:
        text, about = "".join(cell["source"]), cell["metadata"]
        folded = any(tag.startswith(FOLDED) for tag in about.get("tags", ()))
        if cell["cell_type"] == "code":
            now.seconds += spent.get(cell["id"], 0.0)
            now.minutes += FIGURE * ("figure" in about.get("mystnb", {}))
            now.minutes += LINE * (0 if folded else sum(map(bool, text.splitlines())))
        elif not folded:
            told, *labelled = re.split(r"^\((\S+)\)=$", text, flags=re.MULTILINE)
            for label, words in zip(["", *labelled[::2]], [told, *labelled[1::2]], strict=True):
                now = sections.get(make_id(label), now)
                now.minutes += len(re.findall(r"\w[\w'’.-]*", words)) / WORDS
                now.minutes += FORMULA * (words.count("$$") // 2)
    for part in chapter.parts:
        if part.is_exercise:
            named = re.search(r"(\d+) minutes", part.place.get_text())
            part.minutes = float(named[1]) if named else 60.0
        else:
            part.minutes += QUESTION + part.seconds / 60


def _misconceptions(guide: BeautifulSoup) -> list[tuple[list[str], str, str]]:
    """Where each misconception of the instructor guide is settled, it, and what to ask."""
    rows = _section(guide.find(id="misconceptions")).table.find_all("tr")[1:]
    cells = [row.find_all("td") for row in rows]
    return [
        ([Path(link["href"]).name for link in where.find_all("a")], _text(says), _text(ask))
        for says, where, ask in cells
    ]


def _wrong(chapter: Chapter, known: list[tuple[list[str], str, str]]) -> None:
    """Put each misconception to the first part of the chapter where it is settled."""
    for links, says, ask in known:
        anchors = [link.partition("#")[2] for link in links if link.startswith(chapter.name)]
        places = [place for anchor in anchors if (place := chapter.page.find(id=anchor))]
        around = [outer for place in places for outer in (place, *place.parents)]
        for part in chapter.parts:
            if any(part.place is outer for outer in around):
                part.wrong.append(f"{says} <em>{ask}</em>")
                break


def tutor(build: Path, wanted: list[str]) -> list[Path]:
    """Write chapters for the person in front of the class, from the built book."""
    written = []
    for chapter in read(build / "html", wanted, build):
        page = chapter.page
        _unfold(chapter)
        for part in chapter.parts:
            note = _element(f'<div class="admonition tip">{_note(part)}</div>')
            if part.is_exercise:
                part.place.insert_before(note)
            else:
                part.place.find(re.compile("^h[1-6]$")).insert_after(note)
        chapter.heading.insert_after(_element(_timetable(chapter)))
        page.title.insert(0, "For the tutor: ")
        page.html["data-content_root"] = "../html/"
        for tag in page.find_all(True):
            for key in ("href", "src", "action"):
                if (link := tag.get(key)) and not re.match(r"#|[a-z]+:", link):
                    tag[key] = posixpath.normpath(f"../html/notebooks/{link}")
        written.append(build / "tutor" / f"{chapter.name}.html")
        write_text(written[-1], str(page))
    return written


def _element(text: str) -> Tag:
    from bs4 import BeautifulSoup

    return BeautifulSoup(text, "html.parser").find()


def _unfold(chapter: Chapter) -> None:
    """Show outputs that are folded, and put each solution, open, below its exercise."""
    page = chapter.page
    for folded in page.find_all("details"):
        if folded.find(class_="cell_output"):
            folded["open"] = ""
    whole = "\n".join("".join(cell["source"]) for cell in chapter.notebook["cells"])
    labels = re.findall(r"^`+\{solution\} *(\S+)", whole, re.MULTILINE)
    for label, box in zip(labels, page.find_all(class_="solution"), strict=True):
        last = page.find(id=label)
        while (after := last.find_next_sibling()) and "cell" in after.get("class", ()):
            last = after
        box["class"].remove("dropdown")
        last.insert_after(box.extract())
    for rest in page.select('section#solutions, a[href="#solutions"]'):
        rest.decompose()


def _note(part: Part) -> str:
    """What the tutor reads at a section or an exercise."""
    lines = [f'<p class="admonition-title">Lecture {part.lecture}, {part.time}</p>']
    if not part.is_exercise:
        lines.append(f"<p><strong>Ask:</strong> {_text(part.ask)}</p>")
        lines.append(f"<p><strong>Answer:</strong> {_text(part.answer)}</p>")
    lines += [f"<p><strong>Some say:</strong> {wrong}</p>" for wrong in part.wrong]
    return "".join(lines)


def _timetable(chapter: Chapter) -> str:
    rows = []
    for number, parts, minutes in chapter.lectures():
        for part in parts:
            where = f'<a href="#{part.place["id"]}">{part.title}</a>'
            rows.append(f"<tr><td>{number}</td><td>{where}</td><td>{part.minutes:.0f}</td></tr>")
        left = f"{LECTURE - minutes:.0f} of {LECTURE} left for questions"
        rows.append(f"<tr><th>{number}</th><th>together; {left}</th><th>{minutes:.0f}</th></tr>")
    head = "<tr><th>Lecture</th><th>Section or exercise</th><th>Minutes</th></tr>"
    return f'<table class="table"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'


def slides(build: Path, wanted: list[str]) -> list[Path]:
    """Write two lectures a chapter as slides for a browser, with the figures of the built book."""
    try:
        import sphinx_revealjs  # noqa: F401
        from sphinx.application import Sphinx
        from sphinx.util.docutils import docutils_namespace
    except ImportError:
        raise IclError('Slides need sphinx-revealjs: pip install -e ".[teach]"') from None
    html, folder = build / "html", build / "slides"
    decks: dict[str, str] = {}
    for chapter in read(html, wanted, build):
        for number, parts, _ in chapter.lectures():
            decks[f"{chapter.name}_{number}"] = _deck(chapter, number, parts)
    with TemporaryDirectory() as place:
        source = Path(place, "source")
        for name, text in decks.items():
            write_text(source / f"{name}.md", text)
        Path(place, "static").mkdir()
        shutil.copy(html / "_static/slides.css", Path(place, "static"))
        own = {"root_doc": next(iter(decks)), "revealjs_static_path": [str(Path(place, "static"))]}
        folders = (str(source), None, str(folder), str(Path(place, "doctrees")))
        with docutils_namespace():  # leaves nothing behind for who builds next
            deck = Sphinx(*folders, "revealjs", SLIDES | own, status=None, warningiserror=True)
            deck.build()
    shown = "\n".join(decks.values())
    if 'class="live-figure' in shown:
        shutil.copytree(html / "_static/live", folder / "_static/live", dirs_exist_ok=True)
    for image in sorted(set(re.findall(r'"_images/([^"]+)"', shown))):
        (folder / "_images").mkdir(exist_ok=True)
        shutil.copy(html / "_images" / image, folder / "_images" / image)
    return [folder / f"{name}.html" for name in decks]


def _deck(chapter: Chapter, number: int, parts: list[Part]) -> str:
    """The Markdown of a lecture's slides."""
    page = chapter.page
    last = number == max(part.lecture for part in chapter.parts)
    told = f"<p>{_text(chapter.heading.find_next('p'))}</p>"
    told += f'<p class="said">Lecture {number}: {KINDS[number]}</p>'
    shown = ["---\norphan: true\n---", f"# {chapter.title}\n\n{_raw(told)}"]
    if number == 1:
        if opening := parts[0].place.find_previous("figure"):
            shown.append(_slide(chapter.title, _figure(opening, True)))
    else:
        before = [part for part in chapter.parts if part.lecture < number and not part.is_exercise]
        asked = (f"<li><em>{_text(each.ask)}</em> {_text(each.answer)}</li>" for each in before)
        shown.append(_slide("So far", f'<ul class="small">{"".join(asked)}</ul>'))
    for part in parts:
        shown += _slides(part)
    for anchor in ("takeaways", "what-to-believe-and-what-is-open") if last else ():
        section = page.find("section", id=anchor)
        shown.append(_slide(_title(section), _paragraphs(section)))
    if figures := re.findall(r'<div class="live-figure[^>]* id="live-(\w+)"', "".join(shown)):
        load = "".join(f'<script src="_static/live/{n}.js"></script>' for n in (*SCRIPTS, *figures))
        shown.append(_raw(LIVE.format(scripts=load)))
    return "\n\n".join(shown) + "\n"


def _slides(part: Part) -> list[str]:
    """A section: its question, a figure, and the answer at a click; then its other figures, and
    those whose model runs in the page."""
    if part.is_exercise:
        return [_slide(f"Exercise: {part.title}", _paragraphs(part.place.find("section")))]
    ask = f'<p class="ask">{_text(part.ask)}</p>'
    answer = f'<p class="answer fragment">{_text(part.answer)}</p>'
    figures = [it for it in part.place.find_all("figure") if it.find(class_="caption-text")]
    if figures:
        shown = _figure(figures[0], False)
    else:
        shown = "".join(map(str, part.place.find_all("div", class_="math")[:2]))
    wrong = [re.sub("<[^>]*>", "", f"Some say: {each}") for each in part.wrong]
    notes = "\n\n".join([part.time, *wrong])
    more = [_slide(part.title, _figure(figure, True)) for figure in figures[1:]]
    for figure in part.place.select("div.live-figure"):
        _text(figure)  # links lead out of the slides
        more.append(_slide(f"Try it: {part.title}", str(figure)))
    return [_slide(part.title, ask + shown + answer, notes), *more]


def _figure(figure: Tag, told: bool) -> str:
    """A figure, and the first sentence of its caption."""
    image = figure.img
    image["src"] = image["src"].removeprefix("../")
    sentence = re.split(r"(?<=\w[.?]) ", figure.find(class_="caption-text").get_text())[0]
    return str(image) + (f'<p class="said">{sentence}</p>' if told else "")


def _slide(title: str, body: str, notes: str = "") -> str:
    slide = f"## {title}\n\n{_raw(body)}"
    return f"{slide}\n\n```{{revealjs-notes}}\n{notes}\n```" if notes else slide


def _raw(html: str) -> str:
    return f"```{{raw}} html\n{html}\n```"
