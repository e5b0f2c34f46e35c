"""Pages about errors: what a page shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from book._ext.pages import message as shown
from iclutils import IclError

FOLDER = Path(__file__).parents[2] / "book/errors"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md")) if shown(path)}
# What cannot be brought about safely, or not on every machine.
WITHOUT = {"coursework", "extras", "no_build", "offline", "stale", "stopped", "verdicts"}


def example(page: str) -> str:
    """The lines that bring a message about, if its page has some."""
    found = re.search(r"```python\n(.*?)```", PAGES[page].read_text(), re.DOTALL)
    return found[1] if found else ""


def test_which_pages_have_examples() -> None:
    assert {page for page in PAGES if not example(page)} == WITHOUT


@pytest.mark.usefixtures("results_elsewhere")
@pytest.mark.parametrize("page", sorted(set(PAGES) - WITHOUT))
def test_an_example_raises_what_its_page_shows(page: str) -> None:
    with pytest.raises(IclError) as caught:
        exec(example(page), {})
    said = re.sub(r"/\S*/tmp\w+", "FOLDER", str(caught.value))
    assert " ".join(said.split()) == shown(PAGES[page])
