"""Chapter 03: numbers written in tokens, what is expected next, and the algorithms beside it."""

import math

import numpy as np
import torch
from alone import ids, run
from stored import write

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
logits, seen = run(torch.tensor(tokens))


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
known, asked = slice(0, 5), 5


def ridge(columns, target, penalty):
    size = columns.shape[1]
    return np.linalg.solve(columns.T @ columns + penalty * np.eye(size), columns.T @ target)


lines = []
for a, b in zip(x, y, strict=True):
    both = np.stack([a, np.ones_like(a)], 1)
    slope, _, _, _ = np.linalg.lstsq(a[known, None], b[known], rcond=None)
    fit, _, _, _ = np.linalg.lstsq(both[known], b[known], rcond=None)
    w = 0.0
    for one, label in zip(a[known], b[known], strict=True):
        w -= 2 * 0.1 * one * (one * w - label)
    lines.append(
        {
            "least squares": slope[0] * a[asked],
            "ridge 1": ridge(a[known, None], b[known], 1.0)[0] * a[asked],
            "line": fit @ both[asked],
            "line, ridge 1": ridge(both[known], b[known], 1.0) @ both[asked],
            "1-NN": b[known][np.abs(a[known] - a[asked]).argmin()],
            "mean label": b[known].mean(),
            "last label": b[known][-1],
            "SGD at 0.1": w * a[asked],
        }
    )
answer, cut = np.stack([means[:, asked].numpy(), y[:, asked]]), int(at[-1])

given = {"values": [[digit] for digit in DIGITS], "between": [*ARROW, SPACE], "after": NEWLINE}
given |= {"xs": x.tolist(), "ys": y.tolist(), "tokens": tokens}
values = {
    "expected number": means,
    "probability of a number": sure,
    "every x after four pairs": torch.stack(every).view(2, 10),
    "state after layer 10": seen["resid", 9][:, cut, :3],
    "state after layer 29": seen["resid", 28][:, cut, :3],
    **{f"{name}, sixth": [float(line[name]) for line in lines] for name in lines[0]},
    "squared distance to y": float(np.square(answer[0] - answer[1]).mean()),
}
write(__file__, given, values)
