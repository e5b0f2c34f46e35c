"""Homework 5, on chapter 05: softmax attention as a linear model that took one step."""

import math

import torch
from torch import Tensor

from checks import Mistake, Part, generator, normal


def _attention(seed):
    draw, keys, d = generator(seed), 6 + seed, 4 + seed % 3
    demos = torch.arange(keys) < keys - 2
    demos[0] = seed % 2 == 0
    return normal(draw, d), normal(draw, keys, d), normal(draw, keys, 3) + 1, demos


def _step_taken(loss, W, values, keys, total, rate):
    """The answer to a query after a step on the loss, and the loss."""
    weights = W.clone().requires_grad_()
    found = loss(weights, values, keys, total, rate)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        raise Mistake(
            "`contrastive_loss` returns one number as a tensor that depends on W, so that "
            "autograd can take its gradient: no .item(), no detach."
        )
    after = (W - rate * torch.autograd.grad(found, weights)[0]) @ keys[-1]
    return torch.cat([after, found.detach().reshape(1)])


def _points(seed):
    draw, d = generator(seed), 2 + seed % 2
    return normal(draw, 3 + seed, d), normal(draw, 5 + seed, d)


def _dual(seed):
    draw = generator(seed + 100)
    keys = (0.5 * normal(draw, 3 + seed, 5 + seed)).exp()
    values, W = normal(draw, len(keys), 2), normal(draw, 2, keys.shape[1])
    return W, values, keys, (keys @ keys[-1]).sum(), 0.5 + 0.25 * seed


def _contrast(seed):
    return *_attention(seed), 0.3 + 0.2 * seed


q1 = (Part("dual_parts", inputs=_attention, tolerance=1e-06),)
q2 = (Part("features", inputs=_points), Part("contrastive_loss", inputs=_dual, outcome=_step_taken))
q3 = (Part("with_negatives", inputs=_contrast), Part("reason", "letter"))

# Students get what stands above this line, and nothing below it.


def dual_parts(query, keys, values, demos, root=0.5, over=lambda raw, _: (raw.sum(), raw.sum())):
    """What the dual model says before its step, and what the step adds, over normalisers."""
    raw = (keys @ query / len(query) ** root).exp()
    first, second = over(raw, demos)
    start, step = raw[~demos] @ values[~demos], raw[demos] @ values[demos]
    return torch.stack([start / first, step / second])


DUAL_PARTS = {
    "The normaliser is that of *all* keys, for both parts: demonstrations and the rest share one "
    "softmax.": {"over": lambda raw, demos: (raw[~demos].sum(), raw[demos].sum())},
    "The normaliser runs over the demonstrations only: take all keys.": {
        "over": lambda raw, demos: (raw[demos].sum(), raw[demos].sum())
    },
    "The step's normaliser runs over the demonstrations only: take all keys.": {
        "over": lambda raw, demos: (raw.sum(), raw[demos].sum())
    },
    "The two are exchanged: the start is what the other tokens say, the step what the "
    "demonstrations say.": lambda *given: dual_parts(*given).flip(0),
    "The scores are divided by the square root of d.": {"root": 0.0},
    "The scores are divided by the square root of d, not by d.": {"root": 1.0},
    "Divide by the normaliser D_q.": {"over": lambda raw, demos: (1, 1)},
    "D_q takes the place of a mean: do not divide by the number of keys.": {
        "over": lambda raw, demos: (len(raw), len(raw))
    },
    "That is the whole of attention: split it.": lambda *given: dual_parts(*given).sum(0),
}


def features(z, omega, half=0.5, power=0.5):
    """Positive random features."""
    norms = z.square().sum(-1, keepdim=True)
    return torch.exp(z @ omega.T - half * norms) / len(omega) ** power


def contrastive_loss(W, values, features, normaliser, rate):
    """The loss of the dual model."""
    return -(values * (features @ W.T)).sum() / (rate * normaliser)


FEATURES = {
    "The factor exp(-|z|²/2) is missing: without it the mean of the product is exp(|k + q|²/2).": {
        "half": 0.0
    },
    "The factor is exp(-|z|²/2), half the square.": {"half": 1.0},
    "The factor is exp(-|z|²/2): a minus.": {"half": -0.5},
    "The factor is exp(-|z|²/2), with |z|² the sum of squares: did you take the length?": (
        lambda z, omega: (
            torch.exp(z @ omega.T - z.norm(dim=-1, keepdim=True) / 2) / math.sqrt(len(omega))
        )
    ),
    "Divide by the square root of the number of directions: the product of two features is then "
    "a mean.": {"power": 0.0},
    "Divide by the *square root* of the number of directions: a product has two features.": {
        "power": 1.0
    },
}


CONTRASTIVE_LOSS = {
    "The gradient has the wrong sign: the loss is *minus* the similarity, since descent must "
    "raise it.": lambda *given: -contrastive_loss(*given),
    "D_q is missing: without it the step is not softmax attention.": lambda W, v, f, total, rate: (
        contrastive_loss(W, v, f, 1.0, rate)
    ),
    "Softmax has no 1/N: D_q stands in its place.": lambda W, v, f, total, rate: contrastive_loss(
        W, v, f, len(v), rate
    ),
    "D_q and 1/N: one of them is enough.": lambda W, v, f, total, rate: contrastive_loss(
        W, v, f, total * len(v), rate
    ),
    "The rate is missing: a step of the rate η must not depend on it, so the loss is divided by "
    "η.": lambda W, v, f, total, rate: contrastive_loss(W, v, f, total, 1.0),
    "The loss is divided by η, not multiplied.": lambda W, v, f, total, rate: contrastive_loss(
        W, v, f, total, 1 / rate
    ),
}


def with_negatives(query, keys, values, demos, beta, own=1.0, over=1, everywhere=False):
    """The output of a head that also descends the negatives."""
    shown = values[demos]
    changed = values.clone()
    among = demos | everywhere
    changed[among] -= beta * (shown.sum(0) - own * values[among]) / (len(shown) - over)
    return (keys @ query / math.sqrt(len(query))).softmax(0) @ changed


WITH_NEGATIVES = {
    "A value is no negative of its own key: leave v_i out of the sum over j.": {"own": 0.0},
    "It is a mean over the *other* demonstrations: divide by |D| - 1.": {"over": 0},
    "Only demonstrations are in the loss: the values of the other tokens stay.": {
        "everywhere": True
    },
    "Descent pushes *away* from the negatives: subtract them.": lambda *given: with_negatives(
        *given[:4], -given[4]
    ),
    "That is attention as it was: where is beta?": lambda *given: with_negatives(*given[:4], 0.0),
    "That is the step alone: add the start.": lambda *given: (
        with_negatives(*given) - dual_parts(*given[:4])[0]
    ),
}


REASON = {
    "Reason (a): an untrained transformer takes steps, and answers nothing right.": "a",
    "Reason (c): the identity is algebra; check it on any weights.": "c",
    "Reason (d): take the steps out of a trained transformer, and hardly an answer is left.": "d",
}


TRUTHS = {
    "dual_parts": (dual_parts, DUAL_PARTS),
    "features": (features, FEATURES),
    "contrastive_loss": (contrastive_loss, CONTRASTIVE_LOSS),
    "with_negatives": (with_negatives, WITH_NEGATIVES),
    "reason": ("b", REASON),
}
