"""Homework 1, on chapter 01: doubled sequences, head scores, copying, cutting."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor

from ...models import TransformerBridge, bos, get_act_name, load
from .answers import compare, generator, letter

MODELS = ("induction-2", "induction-0")  # of the public check, of the first hidden one


def q1(double: Callable[..., Tensor], seed: int) -> None:
    """BOS and the same tokens twice, token by token."""
    draw = generator(seed)
    count, length, first = 2 + seed, 3 + 2 * seed, 7 + seed
    copy = torch.randint(8 + seed, 99, (count, length), generator=draw)
    rows = [[first, *row, *row] for row in copy.tolist()]
    paired = [[first, *(token for token in row for _ in range(2))] for row in copy.tolist()]
    compare(
        double(copy, first),
        torch.tensor(rows),
        {
            "BOS comes first, not last.": torch.tensor([row[1:] + row[:1] for row in rows]),
            "BOS is missing: one at the start, once.": torch.tensor([row[1:] for row in rows]),
            "BOS stands once at the start, not before each copy.": torch.tensor(
                [[*row[: length + 1], first, *row[1 : length + 1]] for row in rows]
            ),
            "Each token stands twice in a row (ABC gives AABBCC). Repeat the whole list: "
            "ABCABC.": torch.tensor(paired),
        },
    )


def q2(repetition_gain: Callable[..., Tensor], seed: int) -> None:
    """Log-probabilities one by one."""
    draw = generator(seed)
    count, length, vocab = 3 + seed, 4 + seed, 11
    copy = torch.randint(1, vocab, (count, length), generator=draw)
    tokens = torch.cat([torch.zeros(count, 1, dtype=torch.long), copy, copy], 1)
    logits = torch.randn(count, 2 * length + 1, vocab, generator=draw)

    def mean(first: int, stop: int, ahead: int = 1, raw: bool = False) -> Tensor:
        """Mean score of the token ``ahead`` of each entry, for entries ``first`` to ``stop``."""
        rows = []
        for scores, row in zip(logits.double(), tokens.tolist(), strict=True):
            norms = 0.0 if raw else scores.exp().sum(-1).log()[:, None]
            rows.append(sum((scores - norms)[i, row[i + ahead]] for i in range(first, stop)))
        return torch.stack([torch.as_tensor(row) for row in rows]).float() / (stop - first)

    half, clean = mean(0, length), (length + 1, 2 * length)
    compare(
        repetition_gain(logits, tokens),
        mean(*clean) - half,
        {
            "Entry L asks for the first token after the whole list, and nothing has announced "
            "that the list starts over: the clean half starts at entry L + 1.": mean(
                length, 2 * length
            )
            - half,
            "Entry i is about token i + 1. Did you read the probability of token i itself?": mean(
                *clean, ahead=0
            )
            - mean(0, length, ahead=0),
            "The sign is turned around: second copy minus first, of log-probabilities "
            "(not of losses).": half - mean(*clean),
            "Those are differences of raw logits: take the log-softmax over the vocabulary "
            "first.": mean(*clean, raw=True) - mean(0, length, raw=True),
            "That is the second copy alone: subtract the first.": mean(*clean),
        },
    )


def q3(looks_back: Callable[..., Tensor], seed: int) -> None:
    """Heads that were built to look a known distance back, with noise."""
    draw = generator(seed)
    batch, length = 2, 6 + seed
    size = 2 * length + 1
    built = [length - 1, length, 1, 0, length + 1]
    pattern = torch.rand(batch, len(built), size, size, generator=draw) * 0.05
    for head, distance in enumerate(built):
        for query in range(size):  # in the first copy all look elsewhere, and harder
            back = distance if query > length else 2
            pattern[:, head, query, max(query - back, 0)] += 0.15 if query > length else 3.0
    pattern = pattern.tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)
    truth = torch.tensor(built)
    compare(
        looks_back(pattern),
        truth,
        {
            "That is the distance which most of *all* rows prefer: keep the queries of the "
            "second copy, L + 1 to 2L.": torch.full_like(truth, 2),
            "Those are one too many: the distance from q to k is q - k.": truth + 1,
            "Those are one too few: the distance from q to k is q - k.": truth - 1,
            "Those are negative: count the distance back, q - k.": -truth,
            "One number for each head: average over the sequences first.": truth.expand(batch, -1),
        },
    )


def q4(prefix_score: Callable[..., Tensor], seed: int) -> None:
    """Attention to what followed an earlier occurrence, by three loops."""
    draw = generator(seed)
    batch, heads, size = 2, 3, 12 + 2 * seed
    tokens = torch.randint(1, 6, (batch, size), generator=draw)
    tokens[:, 0] = 0
    tokens[:, -3] = 0  # BOS once more: still no occurrence to be matched
    pattern = torch.rand(batch, heads, size, size, generator=draw).tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)

    def score(after: int, sink: bool = False, everywhere: bool = False) -> Tensor:
        total = torch.zeros(batch, heads)
        for b, row in enumerate(tokens.tolist()):
            asked = 0
            for q in range(size):
                earlier = [k for k in range(q) if row[k] == row[q] and (k > 0 or sink)]
                asked += bool(earlier) or everywhere
                for k in earlier:
                    total[b] += pattern[b, :, q, k + after]
            total[b] /= asked
        return total

    compare(
        prefix_score(pattern, tokens),
        score(1),
        {
            "That is the attention to the earlier *copies*: a duplicate-token head. Look at the "
            "position after each copy.": score(0),
            "BOS at position 0 is no earlier occurrence: leave it out.": score(1, sink=True),
            "Average over the queries that have an earlier occurrence, not over all: a query "
            "without one cannot match anything.": score(1, everywhere=True),
            "Sum over the matching positions of a query before you average: it may have "
            "several.": _mean_over_targets(pattern, tokens),
        },
    )


def _mean_over_targets(pattern: Tensor, tokens: Tensor) -> Tensor:
    """The score with an average in place of the sum over a query's matching positions."""
    total = torch.zeros(pattern.shape[:2])
    for b, row in enumerate(tokens.tolist()):
        asked = 0
        for q in range(len(row)):
            after = [k + 1 for k in range(1, q) if row[k] == row[q]]
            if after:
                total[b] += pattern[b, :, q, after].mean(-1)
                asked += 1
        total[b] /= asked
    return total


