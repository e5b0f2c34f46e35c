"""How much faster queries are answered from a memory of shared demonstrations.

On GPT-2 small's shape with random weights, three ways to answer N queries on the same
demonstrations: re-encode the whole prompt for each query, one at a time (the paper's baseline);
re-use keys and values of all demonstration tokens (plain prefix caching, the fair baseline); and
of label words and formatting alone. The first two must give the same predictions and logits to
1e-3, or the benchmark stops. Reading the demonstrations once is not counted, and all ways compute
logits at the target only. Beside the seconds stand what does not depend on the machine: tokens
fed, tokens remembered, and multiply-adds.

    python benchmarks/compression.py            # a few minutes on 2 cores
"""

import torch
from common import gpt2_small, options

from iclutils.chapters.label_anchors.compression import costs, everything, hidden_anchor, seconds
from iclutils.interp.kv_cache import answer_from_cache, cache_demonstrations
from iclutils.interp.readout import target_logits
from iclutils.tasks.prompts import Prompts, Role

TOLERANCE = 1e-3
SHAPES = {  # name: (classes, text tokens of a demonstration, tokens of a query)
    "AG News lengths: 4 demonstrations, 152 tokens; query 37": (4, 31, 37),
    "SST-2 lengths: 2 demonstrations, 18 tokens; query 19": (2, 2, 19),
    "long demonstrations: 8, 240 tokens; query 16": (8, 23, 16),
}


def random_prompts(count, classes, text, query, seed=0):
    """Prompts of random tokens that share one demonstration per class.

    A demonstration is two tokens of formatting, a text, three of formatting, a label word and a
    newline: 7 + text tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    size = 7 + text
    shown = torch.randint(0, 50257, (1, classes * size), generator=draw).expand(count, -1)
    asked = torch.randint(0, 50257, (count, query), generator=draw)
    one = [Role.FORMAT] * 2 + [Role.TEXT] * text + [Role.FORMAT] * 3 + [Role.LABEL, Role.FORMAT]
    roles = torch.tensor([*one * classes, *[Role.QUERY] * query]).expand(count, -1)
    label = torch.arange(classes).expand(count, -1) * size + text + 5
    prompts = Prompts(
        tokens=torch.cat([shown, asked], 1),
        roles=roles,
        target=torch.full((count,), classes * size + query - 1),
        label_pos=label,
        cue_pos=label - 1,
        demo_class=torch.arange(classes).expand(count, -1),
        gold=torch.zeros(count, dtype=torch.long),
        label_words=shown.gather(1, label),
    )
    prompts.check()
    return prompts


def main():
    """Time every shape, one query at a time and in batches."""
    given = options(__doc__, queries=(8, "on the same demonstrations"), repeats=(3, "turns"))
    model = gpt2_small()
    for name, (classes, text, query) in SHAPES.items():
        prompts = random_prompts(given.queries, classes, text, query)
        whole = target_logits(model, prompts)
        held = cache_demonstrations(model, prompts[:1], everything(prompts[:1]))
        again = answer_from_cache(model, held, prompts)
        gap = (whole - again).abs().max().item()
        same = bool((whole.argmax(-1) == again.argmax(-1)).all())
        if not same or gap > TOLERANCE:
            raise SystemExit(f"{name}: predictions differ, or logits by {gap:.1e}")
        print(f"{name} (same predictions, logits within {gap:.0e})")
        counted = costs(model, prompts, hidden_anchor(prompts))
        alone = seconds(model, prompts, batch=1, repeats=given.repeats)
        batched = seconds(model, prompts, batch=given.queries, repeats=given.repeats)
        baseline = alone["re-encoded"]
        for way, cost in counted.items():
            adds = counted["re-encoded"].multiply_adds / cost.multiply_adds
            print(
                f"  {way:10}  fed {cost.fed:3.0f}  remembered {cost.memory:3.0f}  "
                f"multiply-adds {cost.multiply_adds / 1e9:5.2f} G, {adds:4.1f} times fewer;  "
                f"one at a time {alone[way] * 1e3:6.1f} ms, {baseline / alone[way]:4.1f} times "
                f"faster;  all {given.queries} at once {batched[way] * 1e3:6.1f} ms, "
                f"{baseline / batched[way]:4.1f} times faster"
            )


if __name__ == "__main__":
    main()
