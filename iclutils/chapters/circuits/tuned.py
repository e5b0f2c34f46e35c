"""Tuned lens: one affine map per depth, fitted so that its reading nears the final prediction.

The logit lens reads every depth as if it were the last. A tuned lens first translates: x W + b,
one W and b for each depth, chosen to lower KL(final || lens) on training sequences. It shows what
can be read at a depth, not what later layers do with it.

Source: Belrose et al. 2023, section 3. Each depth starts at the identity, as there, or at the
least-squares map to the final residual stream, in closed form, whichever reads better; so few
steps are needed, and on the training rows no depth reads worse than the logit lens.

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import tuned
    >>> from iclutils.interp import clean_corrupt
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> tokens = clean_corrupt.copying(net, 16, 10, generator).clean
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from ...errors import IclError
from ...models import TransformerBridge
from ...progress import bar
from .depth import depths

RIDGE = 1e-2  # of the mean variance of a residual stream's dimension
LOGITS = 2**25  # logits held at once: 134 MB
Maps = tuple[Float[Tensor, "depth d_model d_model"], Float[Tensor, "depth d_model"]]


@dataclass(frozen=True)
class Tuned:
    """A tuned lens. Depth 0 is after the embedding; the last depth is the identity.

    Attributes:
        weight, bias: the maps x -> x W + b.
        kl_start, kl: mean KL(final || lens) on the training rows before and after the steps, nats.
    """

    weight: Float[Tensor, "depth d_model d_out"]
    bias: Float[Tensor, "depth d_out"]
    kl_start: Float[Tensor, "depth"]
    kl: Float[Tensor, "depth"]

    def translate(
        self, entry: Float[Tensor, "*lead d_model"], index: int
    ) -> Float[Tensor, "*lead d_model"]:
        """The residual stream of depth ``index``, translated; for ``depth.lens``."""
        return entry @ self.weight[index] + self.bias[index]


def fit(
    model: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    generator: Generator,
    steps: int = 60,
    rate: float = 1e-3,
    together: int = 512,
    at: Int[Tensor, "batch entry"] | None = None,
) -> Tuned:
    """Fit a tuned lens to some positions of ``tokens``.

    One pass through the model; the steps see cached residual streams only. Where the steps end
    worse than they began, the start is kept.

    Args:
        model: the model.
        tokens: training sequences.
        generator: order of the rows, on the CPU.
        steps: steps of Adam.
        rate: their size.
        together: rows (positions of sequences) in one step, at most.
        at: positions to fit to, those that will be read; all but the first if None.

    Example:
        >>> found = tuned.fit(net, tokens, generator, steps=2)
        >>> bool((found.kl <= found.kl_start + 1e-6).all())
        True
    """
    if at is None:
        at = torch.arange(1, tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    each = torch.arange(len(tokens), device=tokens.device)[:, None]
    stream = torch.stack([x[each, at].flatten(0, 1) for x in depths(model, tokens)])
    lower, final = stream[:-1], stream[-1]
    rows, width = final.shape
    if rows < width:
        raise IclError(
            f"A tuned lens needs at least {width} positions, one for each dimension; got {rows}."
        )
    if together < 1:
        raise IclError(f"together must be at least 1; got {together}.")
    together = min(together, rows, max(1, LOGITS // (len(lower) * model.cfg.d_vocab)))
    identity = torch.eye(width).to(lower).repeat(len(lower), 1, 1), torch.zeros_like(lower[:, 0])
    start = _better(model, lower, final, identity, least_squares(lower, final))
    weight, bias = start[0].clone(), start[1].clone()
    with torch.enable_grad():
        weight.requires_grad_(), bias.requires_grad_()
        adam = torch.optim.Adam([weight, bias], lr=rate)
        for _ in bar(range(steps), "steps"):
            pick = torch.randint(0, rows, (together,), generator=generator).to(tokens.device)
            adam.zero_grad()
            _kl(model, lower[:, pick], final[pick], weight, bias).mean(1).sum().backward()
            adam.step()
    maps = _better(model, lower, final, start, (weight.detach(), bias.detach()))
    zero = lower.new_zeros(1)
    return Tuned(
        weight=torch.cat([maps[0], torch.eye(width).to(lower)[None]]),
        bias=torch.cat([maps[1], lower.new_zeros(1, width)]),
        kl_start=torch.cat([_mean_kl(model, lower, final, *start), zero]),
        kl=torch.cat([_mean_kl(model, lower, final, *maps), zero]),
    )


def least_squares(
    inputs: Float[Tensor, "depth row d_model"], target: Float[Tensor, "row d_model"]
) -> Maps:
    """Affine maps x W + b nearest to ``target``, each as near to the identity as ridge makes it.

    Ridge regression of target - x on x, with a penalty of ``RIDGE`` times the mean variance.

    Example:
        >>> x = torch.randn(1, 200, 3, generator=generator)
        >>> weight, bias = tuned.least_squares(x, 2 * x[0] + 1)
        >>> bool((weight[0].diagonal() > 1.9).all())
        True
    """
    weights, biases = [], []
    for x in inputs:
        centre, goal = x.double().mean(0), (target - x).double().mean(0)
        u, v = x.double() - centre, (target - x).double() - goal
        square = u.T @ u
        eye = torch.eye(len(square)).to(square)
        penalty = RIDGE * square.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        change = torch.linalg.solve(square + penalty * eye, u.T @ v)
        weights.append((change + eye).to(x))
        biases.append((goal - centre @ change).to(x))
    return torch.stack(weights), torch.stack(biases)


def _kl(
    model: TransformerBridge,
    lower: Float[Tensor, "depth row d_model"],
    final: Float[Tensor, "row d_model"],
    weight: Tensor,
    bias: Tensor,
) -> Float[Tensor, "depth row"]:
    """KL(final || lens) of some rows, in nats."""

    def log_p(stream: Tensor) -> Tensor:
        return model.unembed(model.ln_final(stream)).log_softmax(-1)

    target = log_p(final[None])
    return (target.exp() * (target - log_p(lower @ weight + bias[:, None]))).sum(-1)


def _better(model: TransformerBridge, lower: Tensor, final: Tensor, old: Maps, new: Maps) -> Maps:
    """Of each depth the new map where it reads better on all rows, else the old one."""
    gain = _mean_kl(model, lower, final, *new) < _mean_kl(model, lower, final, *old)
    return (
        torch.where(gain[:, None, None], new[0], old[0]),
        torch.where(gain[:, None], new[1], old[1]),
    )


def _mean_kl(
    model: TransformerBridge, lower: Tensor, final: Tensor, weight: Tensor, bias: Tensor
) -> Float[Tensor, "depth"]:
    """Mean over all rows, a chunk of them at a time."""
    step = max(1, LOGITS // (len(lower) * model.cfg.d_vocab))
    with torch.no_grad():
        parts = [
            _kl(model, lower[:, start : start + step], final[start : start + step], weight, bias)
            for start in range(0, len(final), step)
        ]
    return torch.cat(parts, 1).mean(1)
