"""Attribution: the effects of all parts at once, from one pass and without a patch.

``edge_attribution`` and ``node_attribution`` estimate what ``patching`` measures, from gradients;
``direct_logits`` reads what each part adds to the answer's logit itself.

A prediction that is nearly certain has next to no gradient, and the estimate is poor; gradients
averaged over runs on the way from the corrupt one see more. Sources: Nanda 2023; Syed et al. 2023;
Hanna et al. 2024 (averaged); Elhage et al. 2021 (direct).
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import IclError
from ..models import TransformerBridge, check_tokens, get_act_name
from ..progress import bar
from .clean_corrupt import CleanCorrupt
from .graph import (
    CHANNELS,
    Graph,
    Node,
    change_of_writes,
    component_output,
    model_graph,
    output_hook,
    shift_inputs,
)
from .hooks import Hook, activations, at_positions
from .invariants import blocks, logit_direction

ROWS = 16_384  # rows of d_model held at once: (sequence, reader, position)


def edge_attribution(
    model: TransformerBridge, task: CleanCorrupt, steps: int = 1
) -> Float[Tensor, "writer reader batch"]:
    """Estimate the nats lost when each edge alone is patched; 0 where there is no edge: the
    gradient of the score at the reader's input in the clean run, times the writer's change, summed
    over positions, and averaged over ``steps`` runs whose embeddings are 1/steps, 2/steps, ... 1 of
    the way to the clean one."""
    if steps < 1:
        raise IclError(f"steps must be at least 1; got {steps}.")
    check_tokens(model, task.clean)
    graph, size = model_graph(model), task.clean.shape[1]
    names = set(map(output_hook, graph.writers))
    out = torch.zeros(*graph.exists.shape, len(task), device=task.clean.device)
    chunks = torch.arange(len(task)).split(max(1, ROWS // (size * len(graph.readers))))
    for rows in bar(chunks, "sequences"):
        part = task[rows]
        clean, corrupt = (activations(model, x, names) for x in (part.clean, part.corrupt))
        lost = -torch.stack([change_of_writes(model, clean, corrupt, [u]) for u in graph.writers])
        begin = output_hook(graph.writers[0])
        for step in range(1, steps + 1):
            embedding = torch.lerp(corrupt[begin], clean[begin], step / steps)
            out[..., rows] += _products(model, part, graph, embedding, lost) / steps
    return out


def _products(
    model: TransformerBridge,
    part: CleanCorrupt,
    graph: Graph,
    embedding: Float[Tensor, "batch pos d_model"],
    lost: Float[Tensor, "writer batch pos d_model"],
) -> Float[Tensor, "writer reader batch"]:
    """Multiply each writer's change by the gradient of what each reader reads."""
    groups, hooks, leaves = graph.reader_groups, list[Hook](), list[Tensor]()
    for group in groups:  # a change of nothing for every reader, whose gradient is taken
        shape = (len(group),) if group[0].kind in CHANNELS else ()
        leaf = lost.new_zeros(*lost.shape[1:3], *shape, lost.shape[-1], requires_grad=True)

        def nothing(leaf: Tensor = leaf) -> Tensor:
            return leaf

        hooks += shift_inputs(model, group[0], range(len(group)), nothing)
        leaves.append(leaf)
    gradients = _gradients(model, part, embedding, hooks, leaves)
    each, start = lost.transpose(0, 1).flatten(2), 0
    out = lost.new_zeros(len(part), *graph.exists.shape)
    for group, gradient in zip(groups, gradients, strict=True):
        slopes = gradient.transpose(1, 2) if group[0].kind in CHANNELS else gradient[:, None]
        before, count = int(graph.exists[:, start].sum()), len(group)  # its writers are first
        out[:, :before, start : start + count] = each[:, :before] @ slopes.flatten(2).mT
        start += count
    return out.permute(1, 2, 0)


def _gradients(
    model: TransformerBridge,
    task: CleanCorrupt,
    embedding: Tensor,
    hooks: Sequence[Hook],
    leaves: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return gradients of the clean score at ``leaves``, which ``hooks`` put into a run that begins
    with another embedding; sequences do not mix, so one backward pass serves all of them."""
    begin = embedding.detach().requires_grad_()
    first: Hook = output_hook(Node("embed")), lambda value, hook: begin
    with torch.enable_grad():
        logits = model.run_with_hooks(task.clean, fwd_hooks=[first, *hooks, at_positions(task.at)])
        return torch.autograd.grad(task.score(logits).sum(), leaves)


def node_attribution(
    model: TransformerBridge, task: CleanCorrupt, steps: int = 1
) -> Float[Tensor, "node batch"]:
    """Estimate the nats lost when each head or MLP layer is resampled (``patching.ablate``), in the
    order of the graph's writers: the gradient at its output times its change, from one backward
    pass, or averaged over ``steps`` as in ``edge_attribution``."""
    check_tokens(model, task.clean)
    embed, *nodes = model_graph(model).writers
    begin, names = output_hook(embed), list(dict.fromkeys(map(output_hook, nodes)))
    corrupt = activations(model, task.corrupt, [begin, *names])
    clean = activations(model, task.clean, [begin])  # the others are those of the last step
    leaves = [torch.zeros_like(corrupt[name], requires_grad=True) for name in names]

    def add(value: Tensor, hook: object, name: str, leaf: Tensor) -> Tensor:
        clean[name] = value.detach()
        return value + leaf

    hooks: list[Hook] = [
        (name, partial(add, name=name, leaf=leaf)) for name, leaf in zip(names, leaves, strict=True)
    ]
    slopes = {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}
    for step in range(1, steps + 1):
        embedding = torch.lerp(corrupt[begin], clean[begin], step / steps)
        gradients = _gradients(model, task, embedding, hooks, leaves)
        for name, slope in zip(names, gradients, strict=True):
            slopes[name] += slope / steps
    lost = (slopes[name] * (clean[name] - corrupt[name]) for name in names)
    return torch.cat([x.sum((1, 3)).T if x.ndim == 4 else x.sum((1, 2))[None] for x in lost])


def direct_logits(model: TransformerBridge, task: CleanCorrupt) -> Float[Tensor, "writer batch"]:
    """Return the direct effect of each writer on the right answer's logit over the mean of all (or
    ``choices``), mean over scored entries: heads that push the same answer are aggregative (Elhage
    et al. 2021, Wang et al. 2022). Biases are left out; norms keep the scale of the run."""
    blocks(model)  # or a refusal: some architectures lack what is read here
    writers, end = model_graph(model).writers, get_act_name("resid_post", model.cfg.n_layers - 1)
    cache = activations(model, task.clean, {*map(output_hook, writers), end})
    rows = torch.arange(len(task), device=task.clean.device)[:, None]
    reads = answer_direction(model, task, cache[end][rows, task.at])  # (batch, entry, d_model)
    writes = (component_output(model, cache, u)[rows, task.at] for u in writers)
    return torch.stack([(write * reads).sum(-1).mean(-1) for write in writes])


def answer_direction(
    model: TransformerBridge, task: CleanCorrupt, end: Float[Tensor, "batch entry d_model"]
) -> Float[Tensor, "batch entry d_model"]:
    """Return the direction in the residual stream of the answer's logit over the mean of all (or
    choices); the final norm keeps the scale that it has at ``end``, the last stream of the run."""
    tokens = model.W_U.T  # (vocab, d_model)
    if task.choices is None:
        return logit_direction(model, end, tokens[task.answer] - tokens.mean(0))
    return logit_direction(
        model, end, tokens[task.answer] - tokens[task.choices].mean(1, keepdim=True)
    )
