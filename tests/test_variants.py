"""Variants of attention: autograd on the changed losses, ``Solvers``, whole layers in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch.nn import functional

from iclutils import IclError
from iclutils.chapters.gradient_descent.blocks import Block, dual_block, dual_stack, layer_model
from iclutils.chapters.gradient_descent.contrastive import dual_step
from iclutils.chapters.gradient_descent.explicit import descend, learnt, others
from iclutils.chapters.gradient_descent.features import needed_degree, scaled, scores, taylor
from iclutils.chapters.gradient_descent.linearised import linearisation_error, linearised
from iclutils.chapters.gradient_descent.variants import (
    augmented,
    contrasted,
    negative_samples,
    regularised,
    regularised_limit,
)
from iclutils.models.lsa import Layer, Shape, Solvers, as_tokens

EXACT = {"atol": 1e-10, "rtol": 0.0}
seeds = st.integers(0, 9999)
Contexts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def data(seed: int, keys: int = 6, dim: int = 3, batch: tuple[int, ...] = (2,)) -> Contexts:
    """Short queries (*batch, channel), so that a Taylor series of few terms is exact."""
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    shapes = (*batch, dim), (*batch, keys, dim), (*batch, keys, 2)
    q, k, v = (torch.randn(shape, **place) for shape in shapes)
    chosen = torch.rand(*batch, keys, **place) < 0.6
    chosen[..., :2], chosen[..., -1] = True, False
    return functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, chosen


def degree(q: torch.Tensor, k: torch.Tensor) -> int:
    """For all tokens at hand, to 1e-13."""
    tokens = torch.cat([q[..., None, :], k], -2)
    return needed_degree(float(scores(tokens, tokens).abs().max()), 1e-13)


@settings(deadline=None, max_examples=10)
@given(
    seed=seeds,
    keys=st.integers(3, 6),
    alpha=st.sampled_from([-0.5, 0.0, 0.1, 0.5, 1.0, 1.9]),
    steps=st.sampled_from([1, 2, 6]),
    rate=st.sampled_from([0.2, 1.0]),
)
def test_regularised(seed: int, keys: int, alpha: float, steps: int, rate: float) -> None:
    """Fails if the demonstrations were scaled in the first step, or the geometric sum is off."""
    q, k, v, chosen = data(seed, keys)
    found = regularised(q[:, None], k, v, chosen, alpha, steps)[:, 0]
    settings = {"alpha": alpha, "steps": steps, "rate": rate}
    expected = learnt(q, k, v, chosen, degree(q, k), **settings)
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, atol=1e-10 * size, rtol=0)
    if alpha:
        closed = (1 - (1 - alpha) ** steps) / alpha
        first, step, _ = dual_step(q[:, None], k, v, chosen)
        expected = ((1 - alpha) ** steps * first + closed * step)[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-10 * size, rtol=0)


def test_regularised_has_a_minimum() -> None:
    """Unlike the plain loss: at ΔW/α the gradient is 0, and many steps end there."""
    q, k, v, chosen = data(0, dim=2)
    for alpha in (0.5, 1.0, 1.5):
        limit = regularised_limit(q[:, None], k, v, chosen, alpha)
        many = regularised(q[:, None], k, v, chosen, alpha, 400)
        torch.testing.assert_close(many, limit, **EXACT)
        explicit = learnt(q, k, v, chosen, degree(q, k), alpha=alpha, steps=40)
        torch.testing.assert_close(explicit, limit[:, 0], **EXACT)
    assert float(regularised(q[:, None], k, v, chosen, 2.5, 100).abs().max()) > 1e6


def test_regularisation_does_nothing_without_a_query_side() -> None:
    q, k, v, _ = data(0)
    every = torch.ones(6).bool()
    expected = functional.scaled_dot_product_attention(q[:, None], k, v)
    for alpha in (-1.0, 0.3, 1.0):
        found = regularised(q[:, None], k, v, every, alpha)
        torch.testing.assert_close(found, expected, **EXACT)


def view(seed: int, dim: int, gain: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A small MLP beside the identity."""
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    up, down = torch.randn(dim, 5, **place), torch.randn(5, dim, **place)
    return lambda z: z + gain * functional.gelu(z @ up) @ down


@settings(deadline=None, max_examples=10)
@given(seed=seeds, on_keys=st.booleans(), on_values=st.booleans())
def test_augmented(seed: int, on_keys: bool, on_values: bool) -> None:
    """The loss has g_2(v_i)·W φ(g_1(k_i)), D_q is of the augmented keys."""
    q, k, v, chosen = data(seed)
    first = view(1, 3, 0.1) if on_keys else None
    second = view(2, 2, 1.0) if on_values else None
    found = augmented(q[:, None], k, v, first, second)[:, 0]
    key = first(k) if first else k
    value = second(v) if second else v
    expected = learnt(q, key, value, chosen, degree(q, key))
    torch.testing.assert_close(found, expected, **EXACT)
    plain = learnt(q, k, v, chosen, degree(q, k))
    assert (on_keys or on_values) == (not torch.allclose(found, plain, atol=1e-6))


