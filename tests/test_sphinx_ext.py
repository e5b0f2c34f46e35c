"""Directives and roles of the book, on a book of two pages and a ledger of their own."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pybtex.database
import pytest
from sphinx.application import Sphinx
from sphinx.errors import ConfigError
from sphinx.util.docutils import docutils_namespace, patch_docutils
from test_scorecard import LEDGER

from iclutils import zoo
from iclutils.bookkit import address, claims
from iclutils.bookkit.sphinx_ext import pages as status

BIB = "@misc{xiang2024, author={Xiang, Shuyang}, title={A Note}, year={2024}}"
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Demo\n\nText."},
        {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "(90-start)=\n## The start"},
    ],
    "metadata": {
        "kernelspec": {"display_name": "Python 3", "name": "python3", "language": "python"}
    },
    "nbformat": 4,
    "nbformat_minor": 5,
}


ALL = "\n```{bibliography}\n:all:\n```\n"
PIXEL = (  # a PNG of one dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def with_output(**output: Any) -> dict[str, Any]:
    """The notebook with a cell that has this output and, for a figure, its text."""
    output["output_type"] = "stream" if "name" in output else "display_data"
    cell = {
        "cell_type": "code",
        "id": "c",
        "metadata": {"mystnb": {"image": {"alt": "A dot."}}},
        "execution_count": 1,
        "source": "shown()",
        "outputs": [output],
    }
    return NOTEBOOK | {"cells": [*NOTEBOOK["cells"], cell]}  # type: ignore[misc]


def plain_text(html: str) -> str:
    """What a reader sees of it, in one line."""
    html = re.sub(r"</?(a|span|em|code)\b.*?>", "", html)
    return " ".join(unescape(re.sub(r"<.*?>", " ", html)).replace("¶", "").split())


class Tiny:
    """A small book whose pages a test writes and builds."""

    def __init__(self, folder: Path) -> None:
        self.source, self.out = folder / "src", folder / "out"
        self.settings: dict[str, Any] = {
            "extensions": ["myst_nb", "sphinxcontrib.bibtex", "iclutils.bookkit.sphinx_ext"],
            "bibtex_bibfiles": ["refs.bib"],
            "html_theme": "basic",
            "nb_execution_mode": "off",
            "nitpicky": True,
        }
        self.write(
            "index.md", "# Index\n\n```{toctree}\npage\n```\n\n```{bibliography}\n:all:\n```"
        )
        self.write("refs.bib", BIB)

    def write(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def measure(self, claim: str, value: float, tier: str = "mini", **detail: object) -> None:
        """Check a claim as a notebook would, and commit the result to this book."""
        claims.check(claim, value, tier=tier, model="demo-0", seed=7, **detail)
        name = f"{tier}/{claim}.json"
        self.write(f"book/results/{name}", (claims.results_folder() / name).read_text())

    def build(self) -> tuple[str, str]:
        """HTML of ``page`` and the warnings of the build."""
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
        return (self.out / "page.html").read_text(encoding="utf-8"), re.sub(
            r"\x1b\[[\d;]*m", "", warnings.getvalue()
        )


@pytest.fixture
def tiny(tmp_path: Path, make_ledger: Callable[..., Path]) -> Tiny:
    make_ledger("90_demo", LEDGER)
    return Tiny(tmp_path / "tiny")


def shown(html: str, role: str) -> list[str]:
    return re.findall(rf'<span class="{role}">(.*?)</span>', html)


def test_numbers_in_prose_come_from_the_results(tiny: Tiny) -> None:
    tiny.write(
        "page.md",
        "# P\n\n{measured}`90.first`, {measured}`90.first@paper`, {measured}`90.first.verdict`, "
        "{measured}`90.first.best`, {measured}`90.first.seed`, {published}`90.first`",
    )
    tiny.measure("90.first", 2.5, spread=0.12, best="5.1")
    html, warnings = tiny.build()
    assert warnings == ""
    assert shown(html, "measured") == ["2.5 ± 0.1", "not run", "reproduced", "5.1", "7"]
    assert shown(html, "published") == ["−13.898"]
    # Another result, the page untouched: the next build shows it.
    tiny.measure("90.first", 0.25, best="6.9")
    tiny.measure("90.first", 3.0, tier="paper")
    html, _ = tiny.build()
    assert shown(html, "measured") == ["0.250", "3.00", "partly", "6.9", "7"]


@pytest.mark.parametrize(
    ("markup", "message"),
    [
        ("{measured}`90.frist`", "Unknown claim '90.frist'. Did you mean '90.first'?"),
        ("{published}`91.first`", "Unknown claim '91.first'."),
        ("{measured}`90.second@paper`", "Unknown tier of claim 90.second 'paper'. Known: mini."),
        ("{measured}`90.first.colour`", "Unknown field of 90.first 'colour'."),
        ("{measured}`first`", "is not of the form"),
    ],
)
def test_a_wrong_name_in_prose_is_a_warning(tiny: Tiny, markup: str, message: str) -> None:
    tiny.measure("90.first", 2.0)
    tiny.write("page.md", f"# P\n\n{markup}")
    _, warnings = tiny.build()
    assert message in warnings
    assert "page.md:3: WARNING" in warnings


def test_the_scorecard_shows_everything_and_leads_to_the_cell(tiny: Tiny) -> None:
    tiny.write(
        "index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```\n\n```{bibliography}\n```"
    )
    tiny.write("page.md", "# Scorecard\n\n```{scorecard}\n```")
    tiny.write("notebooks/90_demo.ipynb", json.dumps(NOTEBOOK))
    tiny.measure("90.first", 0.5, spread=0.01)
    html, warnings = tiny.build()
    assert warnings == ""
    assert "2 claims in 3 rows, one for each tier: 1 partly, 2 not run." in plain_text(html)
    assert 'href="?verdict=not+run"' in html
    assert 'href="?chapter=90&amp;tier=mini&amp;verdict=partly"' in html
    body = html.split('<table class="scorecard', 2)[2].split("</table>")[0]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)[1:]
    plain = [re.sub(r"<.*?>|\s+", " ", row) for row in rows]
    assert [re.findall(r'id="(claim-[\w-]+)"', row) for row in rows] == [
        ["claim-90-first-mini"],
        ["claim-90-first-paper"],
        ["claim-90-second-mini"],
    ]
    assert re.search(r"It is big.*partly .*0.50 ± 0.01 .*−13.898 .* Xia24 .*mini .*run 1", plain[0])
    assert "reproduced if above 1; partly if above 0; else not reproduced" in plain[0].lower()
    assert re.search(r"It is big.*not run .*not run .*−13.898 .*paper", plain[1])
    assert re.search(r"It is round.*not run .*not run .*no figure .*a bar of ours .*mini", plain[2])
    kinds = [set(re.match(r'<tr class="(.*?)"', row)[1].split()) for row in rows]  # type: ignore[index]
    assert kinds[0] >= {"on-chapter-90", "on-source-xiang2024", "on-tier-mini", "on-verdict-partly"}
    assert kinds[2] >= {"on-source-ours", "on-verdict-not-run"}
    assert ["again" in kind for kind in kinds] == [False, True, False]
    assert all('href="notebooks/90_demo.html#start"' in row for row in rows)
    assert "verdict-partly" in rows[0]
    assert "verdict-not-run" in rows[1]
    runs = re.sub(r"<.*?>|\s+", " ", html.split('id="run-1"')[1])
    assert re.search(r"1 .*mini .*demo-0 .*7 .*cpu .*python \d.*torch \d", runs)


def test_the_filter_offers_what_there_is_and_is_hidden_without_its_script(tiny: Tiny) -> None:
    tiny.write("page.md", "# Scorecard\n\n```{scorecard}\n```")
    tiny.measure("90.first", 0.5)
    html, warnings = tiny.build()
    assert warnings == ""
    form = re.search(r"<form class=\"scorecard-filter\".*?</form>", html, re.DOTALL)[0]  # type: ignore[index]
    assert " hidden>" in form.partition("\n")[0][: form.index(">") + 1]
    offered = {
        name: re.findall(r'<option value="([^"]+)">(.+?)</option>', choices)
        for name, choices in re.findall(r'<select name="(\w+)"[^>]*>(.*?)</select>', form)
    }
    assert offered == {
        "chapter": [("90", "90")],
        "source": [("xiang2024", "Xiang 2024"), ("ours", "our own questions and controls")],
        "verdict": [("partly", "partly"), ("not run", "not run")],
        "tier": [("mini", "mini"), ("paper", "paper")],
    }
    assert form.count("<label for=") == form.count("<select") + form.count("<input")
    assert 'aria-live="polite"' in form
    assert "scorecard.js" in html
    assert "scorecard.js" not in (tiny.out / "index.html").read_text(encoding="utf-8")


def test_a_chapter_leads_from_each_verdict_to_its_row(tiny: Tiny) -> None:
    printed = "partly          90.first\nunknown         90.second\ndone\n"
    contents = "page\nbook/scorecard\nnotebooks/90_demo"
    tiny.write("index.md", f"# I\n\n```{{toctree}}\n{contents}\n```\n{ALL}")
    tiny.write("page.md", "# P")
    tiny.write("book/scorecard.md", "# Scorecard\n\n```{scorecard}\n```")
    tiny.write("notebooks/90_demo.ipynb", json.dumps(with_output(name="stdout", text=printed)))
    _, warnings = tiny.build()
    assert warnings == ""
    html = (tiny.out / "notebooks/90_demo.html").read_text(encoding="utf-8")
    output = re.search(r"<pre class=\"[^\"]*stream.*?</pre>", html, re.DOTALL)[0]  # type: ignore[index]
    assert re.sub("<.*?>", "", output) == printed
    assert re.findall('href="(.*?)"', output) == ["../book/scorecard.html#claim-90-first-mini"]
    # What the run did not judge is named at the end of the section that would.
    rest = re.search(r'<p class="claims-here">(.*?)</p>', html)[1]  # type: ignore[index]
    assert plain_text(rest) == "Judged here, but not in the run shown: 90.second."
    assert 'href="../book/scorecard.html#claim-90-second-mini"' in rest
    assert html.index("claims-here") > html.index("The start") > html.index("<h1>")


def test_verdicts_lead_from_any_page_into_the_scorecard(tiny: Tiny) -> None:
    tiny.write("index.md", "# I\n\n```{toctree}\npage\nbook/front\n```\n" + ALL)
    tiny.write("page.md", "# P")
    tiny.write("book/front.md", "# Front\n\n```{verdicts}\n```")
    tiny.measure("90.first", 0.5)
    assert tiny.build()[1] == ""
    html = (tiny.out / "book/front.html").read_text(encoding="utf-8")
    assert "2 claims, each at one or two sizes of model: 1 partly, 2 not run." in plain_text(html)
    assert 'href="scorecard.html?verdict=partly">1 partly<' in html.replace('internal" ', "")


def test_a_chapters_figure_comes_with_its_text(tiny: Tiny) -> None:
    tiny.write("index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```\n" + ALL)
    tiny.write(
        "notebooks/90_demo.ipynb", json.dumps(with_output(data={"image/png": PIXEL}, metadata={}))
    )
    tiny.write("page.md", "# P\n\n```{chapterfigure} 90-start\nSee *here*.\n```")
    html, warnings = tiny.build()
    assert warnings == ""
    image = re.search(r'<img alt="A dot\." src="(.*?)"', html)[1]  # type: ignore[index]
    assert (tiny.out / image).read_bytes() == base64.b64decode(PIXEL)
    assert "See <em>here</em>." in html
    for markup, message in (
        ("```{chapterfigure} 90-strat\n```", "Unknown label '90-strat'. Did you mean '90-start'?"),
        ("```{chapterfigure} 91-start\n```", "Unknown chapter '91'"),
        ("```{chapterfigure} 90-start\n:number: 2\n```", "has 1 figures, and no figure 2"),
    ):
        tiny.write("page.md", f"# P\n\n{markup}")
        assert message in tiny.build()[1]


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


def test_status_shows_runs_and_what_was_not_run(tiny: Tiny) -> None:
    tiny.write("index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```\n" + ALL)
    tiny.write("notebooks/90_demo.ipynb", json.dumps(NOTEBOOK))
    tiny.write("page.md", "# Status\n\n```{status}\n```")
    tiny.measure("90.first", 0.5)
    tiny.write("book/runs/mini/90_demo.json", json.dumps(RUN))
    html, warnings = tiny.build()
    assert warnings == ""
    lines = [plain_text(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)]
    assert "Demo mini 2 min 05 s 1.5 GiB 1 2026-01-02 0123456789+ 1 partly, 1 not run" in lines
    assert "Demo paper not run 1 not run" in lines
    assert "1 A Chip 2 8 GiB none python 3.11.7, torch 9.9" in lines
    assert 'href="notebooks/90_demo.html"' in html
    # The record is gone, the result is not: that is not the same as never run.
    (tiny.source / "book/runs/mini/90_demo.json").unlink()
    html, _ = tiny.build()
    assert "Demo mini no record 1 partly, 1 not run" in [
        plain_text(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    ]
    tiny.write("book/runs/mini/90_demo.json", '{"chapter": "90_demo"}')
    assert "is not the record of a run" in tiny.build()[1]


@pytest.mark.parametrize(("seconds", "shown"), [(59.4, "59 s"), (59.6, "1 min 00 s"), (0.2, "0 s")])
def test_times_are_whole_seconds(seconds: float, shown: str) -> None:
    assert status.duration(seconds) == shown


def test_memory_of_a_run_names_the_gpus() -> None:
    assert status.held({"memory": 2.0, "gpu": 30.5}) == "2 GiB, GPU 30.5 GiB"
    assert status.held({"memory": 0.0, "gpu": 0.0}) == "unknown"


def test_the_citation_comes_from_its_file(tiny: Tiny) -> None:
    tiny.write("page.md", "# Cite\n\n```{citation}\n```")
    assert "The book has no CITATION.cff" in tiny.build()[1]
    tiny.write(
        "CITATION.cff",
        "authors: [{given-names: Ada, family-names: Byron}, {name: The Others}]\n"
        "title: A Book\nversion: 1.2.0\nlicense: MIT\n"
        "date-released: 2027-03-01\nrepository-code: https://example.org/a/b\n",
    )
    html, warnings = tiny.build()
    assert warnings == ""
    text = plain_text(html)
    said = "Ada Byron, The Others (2027). A Book, version 1.2.0. Licence: MIT. https://example.org"
    assert said in text
    entry = pybtex.database.parse_string(text[text.index("@software") :], "bibtex").entries
    fields = entry["icl_taken_apart"].fields
    assert fields["title"] == "{A Book}"
    assert (fields["year"], fields["url"]) == ("2027", "https://example.org/a/b")
    people = entry["icl_taken_apart"].persons["author"]
    assert [str(person) for person in people] == ["{Ada Byron}", "{The Others}"]


def test_a_page_describes_itself(tiny: Tiny) -> None:
    tiny.write("page.md", "# A *title*\n\n## First\n\n" + 'Some "words" ' * 40)
    html, _ = tiny.build()
    said = re.search('<meta name="description" content="(.*?)"', html)[1]  # type: ignore[index]
    assert said.startswith("Some “words” Some")
    assert said.endswith(" ...")
    assert len(said) < 170
    assert '<meta property="og:title" content="A title"' in html


def test_a_cell_without_its_label_is_a_warning(tiny: Tiny) -> None:
    cells = [NOTEBOOK["cells"][0]]  # type: ignore[index]
    tiny.write(
        "index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```\n\n```{bibliography}\n```"
    )
    tiny.write("page.md", "# Scorecard\n\n```{scorecard}\n```")
    tiny.write("notebooks/90_demo.ipynb", json.dumps(NOTEBOOK | {"cells": cells}))
    assert "cross-reference target not found" in tiny.build()[1]


def test_model_cards_are_included_one_level_down(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "ROOT", tmp_path / "zoo")
    tiny.write("page.md", "# Cards\n\n```{modelcards}\n```")
    assert "No model is shipped yet." in tiny.build()[0]
    card = tmp_path / "zoo" / "demo-0" / "README.md"
    card.parent.mkdir(parents=True)
    (card.parent / "SHA256SUMS").touch()
    card.write_text("---\nlicense: mit\n---\n# demo-0\n\n## Use\n\n```bash\n# a comment\n```\n")
    html, warnings = tiny.build()
    assert warnings == ""
    assert re.search(r"<h2>demo-0<.*<h3>Use<", html, re.DOTALL)
    assert "# a comment" in re.sub("<.*?>", "", html)
    assert "license" not in html


@pytest.mark.parametrize("markup", ["{measured}`90.first`", "```{scorecard}\n```"])
def test_a_broken_result_is_a_warning(tiny: Tiny, markup: str) -> None:
    tiny.write("page.md", f"# P\n\n{markup}")
    tiny.write("book/results/mini/90.first.json", '{"id": "90.first"}')
    _, warnings = tiny.build()
    assert "is not a result" in warnings
    assert "page.md:3:" in warnings


def test_the_address_makes_the_buttons(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write("page.md", "# P")
    tiny.write("notebooks/90_demo.ipynb", json.dumps(NOTEBOOK))
    tiny.write("index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```")
    tiny.settings["html_theme"] = "sphinx_book_theme"
    tiny.settings["html_theme_options"] = {}
    given = "https://github.com/someone/taken-apart"
    options = address.launch_options(given)
    monkeypatch.setattr(address, "launch_options", lambda: options)
    html, warnings = tiny.build()
    assert warnings == ""
    assert f'href="{given}"' in html
    assert f"{given}/edit/" not in html  # a tag cannot be edited
    assert "colab" not in html  # a page of prose is nothing to launch
    notebook = (tiny.out / "notebooks/90_demo.html").read_text(encoding="utf-8")
    colab = "https://colab.research.google.com/github/someone/taken-apart/blob"
    assert f'href="{colab}/{address.TAG}/notebooks/90_demo.ipynb"' in notebook


def test_a_malformed_address_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    real = address.launch_options
    monkeypatch.setattr(address, "launch_options", lambda: real("github.com/someone"))
    tiny.write("page.md", "# P")
    with pytest.raises(ConfigError, match="is not of the form https://HOST/OWNER/REPOSITORY"):
        tiny.build()


def test_the_reference_shows_signatures_text_and_examples(tiny: Tiny) -> None:
    tiny.settings["suppress_warnings"] = ["bibtex.key_not_found"]
    tiny.write("page.md", "# Page\n\n```{api}\niclutils.chapters.regression.distances\n```")
    html, _ = tiny.build()
    text = unescape(re.sub(r"<[^>]+>", "", html))
    assert "under_determined(dim: int) → slice" in " ".join(text.split())
    assert "slice(1, 3, None)" in text, "the example"
    assert "{cite}" not in text, "citations are citations"


def test_every_message_leads_to_its_page(tiny: Tiny) -> None:
    tiny.write("names.md", "# Names\n\n## You see\n\n```text\nUnknown\nname.\n```\n")
    tiny.write("page.md", "# Page\n\n```{messages}\n```\n\n```{toctree}\nnames\n```")
    html, _ = tiny.build()
    (row,) = re.findall(r"<tr.*?</tr>", html.split("<tbody>")[1], re.DOTALL)
    assert "names.html" in row
    assert "Unknown name." in plain_text(row)
