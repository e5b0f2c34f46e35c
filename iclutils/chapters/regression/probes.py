"""Probes: is XᵀY, or the least-squares weight, written in the hidden states, and where?

A probe reads a layer of a frozen network: it mixes the positions with weights α = softmax(s)
that are learned but the same for every context, and maps the mix αᵀH to the target, either by a
linear map or by a network with one hidden GELU layer. In the paper H first goes through a matrix
W; it can be multiplied into the map that follows, so here it is left out: the probes can express
the same functions.

Errors are normalised by the variance of the target, that is 1 − R², on contexts that no probe
was fitted to: 0 is perfect, 1 is no better than the mean. A low error alone says little, since a
network with random weights also spreads its inputs over its hidden states. What the training put
there is the margin over that control.

All layers, networks and targets train side by side as one program; none sees the others.

Source: {cite}`akyurek2023`, section 5 and appendix E. They train with Adam at a rate of 1e-3, for
longer; the control there is a network trained on one fixed weight vector, which any network given
to ``hidden_states`` can be.

Example:
    >>> import torch
    >>> from iclutils.chapters.regression import probes
    >>> from iclutils.models import regressors
    >>> from iclutils.tasks import regression
    >>> net = regressors.load("regression-d2")
    >>> drawn = regression.sample(regression.Task(2), 200, 4, torch.Generator().manual_seed(0))
    >>> states, targets = probes.prepare([net], drawn)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ...errors import IclError
from ...models.regressors import InContextRegressors
from ...progress import bar
from ...tasks.regression import Contexts

Kind = Literal["linear", "mlp"]
States = Float[Tensor, "net layer batch pos width"]
Targets = Float[Tensor, "target contexts d"]  # of the same contexts; a mismatch gets a cure
FLOOR = 1e-6  # directions of the hidden states with less of the largest variance count as empty


@torch.no_grad()
def hidden_states(
    networks: Sequence[InContextRegressors],
    xs: Float[Tensor, "batch pairs d"],
    ys: Float[Tensor, "batch pairs"],
    batch_size: int = 512,
) -> States:
    """The residual streams of all networks, one ensemble after another, on the same contexts.

    Layer 0 is the embedding. For the states after n pairs give n + 1 pairs: the last is the query.
    """
    if len({(net.shape.layers, net.shape.width, net.shape.format) for net in networks}) != 1:
        raise IclError("Probe networks of one depth, width and format at a time.")
    parts = []
    for x, y in zip(xs.split(batch_size), ys.split(batch_size), strict=True):
        parts.append(torch.cat([torch.stack(net.resid(x, y), 1) for net in networks]))
    return torch.cat(parts, 2)


def moment(
    xs: Float[Tensor, "batch pairs d"], ys: Float[Tensor, "batch pairs"]
) -> Float[Tensor, "batch d"]:
    """XᵀY, a sum and not a mean."""
    return (xs * ys[..., None]).sum(-2)


def least_squares(
    xs: Float[Tensor, "batch pairs d"], ys: Float[Tensor, "batch pairs"]
) -> Float[Tensor, "batch d"]:
    """The weight vector of least norm among those that fit the pairs best (OLS).

    With noise and n near d its tails are heavy, and 1 − R² hangs on a few contexts.
    """
    inverse = torch.linalg.pinv(xs.double(), rtol=1e-10)
    return (inverse @ ys.double()[..., None])[..., 0].to(xs.dtype)


def prepare(networks: Sequence[InContextRegressors], contexts: Contexts) -> tuple[States, Targets]:
    """What a probe needs: states up to the last x, and XᵀY and OLS of the pairs before it.

    Example:
        >>> targets.shape
        torch.Size([2, 200, 2])
    """
    xs, ys = contexts.xs, contexts.ys
    pairs = xs[:, :-1], ys[:, :-1]
    return hidden_states(networks, xs, ys), torch.stack([moment(*pairs), least_squares(*pairs)])


def shuffled(targets: Targets, generator: torch.Generator) -> Targets:
    """Every target moved to another context: a probe of these should have an error of 1."""
    order = torch.randperm(targets.shape[1], generator=generator, device=generator.device)
    order = order.to(targets.device)
    moved = torch.empty_like(targets)
    moved[:, order] = targets[:, order.roll(1)]
    return moved


class Probed(NamedTuple):
    """What the probes found, one for every network, layer and target."""

    error: Float[Tensor, "net layer target"]  # 1 − R² on held-out contexts
    attention: Float[Tensor, "net layer target pos"]  # α; each row sums to 1


def fit(
    states: States,
    targets: Targets,
    kind: Kind,
    held_out: int,
    generator: torch.Generator,
    *,
    hidden: int = 64,
    steps: int = 400,
    batch_size: int = 128,
    rate: float = 0.02,
    score_rate: float = 0.2,
) -> Probed:
    """Train one probe for every network, layer and target, all at once.

    Adam with a rate that falls to 0 along a cosine. The hidden states are first centred at every
    position and whitened over all of them, layer by layer, which a probe could undo: it changes
    the speed, not what a probe can express. Every probe starts from the same weights and even
    attention, and sees the same batches.

    Args:
        states: hidden states, as from ``prepare``.
        targets: targets of the same contexts.
        kind: the map behind the attention.
        held_out: so many contexts, the last ones, are kept for the evaluation.
        generator: draws the first weights and the order of the batches.
        hidden: width of the MLP; 512 in the paper.
        steps: steps of Adam.
        batch_size: contexts of a step; those left over are not used.
        rate: first rate of the map; 1e-3 in the paper, which trains for longer.
        score_rate: first rate of the attention scores s.

    Example:
        >>> found = probes.fit(states, targets, "linear", 40, torch.Generator(), steps=9)
        >>> found.error.shape
        torch.Size([3, 5, 2])
    """
    net, layer, batch, pos, width = states.shape
    _check(states, targets, batch, held_out, width + pos)
    fitted = (batch - held_out) // max(batch_size, 1) * batch_size
    if fitted < 1 or steps < 1:
        raise IclError(
            f"Give at least one step and one batch; got {steps} steps, and batches of {batch_size} "
            f"from {batch - held_out} contexts that are not held out."
        )
    parts, rest = _whitened(states, fitted, batch_size, held_out)
    centred = targets.to(states) - targets.to(states)[:, :fitted].mean(1, keepdim=True)
    scaled = centred / centred[:, :fitted].square().mean((1, 2), keepdim=True).sqrt()
    sizes = [width, *([hidden] if kind == "mlp" else []), targets.shape[-1]]
    probes = _Probes(net * layer, len(targets), pos, sizes, generator).to(states)
    wanted = scaled[:, :fitted].unflatten(1, (len(parts), -1)).transpose(0, 1)
    _train(probes, parts, wanted, generator, steps, (rate, score_rate))
    shape = (net, layer, len(targets))
    with torch.no_grad():
        error = _normalised(probes(rest), scaled[:, batch - held_out :])
        attention = probes.scores.softmax(-1)
    return Probed(error.view(shape), attention.view(*shape, pos))


def linear_exact(
    features: Float[Tensor, "*probe batch feature"], targets: Targets, held_out: int
) -> Float[Tensor, "*probe target"]:
    """Held-out error, 1 − R², of the best linear probe of some features, in closed form.

    With ``states.transpose(-2, -3)`` every position has a probe of its own; with
    ``states.flatten(-2)`` one probe reads all positions at once. In float64; directions with less
    than 1e-5 of the largest singular value count as empty.
    """
    batch, size = features.shape[-2:]
    _check(features, targets, batch, held_out, size)
    fitted = batch - held_out
    wanted = targets.double() - targets[:, :fitted].double().mean(1, keepdim=True)
    flat = wanted.transpose(0, 1).flatten(1)
    errors = []
    for each in features.reshape(-1, batch, size):
        centred = each.double() - each[:fitted].double().mean(0)
        seen = centred[:fitted]
        inverse = torch.linalg.pinv(seen.mT @ seen, rtol=1e-10, hermitian=True)
        found = centred[fitted:] @ (inverse @ (seen.mT @ flat[:fitted]))
        shape = (held_out, len(targets), -1)
        errors.append(_normalised(found.view(shape).transpose(0, 1), wanted[:, fitted:]))
    return torch.stack(errors).view(*features.shape[:-2], len(targets))


def released(
    states: States, weights: Float[Tensor, "batch d"], held_out: int
) -> Float[Tensor, "net layer"]:
    """Error of the probe in the released code: linear, of the last position, for the true w.

    There is no attention, no MLP, and neither XᵀY nor OLS there. It is solved here, not trained.

    Example:
        >>> probes.released(states, drawn.weights, held_out=40).shape
        torch.Size([3, 5])
    """
    return linear_exact(states[..., -1, :], weights[None], held_out)[..., 0]


class _Probes(nn.Module):
    """Probes of (group, target); a group is one layer of one network."""

    def __init__(
        self,
        groups: int,
        targets: int,
        pos: int,
        sizes: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        count = groups * targets
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n_in, n_out in pairwise(sizes):
            drawn = torch.rand(n_in, n_out, generator=generator, device=generator.device)
            drawn = (drawn * 2 - 1) / math.sqrt(n_in)
            self.weights.append(nn.Parameter(drawn.expand(count, -1, -1).clone()))
            self.biases.append(nn.Parameter(drawn.new_zeros(count, 1, n_out)))
        self.scores = nn.Parameter(torch.zeros(groups, targets, pos))

    def forward(
        self, states: Float[Tensor, "group pos batch width"]
    ) -> Float[Tensor, "group target batch d"]:
        mixed = torch.bmm(self.scores.softmax(-1), states.flatten(-2))
        out = mixed.view(len(self.weights[0]), -1, states.shape[-1])
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = torch.baddbmm(bias, functional.gelu(out) if i else out, weight)
        return out.unflatten(0, self.scores.shape[:2])


def _train(
    probes: _Probes,
    parts: Float[Tensor, "part group pos batch width"],
    wanted: Float[Tensor, "part target batch d"],
    generator: torch.Generator,
    steps: int,
    rates: tuple[float, float],
) -> None:
    maps = {"params": [*probes.weights, *probes.biases], "lr": rates[0]}
    adam = torch.optim.Adam([maps, {"params": [probes.scores], "lr": rates[1]}], fused=True)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    order: list[int] = []
    for _ in bar(range(steps), "steps"):
        if not order:
            drawn = torch.randperm(len(parts), generator=generator, device=generator.device)
            order = drawn.tolist()
        at = order.pop()
        loss = (probes(parts[at]) - wanted[at]).square().mean((-2, -1)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        falling.step()


def _whitened(
    states: States, fitted: int, batch_size: int, held_out: int
) -> tuple[Float[Tensor, "part group pos size width"], Float[Tensor, "group pos rest width"]]:
    """The states, centred and whitened by the contexts fitted to, as batches and what is held out.

    Batches hold the position before the context, so that one product mixes the positions.
    """
    net, layer, batch, pos, width = states.shape
    parts = states.new_empty(fitted // batch_size, net * layer, pos, batch_size, width)
    rest = states.new_empty(net * layer, pos, held_out, width)
    for i, group in enumerate(states.flatten(0, 1)):
        centred = group - group[:fitted].mean(0)
        flat = centred[:fitted].flatten(0, 1)
        variances, axes = torch.linalg.eigh((flat.mT @ flat).double() / len(flat))
        floor = variances[-1].clamp(min=1e-30) * FLOOR
        white = centred @ (axes / (variances.clamp(min=0) + floor).sqrt() @ axes.mT).to(centred)
        parts[:, i] = white[:fitted].unflatten(0, (-1, batch_size)).transpose(1, 2)
        rest[i] = white[batch - held_out :].transpose(0, 1)
    return parts, rest


def _normalised(
    found: Float[Tensor, "*probe target batch d"], targets: Targets
) -> Float[Tensor, "*probe target"]:
    """1 − R²: squared error over the variance, both summed over the coordinates."""
    spread = (targets - targets.mean(1, keepdim=True)).square().sum((-2, -1))
    return (found - targets).square().sum((-2, -1)) / spread


def _check(states: Tensor, targets: Targets, batch: int, held_out: int, least: int) -> None:
    """Refuse what cannot be probed; ``least`` contexts cannot even fix a probe."""
    if targets.shape[1] != batch:
        raise IclError(f"Got targets of {targets.shape[1]} contexts for states of {batch}.")
    if held_out < 2 or batch - held_out <= least:
        raise IclError(
            f"Too few contexts: hold out at least 2 and fit to more than {least}; got {held_out} "
            f"and {batch - held_out}."
        )
    if not bool(torch.isfinite(states.sum()) & torch.isfinite(targets.sum())):
        raise IclError("Hidden states and targets must be finite: leave out what diverges.")
    for part in (targets[:, : batch - held_out], targets[:, batch - held_out :]):
        if bool((part == part[:, :1]).all(-1).all(-1).any()):
            raise IclError("A target that is the same in every context cannot be probed.")