@settings(deadline=None, max_examples=10)
@given(
    seed=seeds,
    beta=st.sampled_from([-0.3, 0.0, 0.2, 1.0]),
    given_sets=st.booleans(),
    rate=st.sampled_from([0.5, 1.0]),
)
def test_negative_samples(seed: int, beta: float, given_sets: bool, rate: float) -> None:
    """The loss has -v_i·u_i + β mean v_j·u_i: autograd finds the values by itself."""
    q, k, v, chosen = data(seed)
    sets = None
    if given_sets:
        draw = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(seed))
        sets = (draw < 0.4) & chosen[:, None, :]
    found = negative_samples(q[:, None], k, v, chosen, beta, sets)[:, 0]
    expected = learnt(q, k, v, chosen, degree(q, k), beta=beta, negatives=sets, rate=rate)
    torch.testing.assert_close(found, expected, **EXACT)


def test_contrasted_values_by_hand() -> None:
    _, k, v, _ = data(0, keys=4)
    chosen = torch.tensor([True, True, False, True])
    found = contrasted(k, v, chosen, 0.5)
    expected = v.clone()
    expected[:, 0] -= 0.5 * (v[:, 1] + v[:, 3]) / 2
    expected[:, 1] -= 0.5 * (v[:, 0] + v[:, 3]) / 2
    expected[:, 3] -= 0.5 * (v[:, 0] + v[:, 1]) / 2
    torch.testing.assert_close(found, expected, **EXACT)
    alone = torch.tensor([True, False, False, False])
    assert torch.equal(contrasted(k, v, alone, 0.5), v)  # nothing to push away from
    assert others(chosen).sum(-1).tolist() == [2, 2, 3, 2]


def test_variants_under_a_causal_mask() -> None:
    """A later token changes nothing for earlier queries, with earlier keys as negatives."""
    _, k, v, chosen = data(3, batch=())
    mask = torch.ones(6, 6).tril().bool()
    before = torch.ones(6, 6).tril(-1).bool() & chosen
    later_k, later_v = k.clone(), v.clone()
    later_k[5], later_v[5] = later_k[5] + 1, later_v[5] + 1
    for call in (
        lambda key, value: regularised(k, key, value, chosen, 0.3, 2, mask),
        lambda key, value: augmented(k, key, value, view(1, 3, 1.0), None, mask),
        lambda key, value: negative_samples(k, key, value, chosen, 0.3, before, mask),
    ):
        torch.testing.assert_close(call(k, v)[:5], call(later_k, later_v)[:5], **EXACT)


