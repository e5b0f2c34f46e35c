"""The scorecard's field for words, and its links to the chapters and back, in a browser."""

import pytest

from iclutils import claims

pytestmark = pytest.mark.browser

ROWS = "table.evidence tbody tr"


def test_words_hide_the_other_rows(reader):
    tab = reader.open("book/scorecard")
    every = [text.lower() for text in tab.locator(ROWS).all_text_contents()]
    assert len(every) == len(claims.ledger())
    words = ["induction", "papers"]
    wanted = [row for row in every if all(word in row for word in words)]
    tab.get_by_label("Show rows with the words").fill("Induction  papers ")
    assert 0 < tab.locator(f"{ROWS}:not([hidden])").count() == len(wanted) < len(every)
    assert tab.locator(".scorecard-filter output").inner_text().startswith(f"{len(wanted)} of ")
    assert reader.errors == []


def test_a_claim_leads_to_its_section_and_back(reader):
    chapter = claims.chapters()[0]
    tab = reader.open(f"notebooks/{chapter}")
    tab.locator("details.drawer > summary").click()
    tab.locator(".drawer > section > details:has(table.evidence) > summary").click()
    link = tab.locator("table.evidence a[href*='scorecard.html#claim-']").first
    name = link.get_attribute("href").partition("#")[2]
    link.click()
    tab.wait_for_url("**/book/scorecard.html#claim-*")
    target = tab.locator(":target")
    assert target.get_attribute("id") == name
    target.locator("a").click()
    tab.wait_for_url(f"**/notebooks/{chapter[:2]}_*.html#*")
    assert tab.locator(":target").count() == 1
