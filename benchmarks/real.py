"""A real language model on this machine: tokens per second, patching, shared demonstrations.

SmolLM2-135M-Instruct (``load("smollm2")``) on functions between words, ``big -> small``, five
examples and a query, the answer scored at the last position; corrupt prompts carry the answers of
another function. All times are CPU seconds of all threads, so that a busy machine matters little.

- **rate**: tokens per second of forward passes, logits at the target alone, and the share of the
  machine's matrix peak, a product of square matrices timed in turns with it;
- **patching**: what every head gives to the logits, to the queries, keys and values of the
  strongest induction head, and to all readers of the graph (a random sample), by ``path_patching``
  and by one hooked forward pass for each patch with logits at the scored position alone, of which
  every n-th is timed; the effects must agree;
- **demonstrations**: N queries on the same examples, each prompt read whole, one at a time or all
  at once, and all at once from one cache of the examples; the logits must agree.

    python benchmarks/real.py --threads 1
"""

import random
import statistics
from functools import partial

import torch
from common import options, timed

from iclutils.chapters.label_anchors.compression import everything, multiply_adds
from iclutils.interp import patching
from iclutils.interp.clean_corrupt import CleanCorrupt, scored_logits, two_functions
from iclutils.interp.graph import Node, add_to_inputs, component_outputs, of, split_qkv_input
from iclutils.interp.kv_cache import answer_from_cache, cache_demonstrations
from iclutils.interp.readout import target_logits
from iclutils.models import load
from iclutils.tasks import words

INDUCTION = 18, 6  # the strongest induction head on random repeated tokens
NATS, LOGITS = 1e-3, 1e-2  # how far the ways may differ, in single precision


def rate(model):
    """Tokens per second, and the share of the matrix peak."""
    size, made = 1536, torch.randn(1536, 1536)
    tokens = torch.randint(1000, 40_000, (8, 64))
    task = CleanCorrupt(tokens, tokens, torch.full((8, 1), 63), tokens[:, :1])
    adds = 8 * multiply_adds(model, 64)
    one, peak = [], []
    for turn in range(4):
        taken = [timed(way)[1] for way in (lambda: made @ made, lambda: scored_logits(model, task))]
        if turn:
            peak.append(2 * size**3 / taken[0])
            one.append(taken[1])
    rate = 2 * adds / statistics.median(one)
    print(
        f"rate: {tokens.numel() / statistics.median(one):.0f} tokens per CPU second, "
        f"{rate / 1e9:.0f} GFLOP/s of {statistics.median(peak) / 1e9:.0f}: "
        f"{rate / statistics.median(peak):.0%} of the peak",
        flush=True,
    )


def patches(model, task, name, edges, every):
    """All edges at once against one hooked pass each."""
    graph = of(model)
    found, quick = timed(lambda: patching.path_patching(model, task, edges))
    some = edges[::every]
    writers = {u for u, _ in some}
    before, after = (component_outputs(model, x, writers) for x in (task.clean, task.corrupt))
    clean, gap, slow = task.score(scored_logits(model, task)), 0.0, []
    for number, (writer, reader) in enumerate(some):
        hooks = add_to_inputs(model, {reader: after[writer] - before[writer]})
        with split_qkv_input(model):
            logits, taken = timed(partial(scored_logits, model, task, hooks))
        if number:  # the first warms up
            slow.append(taken)
        lost = found[graph.index((writer, reader))]
        gap = max(gap, float((clean - task.score(logits) - lost).abs().max()))
    if gap > NATS:
        raise SystemExit(f"{name}: the two ways differ by {gap:.1e} nats")
    naive = statistics.median(slow) * len(edges)
    print(
        f"patching, {name}: {len(edges)} patches, loop {naive:.0f} CPU s ({len(slow)} timed), at "
        f"once {quick:.1f} s: {naive / quick:.1f} times faster; largest difference {gap:.0e} nats",
        flush=True,
    )


def demonstrations(model, examples, count):
    """Queries on shared examples, whole and from a cache."""
    draw = torch.Generator().manual_seed(0)
    prompts = words.ask("opposite", model.tokenizer, count, examples, draw, shared=True).prompts

    def from_cache():
        held = cache_demonstrations(model, prompts[:1], everything(prompts[:1]))
        return answer_from_cache(model, held, prompts)

    one_by_one, whole = timed(
        lambda: torch.cat([target_logits(model, prompts[i]) for i in range(count)])
    )
    at_once, together = timed(lambda: target_logits(model, prompts))
    cached, quick = timed(from_cache)
    gap = max(float((one_by_one - each).abs().max()) for each in (at_once, cached))
    if gap > LOGITS:
        raise SystemExit(f"demonstrations: logits differ by {gap:.1e}")
    size = int(prompts.target.float().mean()) + 1
    print(
        f"demonstrations: {count} queries of {size} tokens, read whole one at a time {whole:.1f} "
        f"CPU s, all at once {together:.1f} s, from one cache (made within) {quick:.2f} s: "
        f"{whole / quick:.1f} and {together / quick:.1f} times faster; largest difference of a "
        f"logit {gap:.0e}",
        flush=True,
    )


def main():
    """Run all parts."""
    given = options(
        __doc__,
        prompts=(4, "that are patched"),
        every=(27, "loop: time every n-th patch"),
        readers=(6, "drawn of the whole graph"),
        queries=(24, "on the same examples"),
    )
    model = load("smollm2")
    rate(model)
    demonstrations(model, 5, given.queries)
    demonstrations(model, 16, given.queries)
    draw, graph = torch.Generator().manual_seed(0), of(model)
    task = two_functions(model, "past", "gerund", given.prompts, 5, draw)
    heads = [node for node in graph.writers if node.kind == "head"]
    earlier = [node for node in heads if node.layer < INDUCTION[0]]
    drawn = random.Random(1).sample(graph.readers[1:], given.readers)
    cases = {"every head to the logits": [(u, Node("logits")) for u in heads]}
    for channel in "qkv":
        reader = Node(channel, *INDUCTION)
        cases[f"every head to {reader}"] = [(u, reader) for u in earlier]
    sample = [edge for edge in graph.edges() if edge[1] in drawn]
    cases["all writers to random readers"] = sample
    for name, edges in cases.items():
        patches(model, task, name, edges, max(1, min(given.every, len(edges) // 6)))


if __name__ == "__main__":
    main()
