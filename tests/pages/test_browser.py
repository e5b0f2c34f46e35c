"""The pages as a reader meets them; in `make test` one of each kind, nightly all in every look."""

import re
import zipfile
from pathlib import Path

import pytest
from reader import Reader, soon

from tools import build

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
WIDTHS = {"desktop": 1280, "phone": 390}
LISTED = re.findall(r"^[\s-]*(?:root|file): *(\S+)", (ROOT / "_toc.yml").read_text(), re.M)
EVERY = [*LISTED, "search?q=head", "genindex"]
KINDS = ["book/intro", "notebooks/01_gpt2_induction", "book/scorecard"]
QUICK = "desktop, light; phone, dark"
SCRIPT = Path(__file__).with_name("page.js")
LOOKS = {QUICK: KINDS, "desktop, light and dark; phone, light and dark": EVERY}
# What paper has no use for; the contents of the page are printed.
BARS = "nav:not([aria-label='Page']):visible, button:visible, dialog:visible"


def found(result):
    return [
        (violation["id"], node["target"], node["html"][:120], node["failureSummary"])
        for violation in result["violations"]
        for node in violation["nodes"]
    ]


def settled(reader, name):
    base = pytest.importorskip("axe_playwright_python.base")
    tab = reader.open(name)
    tab.add_script_tag(path=SCRIPT)
    tab.evaluate("settle()")
    tab.evaluate(base.AXE_SCRIPT)
    return tab


def resize(tab, device):
    tab.set_viewport_size({"width": WIDTHS[device], "height": 900})
    tab.wait_for_function(
        "[...document.querySelectorAll('pre, .pst-scrollable-table-container')].every(box =>"
        " box.scrollWidth <= box.clientWidth || box.tabIndex === 0)"
    )


def complaints(tab, looks):
    """What axe finds on a page, by the width of the window and by the theme."""
    lines = {}
    for device in WIDTHS:
        resize(tab, device)
        lines[device] = found(tab.evaluate("structure()"))
    tab.evaluate("thin()")
    for look in looks.split("; "):
        device, themes = look.split(", ")
        resize(tab, device)
        for theme in themes.split(" and "):
            lines[f"{device}, {theme}"] = found(tab.evaluate("contrast", theme))
    return {where: what for where, what in lines.items() if what}


@pytest.mark.parametrize(
    ("looks", "name"),
    [
        pytest.param(looks, name, marks=pytest.mark.nightly if names is EVERY else ())
        for looks, names in LOOKS.items()
        for name in names
    ],
)
def test_a_page_can_be_used(reader, looks, name):
    """It stays on the disk, shows all its figures, fits a phone, and axe finds nothing."""
    tab = settled(reader, name)
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert (reader.left, reader.errors) == ([], [])
    assert tab.evaluate("document.documentElement.lang") == "en"
    assert tab.locator("main").count() == 1
    assert tab.locator("h1:visible").count() == 1
    assert (tab.evaluate("nameless()"), tab.evaluate("broken()")) == ([], [])
    resize(tab, "phone")
    assert tab.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"]
    assert tab.evaluate("cutOff()") == []
    if looks == QUICK:
        tab.evaluate("shorten()")
    assert complaints(tab, looks) == {}


def focused(tab):
    return tab.evaluate_handle("document.activeElement").as_element()


def test_search_finds_the_page_that_defines_a_word(reader):
    tab = reader.open("search?q=duplicate-token")
    tab.locator("#search-results li a", has_text="Notation").first.click()
    tab.wait_for_url("**/book/notation.html*")
    assert reader.errors == []


def test_solutions_unfold_without_a_mouse(reader):
    tab = reader.open("notebooks/01_gpt2_induction")
    box = tab.locator(".exercise-box").first
    box.locator("summary").first.focus()
    tab.keyboard.press("Enter")
    folded = box.locator(".solution.toggle-hidden")
    folded.locator("button.toggle-button").focus()
    button = focused(tab)
    text = folded.locator("> :not(.admonition-title)").first.element_handle()
    for unfolded in (False, True):
        assert text.is_visible() == unfolded
        assert button.get_attribute("aria-expanded") == str(unfolded).lower()
        tab.keyboard.press("Enter")


def test_a_bet_of_the_text_is_pressed(reader):
    """A press marks what is right and opens the answer; on paper the choices are a line."""
    tab = reader.open("notebooks/03_ridge_ols")
    bet, answer = tab.locator(".bet").first, tab.locator(".answer").first
    assert answer.locator("p:not(.admonition-title)").first.is_hidden()
    words = bet.locator("button").all_inner_texts()
    assert [text[:4] for text in words] == ["(a) ", "(b) ", "(c) "]
    bet.locator("button").first.click()
    answer.locator("p:not(.admonition-title)").first.wait_for()
    right = answer.locator("p:not(.admonition-title)").first.inner_text()[:3]
    assert bet.locator(".live-right").inner_text().startswith(right)
    assert bet.locator("button:enabled").count() == 0
    tab.emulate_media(media="print")
    assert (bet.locator("button:visible").count(), bet.locator(".bet-said").first.is_visible()) == (
        0,
        True,
    )


