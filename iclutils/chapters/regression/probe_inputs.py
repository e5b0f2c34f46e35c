"""What probes are given: hidden states of frozen networks, and the targets to find in them.

Source: Akyurek et al. 2023, section 5. {cite}`akyurek2023`

Example:
    >>> import torch
    >>> from iclutils.models import regressors
    >>> from iclutils.chapters.regression import probe_inputs
    >>> from iclutils.tasks import regression
    >>> net = regressors.load("regression-d8")
    >>> drawn = regression.sample(regression.Task(8), 8, 3, torch.Generator().manual_seed(0))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError
from ...models.regressors import Format, Learners
from ...tasks.regression import Contexts

States = Float[Tensor, "net layer batch pos width"]
Targets = Float[Tensor, "target contexts d"]  # of the same contexts; a mismatch gets a cure


@torch.no_grad()
def hidden_states(
    networks: Sequence[Learners],
    xs: Float[Tensor, "batch pairs d"],
    ys: Float[Tensor, "batch pairs"],
    batch_size: int = 512,
) -> States:
    """The residual streams of all members of the networks, one after another, on the same contexts.

    Layer 0 is the embedding. For the states after n pairs give n + 1 pairs: the last is the query.
    """
    if len({(net.shape.layers, net.shape.width, net.shape.format) for net in networks}) != 1:
        raise IclError("Probe networks of one depth, width and format at a time.")
    for shape in (net.shape for net in networks):
        if xs.shape[-1] != shape.dim or not 0 < xs.shape[-2] <= shape.pairs:
            raise IclError(
                f"The network reads 1..{shape.pairs} pairs of dimension {shape.dim}; got "
                f"{xs.shape[-2]} of dimension {xs.shape[-1]}."
            )
    parts = []
    for x, y in zip(xs.split(batch_size), ys.split(batch_size), strict=True):
        streams = [torch.stack(net.resid(x[None], y[None]), 1) for net in networks]
        parts.append(torch.cat(streams))
    return torch.cat(parts, 2)


def places(form: Format, n: int) -> int:
    """Positions of a context up to the query x_{n+1}: what a probe may read after n pairs.

    Example:
        >>> probe_inputs.places("one", 3), probe_inputs.places("two", 3)
        (4, 7)
    """
    return 2 * n + 1 if form == "two" else n + 1


def moment(
    xs: Float[Tensor, "batch pairs d"], ys: Float[Tensor, "batch pairs"], n: int
) -> Float[Tensor, "batch d"]:
    """XᵀY of the first n pairs, a sum and not a mean.

    Example:
        >>> xs, ys = torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[3.0, 4.0, 9.0]])
        >>> probe_inputs.moment(xs, ys, n=2)
        tensor([[11.]])
    """
    xs, ys = _first(xs, ys, n)
    return (xs * ys[..., None]).sum(-2)


def least_squares(
    xs: Float[Tensor, "batch pairs d"], ys: Float[Tensor, "batch pairs"], n: int
) -> Float[Tensor, "batch d"]:
    """The weight vector of least norm among those that fit the first n pairs best (OLS).

    With noise and n near d its tails are heavy, and 1 − R² hangs on a few contexts.

    Example:
        >>> xs, ys = torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[3.0, 6.0, 9.0]])
        >>> probe_inputs.least_squares(xs, ys, n=2)
        tensor([[3.]])
    """
    xs, ys = _first(xs, ys, n)
    inverse = torch.linalg.pinv(xs.double(), rtol=1e-10)
    return (inverse @ ys.double()[..., None])[..., 0].to(xs.dtype)


def shuffled(targets: Targets, generator: torch.Generator) -> Targets:
    """Every target moved to another context: a probe of these should have an error of 1.

    Example:
        >>> targets, generator = torch.arange(4.0)[None, :, None], torch.Generator().manual_seed(0)
        >>> sorted(probe_inputs.shuffled(targets, generator).flatten().tolist())
        [0.0, 1.0, 2.0, 3.0]
    """
    order = torch.randperm(targets.shape[1], generator=generator, device=generator.device)
    order = order.to(targets.device)
    moved = torch.empty_like(targets)
    moved[:, order] = targets[:, order.roll(1)]
    return moved


def prepare(networks: Sequence[Learners], contexts: Contexts) -> tuple[States, Targets]:
    """What a probe needs: states up to the last x, and XᵀY and OLS of the pairs before it.

    Example:
        >>> states, targets = probe_inputs.prepare([net], drawn)
        >>> targets.shape
        torch.Size([2, 8, 8])
    """
    xs, ys = contexts.xs, contexts.ys
    n = xs.shape[-2] - 1
    targets = torch.stack([moment(xs, ys, n), least_squares(xs, ys, n)])
    return hidden_states(networks, xs, ys), targets


def check(states: Tensor, targets: Targets, batch: int, held_out: int, least: int) -> None:
    """Refuse what cannot be probed; ``least`` contexts cannot even fix a probe.

    Example:
        >>> states, targets = probe_inputs.prepare([net], drawn)
        >>> probe_inputs.check(states, targets, batch=8, held_out=3, least=1)
    """
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


def _first(xs: Tensor, ys: Tensor, n: int) -> tuple[Tensor, Tensor]:
    if not 1 <= n <= xs.shape[-2]:
        raise IclError(f"The context has {xs.shape[-2]} pairs; there is no target after {n}.")
    return xs[..., :n, :], ys[..., :n]
