"""Directives and roles of the book, on a small book with a ledger of its own."""

import json
import re
from html import unescape

import nbformat
import pytest
from ledger import LEDGER, measured
from small_book import Book

from iclutils import claims

BIB = "@misc{xiang2024, author={Xiang, Shuyang}, title={A Note}, year={2024}}"


def chapter(*texts):
    """The file of a notebook."""
    made = [nbformat.v4.new_markdown_cell(text) for text in texts]
    kernel = {"display_name": "Python 3", "name": "python3", "language": "python"}
    return nbformat.writes(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}))


CHAPTER = chapter("# Demo\n\nText.", "(90-start)=\n## The start", "```{evidence}\n```")


def plain(html):
    """What a reader sees of it, in one line."""
    html = re.sub(r"</?(a|span|em|code)\b.*?>", "", html)
    return " ".join(unescape(re.sub(r"<.*?>", " ", html)).replace("¶", "").split())


@pytest.fixture
def book(tmp_path, make_ledger):
    make_ledger("90_demo", LEDGER)
    made = Book(
        tmp_path / "tiny",
        extensions=["myst_nb", "sphinxcontrib.bibtex", "sphinx_exercise", "book._ext"],
        bibtex_bibfiles=["refs.bib"],
        html_theme="basic",
        nb_execution_mode="off",
        nitpicky=True,
        nitpick_ignore_regex=[("py:.*", ".*")],
        numfig=True,
        myst_enable_extensions=["attrs_block", "attrs_inline", "dollarmath"],
    )
    made.write("refs.bib", BIB)
    made.write("bibliography.md", "# B\n\n```{bibliography}\n:all:\n```\n")
    return made


def measure(book, claim, value, tier="mini", **given):
    """Check a claim as a notebook would, and commit the result to this book."""
    measured(claim, value, tier=tier, model="demo-0", seed=7, **given)
    name = f"{tier}/{claim[:2]}.json"
    book.write(f"book/results/{name}", (claims.results_folder() / name).read_text())


def shown(html, role):
    return re.findall(
        rf'<span class="{role}">(.*?)</span>', html.replace("\N{NO-BREAK SPACE}", " ")
    )


def rows(html):
    return [plain(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)]


def test_pages_show_the_results_there_are(book):
    """Built twice: the second time with other results, the pages untouched."""
    said = "`, {measured}`".join(
        f"90.first{field}" for field in ("", "@paper", "@null", ".best", ".seed", ".percent")
    )
    also = "{verdict}`90.first`, {real}`90.first`, {published}`90.first`"
    book.write("numbers.md", f"# A *title*\n\n{{measured}}`{said}`, {also}\n")
    book.write("book/scorecard.md", "# Scorecard\n\n```{scorecard}\n```")
    book.write("book/verdicts.md", "# Verdicts")
    book.write("notebooks/90_demo.ipynb", CHAPTER)
    measure(book, "90.first", 0.5, spread=0.01, detail={"best": "5.1"})
    assert book.build() == ""
    html = book.html("numbers")
    assert shown(html, "measured") == ["0.50 ± 0.01", "not run", "not run", "5.1", "7", "50 %"]
    assert shown(html, "verdict verdict-weaker") == ["weaker"]
    assert shown(html, "published") == ["−13.898"]
    html = book.html("book/scorecard")
    _, first, second, *counts = rows(html)
    assert counts[-1] == "all 2 0 1 0 0 0"
    assert 'id="claim-90-first"' in html
    assert 'href="../notebooks/90_demo.html#start"' in html
    assert "holds if the whole 95 % interval is > 1" in first
    assert re.search(r"not run 0.50 ± 0.01 weaker .*papers −13.898", first)
    assert "Added after 90.first had failed." in second
    html = book.html("notebooks/90_demo")
    links = re.findall('href="../book/scorecard.html#claim-(.*?)"', html)
    assert links == ["90-first", "90-second"]
    first, second = re.findall(r'<table class="[^"]*evidence.*?</table>', html, re.DOTALL)
    assert rows(first)[1].startswith("It is big. (row) not run 0.50 ± 0.01 weaker −13.898")
    assert rows(second)[1].startswith("It is round. (row) – not run –")
    measure(book, "90.first", 2.25, detail={"best": "6.9"})
    measure(book, "90.first", 3.0, tier="paper")
    measure(book, "90.first", 4.0, tier="real", null=[-1.0, -1.0])
    assert book.build() == ""
    html = book.html("numbers")
    assert shown(html, "measured") == ["2.25", "3.00", "not run", "6.9", "7", "225 %"]
    assert shown(html, "verdict verdict-holds") == ["holds"]
    assert shown(html, "real") == ["4.00"]
    said = "It is big. (row) 4.00 holds 2.25 holds 3.00 reproduced −13.898 random weights: "
    assert said + "SmolLM2 −1.00 fails its bar" in rows(book.html("notebooks/90_demo"))
    assert "all 2 1 0 0 0 0" in rows(book.html("book/scorecard"))


def test_what_is_wrong_is_a_warning_where_it_stands(book):
    mistakes = {
        "{measured}`90.frist`": "Unknown claim '90.frist'. Did you mean '90.first'?",
        "{published}`91.first`": "Unknown claim '91.first'.",
        "{measured}`90.first.colour`": "Unknown field of 90.first 'colour'.",
        "{measured}`first`": "is not of the form 01.claim",
        "$\\nonsense{1}$": "unknown command \\nonsense",
    }
    measure(book, "90.first", 2.0)
    for number, markup in enumerate(mistakes):
        book.write(f"page{number}.md", f"# P\n\n{markup}")
    warnings = book.build().splitlines()
    for number, message in enumerate(mistakes.values()):
        here = [line for line in warnings if f"page{number}.md:3" in line]
        assert any(message in line for line in here), (message, warnings)
    book.write("book/scorecard.md", "# Scorecard\n\n```{scorecard}\n```")
    book.write("notebooks/90_demo.ipynb", chapter("# Demo"))
    assert "cross-reference target not found: '90-start'" in book.build()


def test_times_are_those_from_nothing(book):
    runs = {"mini": {"01_a": {"seconds": 3.2}, "02_b": {"seconds": 4.0, "read": 0.0}}}
    runs["real"] = {"01_a": {"seconds": 100.4, "read": 50.2, "machine": "any"}}
    book.write("book/runs.json", json.dumps(runs))
    book.write("status.md", "# S\n\n```{times}\n```\n")
    assert not book.build()
    table = re.search(r"<table.*?</table>", book.html("status"), re.DOTALL)[0]
    assert plain(table) == "Notebook mini real 01_a 3 151 02_b 4 –"
