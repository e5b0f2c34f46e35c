"""Pages about errors: every message has one, and what a page shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from iclutils import IclError
from iclutils.bookkit.sphinx_ext import messages

FOLDER = Path(__file__).parents[1] / "book/errors"
PAGES = messages.claims(FOLDER)
ALL = messages.messages()
REST = "does_not_fit"


def shown(page: str) -> str:
    """The message that a page shows, on one line."""
    text = (FOLDER / f"{page}.md").read_text()
    block = re.search(r"## You see\n\n```text\n(.*?)\n```", text, re.DOTALL)
    assert block, page
    return " ".join(block[1].split())


def example(page: str) -> str:
    """The lines that bring it about, if the page has some."""
    found = re.search(r"```python\n(.*?)```", (FOLDER / f"{page}.md").read_text(), re.DOTALL)
    return found[1] if found else ""


def template(message: str) -> re.Pattern[str]:
    """What a message of the code looks like once … is filled in."""
    parts = (re.escape(" ".join(part.split(" "))) for part in " ".join(message.split()).split("…"))
    return re.compile(".*".join(parts), re.DOTALL)


def test_every_message_has_a_page_and_every_page_messages() -> None:
    assert len(ALL) > 300
    found = {message.text: messages.page_of(message.text, PAGES) for message in ALL}
    assert set(found.values()) == set(PAGES)
    for page, expressions in PAGES.items():
        for expression in expressions:
            own = [text for text, at in found.items() if at == page and expression.search(text)]
            assert own, f"{page}: no message is matched by {expression.pattern}"


def test_most_messages_have_a_page_of_their_own_kind() -> None:
    rest = [m for m in ALL if messages.page_of(m.text, PAGES) == REST]
    assert len(rest) < len(ALL) / 3


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_shows_one_of_its_messages(page: str) -> None:
    said = shown(page)
    fitting = [m.text for m in ALL if template(m.text).fullmatch(said)]
    specific = max(fitting, key=lambda text: len(text.replace("…", "")))
    assert messages.page_of(specific, PAGES) == page


@pytest.mark.usefixtures("results_elsewhere")
@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if example(page)])
def test_an_example_raises_what_its_page_shows(page: str) -> None:
    with pytest.raises(IclError) as caught:
        exec(example(page), {})
    said = re.sub(r"/\S*/tmp\w+", "FOLDER", str(caught.value))
    assert " ".join(said.split()) == shown(page)


def test_only_what_cannot_be_shown_safely_has_no_example() -> None:
    without = {page for page in PAGES if not example(page)}
    assert without == {
        "coursework", "extras", "no_build", "offline", "stale", "stopped", "verdicts",
    }  # fmt: skip


def test_the_index_names_every_page() -> None:
    index = (FOLDER / "index.md").read_text()
    assert set(re.findall(r"\{doc\}`(\w+)`", index)) == set(PAGES)
    assert "{messages}" in index
