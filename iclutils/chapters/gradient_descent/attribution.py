"""What gradient steps of heads add to a logit, beside their starts, the MLPs and the embedding.

Everything that writes to the residual stream at the query reaches the logit through ``W_O`` (the
heads), the final norm, whose scale is held fixed, and the unembedding. So the logit is a sum of
parts. What a head feeds to later layers counts for those: ``removal`` measures that.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.tasks.repeated import repeated_tokens
    >>> from iclutils.chapters.gradient_descent import attribution, heads
    >>> net = models.load("induction-0")
    >>> task = repeated_tokens(net, 2, 10, torch.Generator().manual_seed(0))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import IclError
from ...models import TransformerBridge, cached, get_act_name
from .heads import Mask, Place, Tokens, checked, dual_heads
from .removal import check_answers

TOLERANCE = 1e-3  # of the parts' absolute sum: float32 in the model, float64 here


class Direct(NamedTuple):
    """Parts of a logit, in nats: they sum to ``logit``.

    ``constant`` is from the biases of the attention outputs, the final norm and the unembedding.
    """

    start: Float[Tensor, "batch layer head"]
    step: Float[Tensor, "batch layer head"]
    mlp: Float[Tensor, "batch layer"]
    embedding: Float[Tensor, "batch"]
    constant: Float[Tensor, "batch"]
    logit: Float[Tensor, "batch"]

    @property
    def share_of_steps(self) -> Float[Tensor, ""]:
        """Mean of what all steps add, divided by the mean logit."""
        return self.step.sum((1, 2)).mean() / self.logit.mean()


def direct(
    model: TransformerBridge,
    tokens: Tokens,
    demonstrations: Mask,
    answer: Int[Tensor, "..."],
    against: Int[Tensor, "..."] | None = None,
    at: Place = None,
) -> Direct:
    """Direct contributions to the logit of the answer.

    Args:
        model: the model.
        tokens: the prompts.
        demonstrations: (batch, pos), which tokens are demonstrations.
        answer: (batch), the token whose logit is taken apart.
        against: (batch, k) tokens whose mean logit is subtracted, or one row of them for all
            prompts; none if omitted. A logit alone means little, as softmax ignores a constant.
        at: (batch), the position of the query; the last if omitted.

    Example:
        >>> tokens, answer = task.tokens[:, :-1], task.tokens[:, -1]
        >>> mask = heads.first_copy(task)[:, :-1]
        >>> found = attribution.direct(net, tokens, mask, answer)
        >>> found.step.shape[1:] == (net.cfg.n_layers, net.cfg.n_heads)
        True
    """
    _, at, _ = checked(tokens, demonstrations, at)
    check_answers(model, tokens, answer, against)
    duals = dual_heads(model, tokens, demonstrations, at)
    layers, rows = range(model.cfg.n_layers), torch.arange(len(tokens), device=tokens.device)
    ends = ("hook_resid_post", "hook_attn_out", "hook_mlp_out")
    names = {f"blocks.{la}.{end}" for la in layers for end in ends} | {"blocks.0.hook_resid_pre"}
    norm = {f"ln_final.hook_{part}" for part in ("scale", "normalized")}
    logits, cache = cached(model, tokens, names | norm)

    def read(name: str) -> Tensor:
        return cache[name][rows, at].double()

    unembed = model.W_U.double()
    direction = unembed[:, answer].T
    offset = model.b_U.double()[answer]
    logit = logits[rows, at].double()
    value = logit.gather(1, answer[:, None])[:, 0]
    if against is not None:
        others = against.expand(len(tokens), -1)
        value = value - logit.gather(1, others).mean(1)
        direction = direction - torch.stack([unembed[:, each].mean(1) for each in against])
        offset = offset - model.b_U.double()[against].mean(1)
    resid = read(f"blocks.{layers[-1]}.hook_resid_post")
    scale, normal = read("ln_final.hook_scale"), read("ln_final.hook_normalized")
    centres = (resid - normal * scale).norm() > TOLERANCE * resid.norm()
    weight, bias = _affine(model)
    toward = direction * weight / scale
    if bool(centres):  # LayerNorm; RMSNorm does not subtract the mean
        toward = toward - toward.mean(1, keepdim=True)
    writes = torch.stack([model.W_O[la].double() for la in layers])
    each = torch.einsum("lhde,be->blhd", writes, toward)
    start, step, z = ((part * each).sum(-1) for part in duals[:3])
    attention = torch.stack([(read(f"blocks.{la}.hook_attn_out") * toward).sum(1) for la in layers])
    mlp = torch.stack([(read(get_act_name("mlp_out", la)) * toward).sum(1) for la in layers], 1)
    embedding = (read("blocks.0.hook_resid_pre") * toward).sum(1)
    constant = attention.sum(0) - z.sum((1, 2)) + (direction * bias).sum(1) + offset
    parts = (start, step, mlp, embedding[:, None], constant[:, None])
    total = sum(part.flatten(1).sum(1) for part in parts)
    size = sum(part.flatten(1).abs().sum(1) for part in parts)
    if not bool(((total - value).abs() <= TOLERANCE * size).all()):
        raise IclError(
            "The parts do not sum to the logit: this model's residual stream or final norm is not "
            "of the usual kind. Use a model like GPT-2, GPT-NeoX or Llama."
        )
    return Direct(start, step, mlp, embedding, constant, value)


def _affine(model: TransformerBridge) -> tuple[Tensor, Tensor]:
    """Weight and bias of the final norm."""
    norm = model.ln_final
    weight = norm.weight.double()
    if getattr(norm, "uses_weight_offset", False):
        weight = 1 + weight
    bias = getattr(norm, "bias", None)
    return weight, torch.zeros_like(weight) if bias is None else bias.double()