def q5(copying_score: Callable[..., float], seed: int) -> None:
    """A circuit built from chosen eigenvalues, some of them complex."""
    draw = generator(seed)
    vocab, width, rank = 24 + 4 * seed, 12, 4
    angle = torch.rand((), generator=draw) + 0.5
    core = torch.zeros(rank, rank)  # eigenvalues: 2, -1 - seed / 10, exp(+i angle), exp(-i angle)
    core[0, 0], core[1, 1] = 2.0, -1.0 - seed / 10
    core[2:, 2:] = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    change = torch.eye(rank) + 0.3 * torch.randn(rank, rank, generator=draw)
    reads = torch.randn(vocab, width, generator=draw)
    values = torch.randn(width, rank, generator=draw)
    left = reads @ values
    right = torch.linalg.pinv(left.double()).float()  # right @ left is the identity
    output = torch.randn(rank, width, generator=draw)
    unembed = torch.linalg.pinv(output.double()).float() @ (
        change @ core @ torch.linalg.inv(change) @ right
    )
    circuit = (left @ output @ unembed).double()
    whole = 2.0 - 1.0 - seed / 10 + 2 * angle.cos().item()
    sizes = 2.0 + 1.0 + seed / 10 + 2.0
    parts = 2.0 + 1.0 + seed / 10 + 2 * angle.cos().abs().item()
    singular = torch.linalg.svdvals(circuit).sum().item()
    even = torch.linalg.eigvalsh((circuit + circuit.T) / 2)
    compare(
        copying_score(reads, values, output, unembed),
        whole / sizes,
        {
            "Singular values are never negative: take the eigenvalues, which may be.": 1.0,
            "Divide by the sum of |eigenvalue|, not of singular values: they differ unless the "
            "matrix is symmetric.": whole / singular,
            "The size of a complex eigenvalue is its absolute value, not that of its real "
            "part: take .abs() before .real.": whole / parts,
            "The matrix is not symmetric: eigvalsh (or symmetrising) gives other numbers than "
            "eigvals.": (even.sum() / even.abs().sum()).item(),
            "Divide by the sum of the eigenvalues' absolute values.": whole,
            "That is upside down: the sum of the eigenvalues goes above, the sum of their "
            "absolute values below.": sizes / whole,
        },
        tolerance=2e-3,  # float32 eigenvalues of a matrix of low rank
    )


