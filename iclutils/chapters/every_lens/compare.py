"""The six lenses side by side: a score of every head from each, and sets of heads to take away."""

from __future__ import annotations

from collections.abc import Mapping, Set

from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...interp.head_scores import draw_heads
from .marks import LENSES, Marks
from .smoothers import beyond_counting

Heads = frozenset[int]  # numbers of heads in order of depth
AGAIN = ("matchers only", "readers only")  # whose control is drawn twice, the second as its null


def head_scores(
    marked: Marks,
    prefix: Float[Tensor, "sequence layer head"],
    contexts: tuple[Float[Tensor, "context choice"], Tensor, Float[Tensor, "context _ _ demo"]],
    shows: Int[Tensor, "context demo"],
    part: slice = slice(None),
) -> dict[str, Float[Tensor, "layer head"]]:
    """Score of every head by each lens, from all prompts, sequences and contexts or a part of each;
    ``contexts`` as of ``smoothers.read_examples``."""
    logits, _, looks = contexts
    other = {
        "induction": prefix[part].mean(0).cpu(),
        "algorithm": beyond_counting(looks[part], shows[part], logits[part]).float(),
    }
    return {k: other[k] if k in other else getattr(marked, k)[part].mean(0) for k in LENSES}


def sets_to_remove(
    top: Mapping[str, Set[int]], layer: Int[Tensor, "head"], generator: Generator
) -> dict[str, Heads]:
    """The heads that each lens marks, what circuit, anchors and induction share or mark alone, and
    for each set a control: as many heads of the same layers that none of these three marks."""
    needed, reads, match = (frozenset(top[k]) for k in ("circuit", "anchors", "induction"))
    sets = {k: frozenset(v) for k, v in top.items()} | {
        "both": reads & match,
        "matchers only": match - reads,
        "readers only": reads - match,
        "circuit only": needed - reads,
        "no circuit": reads - needed,
    }
    barred, drawn = needed | reads | match, {}
    for end, names in ((", others", tuple(sets)), (", others again", AGAIN)):
        for k in names:
            drawn[k + end] = draw_heads(sets[k], layer, generator, barred)
    return sets | drawn
