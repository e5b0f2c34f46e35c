"""Every link, image and citation of the built pages leads somewhere, and no page is heavy."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from iclutils.bookkit import address, build

ROOT = Path(__file__).parents[1]
ADDRESS = "https://github.com/owner/repository"
LIMIT = 2_000_000  # bytes that one page may cost its reader


class Page(HTMLParser):
    """Ids of a page, and the addresses that it links to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            preloaded = tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon")
            (self.loads if preloaded else self.links).append(given["href"])
        if "src" in given:
            self.loads.append(given["src"])


@cache
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the built book."""
    found = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    return {path: Page(path) for path in found}


def target(page: Path, link: str) -> tuple[Path, str]:
    """File and fragment that a link of a page leads to."""
    parts = urlsplit(link)
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, parts.fragment


def inside(link: str) -> bool:
    return not urlsplit(link).scheme


def test_every_page_of_the_contents_is_built(site: Path) -> None:
    wanted = {site / f"{name}.html" for name in [*build.pages(ROOT), "index", "search", "genindex"]}
    assert wanted == set(pages(site))


def test_every_link_inside_the_book_leads_somewhere(site: Path) -> None:
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


def test_what_a_page_loads_is_on_the_disk(site: Path) -> None:
    for path, page in pages(site).items():
        assert [link for link in page.loads if not inside(link) and link[:5] != "data:"] == [], path


def test_links_out_of_the_book_are_well_formed(site: Path) -> None:
    out = {link for page in pages(site).values() for link in page.links if not inside(link)}
    assert len(out) > 20
    wrong = [
        link
        for link in out
        if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[^\s<>\"]*)?", link)
        or urlsplit(link).netloc in ("example.org", "example.com")
    ]
    assert wrong == []


def test_every_citation_is_in_the_bibliography(site: Path) -> None:
    """A key that is in no entry would be shown as it was typed."""
    entries = pages(site)[site / "book/bibliography.html"].ids
    for path in pages(site):
        text = path.read_text(encoding="utf-8")
        cited = re.findall(r'<a class="reference internal" href="[^"]*#([^"]+)"[^>]*>[^<]*<', text)
        named = {name for name in cited if name in entries}
        assert "[?]" not in text, path
        assert "{cite" not in text, path
        if path.name.startswith(("01", "02", "03", "04", "05")):
            assert named, f"{path.name} cites nothing"


def weights(site: Path) -> dict[str, int]:
    """Bytes of each page with what it loads itself: not MathJax, nor what every page loads."""
    loaded = {
        path: {target(path, link)[0] for link in page.loads if inside(link)}
        for path, page in pages(site).items()
        if path.name != "index.html"  # it only leads to the first page
    }
    common = set.intersection(*loaded.values())
    own = {path: [path, *(files - common)] for path, files in loaded.items()}
    return {
        str(path.relative_to(site)): sum(
            file.stat().st_size for file in files if "mathjax" not in file.parts
        )
        for path, files in own.items()
    }


def test_every_page_is_light(site: Path) -> None:
    heavy = {name: size for name, size in weights(site).items() if size > LIMIT}
    assert heavy == {}
    assert max(weights(site).values()) > 200_000, "the figures were not counted"


# Launch, repository and issue buttons

PROSE, CHAPTER = "book/intro", "notebooks/01_gpt2_induction"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Links out of an empty page and an empty chapter, of a book that has an address."""
    folder = tmp_path_factory.mktemp("launched")
    for name in ("src/book", "src/notebooks"):
        (folder / name).mkdir(parents=True)
    page = f"# Title\n\n```{{toctree}}\n/{CHAPTER}\n```\n"
    (folder / f"src/{PROSE}.md").write_text(page, encoding="utf-8")
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Title"}
    kernel = {"kernelspec": {"display_name": "Python 3", "name": "python3"}}
    document = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / f"src/{CHAPTER}.ipynb").write_text(json.dumps(document), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, patch_docutils(), docutils_namespace():
        options = address.launch_options(ADDRESS)
        patch.setattr(address, "launch_options", lambda: options)
        Sphinx(
            srcdir=folder / "src",
            confdir=None,
            outdir=folder / "out",
            doctreedir=folder / "doctrees",
            buildername="html",
            confoverrides={
                "extensions": ["myst_nb", "sphinx_book_theme", "iclutils.bookkit.sphinx_ext"],
                "html_theme": "sphinx_book_theme",
                "nb_execution_mode": "off",
                "root_doc": PROSE,
            },
            status=None,
        ).build()
    return {
        name: [link for link in Page(folder / f"out/{name}.html").links if "owner" in link]
        for name in (PROSE, CHAPTER)
    }


def in_the_repository() -> set[str]:
    """Files that git tracks, or would track once they are added."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], capture_output=True, text=True)
    return set(done.stdout.split("\0"))


def test_launch_links_lead_to_files_of_the_repository(launched: dict[str, list[str]]) -> None:
    """A link is made from the name of the page, so what holds for two of them holds for all."""
    tracked, files = in_the_repository(), {PROSE: f"{PROSE}.md", CHAPTER: f"{CHAPTER}.ipynb"}
    for name, links in launched.items():
        assert ADDRESS in links
        assert any(link.startswith(f"{ADDRESS}/issues/new?title=") for link in links)
        source = re.compile(r".*/owner/repository/(?:blob|edit)/(?P<ref>[^/]+)/(?P<file>.*)")
        found = [match for match in map(source.fullmatch, links) if match]
        assert {match["file"] for match in found} <= {files[name]}
        assert {match["ref"] for match in found} <= {address.TAG, "main"}
    colab = "https://colab.research.google.com/github/owner/repository/blob"
    assert f"{colab}/{address.TAG}/{files[CHAPTER]}" in launched[CHAPTER]
    assert not any("colab" in link for link in launched[PROSE])
    for name in build.pages(ROOT):
        assert tracked & {f"{name}.md", f"{name}.ipynb"}, f"{name} is on the disk alone"


def test_without_an_address_there_is_no_such_button(site: Path) -> None:
    if address.ADDRESS:
        pytest.skip("there is an address")
    for path in pages(site):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"colab\.research|btn-source-|btn-launch", text), path
