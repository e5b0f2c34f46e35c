"""The built files: every link, image and citation leads somewhere on the disk, and all is light."""

import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from book._ext.scorecard import anchor
from iclutils import claims

ROOT = Path(__file__).parents[2]
INCLUDED = re.compile(r"```\{include\} (\S+)")
LIMIT = 1_500_000  # bytes that one page may cost its reader before a press


class Page(HTMLParser):
    """Ids of a page, the addresses that it links to and loads, and its inline scripts."""

    def __init__(self, path):
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.claims: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        if tag != "meta":
            self.ids.update({given[name] for name in ("id", "name") if name in given})
        if "href" in given:
            preloaded = tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon")
            (self.loads if preloaded else self.links).append(given["href"])
        if "src" in given:
            late = given.get("loading") == "lazy"  # of a closed drawer
            (self.links if late else self.loads).append(given["src"])
        if given.get("class") == "claim-id":
            self.claims.append(given["id"])
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)


@cache
def pages(site):
    found = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    return {path: Page(path) for path in found}


def target(page, link):
    """File and fragment that a link of a page leads to."""
    parts = urlsplit(link)
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, parts.fragment


def inside(link):
    return not urlsplit(link).scheme and not urlsplit(link).netloc


def test_every_page_is_in_the_contents_and_built(site):
    listed = re.findall(r"^[\s-]*(?:root|file): *(\S+)", (ROOT / "_toc.yml").read_text(), re.M)
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "book").rglob("*.md")}
    parts = {path.parent / name for path, text in texts.items() for name in INCLUDED.findall(text)}
    written = [path.relative_to(ROOT).with_suffix("") for path in texts.keys() - parts]
    chapters = [f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted([*(path.as_posix() for path in written), *chapters])
    built = {site / f"{name}.html" for name in [*listed, "index", "search", "genindex"]}
    assert built == set(pages(site))
    for path in built - {site / "index.html"}:
        sidebar = path.read_text(encoding="utf-8").partition('<nav class="bd-links')[2]
        links = sidebar.partition("</nav>")[0].count('<a class="reference')
        assert 10 < links <= 32, f"the side bar of {path.name} is short"


def test_every_link_inside_the_book_leads_somewhere(site):
    known, dead, fragments = pages(site), [], 0
    for path, page in known.items():
        for link in filter(inside, [*page.links, *page.loads]):
            file, fragment = target(path, link)
            found = file.is_file() and file.is_relative_to(site)
            if found and fragment and file in known:
                fragments += 1
                found = unquote(fragment) in known[file].ids
            if not found:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert fragments > 1000, "the links into pages were not looked at"


def test_no_page_takes_anything_from_the_network(site):
    for path, page in pages(site).items():
        assert [x for x in page.loads if not inside(x) and not x.startswith("data:")] == [], path
        assert not any(re.search("https?:", script) for script in page.scripts), path
    for path in site.rglob("*.css"):
        text = re.sub("[\"']", "", path.read_text(encoding="utf-8"))
        assert not re.search(r"url\(http|@import[^;]*//", text), path


def test_pages_are_light(site):
    """Each with all that it loads and all fonts; and all of them with every library."""
    fonts = {*(site / "_static/fonts").glob("*.woff2")}
    assert len(fonts) == 6
    loaded = {
        path: {target(path, link)[0] for link in page.loads if inside(link)}
        for path, page in pages(site).items()
        if path.name != "index.html"  # it only leads to the first page
    }
    sizes = {path: sum(f.stat().st_size for f in fonts | {path, *loaded[path]}) for path in loaded}
    heavy = {path for path, size in sizes.items() if size > LIMIT and path.parent.name != "api"}
    assert not heavy, "but for the reference"
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 30e6


def test_figures_are_part_of_the_page(site):
    """Drawn as SVG, each with its text, without the fonts of the machine that drew it."""
    for chapter in claims.chapters():
        text = (site / f"notebooks/{chapter}.html").read_text(encoding="utf-8")
        plots = re.findall(r"<svg[^>]*class=\"plot\".*?</svg>", text, re.DOTALL)
        assert plots, chapter
        assert not re.search("<img|DejaVu|<style|<metadata", "".join(plots))
        for plot in plots:
            assert re.search('role="img" aria-label="[^"]{20,}"', plot), plot[:200]
            used = set(re.findall(r'(?:href="|url\()#([^")]+)', plot))
            assert used <= set(re.findall(' id="([^"]+)"', plot)), "it uses names of its own"


def test_the_scorecard_has_each_claim_and_each_is_in_the_evidence_of_one_notebook(site):
    names = [anchor(claim) for claim in claims.ledger().values()]
    page = pages(site)[site / "book/scorecard.html"]
    assert page.claims == names
    assert max(page.ids.values()) == 1
    links = "".join(path.read_text("utf-8") for path in (site / "notebooks").glob("*.html"))
    evidence = "".join(re.findall(r'<table class="[^"]*evidence.*?</table>', links, re.DOTALL))
    assert sorted(re.findall('scorecard.html#(claim-.*?)"', evidence)) == sorted(names)


def test_exercises_and_answers_are_folded(site):
    """An exercise with its cells and its solution; an answer with what its cell shows, then the
    code, and below it the finding. The cells that only run a page are one bar."""
    for chapter in claims.chapters():
        text = (site / f"notebooks/{chapter}.html").read_text(encoding="utf-8")
        boxes = re.findall(r'<details class="exercise-box printed">.*?</details></div>', text, re.S)
        assert boxes
        assert {box.count("cell tag_exercise") for box in boxes} == {2}, chapter
        assert sum("solution dropdown" not in box for box in boxes) <= 1, "but for the open one"
        assert ">Solutions<" not in text, "a section that has none left"
        assert text.count('<details class="run">') == 1
        answers = text.split('<div class="dropdown answer')[1:]
        assert 0 < text.count('<div class="after-answer') <= len(answers)
        for answer in answers:
            answer, finding, _ = answer.partition('<div class="after-answer')
            shown, code, _ = answer.partition("Show the code")
            assert not (finding and code) or "cell_output" in shown, chapter
        assert '<div class="after-bets' in text
        printed = re.findall(r'<div class="output stream.*?</pre>', text, re.DOTALL)
        assert not [each for each in printed if re.search(r"[ (]-\d", each)], "a real minus sign"
