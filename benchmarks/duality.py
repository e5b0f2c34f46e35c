"""How much faster the dual models of all heads and queries are at once than one by one.

One attention layer of the shape of GPT-2 small: 12 heads of 64, 256 tokens, of which the first
three quarters are demonstrations; every position is a query and sees what is before it. Query
terms and demonstration updates of all heads and queries (``dual.dual_form``) are compared with a
loop over heads and queries: the formula as it is written, exp and sums in numpy, with no care for
overflow.

In float64, the precision of the identities, and in float32, that of the model; all in one
process, in turns, medians over the repeats. Both parts of all ways must agree to 1e-5 of the
largest, or the benchmark stops. The loops take their time in calls, the batched way in products:
it computes the whole square of scores where the loops compute the half that is seen.

    python benchmarks/duality.py --threads 1
"""

import math
import statistics
from functools import partial

import numpy as np
import torch
from common import in_turns, options

from iclutils.chapters.contrastive_kernel.dual import dual_form

TOLERANCE = 1e-5
SCORE = 2.0  # standard deviation of q·k / sqrt(d)


def layer(heads, width, size):
    """Queries, keys and values (head, pos, width), and which tokens are demonstrations."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, size, width, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return SCORE * query, key, value, torch.arange(size) < 3 * size // 4


def batched(query, key, value, demos):
    """All heads and queries at once."""
    size = query.shape[1]
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    return dual_form(query, key, value, demos, lower)


def note(query, key, value, demos):
    """One head and query at a time, D and both sums as the formula has them."""
    q, k, v, shown = (part.numpy() for part in (query, key, value, demos))
    query_term, update = np.zeros_like(v), np.zeros_like(v)
    for head in range(len(q)):
        for place in range(q.shape[1]):
            seen = slice(0, place + 1)
            kernel = np.exp(k[head, seen] @ q[head, place] / math.sqrt(q.shape[-1]))
            total, mine = kernel.sum(), shown[seen]
            query_term[head, place] = kernel[~mine] @ v[head, seen][~mine] / total
            update[head, place] = kernel[mine] @ v[head, seen][mine] / total
    return torch.from_numpy(query_term), torch.from_numpy(update)


WAYS = {"batched": batched, "note's loop": note}


def compare(parts, repeats):
    """Print one line for each way."""
    first = {name: way(*parts) for name, way in WAYS.items()}  # burn-in
    gaps = {}
    for name, found in first.items():
        pairs = zip(first["batched"], found, strict=True)
        gaps[name] = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
        if not gaps[name] <= TOLERANCE:
            raise SystemExit(f"{name} differs by {gaps[name]:.1e} of the largest: {TOLERANCE}")
    seconds = in_turns({name: partial(way, *parts) for name, way in WAYS.items()}, repeats)
    each = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"  {name}: {1e3 * each[name]:.1f} ms "
            f"({1e3 * min(values):.1f}..{1e3 * max(values):.1f}), "
            f"{each[name] / each['batched']:.1f} times the batched way, {gaps[name]:.0e} apart"
        )


def main():
    """Time the ways in both precisions."""
    given = options(
        __doc__, heads=(12, ""), width=(64, "of a head"), tokens=(256, ""), repeats=(7, "turns")
    )
    parts = layer(given.heads, given.width, given.tokens)
    for dtype in (torch.float64, torch.float32):
        print(f"{dtype}, {given.heads} heads, {given.tokens} queries")
        compare([part.to(dtype) for part in parts[:3]] + [parts[3]], given.repeats)


if __name__ == "__main__":
    main()
