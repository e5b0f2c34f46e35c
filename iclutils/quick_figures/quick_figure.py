"""What a quick figure is asked, what it gives, and what it says before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor

from .. import models, zoo
from ..errors import IclError
from ..files import read_json, replacing
from ..models import TransformerBridge
from ..progress import quiet, say
from ..session import Session

Labelled = tuple[str, str]  # a text and its label
FLOAT = 4  # bytes


@dataclass(frozen=True, repr=False)
class QuickFigure:
    """A figure, the numbers that it draws, and in words what it shows (``alt``, for who cannot see
    it) and what was found (``text``)."""

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
        form = ending(path)
        with replacing(path) as temporary:
            self.figure.savefig(temporary, format=form, metadata={"Description": self.alt})
        return path


def ending(path: Path) -> str:
    """The format that a figure's file is written in, by its name."""
    if path.suffix not in (".png", ".svg"):
        raise IclError(f"Figures are written as .png or .svg; got {path.name!r}.")
    return path.suffix[1:]


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
    kind = read_json(config).get("model_type") if config and config.is_file() else None
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
    """Say what comes, for how long (one of the ``passes`` over ``tokens`` is timed), and in how
    much memory: attention patterns, residual streams and logits held at once, and ``more`` bytes.
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
    if size < 1e6:
        return "less than 1 MB"
    return f"about {_rounded(size / 1e9)} GB" if size >= 1e9 else f"about {_rounded(size / 1e6)} MB"


def duration(seconds: float | int) -> str:
    """Seconds in words."""
    if seconds < 2:
        return "less than 2 seconds"
    if seconds < 100:
        return f"about {_rounded(seconds)} seconds"
    return f"about {_rounded(seconds / 60)} minutes"


def _rounded(value: float | int) -> str:
    """Two significant digits, no more than an estimate is worth."""
    return f"{float(f'{value:.1e}'):g}"
