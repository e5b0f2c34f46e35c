"""The induction pair: a head that writes the previous token, and one that looks it up.

The second head is found by its pattern, the first by its effect: the share of the second's prefix
matching that is lost when the first one's write into the second one's *keys*, and nothing else, is
what it would be on other sequences (path patching; Wang et al. 2022). The pair stands for the rule
of ``ideal_attention`` (Elhage et al. 2021; Olsson et al. 2022).

Example:
    >>> import torch
    >>> from iclutils.chapters.circuits import pair
    >>> from iclutils.tasks.repeated import RepeatedTokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, baselines
from ...interp.graph import Edge, Node, all_heads, component_outputs, head
from ...interp.head_scores import prefix_matching, score_heads, strongest
from ...interp.patching import patch_edges, patch_key_input
from ...interp.statistics import bootstrap, mean_se
from ...interp.weights import composition_baseline, composition_scores, copying_scores
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar
from ...tasks.repeated import RepeatedTokens
from ..induction import LABEL
from .patterns import repeats

ROWS = 16384  # rows of d_model held at once
DROP = 0.1  # share of prefix matching that a path must carry to belong to the circuit
Measured = tuple[float, float]  # mean and standard error over sequences


@dataclass(frozen=True)
class Pair:
    """Two heads and what makes them a pair; measured values with their standard errors.

    Attributes:
        previous, induction: the heads.
        prefix: prefix matching of the induction head.
        previous_score, duplicate_score: attention of the first head to the token before, and to
            the earlier copy of the current token.
        drop: share of the prefix matching that its path carries.
        edges: paths into the keys of every induction head (prefix matching above 0.4, or the
            best) that carry more than a tenth of its matching; at least the pair's own.
        loss: share of the gap lost when all of ``edges`` are patched at once.
        copying: of the induction head's weights (-1 to 1); NaN without a folded model.
        k_composition: of the two, in standard deviations above random heads; likewise.
    """

    previous: Node
    induction: Node
    prefix: Measured
    previous_score: Measured
    duplicate_score: Measured
    drop: Measured
    edges: tuple[Edge, ...]
    loss: Measured
    copying: float = float("nan")
    k_composition: float = float("nan")


def find_induction_circuit(
    model: TransformerBridge,
    batch: RepeatedTokens,
    other: RepeatedTokens,
    generator: Generator,
    folded: TransformerBridge | None = None,
) -> Pair:
    """The best induction head, and the earlier head whose path to its keys matters most.

    Args:
        model: the model.
        batch: the sequences.
        other: the same with another first copy (clean and corrupt tokens of a task).
        generator: source of randomness for the null of composition and for standard errors.
        folded: the same model loaded with ``fold=True``, to read its weights.

    Example:
        >>> from iclutils import models
        >>> from iclutils.interp import clean_corrupt
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
    seconds = [second, *(head(*place) for place in (prefix > LABEL).nonzero().tolist())]
    seconds = list(dict.fromkeys(seconds))  # the best comes first, and once
    drops, heads = path_drops(model, batch, other, seconds), all_heads(model)
    best = int(drops[: second.layer * model.cfg.n_heads, 0].mean(-1).argmax())
    first = heads[best]
    chosen = [(first, 0), *((heads[u], v) for u, v in (drops.mean(-1) > DROP).nonzero().tolist())]
    edges = dict.fromkeys((u, Node("k", *seconds[v][1:])) for u, v in chosen)

    at = torch.arange(batch.clean_half.start, batch.clean_half.stop, device=batch.tokens.device)
    at = at.expand(len(batch.tokens), -1)
    task = CleanCorrupt(batch.tokens, other.tokens, at, batch.tokens.gather(1, at + 1))
    clean, corrupt = baselines(model, task)
    lost = torch.stack([clean - patch_edges(model, task, list(edges)), clean - corrupt], -1)
    loss = bootstrap(lost, lambda mean: mean[0] / mean[1], generator)
    return Pair(
        previous=first,
        induction=second,
        prefix=mean_se(scores["prefix"][:, second.layer, second.head]),
        previous_score=mean_se(scores["previous"][:, first.layer, first.head]),
        duplicate_score=mean_se(scores["duplicate"][:, first.layer, first.head]),
        drop=mean_se(drops[best, 0]),
        edges=tuple(edges),
        loss=loss,
        **({} if folded is None else _weights(folded, first, second, generator)),
    )


