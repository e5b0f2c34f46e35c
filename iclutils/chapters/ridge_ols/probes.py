"""Probes: is XᵀY, or the least-squares weight, written in the hidden states, and where?

A probe mixes the positions of a layer with weights α = softmax(s), the same for every context, and
maps αᵀH to the target, linearly or by one hidden GELU layer. Errors are 1 − R² on held-out
contexts; what training put there is the margin over random weights. Source: {cite}`akyurek2023`,
section 5 and appendix E."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ...errors import IclError
from ...models.regressors import InContextRegressors, as_tokens
from ...progress import bar
from ...tasks.regression import Contexts
from .distances import AT_ONCE

Kind = Literal["linear", "mlp"]
States = Float[Tensor, "net layer batch pos width"]
Targets = Float[Tensor, "target contexts d"]  # of the same contexts; a mismatch gets a cure
FLOOR = 1e-6  # directions of the hidden states with less of the largest variance are damped


@torch.no_grad()
def hidden_states(
    networks: Sequence[InContextRegressors],
    xs: Float[Tensor, "batch pairs d"],
    ys: Float[Tensor, "batch pairs"],
    batch_size: int = AT_ONCE,
) -> States:
    """Return the residual streams of all networks (of one shape), one ensemble after another; layer
    0 is the embedding. For the states after n pairs give n + 1 pairs: the last is the query."""
    shape, nets = networks[0].shape, sum(len(net.seeds) for net in networks)
    pos = as_tokens(xs[:1], ys[:1], shape.format).shape[1]
    by_position = nets, shape.layers + 1, pos, len(xs), shape.width  # as a probe mixes them
    states = networks[0].positions.new_empty(by_position).transpose(2, 3)
    for first in range(0, len(xs), batch_size):
        rows = slice(first, first + batch_size)
        streams = [net.resid(xs[rows], ys[rows]) for net in networks]
        for layer, parts_of_layer in enumerate(zip(*streams, strict=True)):
            states[:, layer, rows] = torch.cat(parts_of_layer)
    return states


def prepare(networks: Sequence[InContextRegressors], contexts: Contexts) -> tuple[States, Targets]:
    """Return inputs of a probe: states up to the last x; XᵀY (a sum) and OLS of the pairs before
    it, whose tails are heavy with noise and n near d."""
    x, y = contexts.xs[:, :-1], contexts.ys[:, :-1, None]
    least_squares = torch.linalg.pinv(x.double(), rtol=1e-10) @ y.double()
    targets = torch.stack([(x * y).sum(-2), least_squares[..., 0].to(x.dtype)])
    return hidden_states(networks, contexts.xs, contexts.ys), targets


def shuffle(targets: Targets, generator: torch.Generator) -> Targets:
    """Move every target to another context: a probe of these should have an error of 1."""
    order = torch.randperm(targets.shape[1], generator=generator, device=generator.device)
    order = order.to(targets.device)
    return targets[:, order.roll(1)[order.argsort()]]


class Probed(NamedTuple):
    """Results of the probes, one for every network, layer and target."""

    by_context: Float[Tensor, "net layer target held_out"]  # squared error, over its variance
    attention: Float[Tensor, "net layer target pos"]  # α; each row sums to 1

    @property
    def error(self) -> Float[Tensor, "net layer target"]:
        """Return 1 − R² on the held-out contexts."""
        return self.by_context.mean(-1)


def whiten(states: States, held_out: int, batch_size: int = 128) -> States:
    """Whiten the states in place, layer by layer, and return them: each position loses its own
    mean, and all positions share one covariance. Weak directions are damped. Means and covariance
    are of the contexts that a probe is fitted to: all but the last ``held_out``, in whole batches.
    """
    net, layer, batch, pos, width = states.shape
    fitted = (batch - held_out) // batch_size * batch_size
    if fitted < 1:
        raise IclError(f"{batch} contexts leave no batch of {batch_size} to fit; draw more")
    for group in states.view(net * layer, batch, pos, width):
        centred = group - group[:fitted].mean(0)
        flat = centred[:fitted].flatten(0, 1)
        variances, axes = torch.linalg.eigh((flat.mT @ flat).double() / len(flat))
        floor = variances[-1].clamp(min=1e-30) * FLOOR
        root = axes / (variances.clamp(min=0) + floor).sqrt() @ axes.mT  # (width, width)
        group.copy_(centred @ root.to(centred))
    return states


def fit(
    states: States,
    targets: Targets,
    kind: Kind,
    generator: torch.Generator,
    held_out: int,
    *,
    batch_size: int = 128,
    hidden: int = 64,
    steps: int = 400,
    rate: float = 0.02,
    score_rate: float = 0.2,
) -> Probed:
    """Train one probe for every network, layer and target at once, by Adam, on states from
    ``whiten``; ``rate`` (of the map) and ``score_rate`` (of s) fall to 0 along a cosine. The paper
    has a rate of 1e-3, 512 hidden units and more steps."""
    nets, layers, batch, pos, width = states.shape
    groups = states.view(nets * layers, batch, pos, width)  # a layer of a network each
    count = (batch - held_out) // batch_size
    fitted, targets = count * batch_size, targets.to(states)
    centred = targets - targets[:, :fitted].mean(1, keepdim=True)
    scaled = centred / centred[:, :fitted].square().mean((1, 2), keepdim=True).sqrt()
    sizes = [width, *([hidden] if kind == "mlp" else []), targets.shape[-1]]
    probes = _Probes((len(groups), len(targets), pos), sizes, generator).to(states)
    wanted = scaled[:, :fitted].unflatten(1, (count, batch_size)).transpose(0, 1)
    # (step, target, batch, d)
    maps = {"params": [*probes.weights, *probes.biases], "lr": rate}
    adam = torch.optim.Adam([maps, {"params": [probes.scores], "lr": score_rate}], fused=True)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    order: list[int] = []
    for _ in bar(range(steps), "steps"):
        if not order:
            drawn = torch.randperm(count, generator=generator, device=generator.device)
            order = drawn.tolist()
        at = order.pop()
        part = groups[:, at * batch_size : (at + 1) * batch_size].transpose(1, 2)
        # (group, pos, batch, width)
        loss = (probes(part) - wanted[at]).square().mean((-2, -1)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        falling.step()
    shape = (nets, layers, len(targets))
    with torch.no_grad():
        unseen = groups[:, batch - held_out :].split(batch_size, 1)
        predicted = torch.cat([probes(part.transpose(1, 2)) for part in unseen], 2)
        error = _normalised(predicted, scaled[:, -held_out:])
        attention = probes.scores.softmax(-1)
    return Probed(error.view(*shape, held_out), attention.view(*shape, pos))


class _Probes(nn.Module):
    """Probes of (group, target)."""

    def __init__(
        self, shape: tuple[int, int, int], sizes: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        count = shape[0] * shape[1]
        for n_in, n_out in pairwise(sizes):
            drawn = torch.rand(n_in, n_out, generator=generator, device=generator.device)
            drawn = (drawn * 2 - 1) / math.sqrt(n_in)
            self.weights.append(nn.Parameter(drawn.expand(count, -1, -1).clone()))
            self.biases.append(nn.Parameter(drawn.new_zeros(count, 1, n_out)))
        self.scores = nn.Parameter(torch.zeros(shape))

    def forward(
        self, states: Float[Tensor, "group pos batch width"]
    ) -> Float[Tensor, "group target batch d"]:
        mixed = torch.bmm(self.scores.softmax(-1), states.flatten(-2))  # (group, target, batch w)
        out = mixed.view(len(self.weights[0]), -1, states.shape[-1])  # (group target, batch, width)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = torch.baddbmm(bias, functional.gelu(out) if i else out, weight)
        return out.unflatten(0, self.scores.shape[:2])


def _normalised(
    predicted: Float[Tensor, "*probe target batch d"], targets: Targets
) -> Float[Tensor, "*probe target batch"]:
    """Return each context's part in 1 − R², of sums over the coordinates."""
    spread = (targets - targets.mean(1, keepdim=True)).square().sum(-1).mean(1, keepdim=True)
    return (predicted - targets).square().sum(-1) / spread
