"""Homework 5, on chapter 05: softmax attention as a linear model that took one step."""

import torch
from torch import Tensor

from checks import Mistake, Part, generator, normal, shaped


def _attention(seed):
    draw, keys, d = generator(seed), 6 + seed, 4 + seed % 3
    demos = torch.arange(keys) < keys - 2
    demos[0] = seed % 2 == 0
    return normal(draw, d), normal(draw, keys, d), normal(draw, keys, 3) + 1, demos


def _step_taken(loss, W, values, keys, biases, total, rate):
    """The answer to a query after a step on the loss, and the loss."""
    weights = W.clone().requires_grad_()
    found = loss(weights, values, keys, biases, total, rate)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        raise Mistake("`biased_loss` returns a tensor that depends on W: no .item(), no detach.")
    after = (W - rate * torch.autograd.grad(found, weights)[0]) @ keys[-1]
    return torch.cat([after, found.detach().reshape(1)])


def _points(seed):
    draw, d = generator(seed), 2 + seed % 2
    return normal(draw, 3 + seed, d), normal(draw, 5 + seed, d)


def _dual(seed):
    draw = generator(seed + 100)
    keys = (0.5 * normal(draw, 3 + seed, 5 + seed)).exp()
    values, W, biases = normal(draw, len(keys), 2), normal(draw, 2, keys.shape[1]), -keys[:, 0]
    return W, values, keys, biases, (keys @ keys[-1]).sum(), 0.5 + 0.25 * seed


def _contrast(seed):
    return *_attention(seed), 0.3 + 0.2 * seed


def _examples(seed):
    draw, examples = generator(seed), 2 + seed
    example = torch.cat([torch.arange(examples).repeat(2), torch.tensor([-1, -1])])
    example = example[seed % 2 :][torch.randperm(len(example) - seed % 2, generator=draw)]
    d = 4 + seed % 3
    return normal(draw, d), normal(draw, len(example), d), normal(draw, len(example), 3), example


def _steps(seed):
    draw, functions, each = generator(seed), 3 + seed % 2, 3 + seed
    function = torch.arange(functions).repeat(each)
    function = function[torch.randperm(len(function), generator=draw)]
    return normal(draw, len(function), 4), function, generator(seed + 50)


def _is_control(drawn, steps, function):
    """Whether each prompt has the update of a prompt with another function."""
    orders = []
    for each in drawn:
        found = shaped(each, *steps.shape)
        away = torch.cdist(found.double(), steps)
        if away.min(1).values.max() > 1e-5:
            raise Mistake("A prompt has an update that is nobody's: they change hands, unchanged.")
        order = away.argmin(1)
        if len(order.unique()) < len(order):
            raise Mistake("An update is used twice, and another one not at all.")
        orders.append(order)
    whose, place = torch.stack(orders), torch.arange(len(steps))
    if (whose == place).any():
        raise Mistake("A prompt has kept its own update.")
    if (function[whose] == function).any():
        raise Mistake("A prompt has the update of another prompt with the same function.")
    came_up = (whose[:, :, None] == place).any(0)  # (prompt, partner)
    if came_up[function[:, None] != function].double().mean() < 0.7:
        raise Mistake("Who gets whose update is not at random: some prompts are never partners.")


q1 = (Part("part_and_change", inputs=_examples, tolerance=1e-06),)
q2 = (Part("features", inputs=_points), Part("biased_loss", inputs=_dual, outcome=_step_taken))
q3 = (Part("swapped", _steps, draws=60, verdict=_is_control),)
q4 = (
    Part("with_negatives", inputs=_contrast),
    Part("beta", tolerance=1e-4),
    Part(
        "reason",
        choices=(
            "With more copies the head looks less at its own tokens because their scores fall.",
            "The start is what the head would say without examples, and so the head's own "
            "answer fades with every copy.",
            "Each copy is another step of gradient descent from where the last one ended.",
            "The start is divided by a sum that grows with every copy, and nothing else in it "
            "changes; the update cannot grow beyond a mean of the examples' values.",
        ),
    ),
)

# Students get what stands above this line, and nothing below it.


def part_and_change(query, keys, values, example):
    weights = (keys @ query / len(query) ** 0.5).softmax(0)
    its = example == torch.arange(int(example.max()) + 1)[:, None]  # (example, key)
    parts, whole = (its * weights) @ values, weights @ values
    left = 1 - (its * weights).sum(1, keepdim=True)
    return torch.stack([parts, whole - (whole - parts) / left])


