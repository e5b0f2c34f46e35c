"""Homework 5, on chapter 05: influence, chance, circuits, wires, likeness, coordination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from scipy.stats import entropy
from torch import Tensor

from .answers import Mistake, compare, generator, letter, normal

Node = Callable[[Tensor], Tensor]


def q1(influence: Callable[..., Tensor], seed: int) -> None:
    """Divergences of SciPy."""
    draw = generator(seed)
    draws, vocab = 5 + seed, 7 + seed
    clean = 2 * normal(draw, vocab) + 3
    altered = clean + normal(draw, draws, vocab) + 4 * normal(draw, draws, 1)
    p, q = clean.softmax(-1), altered.softmax(-1)

    def of(values: Sequence[float], error: str = "mean") -> Tensor:
        found = torch.tensor(values, dtype=torch.float64)
        n = len(found)
        spread = (found - found.mean()).square().sum()
        errors = {
            "mean": (spread / (n - 1) / n).sqrt(),
            "single": (spread / (n - 1)).sqrt(),
            "biased": (spread / n / n).sqrt(),
        }
        return torch.stack([found.mean(), errors[error]])

    right = [entropy(p, each) for each in q]
    compare(
        influence(clean, altered),
        of(right),
        {
            "The divergence is the other way round: KL(clean || altered) weighs by the clean "
            "probabilities.": of([entropy(each, p) for each in q]),
            "That is the norm of a difference of logits: a number added to all of them changes "
            "it, and no probability.": of([(each - clean).norm().item() for each in altered]),
            "Those are bits: take the natural logarithm.": of(
                [entropy(p, each, base=2) for each in q]
            ),
            "The standard error of a mean is the deviation over the square root of the number "
            "of draws.": of(right, "single"),
            "For the deviation of a sample, divide by one less than the number of draws.": of(
                right, "biased"
            ),
            "Those are cross-entropies: the clean entropy has to be subtracted.": of(
                [entropy(p, each) + entropy(p) for each in q]
            ),
        },
        tolerance=1e-6,
    )


def q2(sign_flip_p: Callable[..., float], seed: int) -> None:
    """Counted in whole numbers."""
    draw = generator(seed)
    samples, draws = 6 + seed, 39 + 10 * seed
    whole = torch.randint(-2, 4, (samples,), generator=draw)
    whole[0] = 4
    if seed % 2:
        whole = -whole
    signs = torch.randint(0, 2, (draws, samples), generator=draw) * 2 - 1
    signs[0] = 1  # ties with what was observed
    seen = sum(whole.tolist())
    flipped = [sum((row * whole).tolist()) for row in signs]
    both = sum(abs(value) >= abs(seen) for value in flipped)
    strictly = sum(abs(value) > abs(seen) for value in flipped)
    above = sum(value >= seen for value in flipped)
    compare(
        sign_flip_p(whole.double() / 4, signs.double()),
        (1 + both) / (1 + draws),
        {
            "The observation is one of the draws: (1 + as extreme) / (1 + draws), so that no p "
            "is 0.": both / draws,
            "The observation counts above the line as well: (1 + as extreme) / (1 + draws).": both
            / (1 + draws),
            "The observation counts below the line as well: (1 + as extreme) / (1 + draws).": (
                1 + both
            )
            / draws,
            "The test is two-sided: compare absolute values.": (1 + above) / (1 + draws),
            "The test is two-sided: compare absolute values, and count the observation.": above
            / draws,
            "As extreme means at least as large: ties count.": (1 + strictly) / (1 + draws),
            "That is the share of draws that are *less* extreme.": 1 - (1 + both) / (1 + draws),
        },
        tolerance=1e-9,
    )


def q3(faithfulness: Callable[..., float], completeness: Callable[..., float], seed: int) -> None:
    """Sums over sequences."""
    draw = generator(seed)
    batch = 8 + seed
    clean = -torch.rand(batch, generator=draw, dtype=torch.float64)
    corrupt = clean - 3 - 4 * torch.rand(batch, generator=draw, dtype=torch.float64)
    mixed = torch.rand(2, batch, generator=draw, dtype=torch.float64)
    alone = corrupt + (0.6 + 0.3 * mixed[0]) * (clean - corrupt)
    without = corrupt + (0.05 + 0.2 * mixed[1]) * (clean - corrupt)

    def kept(scores: Tensor) -> float:
        above = sum(a - c for a, c in zip(scores.tolist(), corrupt.tolist(), strict=True))
        whole = sum(a - c for a, c in zip(clean.tolist(), corrupt.tolist(), strict=True))
        return above / whole

    def one_by_one(scores: Tensor) -> float:
        return ((scores - corrupt) / (clean - corrupt)).mean().item()

    compare(
        faithfulness(alone, clean, corrupt),
        kept(alone),
        {
            "Numerator and denominator are exchanged: the gap goes below.": 1 / kept(alone),
            "That is the share that is lost: faithfulness is what the circuit keeps.": 1
            - kept(alone),
            "Mean over mean, not the mean of the ratios: a sequence with a small gap would weigh "
            "too much.": one_by_one(alone),
            "Measure from the corrupt run: it is the zero of the scale.": (
                alone.mean() / clean.mean()
            ).item(),
            "Clean and corrupt are exchanged.": 1 - kept(alone),
            "Divide by the gap, clean minus corrupt.": (alone - corrupt).mean().item(),
        },
        tolerance=1e-6,
    )
    compare(
        completeness(without, clean, corrupt),
        1 - kept(without),
        {
            "That is the faithfulness of everything *but* the circuit. A complete circuit leaves "
            "nothing: completeness is 1 minus it.": kept(without),
            "Mean over mean, not the mean of the ratios.": 1 - one_by_one(without),
            "Numerator and denominator are exchanged: the gap goes below.": 1 / (1 - kept(without)),
            "Divide by the gap, clean minus corrupt.": (clean - without).mean().item(),
        },
        tolerance=1e-6,
    )


def q4(patched: Callable[..., Tensor], seed: int) -> None:
    """Products of matrices for nodes that are linear; a model with a forked wire for others."""
    draw = generator(seed)
    batch, d, count = 3, 4, 5 + seed % 2
    clean, corrupt = normal(draw, batch, d), normal(draw, batch, d)
    maps = [0.5 * normal(draw, d, d) for _ in range(count)]
    writer, reader = 1, 3 + seed % (count - 2)  # the last reader is the output

    def after(first: int, x: Tensor, last: int = count) -> Tensor:
        for each in maps[first:last]:
            x = x + x @ each
        return x

    def onward(change: Tensor) -> Tensor:
        """What a change of what the reader reads makes of the output."""
        return change if reader == count else after(reader + 1, change @ maps[reader])

    difference = corrupt - clean
    change = after(0, difference, writer) @ maps[writer]
    straight = change if reader == count else change @ maps[reader]
    whole, truth = after(0, clean), after(0, clean) + onward(change)
    linear: list[Node] = [lambda x, m=each: x @ m for each in maps]  # type: ignore[misc]
    compare(
        patched(linear, clean, corrupt, writer, reader),
        truth,
        {
            "Every later node reads the patched write: that lets indirect paths through. Patch "
            "what *one* reader reads.": whole + after(writer + 1, change),
            "The patch stays in the stream: from the reader on, everything reads it. Give it "
            "to the reader alone.": whole + after(reader, change),
            "The nodes after the reader are held at their clean writes: let them run, on what the "
            "reader now writes.": whole + straight,
            "That is the corrupt run with one clean wire: start from the clean one.": after(
                0, corrupt
            )
            - onward(change),
            "The reader reads the corrupt stream: patch only what this one writer has put "
            "there.": whole + onward(after(0, difference, reader)),
            "The writer's corrupt write comes from a corrupt run of the *whole* model: earlier "
            "nodes write other things there, too.": whole + onward(difference @ maps[writer]),
            "The writer's own clean write is still there: replace it.": whole
            + onward(after(0, corrupt, writer) @ maps[writer]),
            "That is what the patch changes: return the output.": onward(change),
            "Nothing was patched.": whole,
            "The patch has the wrong sign: corrupt minus clean.": whole - onward(change),
        },
        tolerance=1e-6,
    )
    bent: list[Node] = [lambda x, m=each: torch.tanh(x @ m + 0.3) for each in maps]  # type: ignore[misc]
    for source in range(count):
        for target in range(source + 1, count + 1):
            found = patched(bent, clean, corrupt, source, target)
            compare(found, _forked(bent, clean, corrupt, source, target), tolerance=1e-6)


def _forked(
    nodes: Sequence[Node], clean: Tensor, corrupt: Tensor, writer: int, reader: int
) -> Tensor:
    """Output of a model in which one node reads a second copy of another, by recursion."""

    @cache
    def reads(node: int, patched: bool) -> Tensor:
        stream = clean if patched else corrupt
        for before in range(node):
            foreign = patched and (before, node) == (writer, reader)
            stream = stream + writes(before, patched and not foreign)
        return stream

    @cache
    def writes(node: int, patched: bool) -> Tensor:
        return nodes[node](reads(node, patched))

    return reads(len(nodes), True)


def q5(cka: Callable[..., float], seed: int) -> None:
    """The criterion of independence that it comes from, by matrices of samples."""
    draw = generator(seed)
    count, a, b = 12 + 3 * seed, 3 + seed, 5
    x = normal(draw, count, a) + 1.5
    y = torch.cat([x[:, :2], normal(draw, count, b - 2)], 1) @ normal(draw, b, b) + 2

    def alike(x: Tensor, y: Tensor, centred: bool = True) -> float:
        centre = torch.eye(count, dtype=torch.float64) - float(centred) / count
        k, m = (centre @ each @ each.T @ centre for each in (x, y))
        return ((k * m).sum() / ((k * k).sum() * (m * m).sum()).sqrt()).item()

    truth = alike(x, y)
    inner = [each - each.mean(0) for each in (x, y)]
    cross, own = inner[1].T @ inner[0], [(each.T @ each).norm() for each in inner]
    rows = [each - each.mean(1, keepdim=True) for each in (x, y)]
    compare(
        cka(x, y),
        truth,
        {
            "The samples are not centred: subtract each column's mean first.": alike(
                x, y, centred=False
            ),
            "The mean runs over the samples, for each column, and not over the columns.": alike(
                rows[0], rows[1], centred=False
            ),
            "The norm above is squared: ||Y^T X||².": (cross.norm() / (own[0] * own[1])).item(),
            "That is its square root.": truth**0.5,
            "Below stand the norms of X^T X and Y^T Y, not the squared norms of X and Y.": (
                cross.square().sum() / (inner[0].square().sum() * inner[1].square().sum())
            ).item(),
            "Below, the norms are not squared: ||X^T X|| ||Y^T Y||.": (
                cross.square().sum() / (own[0] * own[1]).square()
            ).item(),
        },
        tolerance=1e-6,
    )
    turn = torch.linalg.qr(normal(draw, a, a)).Q
    compare(cka(x, 3 * x @ turn + 1), 1.0, tolerance=1e-6)


def q6(
    synergy: Callable[..., float], stand_in: float, pipeline: float, reason: str, seed: int
) -> None:
    """Losses by loops; numbers and a letter about a shipped model.

    The shares were measured for ten batches of 16 sequences: .752 and -.629, with standard
    deviations .021 and .032. The tolerances are three of these.
    """
    draw = generator(seed)
    batch, groups = 6 + seed, 2 + seed % 3
    clean = -torch.rand(batch, generator=draw, dtype=torch.float64)
    alone = clean - 2 * torch.rand(groups, batch, generator=draw, dtype=torch.float64)
    together = clean - 5 * torch.rand(batch, generator=draw, dtype=torch.float64)

    def lost(scores: Tensor) -> float:
        return sum(a - b for a, b in zip(clean.tolist(), scores.tolist(), strict=True)) / batch

    singles = [lost(each) for each in alone]
    truth = lost(together) - sum(singles)
    scores = together.mean().item() - alone.mean(1).sum().item()
    compare(
        synergy(clean, alone, together),
        truth,
        {
            "The sign is turned around: D is a *loss*, clean minus what is left.": -truth,
            "Those are scores, not losses: subtract each from the clean score.": scores,
            "Subtract what *each* removal costs: the sum of them.": lost(together)
            - sum(singles) / groups,
            "That is what removing all of them costs: subtract what each costs alone.": lost(
                together
            ),
            "That is a ratio. The interaction is a difference, in nats.": lost(together)
            / sum(singles),
        },
        tolerance=1e-6,
    )
    for name, value in (("stand_in", stand_in), ("pipeline", pipeline)):
        if not torch.is_tensor(value) and not isinstance(value, int | float):
            raise Mistake(f"`{name}` is a number, a share of the gap; got {value!r}.")
    answered = letter("reason", reason)
    if not seed:  # the public check does not tell
        return
    for name, value, right, slack, more in (
        ("stand_in", stand_in, 0.75, 0.065, "more"),
        ("pipeline", pipeline, -0.63, 0.1, "less"),
    ):
        compare(
            value,
            right,
            {
                f"`{name}` has the wrong sign: removing all costs *{more}* than the sum.": -right,
                f"`{name}` is in nats: divide by the gap.": 8 * right,
            },
            tolerance=slack,
        )
    compare(
        answered,
        "b",
        {
            "Reason (a): what one removal at a time shows is what the *others* cannot replace. "
            "Look at what the four cost together.": "a",
            "Reason (c): removed together, at the same mean, the four cost most of the gap. So the "
            "mean does take away what they say.": "c",
            "Reason (d): then removing all four would cost little, too.": "d",
        },
    )


__all__ = ["q1", "q2", "q3", "q4", "q5", "q6"]
