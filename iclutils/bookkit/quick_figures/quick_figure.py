"""What a quick figure is asked, what it gives, and what it says before it starts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor

from ... import models, zoo
from ...errors import IclError
from ...files import read_json, replacing
from ...models import TransformerBridge
from ...progress import quiet, say
from ..session import Session

Labelled = tuple[str, str]  # a text and its label
FLOAT = 4  # bytes


@dataclass(frozen=True, repr=False)
class QuickFigure:
    """A figure, the numbers that it draws, and what it shows in words.

    ``alt`` describes the figure to who cannot see it; ``text`` says what was found.
    """

    chapter: str
    figure: Figure
    numbers: dict[str, Any]
    alt: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write the figure as PNG or SVG, with its description inside."""
        path = Path(path)
        ending = path.suffix.lower()[1:]
        if ending not in ("png", "svg"):
            raise IclError(f"Figures are written as .png or .svg; got {path.name!r}.")
        with replacing(path) as temporary:
            self.figure.savefig(temporary, format=ending, metadata={"Description": self.alt})
        return path


@dataclass(frozen=True)
class Request:
    """One call of ``show``; ``kind`` is what the folder of the model holds."""

    session: Session
    name: str
    kind: str
    prompt: str = ""
    demonstrations: tuple[Labelled, ...] = ()
    query: str | Labelled = ""

    def load(self, fold: bool = False) -> TransformerBridge:
        """The model, after saying how large it is; folding holds two more copies for a while."""
        more = ", three times that while they are folded" if fold else ""
        say(f"loading {self.name}: {amount(models.size(self.name))} of weights in memory{more}")
        return self.session.load(self.name, fold=fold)


def kind_of(name: str) -> str:
    """What a name or folder holds: ``in-context regressors``, ``solvers`` or a ``transformer``."""
    known = name in zoo.names() or name in zoo.names(zoo.trained()) or Path(name).is_dir()
    config = zoo.find(name) / "config.json" if known else None
    if config is None or not config.is_file():
        return "transformer"
    kind = str(read_json(config).get("model_type"))
    return kind if kind in ("in-context regressors", "solvers") else "transformer"


def announce(
    model: TransformerBridge,
    what: str,
    tokens: Int[Tensor, "batch pos"],
    passes: float | int,
    *,
    patterns: int = 3,
    streams: int = 12,
    vocab: int = 2,
    more: int = 0,
) -> None:
    """Say what comes, for about how long, in how much memory; one pass is timed for it.

    Args:
        what: in words.
        tokens: what is read at once.
        passes: how many passes over ``tokens`` it takes.
        patterns, streams, vocab: tensors of the size of a layer's attention patterns, of the
            residual stream and of the logits that are held at once, beside the weights.
        more: other bytes.
    """
    if quiet():
        return
    start, cfg = time.perf_counter(), model.cfg
    models.logits(model, tokens)
    seconds = passes * (time.perf_counter() - start)
    each = vocab * cfg.d_vocab + streams * cfg.d_model + patterns * cfg.n_heads * tokens.shape[1]
    held = amount(FLOAT * tokens.numel() * each + more)
    say(f"{what}: {duration(seconds)}, {held} of memory beside the weights")


def amount(size: float | int) -> str:
    """Bytes in words."""
    for unit, many in (("GB", 1e9), ("MB", 1e6)):
        if size >= many:
            return f"about {_rounded(size / many)} {unit}"
    return "less than 1 MB"


def duration(seconds: float | int) -> str:
    """Seconds in words."""
    if seconds < 2:
        return "less than 2 seconds"
    if seconds < 100:
        return f"about {_rounded(seconds)} seconds"
    return f"about {_rounded(seconds / 60)} minutes"


def _rounded(value: float | int) -> str:
    """Two significant digits, no more than an estimate is worth."""
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):.{max(0, digits)}f}"
