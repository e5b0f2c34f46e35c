"""Similarity: whether two heads do alike, where that can be said at all.

The correlation of two heads' activations (seed note 004, section 4.1) means nothing: each head's
``z`` has a basis of its own, and ``turn`` changes it without changing the model. Similarity has to
be taken where heads write: centred kernel alignment (CKA) of their outputs (Kornblith et al.
2019), overlap of their output spaces (``subspaces``), or where they look: divergence of their
attention (Clark et al. 2019).

Example:
    >>> import torch
    >>> from iclutils import models
    >>> from iclutils.chapters.circuits import similarity
    >>> net = models.load("induction-0")
    >>> generator = torch.Generator().manual_seed(0)
    >>> tokens = torch.randint(1, net.cfg.d_vocab, (3, 10), generator=generator)
    >>> turned = similarity.rotation(net.cfg.d_head, generator)
    >>> x = torch.randn(30, net.cfg.d_head, generator=generator)
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import GPT2LMHeadModel, PreTrainedModel

from ...errors import IclError
from ...models import TransformerBridge, cached, get_act_name
from ...progress import bar

MOST = 2048  # rows of outputs kept


def outputs(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], skip_first: bool = True
) -> Float[Tensor, "layer head sample d_model"]:
    """What every head writes to the residual stream (z W_O), all positions of all sequences.

    At most 2,048 of them, evenly spaced; ``skip_first`` leaves out the first position.

    Example:
        >>> similarity.outputs(net, tokens).shape[:3]
        torch.Size([2, 4, 27])
    """
    layers = range(model.cfg.n_layers)
    _, cache = cached(model, tokens, [get_act_name("z", layer) for layer in layers])
    start = int(skip_first)
    count = len(tokens) * (tokens.shape[1] - start)
    pick = torch.arange(min(count, MOST), device=tokens.device) * count // min(count, MOST)
    weights, each = model.W_O, []
    for layer in layers:
        z = cache[get_act_name("z", layer)][:, start:].flatten(0, 1)[pick]
        each.append(z.transpose(0, 1) @ weights[layer])
    return torch.stack(each)


def note_correlation(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head head"]:
    """The note's measure: Pearson correlation of two heads' flattened ``z``.

    Coordinate i of one head is paired with coordinate i of the other, though they have nothing to
    do with each other. NaN for a head whose ``z`` is constant.

    Example:
        >>> similarity.note_correlation(net, tokens).diagonal(0, -2, -1).round(decimals=3).unique()
        tensor([1.], dtype=torch.float64)
    """
    names = [get_act_name("z", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)
    heads = model.cfg.n_heads
    flat = [cache[name].permute(2, 0, 1, 3).reshape(heads, -1).double() for name in names]
    return torch.stack([torch.corrcoef(one).reshape(heads, heads) for one in flat])


def rotation(size: int, generator: Generator) -> Float[Tensor, "size size"]:
    """A random orthogonal matrix.

    Example:
        >>> torch.allclose(turned @ turned.T, torch.eye(len(turned)), atol=1e-5)
        True
    """
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def turn(
    network: PreTrainedModel, layer: int, head: int, rotation: Float[Tensor, "size other_size"]
) -> None:
    """Turn one head's basis in a GPT-2 in place: W_V R, b_V R, R^T W_O (``models.edit_weights``).

    What the head writes stays the same, whatever it attends to.

    Example:
        >>> same = models.edit_weights("induction-0", lambda m: similarity.turn(m, 1, 0, turned))
        >>> bool((models.logits(same, tokens) - models.logits(net, tokens)).abs().max() < 1e-2)
        True
    """
    if not isinstance(network, GPT2LMHeadModel) or not 0 <= layer < len(network.transformer.h):
        raise IclError(f"Only a GPT-2 with a layer {layer} can be turned there.")
    attn: Any = network.transformer.h[layer].attn
    weight, bias, out = attn.c_attn.weight, attn.c_attn.bias, attn.c_proj.weight
    size = attn.head_dim
    if not 0 <= head < attn.num_heads or rotation.shape != (size, size):
        raise IclError(
            f"Need a head below {attn.num_heads} and a rotation of width {size}; got head {head} "
            f"and {tuple(rotation.shape)}."
        )
    if not torch.allclose(rotation.T @ rotation, torch.eye(size), atol=1e-4):
        raise IclError("The matrix is no rotation: its columns must be orthonormal.")
    rows = slice(head * size, (head + 1) * size)
    columns = slice(2 * attn.embed_dim + rows.start, 2 * attn.embed_dim + rows.stop)
    with torch.no_grad():
        weight[:, columns] = weight[:, columns] @ rotation
        bias[columns] = bias[columns] @ rotation
        out[rows] = rotation.T @ out[rows]


def cka(x: Float[Tensor, "sample a"], y: Float[Tensor, "other_sample b"]) -> float:
    """Linear CKA, ||Y^T X||^2 / (||X^T X|| ||Y^T Y||) of centred rows: 0 to 1.

    Rotating or scaling either side changes nothing. NaN if one side is constant.

    Example:
        >>> round(similarity.cka(x, 3 * x @ turned), 4)
        1.0
    """
    if len(x) != len(y):
        raise IclError(f"CKA compares the same samples; got {len(x)} and {len(y)}.")
    x, y = ((t - t.mean(0)).double() for t in (x, y))
    norms = (x.T @ x).norm() * (y.T @ y).norm()
    return ((y.T @ x).square().sum() / norms).item()


def cka_matrix(outputs: Float[Tensor, "head sample d_model"]) -> Float[Tensor, "head head"]:
    """CKA of every pair of heads; NaN for a head that always writes the same."""
    return _aligned(_reduced(outputs))


def cka_null(
    outputs: Float[Tensor, "head sample d_model"], generator: Generator, draws: int = 20
) -> Float[Tensor, "draw head head"]:
    """The same with every head's rows in an order of its own: what unrelated heads would have."""
    reduced = _reduced(outputs)
    heads, count = reduced.shape[:2]
    out = []
    for _ in bar(range(draws), "draws"):
        order = torch.rand(heads, count, generator=generator).argsort(-1).to(reduced.device)
        out.append(_aligned(reduced.gather(1, order[..., None].expand_as(reduced))))
    return torch.stack(out)


