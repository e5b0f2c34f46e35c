"""Chapter 05: the wires of a model when it copies, and how few of them are enough.

Every wire is patched exactly where that is cheap. Where it is not, as in all but very small
models, the effects are estimated from gradients, and the glimpse says so.
"""

from __future__ import annotations

from ...interp import attribution, circuit, clean_corrupt, graph, patching
from ...models import TransformerBridge
from ...plots import figures
from .glimpse import Asked, Glimpse, activations, announce

EXACT = 2e12  # multiplications that all wires may cost to be patched one by one
WORDS = 2000  # tokens; with more, the softmax is over those of the sequence
FEW = 4  # sequences, if wires are estimated
STEPS = 5  # gradients that an estimate averages
SIZES = (0, 1, 2, 5, 10, 15, 20, 25, 30, 40, 60, 80, 120, 200, 400, 1000, 2000, 5000)
ENOUGH = 0.9  # of the gap: a circuit that keeps so much is faithful


def glimpse(asked: Asked) -> Glimpse:
    """Effects of all wires, and what the strongest of them alone still do."""
    model = asked.load()
    cfg, sizes, wired = model.cfg, asked.session.tier.circuits, graph.of(model)
    total = int(wired.exists.sum())
    length = min(sizes.length, (cfg.n_ctx - 1) // 2)
    source = asked.session.generator("sequences")
    task = clean_corrupt.copying(model, sizes.sequences, length, source, narrow=cfg.d_vocab > WORDS)
    exact = cost(model, total, task) <= EXACT
    task = task if exact else task[:FEW]
    clean, corrupt = clean_corrupt.baselines(model, task)
    kept = [size for size in SIZES if size < total] + [total]
    _say(model, task, total if exact else 0, len(kept))
    if exact:
        effects = patching.path_patching(model, task)
    else:
        effects = attribution.edge_attribution(model, task, steps=STEPS)
    gap = (clean - corrupt).mean().item()
    share = (effects.mean(-1) / gap).cpu()
    ranking = circuit.rank_edges(share, wired)
    faithful = circuit.faithfulness(circuit.curve(model, task, ranking, kept), clean, corrupt).cpu()
    enough = circuit.smallest_size(kept, faithful, ENOUGH)
    order = [abs(share[wired.index(edge)].item()) for edge in ranking[:100]]
    way = "patched one by one" if exact else "estimated from gradients, for there are too many"
    count = f"{enough} of {total} wires keep" if enough else f"Fewer than {total} wires do not keep"
    text = (
        f"Copying, the model gains {gap:.1f} nats. {count} {ENOUGH:.0%} of it. The strongest "
        f"({way}): {', '.join(f'{u} -> {v}' for u, v in ranking[:4])}."
    )
    numbers = {
        "effects": share,
        "strongest": ranking[:20],
        "sizes": kept,
        "faithfulness": faithful,
        "enough": enough,
        "gap": gap,
        "exact": exact,
    }
    alt = f"Two line plots: share of the gap by wires kept, and effect of a wire by rank. {text}"
    panels: dict[str, dict[str, figures.Line]] = {
        "share of the gap that is kept": {"strongest wires": (kept, faithful.tolist())},
        "effect of one wire, share of the gap": {"by rank": (range(1, len(order) + 1), order)},
    }
    figure = figures.curves(panels, ["wires kept", "rank of the wire"], log_x=True)
    return Glimpse("05", figure, numbers, alt, text)


def cost(model: TransformerBridge, wires: int, task: clean_corrupt.CleanCorrupt) -> float:
    """Multiplications that patching every wire would take: half a pass for each, on average."""
    cfg = model.cfg
    weights = 12 * cfg.n_layers * cfg.d_model**2
    return wires * task.clean.numel() * weights / 2


def _say(
    model: TransformerBridge, task: clean_corrupt.CleanCorrupt, patched: int, circuits: int
) -> None:
    """What it takes: passes over all sequences, for the wires and then for the circuits."""
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    wires = patched / 2 if patched else 8 * STEPS
    split = layers * (3 * heads + 4) * (1 if patched else 2)  # every head has inputs of its own
    held = activations(model, task.clean, patterns=4 * layers, streams=split)
    announce(model, "wires and circuits", task.clean, wires + 4 * circuits, held)
