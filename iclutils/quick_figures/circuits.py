"""Chapter 06: the edges of a model when it copies, and how few of them are enough.

Every edge is patched exactly where that is cheap; elsewhere, as in all but very small models, the
effects are estimated from gradients, and the figure says so.
"""

from __future__ import annotations

import torch

from ..interp import attribution, circuit, clean_corrupt, graph, patching
from ..plots import figures
from .quick_figure import QuickFigure, Request, announce

EXACT = 2e12  # multiplications that all edges may cost to be patched one by one
WORDS = 2000  # tokens; with more, the softmax is over those of the sequence
FEW = 4  # sequences, if edges are estimated
STEPS = 3  # gradients that an estimate averages
SIZES = (1, 2, 5, 10, 15, 20, 25, 30, 40, 60, 80, 120, 200, 400, 1000, 2000, 5000)
SPARSE = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)  # where there are more than these
NOTHING = 2  # standard errors above 0 that a gain is, if it is one
ENOUGH = 0.9  # of the gap: a circuit that keeps so much is faithful


def draw(request: Request) -> QuickFigure:
    """Effects of all edges, and what the strongest of them alone still do."""
    model = request.load()
    cfg, sizes, edges = model.cfg, request.session.tier.circuits, graph.of(model)
    total, length = int(edges.exists.sum()), min(sizes.length, (cfg.n_ctx - 1) // 2)
    source, narrow = request.session.generator("sequences"), cfg.d_vocab > WORDS
    task = clean_corrupt.copying(model, sizes.sequences, length, source, narrow=narrow)
    # Half a pass for each edge, on average.
    exact = total * task.clean.numel() * 6 * cfg.n_layers * cfg.d_model**2 <= EXACT
    task = task if exact else task[:FEW]
    clean, corrupt = clean_corrupt.baselines(model, task)
    tried = [size for size in (SPARSE if total > SPARSE[-1] else SIZES) if size < total]
    passes = (total / 2 if exact else 8 * STEPS) + 4 * len(tried)
    split = cfg.n_layers * (3 * cfg.n_heads + 4)  # every head has inputs of its own
    held = {"patterns": 4 * cfg.n_layers, "streams": split if exact else 2 * split}
    announce(model, "edges and circuits", task.clean, passes, **held)
    if exact:
        effects = patching.path_patching(model, task)
    else:
        effects = attribution.edge_attribution(model, task, steps=STEPS)
    gains = clean - corrupt
    gap, error = gains.mean().item(), gains.std().item() / len(gains) ** 0.5
    share = (effects.mean(-1) / gap).cpu()
    ranking = circuit.rank_edges(share, edges)
    scores = circuit.curve(model, task, ranking, tried)
    kept = [0, *tried, total]  # both ends are known
    faithful = circuit.faithfulness(torch.stack([corrupt, *scores, clean]), clean, corrupt).cpu()
    enough = circuit.smallest_size(kept, faithful, ENOUGH)
    way = "patched one by one" if exact else "estimated from gradients, for there are too many"
    count = f"{tried[-1]} of {total} edges do not keep"
    if enough is not None and enough < total:
        count = f"{enough} of {total} edges keep"
    text = "Copying, the model gains nothing, of which no circuit can keep a share."
    if gap > NOTHING * error:
        text = (
            f"Copying, the model gains {gap:.1f} nats. {count} {ENOUGH:.0%} of it. The strongest "
            f"({way}): {', '.join(f'{u} -> {v}' for u, v in ranking[:4])}."
        )
    numbers = {
        **{"effects": share, "strongest": ranking[:20], "exact": exact},
        **{"sizes": kept, "faithfulness": faithful, "enough": enough, "gap": gap},
    }
    alt = f"Two line plots: share of the gap by edges kept, and effect of an edge by rank. {text}"
    order = [abs(share[edges.index(edge)].item()) for edge in ranking[:100]]
    panels: dict[str, dict[str, figures.Line]] = {
        "share of the gap that is kept": {"strongest edges": (kept, faithful.tolist())},
        "effect of one edge, share of the gap": {"by rank": (range(1, len(order) + 1), order)},
    }
    figure = figures.curves(panels, ["edges kept", "rank of the edge"], log_x=True)
    return QuickFigure("06", figure, numbers, alt, text)