def attention_divergence(
    first: Float[Tensor, "*lead dest src"], second: Float[Tensor, "*other to of"]
) -> Float[Tensor, "*lead"]:
    """Jensen-Shannon divergence of attention rows, in bits, mean over rows but the first."""
    if first.shape != second.shape:
        raise IclError("Patterns to compare must have the same shape.")
    middle = torch.special.entr((first + second) / 2)
    each = (torch.special.entr(first) + torch.special.entr(second)) / 2
    rows = (middle - each).sum(-1).clamp_min(0) / torch.log(torch.tensor(2.0))
    return rows[..., 1:].mean(-1)


def _reduced(outputs: Tensor) -> Tensor:
    """Centred rows in the principal basis of each head, constant directions left out.

    A head's outputs have at most d_head directions; CKA does not see the basis.
    """
    centred = (outputs - outputs.mean(1, keepdim=True)).double()
    values, vectors = torch.linalg.eigh(centred.mT @ centred)
    kept = int((values > 1e-12 * values.amax(-1, keepdim=True)).sum(-1).max())
    return centred @ vectors[..., -max(kept, 1) :]


def _aligned(centred: Tensor) -> Tensor:
    flat = centred.transpose(0, 1).flatten(1)  # (sample, head x direction)
    cross = [(one.T @ flat).unflatten(1, (len(centred), -1)) for one in centred]
    squares = torch.stack([part.square().sum((0, 2)) for part in cross])
    norms = squares.diagonal().sqrt()
    return squares / (norms[:, None] * norms)
