"""Directives and roles of the book, on a small book with a ledger of its own."""

import base64
import io
import re
from html import unescape
from typing import Any

import nbformat
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
    code(FIGURE, image={"alt": "A dot."}, figure={"name": "fig-dot", "caption": "A dot."}),
    nbformat.v4.new_code_cell('book.check("90.first", 1); book.check("90.second", 1)'),
    text("```{evidence}\n```"),
)


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
            "nitpick_ignore_regex": [("py:.*", ".*")],
            "myst_enable_extensions": ["attrs_block", "attrs_inline", "dollarmath"],
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
        name = f"{tier}/{claim[:2]}.json"
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
                freshenv=True,
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
    for name in ("demo-0", "demo-1"):
        (folder := tmp_path / "zoo" / name).mkdir(parents=True)
        (folder / "SHA256SUMS").touch()
        (folder / "README.md").write_text(
            f"---\nlicense: mit\n---\n# {name}\n\n- **Data**: none.\n"
        )
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
    book.write("figure.md", "# F\n\n```{chapterfigure} fig-dot\nSee *here*.\n```")
    book.write("cards.md", "# Cards\n\n```{modelcards}\n```")
    book.write("notebooks/90_demo.ipynb", CHAPTER)
    book.measure("90.first", 0.5, spread=0.01, detail={"best": "5.1"})
    assert book.build() == ""
    _numbers(book)
    _tables(book)
    html = book.html("figure")
    image = re.search(r'<img alt="A dot\." src="(.*?)"', html)[1]
    assert (book.out / image).read_bytes() == base64.b64decode(PIXEL)
    assert "See <em>here</em>." in html
    cards = plain(book.html("cards"))
    assert "demo-0 Data : none. Of the same kind : demo-1." in cards
    assert "license" not in cards
    # Other results, the pages untouched: the next build shows them.
    book.measure("90.first", 2.25, detail={"best": "6.9"})
    book.measure("90.first", 3.0, tier="paper")
    book.measure("90.first", 4.0, tier="real", null=[-1.0, -1.0])
    assert book.build() == ""
    said = shown(book.html("numbers"), "measured")
    assert said == ["2.25", "3.00", "not run", "6.9", "7", "225\N{NO-BREAK SPACE}%"]
    assert shown(book.html("numbers"), "verdict verdict-holds") == ["holds"]
    assert shown(book.html("numbers"), "real") == ["4.00"]
    said = "It is big. (row) 4.00 holds 2.25 holds 3.00 reproduced −13.898 random weights: "
    said += "SmolLM2 −1.00 fails its bar"
    assert said in [plain(row) for row in rows(book.html("notebooks/90_demo"))]
    assert "all 1 1 0 0 0 0" in [plain(row) for row in rows(book.html("book/front"))]


def _numbers(book):
    html = book.html("numbers")
    value = "0.50 ± 0.01".replace(" ", "\N{NO-BREAK SPACE}")
    share = "50\N{NO-BREAK SPACE}%"
    assert shown(html, "measured") == [value, "not run", "not run", "5.1", "7", share]
    assert shown(html, "verdict verdict-weaker") == ["weaker"]
    assert shown(html, "published") == ["−13.898"]


