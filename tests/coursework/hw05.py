"""Typical wrong answers to homework 5, and what must be said about each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def influence(
    clean: Tensor, altered: Tensor, turned: bool = False, bits: bool = False, root: bool = True
) -> Tensor:
    p, q = clean.log_softmax(-1), altered.log_softmax(-1)
    p, q = (q, p) if turned else (p, q)
    kl = (p.exp() * (p - q)).sum(-1)
    kl = kl / torch.tensor(2.0).log() if bits else kl
    return torch.stack([kl.mean(), kl.std() / (len(kl) ** 0.5 if root else 1)])


def norms(clean: Tensor, altered: Tensor) -> Tensor:
    away = (altered - clean).norm(dim=-1)
    return torch.stack([away.mean(), away.std() / len(away) ** 0.5])


def extreme(effects: Tensor, signs: Tensor, strict: bool = False, sided: bool = True) -> float:
    flipped, seen = (signs * effects).mean(-1), effects.mean()
    flipped, seen = (flipped.abs(), seen.abs()) if sided else (flipped, seen)
    return ((flipped > seen) if strict else (flipped >= seen)).sum().item()


def kept(scores: Tensor, clean: Tensor, corrupt: Tensor) -> float:
    return ((scores - corrupt).mean() / (clean - corrupt).mean()).item()


def lost(scores: Tensor, clean: Tensor, corrupt: Tensor) -> float:
    return 1 - kept(scores, clean, corrupt)


def ratios(scores: Tensor, clean: Tensor, corrupt: Tensor) -> float:
    return ((scores - corrupt) / (clean - corrupt)).mean().item()


def written(nodes: Any, x: Tensor) -> list[Tensor]:
    writes: list[Tensor] = []
    for node in nodes:
        writes.append(node(x))
        x = x + writes[-1]
    return writes


def patched(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    change = written(nodes, corrupt)[writer] - written(nodes, clean)[writer]
    x = clean
    for i, node in enumerate(nodes):
        x = x + node(x + change if i == reader else x)
    return x + change if reader == len(nodes) else x


def indirect(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    foreign, x = written(nodes, corrupt)[writer], clean
    for i, node in enumerate(nodes):
        x = x + (foreign if i == writer else node(x))
    return x


def stays(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    change = written(nodes, corrupt)[writer] - written(nodes, clean)[writer]
    x = clean
    for i, node in enumerate(nodes):
        x = x + change if i == reader else x
        x = x + node(x)
    return x + change if reader == len(nodes) else x


def held(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    own = written(nodes, clean)
    change = written(nodes, corrupt)[writer] - own[writer]
    x = clean + sum(own)
    if reader == len(nodes):
        return x + change
    stream = clean + sum(own[:reader])
    return x - own[reader] + nodes[reader](stream + change)


def whole_stream(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    foreign, x = corrupt + sum(written(nodes, corrupt)[:reader]), clean
    for i, node in enumerate(nodes):
        x = x + node(foreign if i == reader else x)
    return foreign if reader == len(nodes) else x


def early(nodes: Any, clean: Tensor, corrupt: Tensor, writer: int, reader: int) -> Tensor:
    stream = clean + sum(written(nodes, clean)[:writer])
    change = nodes[writer](stream + corrupt - clean) - nodes[writer](stream)
    x = clean
    for i, node in enumerate(nodes):
        x = x + node(x + change if i == reader else x)
    return x + change if reader == len(nodes) else x


def cka(X: Tensor, Y: Tensor, axis: int | None = 0, root: bool = False) -> float:
    if axis is not None:
        X, Y = X - X.mean(axis, keepdim=True), Y - Y.mean(axis, keepdim=True)
    above = (Y.T @ X).square().sum()
    below = (X.T @ X).norm() * (Y.T @ Y).norm()
    return ((above.sqrt() if root else above) / below).item()


def traces(X: Tensor, Y: Tensor) -> float:
    X, Y = X - X.mean(0), Y - Y.mean(0)
    return ((Y.T @ X).square().sum() / (X.square().sum() * Y.square().sum())).item()


def synergy(clean: Tensor, alone: Tensor, together: Tensor) -> float:
    return ((clean - together).mean() - (clean - alone).mean(-1).sum()).item()


def of_scores(clean: Tensor, alone: Tensor, together: Tensor) -> float:
    return (together.mean() - alone.mean(-1).sum()).item()


WRONG: dict[str, list[tuple[str, Any]]] = {
    "q1": [
        ("other way round", lambda *given: influence(*given, turned=True)),
        ("norm of a difference of logits", norms),
        ("bits", lambda *given: influence(*given, bits=True)),
        ("square root of the number", lambda *given: influence(*given, root=False)),
        ("shape", lambda *given: influence(*given)[0]),
    ],
    "q2": [
        ("one of the draws", lambda e, s: extreme(e, s) / len(s)),
        ("above the line", lambda e, s: extreme(e, s) / (1 + len(s))),
        ("two-sided", lambda e, s: (1 + extreme(e, s, sided=False)) / (1 + len(s))),
        ("ties count", lambda e, s: (1 + extreme(e, s, strict=True)) / (1 + len(s))),
        ("less* extreme", lambda e, s: 1 - (1 + extreme(e, s)) / (1 + len(s))),
    ],
    "q3": [
        ("exchanged", (lambda *given: 1 / kept(*given), lost)),
        ("what the circuit keeps", (lost, lost)),
        ("mean of the ratios", (ratios, lost)),
        ("zero of the scale", (lambda a, c, k: (a.mean() / c.mean()).item(), lost)),
        ("but* the circuit", (kept, kept)),
        ("mean of the ratios", (kept, lambda *given: 1 - ratios(*given))),
    ],
    "q4": [
        ("indirect paths", indirect),
        ("let them run", held),
        ("stays in the stream", stays),
        ("corrupt stream", whole_stream),
        ("earlier nodes write other things", early),
        (
            "start from the clean one",
            lambda nodes, clean, corrupt, *wire: patched(nodes, corrupt, clean, *wire),
        ),
    ],
    "q5": [
        ("not centred", lambda X, Y: cka(X, Y, axis=None)),
        ("not over the columns", lambda X, Y: cka(X, Y, axis=1)),
        ("above is squared", lambda X, Y: cka(X, Y, root=True)),
        ("square root", lambda X, Y: cka(X, Y) ** 0.5),
        ("squared norms of X and Y", traces),
    ],
    "q6": [
        ("*loss*", (lambda *given: -synergy(*given), 0.74, -0.61, "b")),
        ("not losses", (of_scores, 0.74, -0.61, "b")),
        ("alone", (lambda c, a, t: (c - t).mean().item(), 0.74, -0.61, "b")),
        ("costs *more*", (synergy, -0.74, -0.61, "b")),
        ("divide by the gap", (synergy, 5.9, -0.61, "b")),
        ("costs *less*", (synergy, 0.74, 0.61, "b")),
        ("cannot replace", (synergy, 0.74, -0.61, "a")),
        ("does take away", (synergy, 0.74, -0.61, "c")),
        ("cost little", (synergy, 0.74, -0.61, "d")),
    ],
}
