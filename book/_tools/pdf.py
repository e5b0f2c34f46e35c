"""Chapters on paper: pages of the built book, printed to PDF by an installed browser."""

from __future__ import annotations

from pathlib import Path

from iclutils.errors import IclError
from iclutils.files import replacing

from . import doctor

FLAGS = ["--no-sandbox", "--disable-gpu"]
PATIENCE = 180_000  # ms that a step may take on a slow machine


def make(html: Path, folder: Path, names: list[str]) -> list[Path]:
    """Print pages of the book in ``html``, one PDF each into ``folder``: A4, light, with an outline
    and tags for screen readers, without what is folded on the page."""
    program = doctor.browser()
    if program is None:
        raise IclError(
            "Printing needs Chromium or Chrome, and none was found. Install one of them, or open "
            f"a page in any browser and print it there. Looked for: {', '.join(doctor.BROWSERS)}."
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise IclError('Printing needs playwright: pip install -e ".[dev]"') from None
    missing = [name for name in names if not (html / f"{name}.html").is_file()]
    if missing:
        raise IclError(f"{html} has no page {missing[0]}. Run: make book")
    printed = []
    with sync_playwright() as playwright:
        launch = playwright.chromium.launch
        started = launch(executable_path=program, args=FLAGS, timeout=PATIENCE)
        tab = started.new_page()
        tab.set_default_timeout(PATIENCE)
        for name in names:
            tab.goto((html / f"{name}.html").resolve().as_uri())
            path = folder / f"{Path(name).name}.pdf"
            with replacing(path) as temporary:
                tab.pdf(path=temporary, format="A4", prefer_css_page_size=True, outline=True,
                        tagged=True, print_background=True)  # fmt: skip
            printed.append(path)
        started.close()
    return printed
