"""The induction circuit: find it, cut it, watch it grow.

An induction head attends from a token to what *followed* its earlier copy. It reads, through its
keys, which token came before each position, from a previous-token head in an earlier layer
(K-composition; Elhage et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import spearmanr
from torch import Generator, Tensor

from ..errors import IclError
from ..interp.graph import all_heads, component_outputs
from ..interp.head_scores import LABEL, prefix_matching, score_heads, strongest, top_heads
from ..interp.hooks import (
    Head,
    Hook,
    How,
    ablate_rows,
    ablate_sets,
    at_positions,
    logits_under,
    run_with_hooks,
)
from ..interp.patching import patch_key_input
from ..interp.readout import check_prompts, icl_score, log_prob, predictions, with_answers, writes
from ..models import TransformerBridge, get_act_name, logits
from ..progress import bar
from ..tasks.repeated import RepeatedTokens, repeated_tokens
from ..tasks.words import Asked


@dataclass(frozen=True)
class Circuit:
    """Heads by role, as (layer, head)."""

    previous: Head
    induction: Head
    all_induction: tuple[Head, ...]
    all_previous: tuple[Head, ...]

    def others(self, model: TransformerBridge) -> list[Head]:
        """Every head without a role here."""
        named = self.all_induction + self.all_previous
        return [head for head in _heads(model, model.cfg.n_layers) if head not in named]

    def pairs(self) -> list[tuple[Head, Head]]:
        """Every previous-token head with every induction head above it."""
        return [(a, b) for a in self.all_previous for b in self.all_induction if a[0] < b[0]]


@dataclass(frozen=True)
class Cause:
    """Prefix matching of the induction head, per sequence, before and after each cut."""

    before: Float[Tensor, "batch"]
    without_previous: Float[Tensor, "batch"]
    without_path: Float[Tensor, "batch"]
    without_all_previous: Float[Tensor, "batch"]
    without_all_paths: Float[Tensor, "batch"]
    without_others: list[Float[Tensor, "batch"]]


def find(model: TransformerBridge, batch: RepeatedTokens) -> Circuit:
    """The strongest induction head, and the strongest previous-token head in a layer below it.

    Example:
        >>> import torch
        >>> from iclutils import models
        >>> from iclutils.chapters import gpt2_induction
        >>> from iclutils.tasks.repeated import repeated_tokens
        >>> net = models.load("induction-0")
        >>> task = repeated_tokens(net, 8, 20, torch.Generator().manual_seed(0))
        >>> found = gpt2_induction.find(net, task)
        >>> found.previous[0] < found.induction[0]
        True
    """
    scores = score_heads(model, batch.tokens, batch.length)
    return roles({name: values.mean(0) for name, values in scores.items()})


def roles(scores: Mapping[str, Float[Tensor, "layer head"]], least: int = 1) -> Circuit:
    """Heads by role from their mean scores (``score_heads``), as in ``find``; ``least``: how many
    stand for a role that no head has."""
    if len(scores["prefix"]) < 2:
        raise IclError("An induction circuit needs two attention layers; this model has one.")
    prefix = scores["prefix"].clone()
    prefix[0] = 0  # nothing below layer 0 could feed a head there
    if not prefix.any():
        raise IclError(
            "No head above layer 0 looks at what followed an earlier copy: every prefix-matching "
            "score is 0, as where a model's attention reaches back less far than a copy is long. "
            "Use shorter copies (L), or a model that looks further back."
        )
    induction = strongest(prefix)
    below = scores["previous"][: induction[0]]
    previous = strongest(below)
    return Circuit(previous, induction, _labelled(prefix, least), _labelled(below, least))


def _labelled(scores: Float[Tensor, "layer head"], least: int) -> tuple[Head, ...]:
    labelled = tuple((layer, head) for layer, head in torch.nonzero(scores > LABEL).tolist())
    return labelled or tuple(top_heads(scores, least))


def _heads(model: TransformerBridge, layers: int) -> list[Head]:
    return [(layer, head) for layer in range(layers) for head in range(model.cfg.n_heads)]


def cause(
    model: TransformerBridge,
    batch: RepeatedTokens,
    circuit: Circuit,
    other: RepeatedTokens,
    controls: Sequence[Sequence[Head]] | None = None,
) -> Cause:
    """Prefix matching of the induction head that remains when the circuit is cut: mean-ablate the
    previous-token head, or patch only its write into the induction head's keys with that on
    ``other``; both for all previous-token heads at once; mean-ablate each set of ``controls``
    (None: each other head)."""
    layer, head = circuit.induction
    if controls is None:
        controls = [[h] for h in _heads(model, layer) if h not in circuit.all_previous]
    name = get_act_name("pattern", layer)

    def matching(hooks: Sequence[Hook]) -> Tensor:
        _, seen = run_with_hooks(model, batch.tokens, hooks, [name], layer + 1)
        return prefix_matching(seen[name][:, head], batch.length)

    def patched(cut: Sequence[Head]) -> Tensor:
        pattern = patch_key_input(model, batch.tokens, cut, circuit.induction, other.tokens)
        return prefix_matching(pattern, batch.length)

    sets = [[circuit.previous], circuit.all_previous, *controls]
    hooks = ablate_sets(model, batch.tokens, sets, "mean", other.tokens)
    without, without_all, *without_others = map(matching, bar(hooks, "sets of heads"))
    return Cause(
        before=matching([]),
        without_previous=without,
        without_path=patched([circuit.previous]),
        without_all_previous=without_all,
        without_all_paths=patched(circuit.all_previous),
        without_others=without_others,
    )


def second_copy(
    model: TransformerBridge, batch: RepeatedTokens, ways: Sequence[Sequence[Hook]]
) -> list[dict[str, Float[Tensor, "batch"]]]:
    """Loss (nats), logit of the right token and accuracy on each clean second copy, for each
    ``way``."""
    entries = torch.arange(*batch.clean_half.indices(batch.tokens.shape[1]))
    at = entries.to(batch.tokens.device).expand(len(batch.tokens), -1)
    truth = batch.tokens.gather(1, at + 1)[..., None]

    def measured(scores: Tensor) -> dict[str, Tensor]:
        logit = scores.gather(-1, truth)[..., 0]
        right = (scores.argmax(-1) == truth[..., 0]).float()
        measures = {"loss": scores.logsumexp(-1) - logit, "logit": logit, "accuracy": right}
        return {name: values.mean(1) for name, values in measures.items()}

    return [measured(scores) for scores in logits_under(model, batch.tokens, ways, at)]


def direct_effects(
    model: TransformerBridge, batch: RepeatedTokens
) -> Float[Tensor, "batch layer head"]:
    """Direct effect of each head on the logit of the right token, above its mean over the
    vocabulary, on the clean second copy; for a model loaded with ``fold=True``. The final norm
    keeps the scale of the whole run, so that the parts add up to the logit."""
    half, last = batch.clean_half, get_act_name("resid_post", model.cfg.n_layers - 1)
    with torch.no_grad():
        _, seen = run_with_hooks(model, batch.tokens, [], [last])
        writes = component_outputs(model, batch.tokens, all_heads(model))
        scale = (seen[last].pow(2).mean(-1) + model.cfg.eps).sqrt()[:, half]
        columns = (model.W_U - model.W_U.mean(1, keepdim=True)).T[batch.tokens[:, 1:][:, half]]
        added = [((w[:, half] * columns).sum(-1) / scale).mean(1) for w in writes.values()]
    return torch.stack(added, 1).unflatten(1, (model.cfg.n_layers, -1))


def shapley_values(
    model: TransformerBridge,
    row: Int[Tensor, "pos"],
    fill: Int[Tensor, "draw token"],
    generator: Generator,
) -> Float[Tensor, "draw token"]:
    """Shapley value of each token between BOS and the last for log p of the last (nats). From a
    sequence with all of these tokens replaced by ``fill`` they are restored in random order,
    another in each draw; the mean over orders is the Shapley value (1953)."""
    draws, count = fill.shape
    step = torch.rand(draws, count, generator=generator).argsort(1).to(row.device)  # of each token
    there = step[:, None] < torch.arange(count + 1, device=row.device)[:, None]
    inner = torch.where(there, row[1:-1], fill[:, None]).flatten(0, 1)
    tokens = torch.cat([row[:1].expand(len(inner), 1), inner], 1)
    end = at_positions(torch.full((len(tokens), 1), count, device=row.device))
    scores, _ = run_with_hooks(model, tokens, [end])
    log_p = scores[:, 0].log_softmax(-1)[:, row[-1]].view(draws, count + 1)
    return log_p.diff(dim=1).gather(1, step)


def losses_without(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    sets: Sequence[Sequence[Sequence[Head]]],
    how: How = "mean",
) -> Float[Tensor, "set batch entry"]:
    """Loss (nats) of every next token without each set of heads, one for all rows or for each
    (``ablate_rows``); resampled from the row before."""
    ways = ablate_rows(model, tokens, sets, how, tokens.roll(1, 0))
    return torch.stack([-log_prob(s, tokens) for s in logits_under(model, tokens, ways)])


def alike(
    one: TransformerBridge,
    other: TransformerBridge,
    prose: Int[Tensor, "passage pos"],
    copied: RepeatedTokens,
) -> tuple[Float[Tensor, "passage"], Float[Tensor, "sequence"]]:
    """How alike two models are that read the same tokens: the share of predictions on prose whose
    likeliest token is the same, and the rank correlation over heads of prefix matching."""
    first, second = (logits(model, prose).argmax(-1) for model in (one, other))
    scores = [score_heads(m, copied.tokens, copied.length)["prefix"] for m in (one, other)]
    ranks = [
        spearmanr(*(x.flatten().cpu() for x in pair)).statistic
        for pair in zip(*scores, strict=True)
    ]
    return (first == second).double().mean(1), torch.tensor(ranks)


def answers_without(
    model: TransformerBridge,
    asked: Asked,
    sets: Sequence[Sequence[Sequence[Head]]],
    how: How = "mean",
) -> Bool[Tensor, "set batch"]:
    """Which words are answered right, whole, without each set of heads (``losses_without``)."""
    check_prompts(model, asked.prompts)
    tokens, at = with_answers(asked.prompts, asked.whole)
    ways = ablate_rows(model, tokens, sets, how, tokens.roll(1, 0))
    logits_of_sets = logits_under(model, tokens, ways, at)
    return torch.stack([writes(scores, asked.whole) for scores in logits_of_sets])


def checkpoint_metrics(
    model: TransformerBridge, batch: RepeatedTokens, generator: Generator
) -> dict[str, float]:
    """Scores of a model at one step of its training: best head scores, loss (nats) and accuracy on
    the clean second copy, and the in-context-learning score of entries 10 and 50 of segments of 15
    tokens repeated four times (Olsson et al. 2022: tokens 50 and 500 of texts)."""
    scores = {k: v.mean(0) for k, v in score_heads(model, batch.tokens, batch.length).items()}
    log_probs, right = predictions(model, batch.tokens)
    long = repeated_tokens(model, len(batch.tokens), 15, generator, times=4)
    icl = icl_score(predictions(model, long.tokens)[0], early=10, late=50)
    return {
        "prefix": scores["prefix"].max().item(),
        "previous": scores["previous"].max().item(),
        "loss": -log_probs[:, batch.clean_half].mean().item(),
        "accuracy": right[:, batch.clean_half].float().mean().item(),
        "icl": icl.mean().item(),
    }


def reached(steps: Sequence[int], values: Sequence[float], share: float) -> float:
    """Step at which a share of the final value is first reached, interpolated between checkpoints;
    NaN where the first checkpoint has it already, or none has."""
    goal = share * values[-1]
    i = next((i for i, value in enumerate(values) if value >= goal), 0)
    if i == 0:
        return math.nan
    within = (goal - values[i - 1]) / (values[i] - values[i - 1])
    return steps[i - 1] + within * (steps[i] - steps[i - 1])