def _tables(book):
    """Of the scorecard, of the notebook, where only the headline is unfolded, and the totals."""
    html = book.html("book/scorecard")
    claims_of = re.split(r'<table class="[^"]*\bevidence', html)[1].split("</table>")[0]
    first, second = rows(claims_of)[1:]
    assert 'id="claim-90-first"' in first
    assert 'href="../notebooks/90_demo.html#start"' in first
    said = plain(first)
    assert "holds if the whole 95 % interval is > 1" in said
    assert re.search(r"not run 0.50 ± 0.01 weaker .*finding, papers −13.898", said)
    assert "Added after 90.first had failed." in plain(second)
    html = book.html("notebooks/90_demo")
    links = re.findall('href="../book/scorecard.html#claim-(.*?)"', html)
    assert links == ["90-first", "90-second"]
    first, second = re.findall(r'<table class="[^"]*evidence.*?</table>', html, re.DOTALL)
    said = "It is big. (row) not run 0.50 ± 0.01 weaker −13.898"
    assert plain(rows(first)[1]).startswith(said)
    assert re.search('<details class="rows"><summary>1 more row', html.split(first)[1])
    assert plain(rows(second)[1]).startswith("It is round. (row) – not run –")
    assert [plain(row) for row in rows(book.html("book/front"))] == [
        "Findings of on small models holds weaker too few to tell fails its bar null does as well",
        "papers 1 0 1 0 0 0",
        "study notes 0 0 0 0 0 0",
        "our own 0 0 0 0 0 0",
        "all 1 0 1 0 0 0",
    ]


def test_chapters_and_figures_have_numbers_and_formulas_no_script(book):
    named = code(FIGURE, figure={"name": "fig-dot", "caption": "A dot of *ink*."})
    other = code(FIGURE, figure={"caption": "No."})
    title = text("# Demo\n\nSee {numref}`fig-dot`, and $x_1$, $\\hat y_1$.")
    book.settings["numfig"] = True
    book.write("first.md", "# First\n\n```{figure} dot.png\nOf a page.\n```\n")
    (book.source / "dot.png").write_bytes(base64.b64decode(PIXEL))
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
    assert "<math" in page
    assert page.count("<msub>") == 2
    assert "munder" not in page, "an index stands beside its letter, also below an accent"
    assert not re.search("<script[^>]*mathjax", page.lower())


def test_what_is_wrong_is_a_warning_where_it_stands(book):
    mistakes = {
        "{measured}`90.frist`": "Unknown claim '90.frist'. Did you mean '90.first'?",
        "{published}`91.first`": "Unknown claim '91.first'.",
        "{measured}`90.second@paper`": "Unknown tier of claim 90.second 'paper'. Known: mini.",
        "{measured}`90.first.colour`": "Unknown field of 90.first 'colour'.",
        "{measured}`first`": "is not of the form 01.claim",
        "```{chapterfigure} fig-dto\n```": "Unknown figure 'fig-dto'. Did you mean 'fig-dot'?",
        "$\\nonsense{1}$": "unknown command \\nonsense",
    }
    book.measure("90.first", 2.0)
    book.write("notebooks/90_demo.ipynb", CHAPTER)
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
    book.write("book/results/mini/90.json", "{}")
    warnings = book.build()
    for page in ("page", "scorecard"):
        assert re.search(rf"{page}.md:3: .*holds no results", warnings)


def test_the_reference_shows_signatures_text_and_examples(book, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = '"""Measure |x| of {cite:t}`xiang2024`."""\n\n'
    text += (
        'def size(a: int, *rest: int) -> int:\n    """Give *one* size_ of ``*a``: (*rest, a).\n\n'
    )
    text += '    >>> size(1) * 2\n    2\n    """\n'
    (tmp_path / "measures.py").write_text(text)
    book.write("page.md", "# Page\n\n```{api}\nmeasures\n```")
    assert book.build() == ""
    page = book.html("page")
    assert "<em>one</em> size_ of" in page
    said = " ".join(unescape(re.sub("<[^>]+>", "", page)).split())
    for part in ("Measure |x| of Xiang [Xia24].", "size(a: int, *rest: int) → int", "(*rest, a)"):
        assert part in said


def test_a_drawer_is_closed_below_its_heading(book):
    book.write("page.md", "# P\n\nStory.\n\n(01-drawer)=\n## Behind\n\n### A part\n\nNumbers.")
    assert not book.build()
    html = book.html("page")
    section = html[html.index('id="behind"') : html.index("</details>")]
    assert section.index("<h2>Behind") < section.index("<details") < section.index("A part")
    assert "Story" not in section
    assert " open" not in section
