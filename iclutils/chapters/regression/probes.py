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

Source: Akyurek et al. 2023, section 5 and appendix E. They train with Adam at a rate of 1e-3, for
longer; the control there is a network trained on one fixed weight vector, which any network given
to ``hidden_states`` can be. {cite}`akyurek2023`

Example:
    >>> import torch
    >>> from iclutils.chapters.regression import probes
    >>> states = torch.randn(1, 2, 96, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> targets = states[0, 1, :, 2, :2][None]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ...errors import IclError
from ...models.regressors import Format
from ...progress import bar
from .probe_inputs import States, Targets, check

Kind = Literal["linear", "mlp"]
FLOOR = 1e-6  # directions of the hidden states with less of the largest variance count as empty


class Probed(NamedTuple):
    """What the probes found, one for every network, layer and target."""

    error: Float[Tensor, "net layer target"]  # 1 − R² on held-out contexts
    fit_error: Float[Tensor, "net layer target"]  # the same on the contexts fitted to
    attention: Float[Tensor, "net layer target pos"]  # α; each row sums to 1


def fit(
    states: States,
    targets: Targets,
    kind: Kind,
    held_out: int,
    generator: torch.Generator,
    *,
    seen: Sequence[int] | None = None,
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
        states: hidden states, as from ``hidden_states``.
        targets: targets of the same contexts.
        kind: the map behind the attention.
        held_out: so many contexts, the last ones, are kept for the evaluation.
        generator: draws the first weights and the order of the batches.
        seen: how many leading positions each target's probe may read; all if omitted. With it,
            targets after different numbers of pairs are probed in one go (see ``places``).
        hidden: width of the MLP; 512 in the paper.
        steps: steps of Adam.
        batch_size: contexts of a step; those left over are not used.
        rate: first rate of the map; 1e-3 in the paper, which trains for longer.
        score_rate: first rate of the attention scores s.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = probes.fit(states, targets, "linear", 32, generator, steps=60, batch_size=32)
        >>> found.error[0, :, 0].argmin()
        tensor(1)
    """
    net, layer, batch, pos, width = states.shape
    check(states, targets, batch, held_out, width + pos)
    fitted = (batch - held_out) // max(batch_size, 1) * batch_size
    if fitted < 1 or steps < 1:
        raise IclError(
            f"Give at least one step and one batch; got {steps} steps, and batches of {batch_size} "
            f"from {batch - held_out} contexts that are not held out."
        )
    parts, rest = _whitened(states, fitted, batch_size, held_out)
    scaled = _standardised(targets.to(states), fitted)
    sizes = [width, *([hidden] if kind == "mlp" else []), targets.shape[-1]]
    probes = _Probes(net * layer, len(targets), pos, sizes, seen, generator).to(states)
    _train(probes, parts, scaled[:, :fitted], generator, steps, (rate, score_rate))
    shape = (net, layer, len(targets))
    with torch.no_grad():
        some = parts[: -(-held_out // batch_size)]
        again = torch.cat([probes(part) for part in some], 2)
        fit_error = _normalised(again, scaled[:, : again.shape[2]])
        error = _normalised(probes(rest), scaled[:, batch - held_out :])
        attention = probes.attention()
    return Probed(error.view(shape), fit_error.view(shape), attention.view(*shape, pos))


def linear_exact(
    features: Float[Tensor, "*probe batch feature"],
    targets: Targets,
    held_out: int,
    penalty: float = 0.0,
) -> Float[Tensor, "*probe target"]:
    """Held-out error, 1 − R², of the best linear probe of some features, in closed form.

    With ``states.transpose(-2, -3)`` every position has a probe of its own; with
    ``states.flatten(-2)`` one probe reads all positions at once. In float64; directions with less
    than 1e-5 of the largest singular value count as empty.

    Args:
        features: what each probe reads.
        targets: targets of the same contexts.
        held_out: so many contexts, the last ones, are kept for the evaluation.
        penalty: λ of ridge regression, for centred features that are not scaled.
    """
    if penalty < 0:
        raise IclError(f"The penalty must not be negative; got {penalty}.")
    batch, size = features.shape[-2:]
    check(features, targets, batch, held_out, size)
    fitted = batch - held_out
    wanted = targets.double() - targets[:, :fitted].double().mean(1, keepdim=True)
    flat = wanted.transpose(0, 1).flatten(1)
    ridge = penalty * torch.eye(size, dtype=flat.dtype, device=flat.device)
    errors = []
    for each in features.reshape(-1, batch, size):
        centred = each.double() - each[:fitted].double().mean(0)
        seen = centred[:fitted]
        inverse = torch.linalg.pinv(seen.mT @ seen + ridge, rtol=1e-10, hermitian=True)
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
        >>> probes.released(states, targets[0], held_out=32).argmin()
        tensor(1)
    """
    return linear_exact(states[..., -1, :], weights[None], held_out)[..., 0]


class Decodable(NamedTuple):
    """Where a target is decodable; a layer counts from the embedding, 0."""

    margin: Float[Tensor, "trained layer target"]  # mean error of the controls less its own
    best: Int[Tensor, "target"]  # layer of the lowest mean error of the trained networks
    attention: Float[Tensor, "target pos"]  # of the probes of that layer, mean of the trained
    on_y: Float[Tensor, "target"]  # its mass on tokens that hold a y; even: n / (2n + 1) if "two"


def decodable(found: Probed, trained: int, form: Format) -> Decodable:
    """Compare the first ``trained`` networks with the rest, which are their controls.

    Example:
        >>> error = torch.tensor([[[0.9], [0.1]], [[0.9], [0.8]]])
        >>> found = probes.Probed(error, error, torch.full((2, 2, 1, 3), 1 / 3))
        >>> probes.decodable(found, trained=1, form="one").best
        tensor([1])
    """
    if not 0 < trained < len(found.error):
        raise IclError(f"Of {len(found.error)} networks {trained} cannot be the trained ones.")
    ours, control = found.error[:trained], found.error[trained:]
    best = ours.mean(0).argmin(0)
    attention = found.attention[:trained].mean(0)[best, torch.arange(len(best), device=best.device)]
    held = attention[:, 1 :: 2 if form == "two" else 1]
    return Decodable(control.mean(0) - ours, best, attention, held.sum(-1))


def onset(
    error: Float[Tensor, "*net layer target"], share: float = 0.5
) -> Int[Tensor, "*net target"]:
    """First layer where the error has made ``share`` of its fall from layer 0 to its minimum."""
    if not 0 < share <= 1:
        raise IclError(f"The share of the fall lies in (0, 1]; got {share}.")
    first, low = error[..., :1, :], error.amin(-2, keepdim=True)
    return (error <= first - share * (first - low)).int().argmax(-2)


class _Probes(nn.Module):
    """Probes of (group, target); a group is one layer of one network."""

    def __init__(
        self,
        groups: int,
        targets: int,
        pos: int,
        sizes: Sequence[int],
        seen: Sequence[int] | None,
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
        seen = [pos] * targets if seen is None else list(seen)
        if len(seen) != targets or not 1 <= min(seen) <= max(seen) <= pos:
            raise IclError(
                f"Name for each of {targets} targets how many of the {pos} positions its probe "
                f"may read; got {seen}."
            )
        self.open: Tensor
        self.register_buffer("open", torch.arange(pos) < torch.tensor(seen)[:, None])

    def attention(self) -> Float[Tensor, "group target pos"]:
        return self.scores.masked_fill(~self.open, -torch.inf).softmax(-1)

    def forward(
        self, states: Float[Tensor, "group pos batch width"]
    ) -> Float[Tensor, "group target batch d"]:
        mixed = torch.bmm(self.attention(), states.flatten(-2))
        out = mixed.view(len(self.weights[0]), -1, states.shape[-1])
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = torch.baddbmm(bias, functional.gelu(out) if i else out, weight)
        return out.unflatten(0, self.scores.shape[:2])


def _train(
    probes: _Probes,
    parts: Float[Tensor, "part group pos batch width"],
    targets: Float[Tensor, "target fitted d"],
    generator: torch.Generator,
    steps: int,
    rates: tuple[float, float],
) -> None:
    wanted = targets.unflatten(1, (len(parts), -1)).transpose(0, 1)
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


def _standardised(targets: Targets, fitted: int) -> Targets:
    """Centred, and divided by one scale for all coordinates: errors stay sums over them."""
    centred = targets - targets[:, :fitted].mean(1, keepdim=True)
    scale = centred[:, :fitted].square().mean((1, 2), keepdim=True).sqrt()
    return centred / scale


def _normalised(
    found: Float[Tensor, "*probe target batch d"], targets: Targets
) -> Float[Tensor, "*probe target"]:
    """1 − R²: squared error over the variance, both summed over the coordinates."""
    spread = (targets - targets.mean(1, keepdim=True)).square().sum((-2, -1))
    return (found - targets).square().sum((-2, -1)) / spread
