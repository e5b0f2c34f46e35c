"""Find the induction circuit, cut it, and watch it grow.

An induction head attends from a token to what *followed* its earlier copy. It reads, through its
keys, which token came before each position, from a previous-token head in an earlier layer
(K-composition; Elhage et al. 2021)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from ..errors import IclError
from ..interp.attribution import direct_logits
from ..interp.clean_corrupt import CleanCorrupt
from ..interp.graph import model_graph
from ..interp.head_scores import LABEL, prefix_matching, score_heads, strongest, top_heads
from ..interp.hooks import Head, Hook, ablate_sets, at_positions, logits_under, run_with_hooks
from ..interp.patching import key_patterns
from ..interp.readout import check_prompts, is_answered, with_answers
from ..models import TransformerBridge, get_act_name
from ..progress import bar
from ..tasks.repeated import RepeatedTokens
from ..tasks.words import WordPrompts


@dataclass(frozen=True)
class Circuit:
    """Heads by role, as (layer, head)."""

    previous: Head
    induction: Head
    all_induction: tuple[Head, ...]
    all_previous: tuple[Head, ...]

    def others(self, model: TransformerBridge) -> list[Head]:
        """Return every head that has no role."""
        named = self.all_induction + self.all_previous
        heads = product(range(model.cfg.n_layers), range(model.cfg.n_heads))
        return [head for head in heads if head not in named]

    def pairs(self) -> list[tuple[Head, Head]]:
        """Return every previous-token head with every induction head above it."""
        return [(a, b) for a in self.all_previous for b in self.all_induction if a[0] < b[0]]

    def wires(self, every: bool = True) -> dict[Head, list[Head]]:
        """Return the previous-token heads below each induction head, or of the best pair alone."""
        pairs = self.pairs() if every else [(self.previous, self.induction)]
        return {b: [a for a, reader in pairs if reader == b] for _, b in pairs}


@dataclass(frozen=True)
class Cuts:
    """Prefix matching of the induction head, before and after each cut of ``effect_of_cuts``."""

    before: Float[Tensor, "batch"]
    without_previous: Float[Tensor, "batch"]
    without_path: Float[Tensor, "batch"]
    without_others: Float[Tensor, "control batch"]


def find(model: TransformerBridge, batch: RepeatedTokens) -> Circuit:
    """Return the strongest induction head, and the strongest previous-token head in a layer below;
    from scores that are there already: ``roles``."""
    scores = score_heads(model, batch.tokens, batch.length)
    return roles({name: values.mean(0) for name, values in scores.items()})


def roles(scores: Mapping[str, Float[Tensor, "layer head"]], least: int = 1) -> Circuit:
    """Return heads by role from their mean scores (``score_heads``): those above 0.4 or, where no
    head is, the ``least`` highest. Models of one layer, and scores of 0, are refused."""
    if len(scores["prefix"]) < 2:
        raise IclError("An induction circuit needs two attention layers; this model has one.")
    prefix = scores["prefix"].clone()
    prefix[0] = 0  # nothing below layer 0 could feed a head there
    if not prefix.any():
        raise IclError(
            "No head above layer 0 looks at what followed an earlier copy: every prefix-matching "
            "score is 0. Use shorter copies (L), or a model that looks further back."
        )
    induction = strongest(prefix)
    below = scores["previous"][: induction[0]]
    return Circuit(strongest(below), induction, _labelled(prefix, least), _labelled(below, least))


def _labelled(scores: Float[Tensor, "layer head"], least: int) -> tuple[Head, ...]:
    above = torch.nonzero(scores > LABEL).tolist()
    return tuple((layer, head) for layer, head in above) or tuple(top_heads(scores, least))


def effect_of_cuts(
    model: TransformerBridge,
    batch: RepeatedTokens,
    circuit: Circuit,
    other: RepeatedTokens,
    controls: Sequence[Sequence[Head]] | None = None,
) -> Cuts:
    """Measure the induction head's prefix matching when the circuit is cut, on each sequence: the
    previous-token head is mean-ablated; or only its write into the induction head's keys is patched
    with that on ``other``; or each set of ``controls`` is mean-ablated (None: every other head).
    What cuts cost the predictions, ``second_copy`` measures."""
    layer, head = circuit.induction
    if controls is None:
        below = product(range(layer), range(model.cfg.n_heads))
        controls = [[one] for one in below if one not in circuit.all_previous]
    name = get_act_name("pattern", layer)

    def matching(hooks: Sequence[Hook]) -> Tensor:
        _, seen = run_with_hooks(model, batch.tokens, hooks, [name], layer + 1)
        return prefix_matching(seen[name][:, head], batch.length)

    sets = [[circuit.previous], *controls]
    hooks = ablate_sets(model, batch.tokens, sets, "mean", other.tokens)
    without, *others = map(matching, bar(hooks, "sets of heads"))
    edge = [[circuit.previous]], circuit.induction
    patched = key_patterns(model, batch.tokens, other.tokens, *edge)  # (1, batch, dest, src)
    without_path = prefix_matching(patched[0], batch.length)
    without_others = torch.cat([without[None][:0], *(x[None] for x in others)])
    return Cuts(matching([]), without, without_path, without_others)


def second_copy(
    model: TransformerBridge, batch: RepeatedTokens, ways: Sequence[Sequence[Hook]]
) -> list[dict[str, Float[Tensor, "batch"]]]:
    """Measure each clean second copy under each list of hooks: loss (nats), logit of the right
    token, and accuracy."""
    task = _clean_half(batch)
    truth = task.answer[..., None]  # (batch, entry, 1)

    def measured(scores: Tensor) -> dict[str, Tensor]:
        logit = scores.gather(-1, truth)[..., 0]  # (batch, entry)
        right = (scores.argmax(-1) == truth[..., 0]).float()
        measures = {"loss": scores.logsumexp(-1) - logit, "logit": logit, "accuracy": right}
        return {name: values.mean(1) for name, values in measures.items()}

    return [measured(scores) for scores in logits_under(model, batch.tokens, ways, task.at)]


def direct_effects(
    model: TransformerBridge, batch: RepeatedTokens
) -> Float[Tensor, "batch layer head"]:
    """Measure what each head adds to the right token's logit, above its mean over the vocabulary,
    on the clean second copy. Norms keep the scale of the run, so that parts add up to the logit."""
    heads = [node.kind == "head" for node in model_graph(model).writers]
    by_head = direct_logits(model, _clean_half(batch))[heads]
    return by_head.T.unflatten(1, (model.cfg.n_layers, -1))


def _clean_half(batch: RepeatedTokens) -> CleanCorrupt:
    """Return the task to predict each clean second copy; nothing is corrupt."""
    entries = torch.arange(*batch.clean_half.indices(batch.tokens.shape[1]))
    at = entries.to(batch.tokens.device).expand(len(batch.tokens), -1)  # (batch, entry)
    return CleanCorrupt(batch.tokens, batch.tokens, at, batch.tokens.gather(1, at + 1))


def shapley_values(
    model: TransformerBridge,
    row: Int[Tensor, "pos"],
    fill: Int[Tensor, "draw token"],
    generator: Generator,
) -> Float[Tensor, "draw token"]:
    """Estimate Shapley values (1953) of the tokens between BOS and the last, for log p of the last
    (nats): all of them are replaced by ``fill``, then restored in random order, another in each
    draw. The mean over draws is the estimate. They tell which token counts, not which head."""
    draws, count = fill.shape
    step = torch.rand(draws, count, generator=generator).argsort(1).to(row.device)  # (draw, token)
    restored = step[:, None] < torch.arange(count + 1, device=row.device)[:, None]
    inner = torch.where(restored, row[1:-1], fill[:, None]).flatten(0, 1)  # (draw * step, token)
    tokens = torch.cat([row[:1].expand(len(inner), 1), inner], 1)
    end = at_positions(torch.full((len(tokens), 1), count, device=row.device))
    scores, _ = run_with_hooks(model, tokens, [end])  # (draw * step, 1, vocab)
    log_p = scores[:, 0].log_softmax(-1)[:, row[-1]].view(draws, count + 1)
    return log_p.diff(dim=1).gather(1, step)


def answers_without(
    model: TransformerBridge, questions: WordPrompts, sets: Sequence[Sequence[Sequence[Head]]]
) -> Bool[Tensor, "set batch"]:
    """Return which words are answered right, whole, without each set of heads, one for all rows or
    one for each, which write their mean (``ablate_sets``)."""
    check_prompts(model, questions.prompts)
    tokens, at = with_answers(questions.prompts, questions.whole)
    ways = ablate_sets(model, tokens, sets, "mean", tokens.roll(1, 0))
    return torch.stack(
        [is_answered(s, questions.whole) for s in logits_under(model, tokens, ways, at)]
    )


def step_reaching(steps: Sequence[int], values: Sequence[float], level: float) -> float:
    """Return the step at which values first reach a level, interpolated between checkpoints;
    infinity where none does, NaN where the first one does already."""
    i = next((i for i, value in enumerate(values) if value >= level), -1)
    if i < 1:
        return math.nan if i == 0 else math.inf
    within = (level - values[i - 1]) / (values[i] - values[i - 1])
    return steps[i - 1] + within * (steps[i] - steps[i - 1])
