"""Depth: what a prediction looks like halfway up, and at which height its work is done.

Lenses say where an answer can be read in the residual stream (logit lens, nostalgebraist 2020;
tuned lens, Belrose et al. 2023), the centre of gravity of ablation effects where it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from sklearn.linear_model import Ridge, RidgeClassifier
from torch import Generator, Tensor

from ...errors import IclError
from ...interp.clean_corrupt import CleanCorrupt, scored_logits
from ...interp.graph import Node
from ...models import ActivationCache, TransformerBridge, cached, get_act_name, logit_lens
from ...progress import bar

RIDGE = 1e-2  # of the mean variance of a residual stream's dimension
LOGITS = 2**25  # logits held at once: 134 MB

Effects = Float[Tensor, "node batch"]
Maps = tuple[Float[Tensor, "depth d_model d_model"], Float[Tensor, "depth d_model"]]


def lens_by_depth(
    model: TransformerBridge,
    task: CleanCorrupt,
    translate: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Float[Tensor, "depth batch"], Float[Tensor, "depth batch"]]:
    """Prediction read at every depth (0 after the embedding, l after layer l - 1): KL(final || read
    here) and score of the right answers, nats, means over the scored entries of the clean
    sequences. ``translate`` (of a ``TunedLens``) acts on the residual stream."""
    final = scored_logits(model, task).log_softmax(-1)
    cache, _ = residual_stream(model, task.clean)
    asked, where = task.at.unique(return_inverse=True)
    rows = torch.arange(len(task), device=task.at.device)[:, None]
    kl, score = [], []
    for depth in bar(range(model.cfg.n_layers + 1), "depths"):
        seen = logit_lens(
            cache, layers=[depth], positions=asked.tolist(), lens=translate, chunk_size=256
        ).values[0]
        logits = seen[rows, where]
        kl.append((final.exp() * (final - logits.log_softmax(-1))).sum(-1).mean(-1))
        score.append(task.score(logits))
    return torch.stack(kl).clamp_min(0), torch.stack(score)


def by_layer(effects: Effects, nodes: Sequence[Node], layers: int) -> Float[Tensor, "layer"]:
    """Size of the effects of each layer: |mean over sequences| of its heads and MLP, summed."""
    index = torch.tensor([node.layer for node in nodes], device=effects.device)
    return effects.new_zeros(layers).index_add_(0, index, effects.mean(1).abs())


def gravity(sizes: Float[Tensor, "layer"]) -> float:
    """Mean layer, weighted by the size of its effects; NaN if there is none at all."""
    layer = torch.arange(len(sizes), device=sizes.device, dtype=sizes.dtype)
    return float((layer * sizes).sum() / sizes.sum())


def probe(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    at: Int[Tensor, "batch"],
    targets: Sequence[Shaped[Tensor, "batch"]],
) -> Float[Tensor, "target depth"]:
    """Held-out accuracy of a linear classifier of each target on the residual stream at ``at``, for
    every depth (Tenney et al. 2019); ridge, fitted on the first half of the sequences."""
    _, depths = residual_stream(model, tokens)
    rows, half = torch.arange(len(tokens), device=tokens.device), len(tokens) // 2
    truths, accuracies = [target.cpu().numpy() for target in targets], []
    for depth in depths:
        x = depth[rows, at].double().cpu().numpy()
        scaled = (x - x[:half].mean(0)) / (x[:half].std(0) + 1e-9)
        for truth in truths:
            fit = RidgeClassifier(alpha=len(x) / 10).fit(scaled[:half], truth[:half])
            accuracies.append(fit.score(scaled[half:], truth[half:]))
    return torch.tensor(accuracies).view(len(depths), len(truths)).T


@dataclass(frozen=True)
class TunedLens:
    """Maps x -> x W + b of every depth but the last, which is left as it is."""

    weight: Float[Tensor, "depth d_model d_model"]
    bias: Float[Tensor, "depth d_model"]

    def translate(
        self, entry: Float[Tensor, "*lead d_model"], index: int
    ) -> Float[Tensor, "*lead d_model"]:
        """The residual stream of depth ``index``, translated; for ``lens``."""
        return entry if index == len(self.bias) else entry @ self.weight[index] + self.bias[index]


def fit_tuned_lens(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    at: Int[Tensor, "batch entry"],
    generator: Generator,
    steps: int = 60,
    batch_size: int = 512,
) -> TunedLens:
    """Tuned lens of the positions ``at`` of ``tokens`` (Belrose et al. 2023, section 3): each depth
    starts at the ridge regression on the final residual stream and takes ``steps`` steps of Adam on
    KL(final || lens)."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    _, depths = residual_stream(model, tokens)
    *below, final = (x[rows, at].flatten(0, 1) for x in depths)
    lower, (count, width) = torch.stack(below), final.shape
    if count < width:
        raise IclError(f"A tuned lens needs at least {width} positions; got {count}.")
    batch_size = min(batch_size, count, max(1, LOGITS // (len(lower) * model.cfg.d_vocab)))
    weight, bias = (part.requires_grad_() for part in least_squares(lower, final))
    adam = torch.optim.Adam([weight, bias], lr=1e-3)
    with torch.enable_grad():
        for _ in bar(range(steps), "steps"):
            pick = torch.randint(0, count, (batch_size,), generator=generator).to(tokens.device)
            resid = final[None, pick], lower[:, pick] @ weight + bias[:, None]
            target, seen = (model.unembed(model.ln_final(x)).log_softmax(-1) for x in resid)
            adam.zero_grad()
            (target.exp() * (target - seen)).sum(-1).mean(1).sum().backward()
            adam.step()
    return TunedLens(weight.detach(), bias.detach())


def least_squares(
    inputs: Float[Tensor, "depth row d_model"], target: Float[Tensor, "row d_model"]
) -> Maps:
    """Affine maps x W + b nearest to ``target``, kept near the identity by ridge (of target - x on
    x, with a penalty of ``RIDGE`` times the mean variance)."""
    weights, biases = [], []
    for x in inputs:
        known, change = x.double().cpu().numpy(), (target - x).double().cpu().numpy()
        penalty = RIDGE * len(known) * max(known.var(0).mean(), 1e-300)
        fit = Ridge(alpha=penalty).fit(known, change)
        weights.append(torch.tensor(fit.coef_.T).to(x) + torch.eye(x.shape[1]).to(x))
        biases.append(torch.tensor(fit.intercept_).to(x))
    return torch.stack(weights), torch.stack(biases)


def residual_stream(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> tuple[ActivationCache, list[Float[Tensor, "batch pos d_model"]]]:
    """The cache of, and the residual stream before each layer and after the last."""
    last = model.cfg.n_layers - 1
    names = [get_act_name("resid_pre", layer) for layer in range(last + 1)]
    names.append(get_act_name("resid_post", last))
    _, cache = cached(model, tokens, names)
    return cache, [cache[name] for name in names]
