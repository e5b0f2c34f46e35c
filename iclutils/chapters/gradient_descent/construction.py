"""Gradient descent as weights of linear self-attention ({cite}`vonoswald2023`, proposition 1).

Tokens are e_i = (x_i, y_i), of d + o channels, and (x_q, -W_0 x_q) for the query. With W_K = W_Q =
[[I, 0], [0, 0]], W_V = [[0, 0], [W_0, -I]] and P = η/N on the y-block, a layer adds -ΔW x_j to
every y_j, so labels become what is left of them, and layers stack: K of them are K steps. The
answer is the query's y-block times -1.

The *note* that this chapter starts from has P = -η/n and (x_q, +W_0 x_q), read as it is. One
layer gives the same answer. But it adds +ΔW x_i to the labels, and a second layer goes astray.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import construction, descent
    >>> from iclutils.models.lsa import Shape
    >>> xs = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    >>> ys = torch.tensor([2.0, 4.0, 0.0], dtype=torch.float64)
    >>> layer = construction.gradient_layer(dim=1, rate=0.1, pairs=2)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import IclError, unknown
from ...models.lsa import Layer, Shape, Solvers, attend
from .descent import Labels, Settings, checked, initial, settings

Convention = str  # "stacking" or "note"
SIGNS = {"stacking": -1, "note": 1}  # of the answer in the query's y-block


def gradient_layer(
    dim: int,
    rate: float,
    pairs: int,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
) -> Layer:
    """One step of GD, as a head of d + o channels, float64.

    Args:
        dim: d.
        rate: η.
        pairs: N.
        start: W_0; zero if omitted.
        outputs: o.

    Example:
        >>> stream = construction.run(construction.tokens(xs, ys), [layer])
        >>> construction.readout(stream[-1], dim=1)
        tensor([1.5000], dtype=torch.float64)
    """
    return _layer(dim, rate, pairs, start, outputs, 0.0)


def plus_layer(
    dim: int,
    rate: float,
    pairs: int,
    gamma: float,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
) -> Layer:
    """One step of GD++: as ``gradient_layer``, and W_V, P hold I and -γ I on the x-block."""
    return _layer(dim, rate, pairs, start, outputs, gamma)


def note_layer(
    dim: int,
    rate: float,
    pairs: int,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
) -> Layer:
    """The note's layer, its P cut to a size that fits: -η/n on the y-block.

    Example:
        >>> layer = construction.note_layer(dim=1, rate=0.1, pairs=2)
        >>> stream = construction.run(construction.tokens(xs, ys, convention="note"), [layer])
        >>> construction.readout(stream[-1], dim=1, convention="note")
        tensor([1.5000], dtype=torch.float64)
    """
    return _layer(dim, -rate, pairs, start, outputs, 0.0)


def note_layer_as_written(
    dim: int,
    rate: float,
    pairs: int,
    start: Float[Tensor, "o d"] | None = None,
    outputs: int = 1,
) -> Layer:
    """The note's layer with its P = -(η/n) I_n. It exists if n happens to be d + o."""
    layer = _layer(dim, 1.0, pairs, start, outputs, 0.0)
    channels = dim + outputs
    if channels != pairs:
        raise IclError(
            f"P = -(η/n) I_n is {pairs} x {pairs}, but it multiplies the columns of W_V H, which "
            f"have d + o = {channels} entries: it must be {channels} x {channels}, whatever n is. "
            "Use note_layer."
        )
    out = -rate / pairs * torch.eye(channels, dtype=torch.float64)[None]
    return layer._replace(out=out)


def tokens(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    start: Float[Tensor, "o dim"] | None = None,
    convention: Convention = "stacking",
) -> Float[Tensor, "*batch n channel"]:
    """(x_i, y_i), and the query's x with -W_0 x_q, or +W_0 x_q in the note's convention.

    Args:
        xs: inputs, the query's last.
        ys: labels, (*batch, n) or (*batch, n, o); the last is not read.
        start: W_0; zero if omitted.
        convention: "stacking" or "note".

    Example:
        >>> construction.tokens(xs, ys)
        tensor([[1., 2.],
                [2., 4.],
                [3., 0.]], dtype=torch.float64)
    """
    _, query, labels = checked(xs, ys)
    first = initial(start, labels.shape[-1], xs)
    guess = _sign(convention) * query @ first.mT
    return torch.cat([xs, torch.cat([labels, guess[..., None, :]], -2)], -1)


def run(
    given: Float[Tensor, "*batch n channel"], layers: Sequence[Layer]
) -> Float[Tensor, "step *batch n channel"]:
    """The tokens before the first layer and after each; the query, which is last, is no key.

    Example:
        >>> construction.run(construction.tokens(xs, ys), [layer, layer]).shape
        torch.Size([3, 3, 2])
    """
    flat = given.reshape(-1, *given.shape[-2:])
    stream = [flat]
    for layer in layers:
        if layer.query.shape[-2] != given.shape[-1]:
            raise IclError(
                f"The layer reads {layer.query.shape[-2]} channels; the tokens have "
                f"{given.shape[-1]}. Give it the same d and outputs."
            )
        weights = Layer(*(part.to(flat) for part in layer))
        stream.append(stream[-1] + attend(stream[-1], weights, given.shape[-2] - 1))
    return torch.stack(stream).reshape(-1, *given.shape)


