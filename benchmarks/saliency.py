"""What saliency costs, in plain forward passes, and against the placeholder-gradient method.

On the shape of GPT-2 small with random weights, for a batch of prompts of different lengths:

- **forward**: the saliency of the batch against one plain forward pass of the same batch through
  the same model, without gradients; and, beside it, against a forward pass that, like the
  saliency, reads out the targets only;
- **placeholder**: against the method of the paper's code, with parameter gradients on: every
  attention pattern is multiplied by a tensor of ones that requires a gradient, one prompt at a
  time, and the gradient of the ones is read after ``backward``.

All run interleaved in one process, after burn-in; medians over the repeats. The saliencies
of both methods must agree or the benchmark stops.

    python benchmarks/saliency.py               # a few minutes on 2 cores
"""

import statistics
from functools import partial

import torch
from common import gpt2_small, in_turns, options
from torch.nn import functional

from iclutils.chapters.label_anchors.saliency import saliency
from iclutils.interp.readout import target_logits
from iclutils.models import get_act_name
from iclutils.tasks.prompts import Prompts, Role, class_logits

CLASSES = 4
TOLERANCE = 1e-4  # of the largest saliency of a layer: float32, different order of sums


def random_batch(count, shortest, longest, vocab):
    """Prompts of random tokens with one demonstration per class; only the positions matter."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest, longest, count).round().long()
    tokens = torch.randint(0, vocab, (count, longest), generator=generator)
    place = torch.arange(longest)
    step = (lengths - 1) // (CLASSES + 1)
    label_pos = step[:, None] * torch.arange(1, CLASSES + 1)
    words = torch.arange(CLASSES).expand(count, CLASSES)
    tokens.scatter_(1, label_pos, words)
    prompts = Prompts(
        tokens=tokens,
        roles=torch.where(place < lengths[:, None], int(Role.TEXT), int(Role.PAD)),
        target=lengths - 1,
        label_pos=label_pos,
        cue_pos=label_pos - 1,
        demo_class=words,
        gold=torch.randint(0, CLASSES, (count,), generator=generator),
        label_words=words,
    )
    prompts.check()
    return prompts


def placeholder(model, prompts):
    """The paper's method: ones that require a gradient, parameter gradients on, batch size 1."""
    size = prompts.tokens.shape[1]
    out = torch.zeros(len(prompts), model.cfg.n_layers, size, size)
    model.requires_grad_(True)
    for row in range(len(prompts)):
        one = prompts[row : row + 1]
        ones = []

        def multiply(pattern, hook, ones=ones):
            ones.append(torch.ones_like(pattern, requires_grad=True))
            return pattern * ones[-1]

        hooks = [(get_act_name("pattern", la), multiply) for la in range(model.cfg.n_layers)]
        scores = model.run_with_hooks(one.tokens, fwd_hooks=hooks)[:, int(one.target[0])]
        functional.cross_entropy(class_logits(one, scores), one.gold).backward()
        width = one.tokens.shape[1]
        for layer, factor in enumerate(ones):
            out[row, layer, :width, :width] = factor.grad[0].sum(0).abs()
        model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return out


def plain(model, prompts):
    """One forward pass, nothing else."""
    with torch.no_grad():
        return model(prompts.tokens)


def main():
    """Time the three ways and print their ratios."""
    given = options(
        __doc__,
        count=(8, "prompts in the batch"),
        shortest=(64, "tokens of the shortest prompt"),
        longest=(128, "tokens of the longest"),
        repeats=(5, "turns"),
    )
    model = gpt2_small()
    prompts = random_batch(given.count, given.shortest, given.longest, model.cfg.d_vocab)
    ways = {
        "forward": plain,
        "forward, targets only": target_logits,
        "saliency": saliency,
        "placeholder": placeholder,
    }
    first = {name: way(model, prompts) for name, way in ways.items()}  # burn-in
    ours, theirs = first["saliency"], first["placeholder"]
    gap = ((ours - theirs).abs().amax((-2, -1)) / theirs.amax((-2, -1))).max().item()
    if gap > TOLERANCE:
        raise SystemExit(f"the two saliencies differ by {gap:.1e} of the largest: {TOLERANCE}")
    calls = {name: partial(way, model, prompts) for name, way in ways.items()}
    seconds = in_turns(calls, given.repeats)
    each = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        spread = f"{min(values):.2f}..{max(values):.2f}"
        print(f"{name}: {each[name]:.2f} s for {len(prompts)} prompts ({spread})")
    print(
        f"saliency costs {each['saliency'] / each['forward']:.2f} plain forward passes, "
        f"{each['saliency'] / each['forward, targets only']:.2f} that read out targets only; it is "
        f"{each['placeholder'] / each['saliency']:.1f} times faster than the placeholder method; "
        f"largest difference {gap:.0e} of the layer's largest saliency"
    )


if __name__ == "__main__":
    main()
