"""Chapter 04, which has no language model: linear self-attention and descent, by loops."""

import numpy as np
import torch
from stored import write

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
DIM, PAIRS, RATES, GAMMAS = 2, 4, (0.3, 0.2), (0.05, 0.02)
xs, ys = torch.randn(3, PAIRS + 1, DIM), torch.randn(3, PAIRS + 1)
names = "query", "key", "value", "out"
layers = [{name: 0.5 * torch.randn(DIM + 1, DIM + 1) for name in names} for _ in range(2)]


def answer(x, y, softmax=False, depth=2):
    """One context, token by token; the last x is the query."""
    stream = [torch.cat([a, b[None]]) for a, b in zip(x, [*y[:-1], y.new_zeros(())], strict=True)]
    for layer in layers[:depth]:
        new = []
        for token in stream:
            scores = [(token @ layer["query"]) @ (other @ layer["key"]) for other in stream[:PAIRS]]
            weights = torch.stack(scores)
            weights = (weights / (DIM + 1) ** 0.5).softmax(0) if softmax else weights
            parts = zip(weights, stream[:PAIRS], strict=True)
            heard = sum(w * (other @ layer["value"]) for w, other in parts)
            new.append(token + heard @ layer["out"])
        stream = new
    return -stream[-1][DIM]


def loss(w, x, y):
    return 0.5 * (x[:PAIRS] @ w - y[:PAIRS]).square().mean()


def descended(x, y):
    w, found = torch.zeros(DIM), []
    for rate in RATES:
        at = w.clone().requires_grad_()
        w = w - rate * torch.autograd.grad(loss(at, x, y), at)[0]
        found.append(w @ x[-1])
    return found


def plus(x, y):
    """GD++: a step changes the labels left and squeezes the x of pairs and query."""
    x, y, found = x.clone(), y.clone(), torch.zeros(())
    for rate, gamma in zip(RATES, GAMMAS, strict=True):
        step = rate / PAIRS * (x[:PAIRS].T @ y[:PAIRS])
        found = found + step @ x[-1]
        y = y - x @ step
        x = x - gamma * x @ (x[:PAIRS].T @ x[:PAIRS])
    return found


def each(way, *more):
    return torch.stack([way(x, y, *more) for x, y in zip(xs, ys, strict=True)])


def slope(x, y):
    query = x[-1].clone().requires_grad_()
    found = answer(torch.cat([x[:-1], query[None]]), y)
    return torch.autograd.grad(found, query)[0]


first = layers[0]
# x is uniform in -1/2 .. 1/2: three nodes a number are exact for what is of fourth order in x
nodes, sizes = (torch.tensor(part) / 2 for part in np.polynomial.legendre.leggauss(3))
grid = torch.cartesian_prod(*[torch.arange(3)] * (PAIRS * DIM))
inputs, chance = nodes[grid].view(-1, PAIRS, DIM), sizes[grid].prod(1)
kq, pv = first["query"] @ first["key"].T, first["value"] @ first["out"]
inside = DIM * kq.diagonal()[:DIM].mean() ** 2
moment = (inputs.mT @ inputs / PAIRS).square().sum(-1).T @ chance  # E Ŝ², its diagonal
steps = torch.stack([torch.stack(descended(x, y)) for x, y in zip(xs, ys, strict=True)], 1)
slopes, weights = each(slope), []
for x, y in zip(xs, ys, strict=True):
    at = torch.zeros(DIM, requires_grad=True)
    weights.append(-RATES[0] * torch.autograd.grad(loss(at, x, y), at)[0])
cosine = torch.nn.functional.cosine_similarity(slopes, torch.stack(weights), dim=-1)

given = {"xs": xs, "ys": ys, "rates": list(RATES), "gammas": list(GAMMAS)}
given |= {**{name: torch.stack([layer[name] for layer in layers]) for name in names}}
values = {
    "answers of two layers": each(answer),
    "answers of softmax attention": each(answer, True),
    "slope in the query": slopes,
    "one step of descent": steps[0],
    "two steps of descent": steps[1],
    "two steps of descent, GD++": each(plus),
    "cosine with one step": cosine.mean().item(),
    "distance of the slopes": (slopes - torch.stack(weights)).norm(dim=-1).mean().item(),
    "half the squared error": (0.5 * (each(answer) - ys[:, -1]).square().mean()).item(),
    "off the pattern, KQ": (1 - inside / kq.square().sum()).item(),
    "off the pattern, PV": (1 - pv[DIM, DIM] ** 2 / pv.square().sum()).item(),
    "matrix of the step": -PAIRS * pv[DIM, DIM] * kq[:DIM, :DIM],
    "best rate": ((1 / 12) ** 2 * DIM / (moment / 12).sum()).item(),
}
write(__file__, given, values)