def q6(shares_kept: Callable[..., Tensor], reason: str, seed: int) -> None:
    """One model in the public check, another in the hidden ones."""
    answered = letter("reason", reason)
    if seed:  # the public check does not tell
        compare(
            answered,
            "c",
            {
                "Reason (a): the share kept is a ratio of two scores of the *same* head; that "
                "the score is high before the cut says nothing of what remains.": "a",
                "Reason (b): the cut head does look at the previous token, its score is above "
                "0.9. What else does so in that layer?": "b",
                "Reason (d): mean ablation does remove what the head says about its position: "
                "the same cut leaves next to nothing in induction-2.": "d",
            },
        )
    if seed < len(MODELS):
        given, truth, mistakes = _cuts(seed)
        compare(shares_kept(*given), truth, mistakes, tolerance=1e-3)


@cache
def _cuts(seed: int) -> tuple[tuple[Any, ...], Tensor, dict[str, Tensor]]:
    """The cut written out: the mean of one head's z, put in its place."""
    model, length, head = load(MODELS[seed]), 10 + seed, 0
    tokens, other = (_doubled(model, 4, length, generator(seed + i)) for i in (0, 50))
    queries = torch.arange(length + 1, 2 * length + 1)

    def scores(cut: int | None, how: str = "mean") -> Tensor:
        """Mean attention L - 1 back, and L back."""

        def replace(z: Tensor, hook: object) -> Tensor:
            z = z.clone()
            if cut is not None:
                z[:, :, cut] = z[:, :, cut].mean((0, 1)) if how == "mean" else 0.0
            return z

        def watch(pattern: Tensor, hook: object) -> Tensor:
            seen.append(pattern[:, head])
            return pattern

        seen: list[Tensor] = []
        hooks = [(get_act_name("z", 0), replace), (get_act_name("pattern", 1), watch)]
        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=[*hooks])
        return torch.stack([seen[0][:, queries, queries - d].mean() for d in (length - 1, length)])

    heads = range(model.cfg.n_heads)
    before, after = scores(None), torch.stack([scores(cut) for cut in heads])
    zeroed = torch.stack([scores(cut, "zero") for cut in heads])
    kept = after[:, 0] / before[0]
    mistakes = {
        "Those are the scores after the cut: divide by the score before it.": after[:, 0],
        "That is what is lost: the share kept is after / before.": 1 - kept,
        'Those are the shares after zero ablation: ask for "mean".': zeroed[:, 0] / before[0],
        "Those are the shares of the attention L back, to the same token. Prefix matching "
        "looks L - 1 back.": after[:, 1] / before[1],
        "That is before / after: turn it around.": 1 / kept,
    }
    return (model, (1, head), tokens, other), kept, mistakes


def _doubled(model: TransformerBridge, count: int, length: int, draw: Generator) -> Tensor:
    copy = torch.randint(1, model.cfg.d_vocab - 1, (count, length), generator=draw)
    start = torch.full((count, 1), bos(model))
    copy[copy == bos(model)] = model.cfg.d_vocab - 1
    return torch.cat([start, copy, copy], 1)
