"""The induction pair: a head that writes the previous token, and one that looks it up.

The second head is found by its pattern, the first by its effect: the share of the second's prefix
matching that is lost when the first one's write into the second one's *keys*, and nothing else, is
what it would be on other sequences (path patching; Wang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from ...errors import IclError
from ...interp import graph
from ...interp.clean_corrupt import CleanCorrupt
from ...interp.graph import Edge, Node, head
from ...interp.head_scores import LABEL, prefix_matching, score_heads, strongest
from ...interp.patching import CleanRun, key_patterns
from ...interp.statistics import mean_se
from ...interp.weights import composition_baseline, composition_scores, copying_scores
from ...models import TransformerBridge
from ...progress import bar
from ...tasks.repeated import RepeatedTokens

DROP = 0.1  # share of prefix matching that a path must carry to belong to the circuit
Measured = tuple[float, float]  # mean and standard error over sequences


class Pair(NamedTuple):
    """Two heads and what makes them a pair: the matching (``prefix``) of the induction head, the
    share of it that the path from the other head carries (``drop``), and that head's attention to
    the token before and to the earlier copy. ``edges``: all paths into the keys of induction heads
    that carry more than a tenth of it. From folded weights: ``copying`` (-1 to 1), and
    ``k_composition`` in standard deviations above random heads."""

    previous: Node
    induction: Node
    prefix: Measured
    previous_score: Measured
    duplicate_score: Measured
    drop: Measured
    edges: tuple[Edge, ...]
    copying: float = float("nan")
    k_composition: float = float("nan")


def find_induction_circuit(
    model: TransformerBridge,
    batch: RepeatedTokens,
    other: RepeatedTokens,
    generator: Generator,
    folded: TransformerBridge | None = None,
) -> Pair:
    """The best induction head, and the earlier head whose path to its keys matters most. ``other``:
    the same sequences with another first copy. ``folded``: the same model loaded with
    ``fold=True``, to read its weights; ``generator`` is for the null of their composition.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters.attention_circuits import pair
        >>> from iclutils.interp import clean_corrupt
        >>> from iclutils.tasks.repeated import RepeatedTokens
        >>> net, generator = models.load("induction-0"), torch.Generator().manual_seed(0)
        >>> task = clean_corrupt.copying(net, 6, 8, generator)
        >>> batches = (RepeatedTokens(tokens, 8) for tokens in (task.clean, task.corrupt))
        >>> found = pair.find_induction_circuit(net, *batches, generator)
        >>> found.previous.layer, found.induction.layer
        (0, 1)
    """
    if model.cfg.n_layers < 2:
        raise IclError("An induction pair needs two attention layers; this model has one.")
    scores = score_heads(model, batch.tokens, batch.length)
    prefix = scores["prefix"].mean(0)
    prefix[0] = 0  # nothing below layer 0 could feed a head there
    second = head(*strongest(prefix))
    labelled = (head(*place) for place in (prefix > LABEL).nonzero().tolist())
    seconds = list(dict.fromkeys([second, *labelled]))  # the best comes first, and once
    drops, heads = path_drops(model, batch, other, seconds), graph.all_heads(model)
    best = int(drops[: second.layer * model.cfg.n_heads, 0].mean(-1).argmax())
    first, strong = heads[best], (drops.mean(-1) > DROP).nonzero().tolist()
    paths = [(first, second), *((heads[u], seconds[v]) for u, v in strong)]
    weights = {}
    if folded is not None:
        score = composition_scores(folded, "K")[(*first[1:], *second[1:])].item()
        mean, spread = composition_baseline(folded.cfg.d_model, folded.cfg.d_head, generator)
        weights["k_composition"] = (score - mean) / spread
        weights["copying"] = copying_scores(folded)[second.layer, second.head].item()
    return Pair(
        previous=first,
        induction=second,
        prefix=mean_se(scores["prefix"][:, second.layer, second.head]),
        previous_score=mean_se(scores["previous"][:, first.layer, first.head]),
        duplicate_score=mean_se(scores["duplicate"][:, first.layer, first.head]),
        drop=mean_se(drops[best, 0]),
        edges=tuple(dict.fromkeys((u, v._replace(kind="k")) for u, v in paths)),
        **weights,
    )


def path_drops(
    model: TransformerBridge,
    batch: RepeatedTokens,
    other: RepeatedTokens,
    induction: Sequence[Node],
) -> Float[Tensor, "head induction batch"]:
    """Share of an induction head's prefix matching that is lost when its keys, and nothing else,
    read what an earlier head writes on ``other``; 0 for heads that are not earlier. Mean over
    sequences is mean lost over mean matching."""
    heads = graph.all_heads(model)
    at = torch.full_like(batch.tokens[:, :1], batch.tokens.shape[1] - 1)
    run = CleanRun(model, CleanCorrupt(batch.tokens, other.tokens, at, batch.tokens[:, :1]))
    drops = torch.zeros(len(heads), len(induction), len(batch.tokens), device=batch.tokens.device)
    for i, target in enumerate(bar(induction, "induction heads")):
        below = target.layer * model.cfg.n_heads
        seen = key_patterns(run, [[], *([node] for node in heads[:below])], target)
        before, *after = prefix_matching(seen.flatten(0, 1), batch.length).view(len(seen), -1)
        if below:
            drops[:below, i] = (before - torch.stack(after)) / before.mean()
    return drops