def path_drops(
    model: TransformerBridge,
    batch: RepeatedTokens,
    other: RepeatedTokens,
    induction: Sequence[Node],
) -> Float[Tensor, "head induction batch"]:
    """Share of an induction head's prefix matching lost by each earlier head's path to its keys.

    The write of one head is exchanged for what it writes on ``other``, in the keys of one
    induction head alone; for every head of the model, 0 where it is not in an earlier layer. Mean
    over sequences is mean lost over mean matching.
    """
    heads = all_heads(model)
    last = max((node.layer for node in induction), default=0)
    early = [node for node in heads if node.layer < last]
    clean, foreign = (component_outputs(model, b.tokens, early) for b in (batch, other))
    change = {node: foreign[node] - clean[node] for node in early}
    out = torch.zeros(len(heads), len(induction), len(batch.tokens), device=batch.tokens.device)
    for i, target in enumerate(bar(induction, "induction heads")):
        changes = {node: change[node] for node in early if node.layer < target.layer}
        if changes:
            before, after = _matching(model, batch, other, target, changes)
            out[: len(changes), i] = (before - after) / before.mean()
    return out


def ideal_attention(tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch dest src"]:
    """a_t(s) = [x_{s-1} = x_t] / number of such s: even over what followed the current token.

    Rows without a match are 0. The first token is no match for any.
    """
    follows = repeats(tokens).roll(1, -1).float()
    return follows / follows.sum(-1, keepdim=True).clamp_min(1)


def ideal_prediction(
    tokens: Int[Tensor, "batch pos"], vocab: int
) -> Float[Tensor, "batch pos vocab"]:
    """p(x_{t+1} = v) = sum over s of a_t(s) [x_s = v]; 0 for every v where nothing matches."""
    attention = ideal_attention(tokens)
    out = attention.new_zeros(*tokens.shape, vocab)
    return out.scatter_add_(-1, tokens[:, None].expand_as(attention), attention)


def _matching(
    model: TransformerBridge,
    batch: RepeatedTokens,
    other: RepeatedTokens,
    target: Node,
    changes: dict[Node, Float[Tensor, "batch pos d_model"]],
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "patch batch"]]:
    """Prefix matching of one head before, and after each change of its keys.

    All changes at once, keys of the changed residual stream against the queries of one clean
    pass, where that reproduces the clean run; else by one hooked pass for each.
    """
    layer, index, length = target.layer, target.head, batch.length
    names = [f"blocks.{layer}.{n}" for n in ("hook_resid_pre", "attn.hook_q", "attn.hook_k")]
    _, cache = cached(model, batch.tokens, [*names, get_act_name("pattern", layer)])
    before = prefix_matching(cache[get_act_name("pattern", layer)][:, index], length)
    resid, q, k = (cache[name] for name in names)
    query = q[:, length + 1 :, index] / q.shape[-1] ** 0.5  # those of the second copy
    size = resid.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool, device=resid.device).tril()[length + 1 :]
    entry = torch.arange(length, device=resid.device)

    def matching(shift: Float[Tensor, "patch batch pos d_model"]) -> Tensor:
        normal = model.blocks[layer].ln1((resid + shift).flatten(0, 1))
        keys = (normal @ model.W_K[layer, index]).unflatten(0, shift.shape[:2])
        keys = keys + model.b_K[layer, index]
        scores = (query @ keys.mT).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1)[..., entry, entry + 2].mean(-1)  # row L+1+i matches i+2

    plain = q.shape == k.shape and model.cfg.positional_embedding_type == "standard"
    with torch.no_grad():
        if plain and torch.allclose(matching(torch.zeros_like(resid)[None])[0], before, atol=1e-5):
            per = max(1, ROWS // resid[..., 0].numel())
            parts = [list(changes.values())[i : i + per] for i in range(0, len(changes), per)]
            return before, torch.cat([matching(torch.stack(part)) for part in parts])
    pairs = [([(u.layer, u.head)], (layer, index)) for u in changes]
    after = [patch_key_input(model, batch.tokens, *pair, other.tokens) for pair in pairs]
    return before, torch.stack([prefix_matching(pattern, length) for pattern in after])


def _weights(
    folded: TransformerBridge, first: Node, second: Node, generator: Generator
) -> dict[str, float]:
    score = composition_scores(folded, "K")[(*first[1:], *second[1:])].item()
    mean, spread = composition_baseline(folded.cfg.d_model, folded.cfg.d_head, generator)
    copying = copying_scores(folded)[second.layer, second.head].item()
    return {"copying": copying, "k_composition": (score - mean) / spread}
