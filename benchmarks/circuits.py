"""How much faster all wires between heads are at once than one hooked forward pass each.

The loop is TransformerLens' ``get_act_patch_direct_path_all_sources``: one forward pass with
forked inputs for every pair of heads. ``--every`` runs it for every n-th writing head only, in
turns with the fast way (``patching.path_patching``), and scales up; the fast way is always timed
whole, with the clean and corrupt passes that it needs. Both run in one process on the same
weights and tokens, and scores must agree to 1e-5 nats or the benchmark stops. Times are
CPU seconds of all threads, so that a busy machine does not matter.

Four cases: the shipped guide (anchors-0: 16 sequences of 41 tokens) and the shape of GPT-2 small
(random weights, 51 tokens), each with the last entry scored and with the whole second copy. Next
to the ratio stands the bound: the multiply-adds of the loop over those that must be redone. Where
the second copy is scored over 50,257 tokens the unembedding alone, which both must do, leaves a
bound below 3; on the guide one pass is mostly overhead, so the ratio may exceed the bound.

    python benchmarks/circuits.py --threads 1 --every 50
"""

import statistics
import time
from dataclasses import replace

import torch
from common import gpt2_small, options, timed
from transformer_lens.patching import get_act_patch_direct_path

from iclutils.interp import patching
from iclutils.interp.clean_corrupt import baselines, copying
from iclutils.interp.graph import of
from iclutils.models import cached, load

TOLERANCE = 1e-5


def last_entry(behaviour):
    """Only the last entry scored."""
    return replace(behaviour, at=behaviour.at[:, -1:], answer=behaviour.answer[:, -1:], source=None)


def loop(model, behaviour, channel, source):
    """Score of every sequence for every later head, (pair, batch), and CPU seconds for a pass."""
    names = {f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)}
    _, clean = cached(model, behaviour.clean, names)
    _, corrupt = cached(model, behaviour.corrupt, names)
    rows = torch.arange(len(behaviour))[:, None]
    kept = []

    def score(logits):
        kept.append(behaviour.score(logits[rows, behaviour.at]))
        return kept[-1].mean()

    began = time.process_time()
    with torch.no_grad():  # it puts the writes of its second cache into runs of these tokens
        get_act_patch_direct_path(
            model, behaviour.clean, corrupt, clean, score, *source, channel, verbose=False
        )
    return torch.stack(kept), (time.process_time() - began) / len(kept)


def bound(model, behaviour):
    """Multiply-adds of the loop over those that must be redone (matrix products with weights).

    Per position a block costs 4 d^2 + 2 d d_mlp and the unembedding d V. A patched key input
    leaves the head's keys and output, the MLP of its layer, the later layers, and the readout.
    """
    cfg, size, entries = model.cfg, behaviour.clean.shape[1], behaviour.at.shape[1]
    reach = int(behaviour.at.max()) + 1
    square, mlp = cfg.d_model**2, 2 * cfg.d_model * cfg.d_mlp
    readout = cfg.d_model * cfg.d_vocab
    naive = needed = 0
    for reader in range(1, cfg.n_layers):
        pairs = reader * cfg.n_heads**2
        later = cfg.n_layers - 1 - reader
        rows = reach if later else entries
        one = 2 * reach * cfg.d_model * cfg.d_head + rows * mlp
        if later:
            last = 2 * square * (reach + entries) + mlp * entries
            one += (later - 1) * reach * (4 * square + mlp) + last
        needed += pairs * (one + entries * readout)
        naive += pairs * size * (cfg.n_layers * (4 * square + mlp) + readout)
    return naive / needed


def compare(name, model, behaviour, given):
    """Run both ways in turns, check that they agree, print the ratio and the bound."""
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    clean, _ = baselines(model, behaviour)
    pairs = heads**2 * layers * (layers - 1) // 2
    sources = [(layer, head) for layer in range(layers - 1) for head in range(heads)]
    graph = of(model)
    keys = [(u, v) for u, v in graph.edges() if u.kind == "head" and v.kind == "k"]

    rows = [u for u, writer in enumerate(graph.writers) if writer.kind == "head"]
    columns = [v for v, reader in enumerate(graph.readers) if reader.kind == "k"]

    def all_at_once():
        found = patching.path_patching(model, behaviour, keys)[rows][:, columns]
        return found.view(layers, heads, layers, heads, -1)

    found = all_at_once()  # burn-in
    loop(model, behaviour, "k", sources[-1])
    fast, slow, gap = [], [], 0.0
    for number, source in enumerate(sources[:: given.every]):
        if number < given.repeats:
            fast.append(timed(all_at_once)[1])
        scores, each = loop(model, behaviour, "k", source)
        slow.append(each)
        lost = found[source][source[0] + 1 :].flatten(0, 1)
        gap = max(gap, float((clean - scores - lost).abs().max()))
    if gap > TOLERANCE:
        raise SystemExit(f"{name}: the two ways differ by {gap:.1e} nats, more than {TOLERANCE}")
    naive, quick = statistics.median(slow) * pairs, statistics.median(fast)
    print(
        f"{name}: loop {naive:.1f} CPU s ({len(slow)} of {len(sources)} writing heads timed, "
        f"{pairs} pairs), fast {quick:.2f} s (median of {len(fast)}): "
        f"{naive / quick:.1f} times faster; bound by multiply-adds {bound(model, behaviour):.1f}; "
        f"largest difference {gap:.0e} nats",
        flush=True,
    )


def main():
    """Run all four comparisons."""
    given = options(
        __doc__,
        every=(1, "run every n-th writing head's loop"),
        repeats=(3, "repetitions of the fast way"),
        only=("", "one of the two models: guide or small"),
        layers=(12, "of the small model; fewer: faster"),
    )
    cases = {
        "guide": (lambda: load("anchors-0"), 16, 20),
        "small": (lambda: gpt2_small(given.layers), 1, 25),
    }
    for name, (make, count, length) in cases.items():
        if given.only in ("", name):
            model = make()
            whole = copying(model, count, length, torch.Generator().manual_seed(0))
            compare(f"{name}, last entry", model, last_entry(whole), given)
            compare(f"{name}, second copy", model, whole, given)


if __name__ == "__main__":
    main()