PART_AND_CHANGE = {
    "Without the example the other weights grow: divide by what is left of them.": " / left -> ",
    "The change is the output with all keys, less the output without the example.": (
        "whole - (whole - parts) / left -> (whole - parts) / left - whole"
    ),
    "The parts come first, then the changes.": lambda *given: part_and_change(*given).flip(0),
    "The scores are divided by the square root of d.": " / len(query) ** 0.5 -> ",
    "The scores are divided by the square root of d, not by d.": " ** 0.5 -> ",
}


def features(z, omega):
    directions, half = torch.cat([omega, -omega]), z.square().sum(-1, keepdim=True) / 2
    return torch.exp(z @ directions.T - half) / len(directions) ** 0.5


FEATURES = {
    "The factor exp(-|z|²/2) is missing.": " - half -> ",
    "Divide by the square root of the number of features.": " / len(directions) ** 0.5 -> ",
    "Divide by the *square root* of that number: a product has two features.": " ** 0.5 -> ",
    "There are 2 m features: divide by the root of 2 m.": "len(directions) -> len(omega)",
    "First all with omega, then all with -omega.": (
        "torch.cat([omega, -omega]) -> torch.stack([omega, -omega], 1).flatten(0, 1)"
    ),
}


def biased_loss(W, values, features, biases, normaliser, rate):
    similarity = (values * (features @ W.T)).sum(1)
    return -(biases.exp() * similarity).sum() / (rate * normaliser)


BIASED_LOSS = {
    "The gradient has the wrong sign: the loss is *minus* the similarity.": "-(biases -> (biases",
    "The biases are missing.": "biases.exp() * similarity -> similarity",
    "A bias is added to the score: it multiplies by its exponential.": "biases.exp() -> biases",
    "D_q is missing: without it the step is not softmax attention.": " * normaliser -> ",
    "The rate is missing: the step must not depend on it.": "rate * normaliser -> normaliser",
}


def swapped(steps, function, generator):
    order = torch.randperm(len(steps), generator=generator)
    while (clash := function[order] == function).any():
        for i in clash.nonzero()[:, 0].tolist():
            j = int(torch.randint(len(steps), (1,), generator=generator))
            order[[i, j]] = order[[j, i]]
    return steps[order]


def _rotated(steps, function, generator):
    at, each = function.argsort(stable=True), int((function == 0).sum())
    return torch.empty_like(steps).index_copy(0, at, steps[at.roll(each)])


SWAPPED = {
    "A prompt has kept its own update.": "function[order] == function -> order < 0",
    "with the same function": "function[order] == function -> order == torch.arange(len(order))",
    "An update is used twice": (
        "steps[order] "
        "-> steps[torch.where(function[order.roll(1)] == function, order, order.roll(1))]"
    ),
    "A prompt has an update that is nobody's": lambda steps, *_: steps.mean(0).expand_as(steps),
    "Who gets whose update is not at random": _rotated,
    "Take random numbers from": "randperm(len(steps), generator=generator) -> randperm(len(steps))",
}


def with_negatives(query, keys, values, demos, beta):
    shown, changed = values[demos], values.clone()
    changed[demos] = shown - beta * (shown.sum(0) - shown) / (len(shown) - 1)
    return (keys @ query / len(query) ** 0.5).softmax(0) @ changed


WITH_NEGATIVES = {
    "A value is no negative of its own key.": "shown.sum(0) - shown -> shown.sum(0)",
    "It is a mean over the *other* ones: divide by |D| - 1.": "(len(shown) - 1) -> len(shown)",
    "Only examples are in the loss: the values of the other tokens stay.": (
        "changed[demos] = shown - beta * (shown.sum(0) - shown) "
        "-> changed = values - beta * (shown.sum(0) - values)"
    ),
    "Descent pushes *away* from the negatives: subtract them.": "shown - beta -> shown + beta",
}


def _own_head(own):
    """The head of a student."""
    drawn = {"generator": torch.Generator().manual_seed(own), "dtype": torch.float32}
    query, keys, values = (torch.randn(*n, **drawn).double() for n in ((4,), (6, 4), (6, 3)))
    values[:4] += 1
    return query, keys, values, torch.arange(6) < 4


def beta(own):
    """The strength at which the output is orthogonal to the first example's value."""
    head = _own_head(own)
    plain, changed = (with_negatives(*head, beta) @ head[2][0] for beta in (0.0, 1.0))
    return (plain / (plain - changed)).item()


BETA = {
    "`beta` has the wrong sign: negatives are taken off with a minus.": lambda beta: -beta,
    "`beta` is upside down.": lambda beta: 1 / beta,
}


reason = "d"
REASON = {
    "Scores depend on keys and the query, and neither changes.": "a",
    "Without examples the normaliser would be another: the start is not that answer.": "b",
    "The whole is one step: each copy adds a term to the same sum.": "c",
}