def test_what_a_chapter_knows_waits_for_its_bets(reader):
    """For all of them, or for a press; paper does not wait."""
    tab = reader.open("notebooks/05_contrastive_kernel")
    bars, boxes = tab.locator(".waits-bar"), tab.locator(".after-bets")

    def seen():  # what stands below the second bet, and last what the chapter knows
        return [box.is_visible() for box in boxes.all()]

    below = boxes.count() - 1

    for media, shown in {"print": True, "screen": False}.items():
        tab.emulate_media(media=media)
        assert (bars.first.is_visible(), seen()) == (not shown, (below + 1) * [shown])
    closed, opened = tab.locator(".answer.toggle-hidden .toggle-button"), 0
    for left in range(closed.count(), 0, -1):
        assert seen() == [*below * [opened > 1], False]
        assert f" {left + 1} are left: the live figure’s" in bars.last.inner_text()
        assert bars.last.locator("a").count() == left + 1
        closed.first.click()
        opened += 1
    assert opened > 1
    assert " 1 is left: the live figure’s." in bars.last.inner_text()
    bars.last.locator("a").click()
    bet = tab.locator(".live-bet")
    soon(lambda: 0 <= bet.bounding_box()["y"] < 300, True)
    bet.locator("button").first.click()
    soon(lambda: (bars.count(), seen()), (0, (below + 1) * [True]))
    tab.reload()
    bars.last.get_by_role("button").focus()
    tab.keyboard.press("Enter")
    assert (bars.count(), seen()) == (below, [*below * [False], True])


PHONE = pytest.mark.parametrize(
    "reader", [{"viewport": {"width": WIDTHS["phone"], "height": 844}}], indirect=True
)
HINTS = """all => all.map(x => [x.scrollWidth > x.clientWidth + 4,
    getComputedStyle(x.querySelector("figcaption") ?? x, "::before").content
        .includes("to the right")])
"""


@PHONE
def test_a_phone_shows_figures_whole_until_they_are_made_larger(reader):
    """Then they scroll, and their captions say so."""
    tab = settled(reader, "notebooks/01_gpt2_induction")
    figures = tab.locator("article figure:visible")
    assert figures.count() > 2
    assert figures.evaluate_all(HINTS) == [[False, False]] * figures.count()
    wide = figures.filter(has=tab.locator(".larger-button"))
    for said in (True, False):
        wide.first.get_by_role("button").click()
        soon(lambda: wide.first.evaluate(f"x => ({HINTS})([x])[0]"), [said, said])


@PHONE
def test_a_phone_wraps_code_and_lets_tables_scroll(reader):
    """Of a table that is wider than the page in small type, a line says so."""
    tab = settled(reader, "notebooks/04_gradient_step")
    code = tab.locator(".cell_input pre:visible")
    assert code.count() > 2
    assert code.evaluate_all("all => all.every(x => x.scrollWidth <= x.clientWidth)")
    hints = tab.locator(".cell_output pre:not(.wraps):visible").evaluate_all(HINTS)
    assert [True, True] in hints
    assert all(wide == said for wide, said in hints)


def test_a_page_is_printed_light_and_without_bars(reader):
    tab = reader.open("notebooks/01_gpt2_induction")
    tab.evaluate("document.documentElement.dataset.theme = 'dark'")
    tab.emulate_media(media="print")
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    tab.set_viewport_size({"width": 660, "height": 900})  # what A4 leaves
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.locator(BARS).count() == 0
    assert tab.locator(".toggle-hidden:visible").count() == 0
    for kind in ("h1", "article svg.plot", "article pre"):
        assert tab.locator(f"{kind}:visible").count() > 0, kind
    cut = """() => [...document.querySelectorAll("article *")].filter(element =>
        !element.closest("svg") && element.getClientRects().length &&
        element.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))
    """
    assert tab.evaluate(cut) == []
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.nightly
def test_the_packed_book_works_wherever_it_is_unpacked(browser, site, tmp_path):
    (tmp_path / "html").symlink_to(site)
    packed = build.pack(tmp_path / "html")
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
    tab = reader.open("notebooks/03_ridge_ols")
    assert tab.locator("math").first.is_visible()
    tab.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth)")
    reader.open("search?q=duplicate-token").locator("#search-results li a").first.wait_for()
    assert (reader.left, reader.errors) == ([], [])
    context.close()
