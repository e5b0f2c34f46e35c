"""Progress: one kind of bar for everything that may take longer than two seconds."""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds of work before a bar is shown


def bar(items: Iterable[Item] | None = None, what: str = "", total: int | None = None) -> Any:
    """Go through ``items`` and show how far one is, once it takes longer than ``PATIENCE``; nothing
    where ``$ICLUTILS_QUIET`` is set, so that a page does not depend on the speed of a machine."""
    return tqdm(items, desc=what, total=total, leave=False, delay=PATIENCE, disable=quiet())


def say(text: str) -> None:
    """Print what is about to be done, above any bar, unless all is to be quiet."""
    if not quiet():
        tqdm.write(text)


def quiet() -> bool:
    """Whether ``$ICLUTILS_QUIET`` asks for nothing that depends on the speed of a machine."""
    return bool(os.environ.get("ICLUTILS_QUIET"))
