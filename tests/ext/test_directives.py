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


def test_what_answers_a_bet_is_folded_with_its_answer(book):
    """The text first, what the hidden cell shows, its code, and then the finding, to be hidden."""
    bet, answer = ("```{admonition} " + x + "\n```" for x in ("A bet\nUp?", "Answer\nNo, down."))
    known = "## What we know, and how well\n\nDown.\n\n(90-open)=\n## What is open"
    texts = bet, f"{answer}\n\nIt fell:\n\n| by |\n|-|\n| 2 |\n\nSo it fell.\n\nMore.\n\n{known}"
    made = nbformat.reads(chapter("# Demo", *texts), as_version=4)
    shows = {"outputs": [nbformat.v4.new_output("stream", text="-1")], "execution_count": 1}
    cell = nbformat.v4.new_code_cell("print(-1)", metadata={"tags": ["hide-cell"]}, **shows)
    made.cells.insert(2, cell)
    book.write("notebooks/90_bet.ipynb", nbformat.writes(made))
    assert book.build() == ""
    before, _, folded = book.html("notebooks/90_bet").partition("dropdown answer")
    places = [folded.index(x) for x in ("No, down.", "cell_output", "Show the code", "cell_input")]
    assert places == sorted(places)
    finding, _, more = folded.partition('<div class="after-answer docutils container">')[
        2
    ].partition("</div>")
    assert plain(finding) == "It fell: by 2 So it fell."
    assert plain(more).startswith("More.")
    assert "after-answer" not in more
    waits, _, later = more.partition('<div class="after-bets docutils container">')[2].partition(
        "</div>"
    )
    assert plain(waits) == "Down."
    assert plain(later).startswith("What is open")
    assert 'id="open"' not in waits
    assert "cell_output" not in before


def code(source, *tags, **outputs):
    """A cell that has run."""
    made = nbformat.v4.new_code_cell(source, metadata={"tags": [*tags]}, execution_count=1)
    made.outputs = [nbformat.v4.new_output("stream", text=text) for text in outputs.values()]
    return made


def test_an_exercise_is_one_closed_box(book):
    """With its cells and its solution, whose section goes; other cells that are closed at the head
    of a page are one bar, and what is printed has a minus sign."""
    texts = (
        "# Demo",
        "````{exercise} How much?\n:label: 90-ex-much\n:nonumber:\n*Easy, 5 minutes. By hand.* "
        "Say.\n````",
        "Text after it.",
        "## Solutions\n\nThey take the place of stubs.",
        "````{solution} 90-ex-much\nMinus one.\n````",
    )
    made = nbformat.reads(chapter(*texts), as_version=4)
    made.cells[2:2] = code("stub()", "exercise"), code("check()", "exercise", "hide-cell")
    head = code("a = 1", "parameters", "hide-input"), code("print(a)", "hide-cell", says="x-1 -2.5")
    for cell in head:
        cell.metadata["mystnb"] = {"code_prompt_show": "Run this page: cells"}
    made.cells[1:1] = head
    book.write("notebooks/90_box.ipynb", nbformat.writes(made))
    assert book.build() == ""
    html = book.html("notebooks/90_box")
    box = html.partition('<details class="exercise-box printed">')[2]
    places = [plain(box).index(x) for x in ("Exercise: How much?", "Say.", "stub()", "check()",
                                            "Minus one.", "Text after it.")]  # fmt: skip
    assert places == sorted(places)
    assert plain(box.partition("</summary>")[0]) == "Exercise: How much? Easy, 5 minutes. By hand."
    assert "They take the place" not in html
    bar = html.partition('<details class="run">')[2].partition("</details>")[0]
    assert plain(bar).startswith("Run this page a = 1 print(a)")
    assert "x-1 −2.5" in plain(bar)


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
