"""The built pages as a reader sees them: from disk, with no network, in an installed browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iclutils import book

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name resolves: there is no network
)
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


class Reader:
    """A browser tab that notes every request that leaves the disk and every error."""

    def __init__(self, tab: Any, site: Path) -> None:
        self.tab, self.site = tab, site
        self.left: list[str] = []
        self.errors: list[str] = []
        tab.on("request", lambda request: self._note(request.url))
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)

    def _note(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.left.append(url)

    def open(self, name: str) -> Any:
        """Open a page of the book; return the tab."""
        path, _, query = name.partition("?")
        address = (self.site / f"{path}.html").as_uri() + (f"?{query}" if query else "")
        self.tab.goto(address, wait_until="load")
        return self.tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(NAMES)}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def reader(browser: Any, site: Path, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """A tab with the options that the test gives as its parameter."""
    context = browser.new_context(**getattr(request, "param", {}))
    yield Reader(context.new_page(), site)
    context.close()


def test_no_page_leaves_the_disk_or_reports_an_error(reader: Reader) -> None:
    for name in [*book.pages(ROOT), "index", "search", "genindex"]:
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
    for name in [*book.pages(ROOT), "search"]:
        tab = reader.open(name)
        tab.wait_for_timeout(150)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, name
    tab = reader.open("book/scorecard")
    table = tab.locator("table.scorecard").first
    assert table.evaluate("t => t.scrollWidth > t.parentElement.clientWidth"), "nothing to scroll"
    assert table.evaluate("t => getComputedStyle(t.parentElement).overflowX") in ("auto", "scroll")


def test_figures_load(reader: Reader) -> None:
    for name in book.pages(ROOT):
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
