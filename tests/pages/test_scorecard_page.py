"""The scorecard's filter, its links to the chapters and back, and the front page, in a browser."""

from pathlib import Path
from urllib.parse import parse_qs

import pytest

from iclutils import claims, scorecard

pytestmark = pytest.mark.browser

PAGE = "book/scorecard"
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOWN = "table.scorecard tbody tr:not([hidden])"


@pytest.fixture(scope="module")
def rows(site):
    """What the scorecard should show, from the results that the pages were made of."""
    return scorecard.rows(claims.read_results(site.parent / "src/book/results"))


def shown(tab):
    """Targets of the rows that are shown, in order."""
    return tab.locator(f"{SHOWN} .claim-id").evaluate_all("found => found.map(p => p.id)")


def names(rows):
    targets = [f"claim-{row['mini'].claim.id}" for row in rows]
    return [target.replace(".", "-").replace("_", "-") for target in targets]


def test_each_choice_hides_the_other_rows(reader, rows):
    tab = reader.open(PAGE)
    said = tab.locator(".scorecard-filter output")
    assert said.inner_text() == f"{len(rows)} of {len(rows)} claims"
    choices = {
        "Chapter": ("03", lambda claim: claim.chapter == "03"),
        "Kind": ("finding", lambda claim: claim.kind == "finding"),
        "Said by": ("paper", lambda claim: claim.origin == "paper"),
        "Source": ("akyurek2023", lambda claim: "akyurek2023" in claim.source),
    }
    left = rows
    for label, (value, keep) in choices.items():
        before, left = left, [row for row in left if keep(row["mini"].claim)]
        assert 0 < len(left) < len(before), f"{label} chooses nothing here: take another value"
        tab.get_by_label(label, exact=True).select_option(value)
        assert shown(tab) == names(left), label
        assert said.inner_text() == f"{len(left)} of {len(rows)} claims"
    left = [row for row in left if row["mini"].verdict == "does not hold"]
    tab.get_by_label("Small models").select_option("does not hold")
    assert shown(tab) == names(left) != []
    assert not tab.get_by_role("heading", name="Chapter 01").is_visible()
    # The address holds what was chosen: another tab that opens it shows the same.
    query = tab.evaluate("location.search")[1:]
    chosen = [value for value, _ in choices.values()] + ["does not hold"]
    assert [value for (value,) in parse_qs(query).values()] == chosen
    tab = reader.open(f"{PAGE}?{query}")
    assert shown(tab) == names(left)
    assert tab.get_by_label("Small models").input_value() == "does not hold"
    tab.get_by_role("button", name="Show all").click()
    tab.wait_for_function("!location.search")
    assert len(shown(tab)) == len(rows)
    assert reader.errors == []


def test_a_link_to_a_row_shows_it_whatever_was_chosen(reader, rows):
    name = names([row for row in rows if row["mini"].claim.chapter == "02"])[0]
    tab = reader.open(f"{PAGE}?chapter=05#{name}")
    assert tab.locator(f"#{name}").is_visible()
    tab.get_by_label("Chapter").select_option("05")
    assert not tab.locator(f"#{name}").is_visible()
    tab.evaluate("location.hash = '#runs'")
    tab.evaluate(f"location.hash = '#{name}'")
    tab.locator(f"#{name}").wait_for(state="visible")


@pytest.mark.parametrize("reader", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_the_whole_table_is_there(reader, rows):
    tab = reader.open(f"{PAGE}?chapter=05")
    assert tab.locator("table.scorecard tbody tr").count() == len(rows)
    assert not tab.locator("table.scorecard").first.is_visible(), "each chapter's rows are folded"
    tab.locator("details:has(table.scorecard) > summary").first.click()
    assert tab.locator("table.scorecard tbody tr").first.is_visible()
    assert not tab.locator(".scorecard-filter").is_visible()


def test_every_claim_leads_to_its_cell_and_back(reader, rows):
    for chapter in claims.chapters():
        back = set()
        for path in sorted(NOTEBOOKS.glob(f"{chapter[:2]}_*.ipynb"), reverse=True):
            tab = reader.open(f"notebooks/{path.stem}")
            back |= set(
                tab.locator("article a[href*='scorecard.html#claim-']").evaluate_all(
                    "links => links.map(link => new URL(link.href).hash.slice(1))"
                )
            )
        own = {*names([row for row in rows if row["mini"].claim.chapter == chapter[:2]])}
        assert own <= back, own - back
    link = tab.locator("table.evidence a[href*='scorecard.html#claim-']").first
    name = link.get_attribute("href").partition("#")[2]
    link.click()
    tab.wait_for_url("**/book/scorecard.html#claim-*")
    row = tab.locator(":target")
    assert row.get_attribute("id") == name
    row.locator("a").click()
    tab.wait_for_url(f"**/notebooks/{chapter}.html#*")
    assert tab.locator(":target").count() == 1
