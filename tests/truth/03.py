"""Chapter 03: numbers written in tokens, and what is expected next."""

import math

import numpy as np
import torch
from alone import ids, run, write

LARGEST = math.sqrt(3)
NUMBERS = np.linspace(-LARGEST, LARGEST, 10)
DIGITS = [ids(str(i))[0] for i in range(10)]
SPACE, ARROW, NEWLINE = ids(" 5")[0], ids(" ->"), ids("\n")
XS, SLOPES = [[2, 9, 4, 7, 0, 6], [8, 1, 5, 3, 9, 2]], (0.8, -0.5)

ys = [
    [int(np.abs(NUMBERS - slope * NUMBERS[x]).argmin()) for x in row]
    for row, slope in zip(XS, SLOPES, strict=True)
]
tokens, at = [], []
for row, labels in zip(XS, ys, strict=True):
    line = []
    for x, y in zip(row, labels, strict=True):
        line += [DIGITS[x], *ARROW, SPACE]
        at.append(len(line) - 1)
        line += [DIGITS[y], *NEWLINE]
    tokens.append(line)
at = torch.tensor(at[: len(XS[0])])
logits, _ = run(torch.tensor(tokens))


def expected(scores):
    """The mean number, and the probability of any."""
    p = scores.double().softmax(-1)[..., DIGITS]
    return (p / p.sum(-1, keepdim=True)) @ torch.tensor(NUMBERS), p.sum(-1)


means, sure = expected(logits[:, at])
pair = len(ARROW) + 4  # its tokens
every = [
    expected(run(torch.tensor([[*row[: 4 * pair], DIGITS[x], *ARROW, SPACE]]))[0][0, -1])[0]
    for row in tokens
    for x in range(10)
]
x, y = NUMBERS[np.array(XS)], NUMBERS[np.array(ys)]
given = {"values": [[digit] for digit in DIGITS], "between": [*ARROW, SPACE], "after": NEWLINE}
given |= {"xs": x.tolist(), "ys": y.tolist(), "tokens": tokens}
values = {
    "expected number": means,
    "probability of a number": sure,
    "every x after four pairs": torch.stack(every).view(2, 10),
}
write(__file__, given, values)
