"""Attribution: the effects of all wires at once, estimated from one backward pass.

Patching a wire changes what its reader reads by a known vector; to first order the score follows
its gradient at that input. One forward and one backward pass give the gradient at every input,
so all wires of a model cost little more than one pass. The estimate is poor where the score is
saturated: a prediction that is nearly certain has next to no gradient. Gradients of the corrupt
run, or averaged over runs between the two, see more.

Sources: Nanda 2023 and Syed et al. 2023 (edge attribution); Hanna et al. 2024 (averaged).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.interp import attribution, clean_corrupt, graph
    >>> net = models.load("induction-0")
    >>> task = clean_corrupt.copying(net, 4, 5, torch.Generator().manual_seed(0))
    >>> exists = graph.of(net).exists
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float
from scipy.stats import spearmanr
from torch import Tensor

from ..errors import IclError, unknown
from ..models import TransformerBridge, check_tokens
from ..progress import bar
from .clean_corrupt import CleanCorrupt
from .graph import (
    CHANNELS,
    Graph,
    Node,
    component_outputs,
    input_hook,
    of,
    output_hook,
    split_qkv_input,
)
from .hooks import Hook, at_positions, check_editable

ROWS = 16_384  # rows of d_model held at once: (sequence, reader, position)


def edge_attribution(
    model: TransformerBridge, behaviour: CleanCorrupt, steps: int = 1, at: str = "clean"
) -> Float[Tensor, "writer reader batch"]:
    """Nats lost when each wire alone is patched, estimated; 0 where there is no wire.

    The gradient of the score at the reader's input, times what its writer writes less on the
    clean than on the corrupt sequence, summed over positions, with the sign of a loss.

    Args:
        model: the model.
        behaviour: the clean and corrupt sequences and what is scored.
        steps: with more than one, the gradient is averaged over runs that begin with embeddings
            a share 1/steps, 2/steps, ... 1 of the way to ``at``.
        at: ``"clean"`` or ``"corrupt"``, the run whose gradient is taken.

    Example:
        >>> found = attribution.edge_attribution(net, task).mean(-1)
        >>> bool((found[~exists] == 0).all())
        True
    """
    if at not in ("clean", "corrupt"):
        raise unknown("end of the path", at, ["clean", "corrupt"])
    if steps < 1:
        raise IclError(f"steps must be at least 1; got {steps}.")
    check_tokens(model, behaviour.clean)
    check_tokens(model, behaviour.corrupt)
    check_editable(model)
    graph, size = of(model), behaviour.clean.shape[1]
    out = torch.zeros(*graph.exists.shape, len(behaviour), device=behaviour.clean.device)
    chunks = torch.arange(len(behaviour)).split(max(1, ROWS // (size * len(graph.readers))))
    with split_qkv_input(model):
        for rows in bar(chunks, "sequences"):
            part = behaviour[rows]
            clean = component_outputs(model, part.clean, graph.writers)
            corrupt = component_outputs(model, part.corrupt, graph.writers)
            lost = torch.stack([clean[u] - corrupt[u] for u in graph.writers])
            ends = corrupt[Node("embed")], clean[Node("embed")]
            start, end = ends if at == "clean" else ends[::-1]
            for step in range(1, steps + 1):
                begin = torch.lerp(start, end, step / steps)
                out[..., rows] += _products(model, part, graph, begin, lost) / steps
    return out * graph.exists[..., None].to(out)


def _products(
    model: TransformerBridge,
    part: CleanCorrupt,
    graph: Graph,
    begin: Float[Tensor, "batch pos d_model"],
    lost: Float[Tensor, "writer batch pos d_model"],
) -> Float[Tensor, "writer reader batch"]:
    """Each writer's change times the gradient at each reader's input, from one backward pass."""
    inputs: dict[str, Tensor] = {}

    def enter(value: Tensor, hook: object) -> Tensor:
        return begin.detach().requires_grad_()

    def keep(name: str) -> Hook:
        def store(value: Tensor, hook: object) -> Tensor:
            # A new tensor, because an MLP reads the very one that the stream goes on with.
            inputs[name] = value.view_as(value)
            return inputs[name]

        return name, store

    readers = [v for v in graph.readers if v.head <= 0]  # the heads of a layer share a hook
    names = [input_hook(model, v) for v in readers]
    start, end = (output_hook(Node("embed")), enter), at_positions(part.at)
    with torch.enable_grad():
        logits = model.run_with_hooks(part.clean, fwd_hooks=[start, *map(keep, names), end])
        # Sequences do not mix, so one backward pass serves all of them.
        found = torch.autograd.grad(part.score(logits).sum(), [inputs[n] for n in names])
    columns = []
    for reader, gradient in zip(readers, found, strict=True):
        split = gradient if reader.kind in CHANNELS else gradient[:, :, None]
        columns.append(einsum(lost, split, "u b p d, b p v d -> u v b"))
    return torch.cat(columns, 1)


class Agreement(NamedTuple):
    """How well estimates stand for the exact effects of the wires.

    Attributes:
        rank: Spearman's rank correlation over all wires; NaN if either does not vary.
        relative_error: root of the summed squared error over that of the summed squares; NaN or
            infinite if there is no effect.
        top: share of the k largest, by absolute value, that both have in common, k = 1, 2, ...
    """

    rank: float
    relative_error: float
    top: Float[Tensor, "size"]


def agreement(
    estimated: Float[Tensor, "writer reader"],
    exact: Float[Tensor, "writer reader"],
    exists: Bool[Tensor, "writer reader"],
) -> Agreement:
    """Compare the estimated with the exact effects of the wires that there are.

    Example:
        >>> effects = torch.rand(exists.shape, generator=torch.Generator().manual_seed(0)) * exists
        >>> round(attribution.agreement(effects, effects, exists).rank, 3)
        1.0
    """
    ours, truth = (v.detach().cpu().double()[exists.cpu()] for v in (estimated, exact))
    if len(truth) < 2:
        raise IclError("Agreement needs at least two wires.")
    constant = bool((ours == ours[0]).all() or (truth == truth[0]).all())
    rank = float("nan") if constant else float(spearmanr(ours, truth).statistic)
    error = (ours - truth).square().sum().sqrt() / truth.square().sum().sqrt()
    places = [v.abs().sort(descending=True, stable=True).indices.argsort() for v in (ours, truth)]
    # A wire is among the k best of both from k = (the later of its two places) + 1 on.
    both = torch.maximum(*places).bincount(minlength=len(truth)).cumsum(0)
    return Agreement(rank, float(error), both / torch.arange(1, len(truth) + 1))
