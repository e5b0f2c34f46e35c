"""How much faster OLS and ridge at every prefix are than a loop over contexts and prefixes.

There are two loops: of scikit-learn's fits, and of bare numpy (``lstsq`` and ``solve``), which is
the fair baseline for speed. All ways run in one process on the same float64 contexts; for every
size the loops take a share of the contexts (``--loop`` of them), the batched way takes all. The
predictions for the contexts that all have seen must agree to 1e-8 or the benchmark stops.

    python benchmarks/regression.py --threads 1          # about a minute
"""

import statistics
from functools import partial

import numpy as np
import torch
from common import in_turns, options
from sklearn.linear_model import LinearRegression, Ridge

from iclutils.chapters.ridge_ols.algorithms import ols, ridge

TOLERANCE = 1e-8
SIZES = ((2, 6), (4, 10), (8, 17), (8, 40), (20, 40))  # d and pairs; the last two, the paper's
PENALTY = 0.1


def fitted(make, x, y, query):
    """One prediction of a model of scikit-learn."""
    return make(fit_intercept=False).fit(x, y).predict(query[None])[0]


def numpy_ols(x, y, query):
    """One prediction of min-norm least squares."""
    return query @ np.linalg.lstsq(x, y, rcond=None)[0]


def numpy_ridge(x, y, query):
    """One prediction of ridge regression, by its normal equations."""
    return query @ np.linalg.solve(x.T @ x + PENALTY * np.eye(x.shape[1]), x.T @ y)


WAYS = {
    "OLS": (ols, {"scikit-learn": partial(fitted, LinearRegression), "numpy": numpy_ols}),
    "ridge": (
        partial(ridge, penalty=PENALTY),
        {"scikit-learn": partial(fitted, partial(Ridge, alpha=PENALTY)), "numpy": numpy_ridge},
    ),
}


def contexts(count, pairs, dim):
    """Contexts with noise, so that no fit is exact."""
    generator = torch.Generator().manual_seed(0)
    place = {"generator": generator, "dtype": torch.float64}
    xs = torch.randn(count, pairs, dim, **place)
    ys = (xs @ torch.randn(count, dim, 1, **place))[..., 0]
    return xs, ys + 0.5 * torch.randn(count, pairs, **place)


def loop(predict, xs, ys):
    """A fit for each context and prefix, and one prediction from each."""
    found = np.zeros_like(ys)
    for x, y, row in zip(xs, ys, found, strict=True):
        for n in range(1, len(y)):
            row[n] = predict(x[:n], y[:n], x[n])
    return found


def seconds(call, repeats):
    """Median time of a call, after one that is not counted."""
    return statistics.median(in_turns({"": call}, 1 + repeats)[""][1:])


def main():
    """Print one line for each size and algorithm."""
    given = options(
        __doc__,
        contexts=(1024, "of the batched way"),
        loop=(16, "contexts that the loop takes"),
        repeats=(5, "repetitions of the batched way"),
    )
    for dim, pairs in SIZES:
        xs, ys = contexts(given.contexts, pairs, dim)
        some = xs[: given.loop].numpy(), ys[: given.loop].numpy()
        for name, (batched, loops) in WAYS.items():
            quick = 1e6 * seconds(partial(batched, xs, ys), given.repeats) / given.contexts
            found = batched(xs, ys)[: given.loop].numpy()
            line = f"d={dim} n={pairs} {name}: {quick:.1f} us a context"
            for other, one in loops.items():
                expected = loop(one, *some)
                naive = 1e6 * seconds(partial(loop, one, *some), 3) / given.loop
                gap = np.abs(found - expected).max()
                if not gap <= TOLERANCE:
                    raise SystemExit(f"{line}: differs from {other} by {gap:.1e}")
                line += f"; {other} {naive:.0f}, {naive / quick:.0f} times ({gap:.0e} apart)"
            print(line, flush=True)


if __name__ == "__main__":
    main()