def readout(
    stream: Float[Tensor, "*batch n channel"], dim: int, convention: Convention = "stacking"
) -> Float[Tensor, "*batch o"]:
    """The answer, from the query's y-block: times -1, but not so in the note's convention.

    Example:
        >>> stream = torch.tensor([[1.0, 2.0], [3.0, -1.5]], dtype=torch.float64)
        >>> construction.readout(stream, dim=1)
        tensor([1.5000], dtype=torch.float64)
    """
    return _sign(convention) * stream[..., -1, dim:]


def stacked(
    xs: Float[Tensor, "*batch n d"],
    ys: Labels,
    rates: Settings,
    gammas: Settings | None = None,
    start: Float[Tensor, "o dim"] | None = None,
    convention: Convention = "stacking",
) -> Float[Tensor, "step ..."]:
    """The answers after 0 .. K layers, in the shape of ``descent.descend(...).predictions``.

    Equal to them with the convention "stacking"; with "note", after the first layer alone.

    Example:
        >>> steps = descent.descend(xs, ys, [0.1, 0.1]).predictions
        >>> torch.allclose(construction.stacked(xs, ys, [0.1, 0.1]), steps)
        True
    """
    pairs, _, labels = checked(xs, ys)
    etas, squeezes = settings(rates, gammas)
    if convention == "note" and gammas is not None:
        raise IclError("The note has no GD++: leave the gammas out.")
    sign = -_sign(convention)
    sizes = xs.shape[-1], pairs.shape[-2], labels.shape[-1]
    layers = [
        _layer(sizes[0], sign * eta, sizes[1], start, sizes[2], gamma)
        for eta, gamma in zip(etas, squeezes, strict=True)
    ]
    answers = readout(run(tokens(xs, ys, start, convention), layers), xs.shape[-1], convention)
    return answers if ys.ndim == xs.ndim else answers[..., 0]


def constructed(
    shape: Shape,
    rates: Settings,
    gammas: Settings | None = None,
    dtype: torch.dtype = torch.float32,
) -> Solvers:
    """Solvers, one member, whose weights are the construction, for W_0 = 0 and one output.

    With several heads, the first does the work and the others are 0.

    Args:
        shape: with linear attention alone; where it clips, steps are exact within the bound.
        rates: of each layer, the same for all if the layers share their weights.
        gammas: of each layer, for GD++.
        dtype: of the weights; float64 for identities.

    Example:
        >>> made = construction.constructed(Shape(1, 2), [0.1], dtype=torch.float64)
        >>> made(xs[None, None], ys[None, None]).round(decimals=3)
        tensor([[1.5000]], dtype=torch.float64)
    """
    etas, squeezes = settings(rates, gammas)
    if set(shape.attention) != {"linear"} or _more(shape):
        raise IclError(
            "The construction needs linear attention over joint tokens, without the query among "
            f"the keys, LayerNorm, an MLP, a read-in or a variant; got {shape}."
        )
    if len(etas) != shape.layers:
        raise IclError(f"Need a rate for each of {shape.layers} layers; got {len(etas)}.")
    if shape.shared and len({*zip(etas, squeezes, strict=True)}) > 1:
        raise IclError("Layers that share their weights need the same rate and gamma for all.")
    network = Solvers(shape, (0,)).to(dtype).requires_grad_(False)
    for parameter in network.parameters():
        parameter.zero_()
    own = 1 if shape.shared else shape.layers
    for number in range(own):
        layer = _layer(shape.dim, etas[number], shape.pairs, None, 1, squeezes[number])
        for name, part in layer._asdict().items():
            network.attention[name][0, number, 0] = part[0].to(dtype)
    return network.eval()


def _more(shape: Shape) -> bool:
    """Whether a shape has more than layers of attention over joint tokens."""
    extra = shape.norm or shape.hidden or shape.width or shape.variant != "plain"
    return bool(extra or shape.sees_query or shape.separate)


def _layer(
    dim: int, rate: float, pairs: int, start: Tensor | None, outputs: int, gamma: float
) -> Layer:
    if min(dim, pairs, outputs) < 1:
        raise IclError(f"Need sizes of at least 1; got d={dim}, N={pairs}, o={outputs}.")
    settings([rate], [gamma])
    place = torch.zeros(1, dtype=torch.float64)
    first = initial(start, outputs, place.expand(1, dim))
    x = torch.cat([torch.ones(dim), torch.zeros(outputs)]).to(place)
    value = torch.diag(x * bool(gamma) - (1 - x))
    value[:dim, dim:] = first.mT
    out = torch.diag((1 - x) * rate / pairs - x * gamma)
    return Layer(*(part[None] for part in (x.diag(), x.diag(), value, out)))


def _sign(convention: str) -> int:
    if convention not in SIGNS:
        raise unknown("convention", convention, SIGNS)
    return SIGNS[convention]
