"""The built pages as a reader sees them: from disk, with no network, in an installed browser."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from reader import Reader

from iclutils.bookkit import build

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
# Contrast of an element's text against the first opaque ground behind it, as WCAG defines it.
CONTRAST = """
element => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = text => parse(text).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let ground = element;
  const clear = node => (parse(getComputedStyle(node).backgroundColor)[3] ?? 1) < 1;
  while (ground.parentElement && clear(ground)) ground = ground.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
  const [low, high] = pair.map(light).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
"""


# What sticks out of the screen and out of no part that can be scrolled, so that nobody sees it.
CUT_OFF = """
() => {
  const scrolled = new Map([[null, false]]);
  const scrolls = node => {
    if (!scrolled.has(node)) {
      const own = ["auto", "scroll"].includes(getComputedStyle(node).overflowX) &&
        node.getBoundingClientRect().right <= innerWidth + 1;
      scrolled.set(node, own || scrolls(node.parentElement));
    }
    return scrolled.get(node);
  };
  return [...document.querySelectorAll("article :not(svg *, mjx-assistive-mml *)")].filter(e =>
    e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1 &&
    !e.closest("mjx-assistive-mml") && !scrolls(e)).map(e => e.outerHTML.slice(0, 120));
}
"""


def test_no_page_leaves_the_disk_or_reports_an_error(reader: Reader) -> None:
    for name in [*build.pages(ROOT), "index", "search", "genindex"]:
        tab = reader.open(name)
        tab.wait_for_timeout(150)
        assert reader.left == [], name
        assert reader.errors == [], name
    reader.tab.evaluate("fetch('https://example.org/').catch(() => 0)")
    assert reader.left == ["https://example.org/"], "a request would not have been noticed"


def test_mathematics_is_set(reader: Reader) -> None:
    tab = reader.open("book/notation")
    tab.wait_for_selector("mjx-container svg")
    tab.wait_for_function("!document.querySelector('article').innerText.includes('\\\\(')")
    assert tab.locator("mjx-container").count() > 20
    assert tab.locator("mjx-merror, [data-mjx-error]").count() == 0


def test_search_works_from_disk(reader: Reader) -> None:
    tab = reader.open("search?q=duplicate-token")
    tab.wait_for_selector("#search-results li a")
    links = tab.locator("#search-results li a")
    titles = [links.nth(i).inner_text() for i in range(links.count())]
    assert "Notation" in titles
    links.nth(titles.index("Notation")).click()
    tab.wait_for_url("**/book/notation.html*")
    assert reader.errors == []


@pytest.mark.parametrize(
    ("reader", "dark"),
    [({"color_scheme": "light"}, False), ({"color_scheme": "dark"}, True)],
    indirect=["reader"],
)
def test_text_can_be_read_in_light_and_dark(reader: Reader, dark: bool) -> None:
    places = {
        "book/intro": ["h1", "p", "article a:not(.headerlink)", "td", ".sd-card-text"],
        "book/scorecard": [".scorecard p", ".scorecard summary", ".scorecard .claim-id a"],
        "book/how_to_run": ["pre span", "p code", "dt"],
    }
    for name, selectors in places.items():
        tab = reader.open(name)
        assert tab.evaluate("document.documentElement.dataset.theme") == (
            "dark" if dark else "light"
        )
        for selector in selectors:
            for element in tab.locator(selector).element_handles()[:12]:
                assert element.evaluate(CONTRAST) >= 4.5, f"{name}: {selector}"
    tab = reader.open("book/scorecard")
    for verdict in ("reproduced", "partly", "corrected", "not-reproduced", "not-run"):
        made = tab.evaluate_handle(
            """verdict => {
                const cell = document.querySelector("table.scorecard tbody td:last-child");
                const badge = document.createElement("span");
                badge.className = `verdict verdict-${verdict}`;
                cell.append(badge);
                return badge;
            }""",
            verdict,
        )
        assert made.as_element().evaluate(CONTRAST) >= 4.5, verdict


def test_the_theme_can_be_switched_by_hand(reader: Reader) -> None:
    tab = reader.open("book/intro")
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {tab.evaluate(ground)}
    for _ in range(3):
        tab.locator("button.theme-switch-button:visible").first.click()
        seen.add(tab.evaluate(ground))
    assert len(seen) == 2


@pytest.mark.parametrize("reader", [{"viewport": {"width": 390, "height": 800}}], indirect=True)
def test_no_page_is_wider_than_a_phone(reader: Reader) -> None:
    for name in [*build.pages(ROOT), "search"]:
        tab = reader.open(name)
        tab.wait_for_timeout(150)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert tab.evaluate(CUT_OFF) == [], name
    tab = reader.open("book/scorecard")
    table = tab.locator("table.scorecard").first
    assert table.evaluate("t => t.scrollWidth > t.parentElement.clientWidth"), "nothing to scroll"
    assert table.evaluate("t => getComputedStyle(t.parentElement).overflowX") in ("auto", "scroll")


def test_figures_load(reader: Reader) -> None:
    for name in build.pages(ROOT):
        tab = reader.open(name)
        broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        assert tab.evaluate(broken) == [], name


def test_a_claim_leads_to_the_cell_and_says_how_it_is_judged(reader: Reader) -> None:
    tab = reader.open("book/scorecard")
    rules = tab.locator("table.scorecard details").first
    assert not rules.locator("li").first.is_visible()
    rules.locator("summary").click()
    assert rules.locator("li").first.is_visible()
    tab.locator("table.scorecard .claim-id a").first.click()
    tab.wait_for_url("**/notebooks/*.html#*")
    assert tab.evaluate("document.querySelector(decodeURIComponent(location.hash)) !== null")


def test_the_packed_book_works_wherever_it_is_unpacked(
    browser: Any, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "html").symlink_to(site)
    packed = build.pack(tmp_path)
    folder = tmp_path / "Bücher & mehr, 100 %"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    assert unpacked.name == packed.stem
    context = browser.new_context(offline=True)
    reader = Reader(context.new_page(), unpacked)
    tab = reader.open("index")
    tab.wait_for_url("**/book/intro.html")
    assert tab.locator("article h1").is_visible()
    fonts = "document.fonts.ready.then(all => [...all].map(font => font.status))"
    assert "loaded" in tab.evaluate(fonts)  # the signs of the buttons are letters of a font
    assert "error" not in tab.evaluate(fonts)
    assert tab.evaluate("document.styleSheets.length") > 5
    tab = reader.open("notebooks/03_ridge_ols")
    tab.wait_for_selector("mjx-container svg")
    images = "[...document.images].every(image => image.complete && image.naturalWidth)"
    tab.wait_for_function(images)
    tab.keyboard.press("Control+k")
    tab.keyboard.type("duplicate-token")
    tab.keyboard.press("Enter")
    tab.locator("#search-results li a", has_text="Notation").first.click()
    tab.wait_for_url("**/book/notation.html*")
    assert (reader.left, reader.errors) == ([], [])
    context.close()