def by_functions(net: Solvers, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """What members predict, with the modified-attention functions in the place of their layer."""
    tokens = as_tokens(xs, ys)
    shape, count = net.shape, xs.shape[-2] - 1
    answers = []
    for member in range(len(net.seeds)):
        layer = [part[member] for part in net.layer()]
        own = {name: part.detach()[member] for name, part in net.others.items()}

        def augment(part: str, own: dict = own) -> Callable[[torch.Tensor], torch.Tensor] | None:
            if f"{part}_up" not in own:
                return None
            up, down = own[f"{part}_up"], own[f"{part}_down"]
            return lambda z: z + functional.gelu(z @ up) @ down

        context = tokens[member if len(tokens) > 1 else 0]
        total = context.clone()
        for head in range(shape.heads):
            query, key, value, out = (part[head].detach() for part in layer)
            seen = context if shape.sees_query else context[:, :-1]
            q, k, v = context @ query, seen @ key, seen @ value
            chosen = torch.arange(seen.shape[-2]) < count
            match shape.variant:
                case "regularised":
                    mixed = regularised(q, k, v, chosen, shape.strength)
                case "negatives":
                    mixed = negative_samples(q, k, v, chosen, shape.strength)
                case _:
                    mixed = augmented(q, k, v, augment("keys"), augment("values"))
            total = total + mixed @ out
        answers.append(-total[:, -1, shape.dim])
    return torch.stack(answers)


@pytest.mark.parametrize("sees_query", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("variant", ["regularised", "values", "both", "negatives"])
def test_trained_layers_compute_these_functions(variant: str, heads: int, sees_query: bool) -> None:
    """``Solvers`` of every variant, with large random weights. Fails if a strength is not used."""
    options = {"heads": heads, "attention": ("softmax",), "sees_query": sees_query}
    if variant == "regularised" and not sees_query:
        with pytest.raises(IclError, match="sees_query=True"):
            Shape(3, 5, variant=variant, **options)
        return
    shape = Shape(3, 5, variant=variant, strength=0.375, **options)
    net = Solvers(shape, [0, 1], scale=2.0).double()
    place = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    xs, ys = torch.randn(2, 4, 6, 3, **place), torch.randn(2, 4, 6, **place)
    with torch.no_grad():
        found = net(xs, ys)
        torch.testing.assert_close(found, by_functions(net, xs, ys), **EXACT)
        plain = Solvers(replace(shape, variant="plain"), [0, 1], scale=2.0).double()
        plain.load_state_dict(
            {n: p for n, p in net.state_dict().items() if n.startswith("attention")}
        )
        same = torch.allclose(found, plain(xs, ys), atol=1e-8)
    assert same == (variant == "regularised" and not sees_query)


def block(seed: int, activation: str, normed: bool = False, heads: int = 2) -> Block:
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    parts = [torch.randn(heads, 5, 3, **place) / 2.5 for _ in range(3)]
    layer = Layer(*parts, torch.randn(heads, 3, 5, **place) / 1.7)
    up, up_bias = torch.randn(5, 12, **place) / 2.2, torch.randn(12, **place)
    down, down_bias = torch.randn(12, 5, **place) / 3.5, torch.randn(5, **place)
    return Block(layer, up, up_bias, down, down_bias, activation, normed)


def norm(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


ACTIVATIONS = {
    "relu": lambda u: np.maximum(u, 0),
    "gelu": lambda u: u * special.ndtr(u),
    "gelu_new": lambda u: functional.gelu(torch.from_numpy(u), approximate="tanh").numpy(),
}


def forward(x: np.ndarray, weights: Block, causal: bool) -> np.ndarray:
    """The layer as anyone would write it: x (pos, channel)."""
    read = norm(x) if weights.normed else x
    after = x.copy()
    for query, key, value, out in zip(*(p.numpy() for p in weights.attention), strict=True):
        exponent = (read @ query) @ (read @ key).T / math.sqrt(query.shape[-1])
        if causal:
            exponent[np.triu_indices(len(x), 1)] = -np.inf
        after += special.softmax(exponent, -1) @ (read @ value) @ out
    read = norm(after) if weights.normed else after
    hidden = ACTIVATIONS[weights.activation](read @ weights.up.numpy() + weights.up_bias.numpy())
    return after + hidden @ weights.down.numpy() + weights.down_bias.numpy()


def stream(seed: int, batch: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.randn(*batch, 7, 5, generator=torch.Generator().manual_seed(seed)).double()


@settings(deadline=None, max_examples=25)
@given(
    seed=seeds,
    activation=st.sampled_from(list(ACTIVATIONS)),
    normed=st.booleans(),
    causal=st.booleans(),
)
def test_start_and_step_of_a_whole_layer(
    seed: int, activation: str, normed: bool, causal: bool
) -> None:
    weights = block(seed, activation, normed)
    tokens = stream(seed, (2,))
    chosen = torch.arange(7) < 4
    mask = torch.ones(7, 7).tril().bool() if causal else None
    found = dual_block(tokens, weights, chosen, mask)
    for b in range(2):
        expected = forward(tokens[b].numpy(), weights, causal)
        np.testing.assert_allclose((found.start + found.step)[b], expected, atol=1e-10)
    assert not bool(dual_block(tokens, weights, ~chosen & chosen, mask).step.any())
    early = dual_block(tokens, weights, chosen, mask, early=True)
    gap = (early.start + early.step - found.start - found.step).abs().max()
    if activation != "relu":  # whose gates may happen to be the same
        assert float(gap) > 1e-9  # the gates are those after the step


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("normed", [False, True])
def test_a_whole_layer_is_one_gradient_step(activation: str, normed: bool) -> None:
    """Autograd on -Σ_h (1/D_h) Σ_D (M O_h v_i)·W φ_h(k_i), one W over all heads' features."""
    weights, tokens = block(1, activation, normed), stream(2) / 2
    chosen = torch.arange(7) < 4
    model, constant = layer_model(tokens, weights, chosen)
    layer = weights.attention
    read = torch.from_numpy(norm(tokens.numpy())) if normed else tokens
    parts = []  # features of all heads, in one space
    q = [read[-1] @ layer.query[h] for h in range(2)]
    k = [read @ layer.key[h] for h in range(2)]
    pairs = [torch.cat([q[h][None], k[h]]) for h in range(2)]
    largest = max(float(scores(p, p).abs().max()) for p in pairs)
    terms = needed_degree(largest, 1e-13)
    width = taylor(q[0], terms).shape[-1]
    for h in range(2):
        padded = torch.zeros(8, 2 * width).double()
        features = taylor(scaled(pairs[h]), terms) / math.exp(float(-model.log_scale[h]) / 2)
        padded[:, h * width : (h + 1) * width] = features
        parts.append(padded)
    query, keys = parts[0][0] + parts[1][0], [part[1:] for part in parts]
    first = sum(model.values[h][~chosen].mT @ keys[h][~chosen] for h in range(2))

    def loss(matrix: torch.Tensor) -> torch.Tensor:
        fits = [(keys[h] @ matrix.mT * model.values[h]).sum(-1)[chosen].sum() for h in range(2)]
        return -(fits[0] + fits[1])

    after = descend(loss, first, 1.0) @ query + constant
    expected = forward(tokens.numpy(), weights, False)[-1]
    np.testing.assert_allclose(after, expected, atol=1e-10)
    asked = torch.stack(q)[:, None]
    said = model.stepped(chosen)(asked)[:, 0].sum(0) + constant
    np.testing.assert_allclose(said, expected, atol=1e-10)
    before = model(asked)[:, 0].sum(0) + constant
    np.testing.assert_allclose(before, dual_block(tokens, weights, chosen).start[-1], atol=1e-10)


def test_a_stack_of_layers() -> None:
    """Exact at each layer; and what demonstrations taught in the first is in the second's start."""
    blocks = [block(3, "relu"), block(4, "gelu", True)]
    tokens, chosen = stream(5), torch.arange(7) < 5
    found = dual_stack(tokens, blocks, chosen)
    expected = tokens.numpy()
    for halves, weights in zip(found, blocks, strict=True):
        expected = forward(expected, weights, False)
        np.testing.assert_allclose(halves.start + halves.step, expected, atol=1e-10)
    other = tokens.clone()
    other[0] += 1  # a demonstration
    moved = dual_stack(other, blocks, chosen)[1].start[-1] - found[1].start[-1]
    assert float(moved.abs().max()) > 1e-3


@settings(deadline=None, max_examples=25)
@given(seed=seeds, keys=st.integers(1, 7), dim=st.integers(1, 4))
def test_linearised_is_the_first_derivative(seed: int, keys: int, dim: int) -> None:
    """By autograd: attention at scores of 0, and its derivative along them."""
    place = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    shapes = (2, 3, dim), (2, keys, dim), (2, keys, 2)
    q, k, v = (torch.randn(shape, **place) for shape in shapes)
    exact = functional.scaled_dot_product_attention
    at, slope = torch.func.jvp(
        lambda s: exact(s * q, k, v), (q.new_zeros(()),), (torch.ones_like(q.new_zeros(())),)
    )
    torch.testing.assert_close(linearised(q, k, v), at + slope, **EXACT)


def test_linearisation_error_is_of_second_order() -> None:
    place = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    q, k, v = (torch.randn(4, n, 3, **place) for n in (5, 9, 9))
    scales = [0.001, 0.01, 0.1, 10.0]
    found = linearisation_error(q, k, v, scales)
    ratio = found.error[1] / found.error[0], found.error[2] / found.error[1]
    assert float(ratio[0]) == pytest.approx(100, rel=0.02)
    assert float(ratio[1]) == pytest.approx(100, rel=0.2)
    assert float(found.moved[1] / found.moved[0]) == pytest.approx(10, rel=0.02)
    assert float(found.error[3] / found.moved[3]) > 1
    torch.testing.assert_close(found.spread / found.spread[0], q.new_tensor(scales) / 0.001)


def test_bad_input_is_refused() -> None:
    q, k, v, chosen = data(0)
    with pytest.raises(IclError, match="finite α"):
        regularised(q[:, None], k, v, chosen, math.nan)
    with pytest.raises(IclError, match="at least one step"):
        regularised(q[:, None], k, v, chosen, 0.1, 0)
    with pytest.raises(IclError, match="only for α > 0"):
        regularised_limit(q[:, None], k, v, chosen, 0.0)
    with pytest.raises(IclError, match="β must be finite"):
        negative_samples(q[:, None], k, v, chosen, math.inf)
    with pytest.raises(IclError, match="Need negatives"):
        negative_samples(q[:, None], k, v, chosen, 0.1, torch.ones(6, 5).bool())
    with pytest.raises(IclError, match="one value for each key"):
        augmented(q[:, None], k, v, None, lambda z: z[:, 1:])
    with pytest.raises(IclError, match="at least one scale"):
        linearisation_error(q[:, None], k, v, [])
    with pytest.raises(IclError, match="Did you mean 'gelu'"):
        block(0, "gelus")
    weights = block(0, "relu")
    with pytest.raises(IclError, match="do not fit a layer"):
        dual_block(stream(0)[:, :4], weights, torch.ones(7).bool())
    with pytest.raises(IclError, match="mask of demonstrations"):
        dual_block(stream(0), weights, torch.ones(6).bool())
