"""Directives and roles of the book, on a small book with a ledger of its own."""

import base64
import io
import json
import re
from html import unescape
from typing import Any

import nbformat
import pybtex.database
import pytest
from ledger import LEDGER, measured
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from book import _ext  # noqa: F401, it reads the zoo, which a test moves
from iclutils import claims, zoo

BIB = "@misc{xiang2024, author={Xiang, Shuyang}, title={A Note}, year={2024}}"
PIXEL = (  # a PNG of one dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def code(*outputs, **mystnb):
    """A cell that was run, with a title or a text of its figure."""
    about = {"metadata": {"mystnb": mystnb}} if mystnb else {}
    return nbformat.v4.new_code_cell("1", execution_count=1, outputs=list(outputs), **about)


def chapter(*cells):
    """The file of a notebook."""
    kernel = {"display_name": "Python 3", "name": "python3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=list(cells), metadata={"kernelspec": kernel})
    return nbformat.writes(made)


def output(kind, content):
    return nbformat.v4.new_output("display_data", data={kind: content})


TITLE = text("# Demo\n\nText.")
FIGURE = output("image/png", PIXEL)
CHAPTER = chapter(
    TITLE,
    text("(90-start)=\n## The start"),
    code(FIGURE, image={"alt": "A dot."}),
    nbformat.v4.new_code_cell('book.check("90.first", 1); book.check("90.second", 1)'),
    text("```{evidence}\n```"),
)
RUN = {
    "chapter": "90_demo",
    "tier": "mini",
    "seconds": 125.4,
    "peak_gib": {"memory": 1.5, "gpu": 0.0},
    "machine": {"cpu": "A Chip", "cores": 2, "memory_gib": 8, "gpu": ""},
    "versions": {"torch": "9.9"},
    "python": "3.11.7",
    "commit": "0123456789abcdef+",
    "date": "2026-01-02",
}
LIVE = {"figures": {"demo": [90, 12, 40]}, "browser": "Chromium 1", "load": 0.5}
LIVE |= {key: RUN[key] for key in ("machine", "commit", "date")}
CITATION = """
authors: [{given-names: Ada, family-names: Byron}, {name: The Others}]
title: A Book
version: 1.2.0
license: MIT
date-released: 2027-03-01
repository-code: https://example.org/a/b
"""


def plain(html):
    """What a reader sees of it, in one line."""
    html = re.sub(r"</?(a|span|em|code)\b.*?>", "", html)
    return " ".join(unescape(re.sub(r"<.*?>", " ", html)).replace("¶", "").split())


class Book:
    """A small book whose pages a test writes and builds."""

    def __init__(self, folder):
        self.source, self.out = folder / "src", folder / "out"
        self.settings: dict[str, Any] = {
            "extensions": ["myst_nb", "sphinxcontrib.bibtex", "book._ext"],
            "bibtex_bibfiles": ["refs.bib"],
            "html_theme": "basic",
            "nb_execution_mode": "off",
            "nitpicky": True,
        }
        self.write("refs.bib", BIB)
        self.pages: list[str] = []

    def write(self, name, text):
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix in (".md", ".ipynb"):
            self.pages = list(dict.fromkeys([*self.pages, name.rpartition(".")[0]]))

    def measure(self, claim, value, tier="mini", **given):
        """Check a claim as a notebook would, and commit the result to this book."""
        measured(claim, value, tier=tier, model="demo-0", seed=7, **given)
        name = f"{tier}/{claim}.json"
        self.write(f"book/results/{name}", (claims.results_folder() / name).read_text())

    def build(self):
        """Build the book; return the warnings."""
        contents = "\n".join(self.pages)
        index = f"# I\n\n```{{toctree}}\n{contents}\n```\n\n```{{bibliography}}\n:all:\n```\n"
        (self.source / "index.md").write_text(index, encoding="utf-8")
        warnings = io.StringIO()
        with patch_docutils(), docutils_namespace():
            Sphinx(
                srcdir=self.source,
                confdir=None,
                outdir=self.out,
                doctreedir=self.out / ".doctrees",
                buildername="html",
                confoverrides=self.settings,
                status=None,
                warning=warnings,
            ).build()
        return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())

    def html(self, name):
        """A built page."""
        return (self.out / f"{name}.html").read_text(encoding="utf-8")


@pytest.fixture
def book(tmp_path, make_ledger):
    make_ledger("90_demo", LEDGER)
    return Book(tmp_path / "tiny")


def shown(html, role):
    return re.findall(rf'<span class="{role}">(.*?)</span>', html)


def rows(html):
    return re.findall(r"<tr.*?</tr>", html, re.DOTALL)


def test_every_page_shows_what_there_is(book, tmp_path, monkeypatch):
    """One book with every directive and role, built twice: the second time with other results."""
    monkeypatch.setattr(zoo, "ROOT", tmp_path / "zoo")
    card = tmp_path / "zoo" / "demo-0" / "README.md"
    card.parent.mkdir(parents=True)
    (card.parent / "SHA256SUMS").touch()
    text = "# demo-0\n\n## Use\n\n```bash\n# a comment\n```\n\n- **Data**: of demo-0.\n"
    card.write_text(f"---\nlicense: mit\n---\n{text}- **Seed**: 0.\n")
    twin = tmp_path / "zoo" / "demo-1" / card.name
    twin.parent.mkdir()
    (twin.parent / "SHA256SUMS").touch()
    twin.write_text(f"{text.replace('demo-0', 'demo-1')}- **Seed**: 1.\n")
    book.write(
        "numbers.md",
        "# A *title*\n\n{measured}`90.first`, {measured}`90.first@paper`, "
        "{verdict}`90.first`, {measured}`90.first@null`, {measured}`90.first.best`, "
        "{measured}`90.first.seed`, {measured}`90.first.percent`, {real}`90.first`, "
        "{published}`90.first`\n",
    )
    book.write("book/scorecard.md", "# Scorecard\n\n```{scorecard}\n```")
    book.write("book/verdicts.md", "# Verdicts")
    book.write("book/front.md", "# Front\n\n```{verdicts}\n```")
    book.write("figure.md", "# F\n\n```{chapterfigure} 90-start\nSee *here*.\n```")
    book.write("status.md", "# Status\n\n```{status}\n```\n\n```{livetimes}\n```")
    book.write("book/runs/live.json", json.dumps(LIVE))
    book.write("cite.md", "# Cite\n\n```{citation}\n```")
    book.write("cards.md", "# Cards\n\n```{modelcards}\n```")
    book.write("CITATION.cff", CITATION)
    book.write("notebooks/90_demo.ipynb", CHAPTER)
    book.write("book/runs/mini/90_demo.json", json.dumps(RUN))
    book.measure("90.first", 0.5, spread=0.01, detail={"best": "5.1"})
    assert book.build() == ""
    _numbers(book)
    _scorecard(book)
    _chapter(book)
    _front_status_and_figure(book)
    _citation(book)
    cards = book.html("cards")
    assert re.search(r"<h2>demo-0<.*<h3>Use<", cards, re.DOTALL)
    assert "# a comment" in re.sub("<.*?>", "", cards)
    assert "license" not in cards
    second = plain(cards[cards.index("<h2>demo-1") :])
    assert "Seed : 1. As of demo-0, but for the name : data." in second
    # Other results, the pages untouched: the next build shows them.
    book.measure("90.first", 2.25, detail={"best": "6.9"})
    book.measure("90.first", 3.0, tier="paper")
    book.measure("90.first", 4.0, tier="real", null=[-1.0, -1.0])
    (book.source / "book/runs/mini/90_demo.json").unlink()
    assert book.build() == ""
    said = shown(book.html("numbers"), "measured")
    assert said == ["2.25", "3.00", "not run", "6.9", "7", "225\N{NO-BREAK SPACE}%"]
    assert shown(book.html("numbers"), "verdict verdict-holds") == ["holds"]
    assert shown(book.html("numbers"), "real") == ["4.00"]
    said = "It is big. (row) 4.00 holds 2.25 holds 3.00 reproduced −13.898 random weights: "
    said += "SmolLM2 −1.00"
    assert said in [plain(row) for row in rows(book.html("notebooks/90_demo"))]
    assert "all 1 1 0 0 0 0" in [plain(row) for row in rows(book.html("book/front"))]
    status = [plain(row) for row in rows(book.html("status"))]
    assert "90 Demo Small models no record 1 holds" in status


def _numbers(book):
    html = book.html("numbers")
    value = "0.50 ± 0.01".replace(" ", "\N{NO-BREAK SPACE}")
    share = "50\N{NO-BREAK SPACE}%"
    assert shown(html, "measured") == [value, "not run", "not run", "5.1", "7", share]
    assert shown(html, "verdict verdict-holds-in-a-weaker-form") == ["holds in a weaker form"]
    assert shown(html, "published") == ["−13.898"]
    said = re.search('<meta name="description" content="(.*?)"', html)[1]
    assert said.startswith("0.50 ± 0.01, not run, holds in a weaker form")


def _scorecard(book):
    html = book.html("book/scorecard")
    assert 'href="?kind=erratum"' in html
    assert 'href="?chapter=90&amp;kind=finding&amp;verdict=holds+in+a+weaker+form"' in html
    body = re.split(r'<table class="[^"]*\bscorecard ', html)[1].split("</table>")[0]
    found = rows(body)[1:]
    said = [re.sub(r"<.*?>|\s+", " ", row) for row in found]
    assert [re.findall(r'id="(claim-[\w-]+)"', row) for row in found] == [
        ["claim-90-first"],
        ["claim-90-second"],
    ]
    cells = r"It is big.*finding, .*−13.898 .* Xia24 .*0.50 ± 0.01 .*holds in a "
    cells += r"weaker form .*run 1 "
    cells += r".*Null, random weights: +not run( .*not run){2}"
    assert re.search(cells, said[0])
    assert "Paper: holds if the whole 95 % interval is above 1" in said[0]
    assert re.search(
        r"It is round.*Added after +90.first +had failed.*a bar of ours .*not run", said[1]
    )
    assert all('href="../notebooks/90_demo.html#start"' in row for row in found)
    runs = re.sub(r"<.*?>|\s+", " ", html.split('id="run-1"')[1])
    assert re.search(r"1 .*demo-0 .*7 .*cpu .*python \d.*torch \d", runs)


def _chapter(book):
    """What the notebook judges, once, each with its row; only the headline is unfolded."""
    html = book.html("notebooks/90_demo")
    assert re.findall('href="../book/scorecard.html#claim-(.*?)"', html) == [
        "90-first",
        "90-second",
    ]
    first, second = re.findall(r'<table class="[^"]*evidence.*?</table>', html, re.DOTALL)
    said = "It is big. (row) not run 0.50 ± 0.01 holds in a weaker form −13.898 –"
    assert plain(rows(first)[1]) == said
    assert re.search('<details class="rows"><summary>1 more row', html.split(first)[1])
    assert plain(rows(second)[1]) == "It is round. (row) – not run – –"


def _front_status_and_figure(book):
    html = book.html("book/front")
    assert [plain(row) for row in rows(html)] == [
        "Findings of on small models hold hold in a weaker form inconclusive do not hold "
        "uninformative",
        "papers 1 0 1 0 0 0",
        "study notes 0 0 0 0 0 0",
        "our own 0 0 0 0 0 0",
        "all 1 0 1 0 0 0",
    ]
    assert 'href="scorecard.html?kind=finding&amp;verdict=holds+in+a+weaker+form">1<' in html
    html = book.html("status")
    lines = [plain(row) for row in rows(html)]
    ran = (
        "90 Demo Small models 2 min 05 s 1.5 GiB 1 2026-01-02 0123456789+ 1 holds in a weaker form"
    )
    assert ran in lines
    assert "90 Demo Paper not run 1 not run" in lines
    assert "1 A Chip 2 8 GiB none python 3.11.7, torch 9.9" in lines
    assert "demo 90 12 40" in lines
    assert "Measured 2026-01-02, 0123456789+: Chromium 1, A Chip, 2 cores, load 0.5." in plain(html)
    html = book.html("figure")
    image = re.search(r'<img alt="A dot\." src="(.*?)"', html)[1]
    assert (book.out / image).read_bytes() == base64.b64decode(PIXEL)
    assert "See <em>here</em>." in html


def _citation(book):
    page = plain(book.html("cite"))
    said = "Ada Byron, The Others (2027). A Book, version 1.2.0. Licence: MIT. https://example.org"
    assert said in page
    entry = pybtex.database.parse_string(page[page.index("@software") :], "bibtex").entries
    fields = entry["icl_taken_apart"].fields
    assert fields["title"] == "{A Book}"
    assert (fields["year"], fields["url"]) == ("2027", "https://example.org/a/b")
    people = entry["icl_taken_apart"].persons["author"]
    assert [str(person) for person in people] == ["{Ada Byron}", "{The Others}"]


def test_chapters_and_figures_have_numbers_and_formulas_no_script(book):
    named = code(FIGURE, figure={"name": "fig-dot", "caption": "A dot of *ink*."})
    other = code(FIGURE, figure={"caption": "No."})
    title = text("# Demo\n\nSee {numref}`fig-dot`, and $x_1$, $\\hat y_1$.")
    book.settings |= {"numfig": True, "myst_enable_extensions": ["dollarmath"]}
    book.write("first.md", "# First\n\n```{figure} dot.png\nOf a page.\n```\n")
    (book.source / "dot.png").write_bytes(base64.b64decode(PIXEL))
    book.write("taken.md", "# Taken\n\n```{chapterfigure} 07-dots\n:name: fig-dot\nIt.\n```\n")
    book.write("notebooks/07_demo.ipynb", chapter(title, text("(07-dots)=\n## Dots"), named, other))
    book.write("notebooks/07_appendix.ipynb", chapter(text("# More"), other))
    assert book.build() == ""
    page = book.html("notebooks/07_appendix")
    assert "<h1>More" in page
    assert "Fig. 7A.1 No." in plain(page)
    page = book.html("notebooks/07_demo")
    assert "<h1>07 Demo" in page
    assert "07 Demo" in book.html("index")
    assert "See Fig. 7.1, and" in plain(page)
    assert re.findall(r"Fig\. [\d.]+ ", plain(page.split("<figcaption>", 1)[1])) == [
        "Fig. 7.1 ", "Fig. 7.2 "
    ]  # fmt: skip
    assert 'alt="A dot of ink."' in page
    assert "Fig. 1 Of a page." in plain(book.html("first"))
    assert (book.out / ".doctrees/figures/07-dots-fig-dot.png").is_file()
    assert "<math" in page
    assert page.count("<msub>") == 2
    assert "munder" not in page, "an index stands beside its letter, also below an accent"
    assert not re.search("<script[^>]*mathjax", page.lower())


def test_a_formula_that_cannot_be_read_is_a_warning(book):
    book.settings |= {"myst_enable_extensions": ["dollarmath"]}
    book.write("first.md", "# First\n\n$\\nonsense{1}$\n")
    assert "formula '\\\\nonsense{1}'" in book.build()


def test_what_is_wrong_is_a_warning_where_it_stands(book):
    mistakes = {
        "{measured}`90.frist`": "Unknown claim '90.frist'. Did you mean '90.first'?",
        "{published}`91.first`": "Unknown claim '91.first'.",
        "{measured}`90.second@paper`": "Unknown tier of claim 90.second 'paper'. Known: mini.",
        "{measured}`90.first.colour`": "Unknown field of 90.first 'colour'.",
        "{measured}`first`": "is not of the form 01.claim",
        "```{chapterfigure} 90-strat\n```": "Unknown label '90-strat'. Did you mean '90-start'?",
        "```{chapterfigure} 91-start\n```": "Unknown chapter '91'",
        "```{chapterfigure} 90-start\n:number: 2\n```": "has 1 figures, and no figure 2",
        "```{citation}\n```": "The book has no CITATION.cff",
        "```{status}\n```": "is not the record of a run",
    }
    book.measure("90.first", 2.0)
    book.write("notebooks/90_demo.ipynb", CHAPTER)
    book.write("book/runs/mini/90_demo.json", '{"chapter": "90_demo"}')
    for number, markup in enumerate(mistakes):
        book.write(f"page{number}.md", f"# P\n\n{markup}")
    warnings = book.build()
    for number, message in enumerate(mistakes.values()):
        here = [line for line in warnings.splitlines() if f"page{number}.md:3" in line]
        assert any(message in line for line in here), (message, warnings)


def test_a_broken_result_and_a_cell_without_its_label_are_warnings(book):
    book.write("scorecard.md", "# Scorecard\n\n```{scorecard}\n```")
    book.write("notebooks/90_demo.ipynb", chapter(TITLE))
    assert "cross-reference target not found: '90-start'" in book.build()
    book.write("page.md", "# P\n\n{measured}`90.first`")
    book.write("book/results/mini/90.first.json", '{"id": "90.first"}')
    warnings = book.build()
    for page in ("page", "scorecard"):
        assert re.search(rf"{page}.md:3: .*is not a result", warnings)


def test_the_reference_shows_signatures_text_and_examples(book):
    book.settings["suppress_warnings"] = ["bibtex.key_not_found"]
    modules = "iclutils.tasks.repeated\niclutils.interp.circuit"
    book.write("page.md", f"# Page\n\n```{{api}}\n{modules}\n```")
    book.write("index2.md", "# Modules\n\n```{modules}\niclutils.tasks.repeated\n```")
    assert book.build() == ""
    shown = unescape(re.sub(r"<[^>]+>", "", book.html("page")))
    assert re.search(r"repeated_tokens\(.*\) → ", " ".join(shown.split()))
    assert "{cite}" not in shown, "citations are citations"
    assert "<em>Faithful</em>" in book.html("page")
    assert 'href="page.html#module-iclutils.tasks.repeated"' in book.html("index2")
