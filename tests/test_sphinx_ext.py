"""Directives and roles of the book, on a book of two pages and a ledger of their own."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sphinx.application import Sphinx
from sphinx.errors import ConfigError
from sphinx.util.docutils import docutils_namespace, patch_docutils
from test_scorecard import LEDGER

from iclutils import address, claims, zoo

BIB = "@misc{xiang2024, author={Xiang, Shuyang}, title={A Note}, year={2024}}"
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Demo\n\nText."},
        {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "(90-start)=\n## The start"},
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


class Tiny:
    """A small book whose pages a test writes and builds."""

    def __init__(self, folder: Path) -> None:
        self.source, self.out = folder / "src", folder / "out"
        self.settings: dict[str, Any] = {
            "extensions": ["myst_nb", "sphinxcontrib.bibtex", "iclutils.sphinx_ext"],
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
    assert "2 claims in 3 rows, one for each tier: 1 partly, 2 not run." in html
    body = html.split('<table class="scorecard', 2)[2].split("</table>")[0]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)[1:]
    plain = [re.sub(r"<.*?>|\s+", " ", row) for row in rows]
    assert [re.findall(r'id="(claim-[\w-]+)"', row) for row in rows] == [
        ["claim-90-first-mini"],
        ["claim-90-first-paper"],
        ["claim-90-second-mini"],
    ]
    assert re.search(r"It is big.*−13.898 .* Xia24 .*0.50 ± 0.01 .*mini .*run 1 .*partly", plain[0])
    assert "reproduced if above 1; partly if above 0; else not reproduced" in plain[0].lower()
    assert re.search(r"−13.898 .*not run .*paper .*not run", plain[1])
    assert re.search(r"It is round.*no figure .*a bar of ours .*not run .*mini .*not run", plain[2])
    assert all('href="notebooks/90_demo.html#start"' in row for row in rows)
    assert "verdict-partly" in rows[0]
    assert "verdict-not-run" in rows[1]
    runs = re.sub(r"<.*?>|\s+", " ", html.split('id="run-1"')[1])
    assert re.search(r"1 .*mini .*demo-0 .*7 .*cpu .*python \d.*torch \d", runs)


def test_a_cell_without_its_label_is_a_warning(tiny: Tiny) -> None:
    cells = [NOTEBOOK["cells"][0]]  # type: ignore[index]
    tiny.write(
        "index.md", "# I\n\n```{toctree}\npage\nnotebooks/90_demo\n```\n\n```{bibliography}\n```"
    )
    tiny.write("page.md", "# Scorecard\n\n```{scorecard}\n```")
    tiny.write("notebooks/90_demo.ipynb", json.dumps(NOTEBOOK | {"cells": cells}))
    assert "undefined label: '90-start'" in tiny.build()[1]


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
    assert f"{given}/edit/main/page.md" in html
    assert "colab" not in html  # a page of prose is nothing to launch
    notebook = (tiny.out / "notebooks/90_demo.html").read_text(encoding="utf-8")
    colab = "https://colab.research.google.com/github/someone/taken-apart/blob/main/"
    assert f'href="{colab}notebooks/90_demo.ipynb"' in notebook


def test_a_malformed_address_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    real = address.launch_options
    monkeypatch.setattr(address, "launch_options", lambda: real("github.com/someone"))
    tiny.write("page.md", "# P")
    with pytest.raises(ConfigError, match="is not of the form https://HOST/OWNER/REPOSITORY"):
        tiny.build()
