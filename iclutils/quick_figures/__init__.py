"""Quick figures: each chapter's main figure, from one call, on a model of the reader's own.

The measures are those of the chapters; only the sizes are small, so that a call on a model of GPT-2
small's shape takes about a minute on two cores.

Example:
    >>> import iclutils
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import presets
from ..errors import IclError, unknown
from ..session import Session, refuse, resolve_device
from . import circuits, gradient_descent, induction, label_words, regression
from .quick_figure import Labelled, QuickFigure, Request, kind_of

__all__ = ["QuickFigure", "show"]

CHAPTERS = {
    "01": induction.draw,
    "02": label_words.draw,
    "03": regression.draw,
    "04": gradient_descent.of_lsa,
    "05": gradient_descent.of_heads,
    "06": circuits.draw,
}
# Which chapter looks at networks without tokens.
NUMBERS = {"in-context regressors": "03", "solvers": "04"}


def show(
    chapter: str,
    model: str | Path = "",
    *,
    prompt: str = "",
    demonstrations: Sequence[Labelled] = (),
    query: str | Labelled = "",
    seed: int = 0,
    device: str = "auto",
) -> QuickFigure:
    """A chapter's main figure for one model; what it will take is said before.

    Args:
        chapter: its number.
        model: a Hugging Face folder, a name that ``load`` knows, or a folder of in-context
            regressors (03) or of linear self-attention (04); the chapter's own model if omitted.
        prompt: chapter 01 only, for a model with a tokenizer: a text, which is shown twice.
        demonstrations, query: chapter 02 only, for a model with a tokenizer: texts with their
            labels, and the text to be labelled, with its label if there is a right one.
        seed, device: as in ``begin``.

    Example:
        >>> made = iclutils.show("01", "induction-0")
        >>> made.numbers["induction head"]
        (1, 0)
    """
    if chapter not in CHAPTERS:
        raise unknown("chapter", chapter, CHAPTERS)
    if prompt and chapter != "01":
        raise IclError("A prompt of your own is for chapter 01; 02 takes demonstrations and query.")
    if (demonstrations or query) and chapter != "02":
        raise IclError("Demonstrations and a query are for chapter 02.")
    refuse(str(model), seed)
    tier = presets.get("mini")
    name = str(model) or tier.models(chapter)[0]
    kind = kind_of(name)
    if NUMBERS.get(kind, chapter) != chapter:
        raise IclError(
            f"{name!r} holds {kind}, which read numbers and no tokens: ask for chapter "
            f"{NUMBERS[kind]}, or name a language model."
        )
    if chapter == "04" and kind == "transformer":
        raise IclError(
            f"Chapter 04 looks at networks that read numbers, such as 'lsa-1'; ask for chapter 05, "
            f"which takes the heads of {name!r} as steps of gradient descent."
        )
    session = Session(tier, str(model), seed, resolve_device(device))
    return CHAPTERS[chapter](Request(session, name, kind, prompt, tuple(demonstrations), query))
