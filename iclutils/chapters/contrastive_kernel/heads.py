"""Heads of a real transformer as linear models that take one gradient step on the examples.

At one position of every prompt (``AtQuery``) a head's output z, before ``W_O``, is its start plus
its update, which is one gradient step on the demonstrations, a mask of tokens (see ``dual``).
Queries, keys and values are the actual activations, after any rotation; products are in float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import IclError
from ...interp.at_query import AtQuery, Mask, read, read_heads
from ...interp.hooks import Head, check_head
from ...interp.invariants import blocks, logit_direction
from ...interp.kv_cache import demonstrations as before_query
from ...models import TransformerBridge, bos, get_act_name
from ...progress import bar
from ...tasks.prompts import Prompts, Role
from ...tasks.repeated import RepeatedTokens, repeated_tokens
from .dual import dual_form, explicit_step, gram

Ids = Int[Tensor, "..."]  # tokens: answers (batch), or those they are compared with (batch or 1, k)
LOGIT_TOLERANCE = 1e-3  # of the parts' absolute sum


def first_copy(batch: RepeatedTokens) -> Bool[Tensor, "batch pos"]:
    """Return the demonstrations of repeated tokens: the first copy, without BOS."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return ((place >= 1) & (place <= batch.length)).expand(batch.tokens.shape)


def demonstration_tokens(model: TransformerBridge, prompts: Prompts) -> Bool[Tensor, "batch pos"]:
    """Return the demonstrations of few-shot prompts: all before the query but BOS."""
    demos = before_query(prompts).clone()
    if getattr(model.cfg, "bos_token_id", None) is not None:
        demos[:, 0] &= prompts.tokens[:, 0] != bos(model)
    return demos


def examples(prompts: Prompts) -> Int[Tensor, "batch pos"]:
    """Number the examples that tokens belong to, from 0, each with the newline at its end."""
    label = torch.nn.functional.pad(prompts.roles == Role.LABEL, (2, 0))
    return (label[:, :-2] & ~label[:, 1:-1]).cumsum(1)


class Case(NamedTuple):
    """Prompts read at their query, the tokens of their examples, and what a right answer is."""

    query: AtQuery
    demonstrations: Mask
    answer: Ids
    choices: Ids | None = None  # tokens among which the answer is chosen; None: all


def copying_case(
    model: TransformerBridge, count: int, length: int, generator: torch.Generator
) -> Case:
    """Read repeated tokens up to the middle of the second copy; the first copy is the examples."""
    batch = repeated_tokens(model, count, length, generator, distinct=True)
    end = length + length // 2 + 1
    query = read(model, batch.tokens[:, :end])
    return Case(query, first_copy(batch)[:, :end], batch.tokens[:, end])


def few_shot_case(model: TransformerBridge, prompts: Prompts, choices: Ids | None = None) -> Case:
    """Read few-shot prompts; the answer is one of the choices, or any word."""
    answer = prompts.label_words.gather(1, prompts.gold[:, None])[:, 0]
    query = read(model, prompts.tokens, prompts.target)
    return Case(query, demonstration_tokens(model, prompts), answer, choices)


class DualHeads(NamedTuple):
    """The dual model of every head at the query: W_0 φ(q), ΔW φ(q), and what the head gives."""

    start: Float[Tensor, "batch layer head d_head"]
    update: Float[Tensor, "batch layer head d_head"]
    z: Float[Tensor, "batch layer head d_head"]


def dual_heads(query: AtQuery, demonstrations: Mask) -> DualHeads:
    """Split the output of every head at the query into its start and its update."""
    masks = query.mask(demonstrations)[:, None], query.seen[:, None, None]
    layers = []
    for q, key, value, z in bar(read_heads(query), "layers", query.model.cfg.n_layers):
        start, update = (p[:, :, 0] for p in dual_form(q[:, :, None], key, value, *masks))
        layers.append((start, update, z))
    return DualHeads(*(torch.stack(field, 1) for field in zip(*layers, strict=True)))


def explicit_head_step(
    query: AtQuery, demonstrations: Mask, head: Head
) -> tuple[Float[Tensor, "batch d_head"], Float[Tensor, "batch d_head"]]:
    """Return a head's answers before and after a gradient step by autograd, in exact features."""
    check_head(query.model, head)
    (parts,) = read_heads(query, [head[0]])
    q, key, value = (part[:, head[1]] for part in parts[:3])
    return explicit_step(*gram(q, key), value, query.mask(demonstrations), query.seen)


class LogitAttribution(NamedTuple):
    """Parts of a logit, in nats: they sum to ``logit``."""

    start: Float[Tensor, "batch layer head"]
    update: Float[Tensor, "batch layer head"]
    mlp: Float[Tensor, "batch layer"]
    embedding: Float[Tensor, "batch"]
    constant: Float[Tensor, "batch"]  # biases of attention outputs, final norm, unembedding
    logit: Float[Tensor, "batch"]

    @property
    def update_share(self) -> Float[Tensor, ""]:
        """Return the mean of what all updates add, divided by the mean logit."""
        return self.update.sum((1, 2)).mean() / self.logit.mean()


def direct_logit_attribution(
    query: AtQuery, duals: DualHeads, answer: Ids, against: Ids | None = None
) -> LogitAttribution:
    """Split the answer's logit, less the mean of the tokens ``against``, (batch, k) or one row for
    all, into starts and updates of heads, MLPs and the embedding. Every norm on the way keeps the
    scale of the run."""
    model = query.model
    layers = range(model.cfg.n_layers)

    def at_query(name: str, layer: int) -> Tensor:
        return query.activations[get_act_name(name, layer)][:, 0].double()

    unembed, logit = model.W_U, query.logits.double()
    direction = unembed[:, answer].T
    value = logit.gather(1, answer[:, None])[:, 0]
    if against is not None:
        value = value - logit.gather(1, against.expand(len(query), -1)).mean(1)
        direction = direction - torch.stack([unembed[:, ids].mean(1) for ids in against])
    end = at_query("resid_post", layers[-1])
    reads = logit_direction(model, end.float(), direction).double()
    by_head = []
    for layer, block in enumerate(blocks(model)):
        z = query.activations[get_act_name("z", layer)][:, 0]
        through = block.pull_back(z, reads.float()).double()  # (batch, d_model)
        by_head.append(torch.einsum("hed,bd->bhe", block.out.double(), through))
    start, update, z = ((part * torch.stack(by_head, 1)).sum(-1) for part in duals)
    # (batch, layer, head) each
    attention, mlp = (
        torch.stack([(at_query(name, la) * reads).sum(1) for la in layers], 1)
        for name in ("attn_out", "mlp_out")
    )
    embedding = (at_query("resid_pre", 0) * reads).sum(1)
    biases = attention.sum(1) - z.sum((1, 2))
    constant = biases + value - (end * reads).sum(1)
    parts = torch.cat([start.flatten(1), update.flatten(1), mlp, embedding[:, None]], 1)
    gap = parts.sum(1) + biases - (end * reads).sum(1)
    if not bool((gap.abs() <= LOGIT_TOLERANCE * (parts.abs().sum(1) + constant.abs())).all()):
        raise IclError(
            "Direct logit attribution does not fit this model: the parts do not sum to the logit. "
            "Use a model like GPT-2, GPT-NeoX or Llama."
        )
    return LogitAttribution(start, update, mlp, embedding, constant, value)
