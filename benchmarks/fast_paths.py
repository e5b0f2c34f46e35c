"""How much each fast path saves beside the plain way to the same numbers.

Both ways run in one process on the same inputs, in turns. If their results differ, the benchmark
stops. A ratio is that of processor seconds, so that a busy machine does not matter.

    python benchmarks/fast_paths.py            # some minutes on one core
    python benchmarks/fast_paths.py prefixes heads
"""

import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from sklearn.linear_model import Ridge
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from iclutils.chapters.label_anchors.saliency import saliency
from iclutils.chapters.ridge_ols.algorithms import ridge
from iclutils.interp import patching, removal
from iclutils.interp.clean_corrupt import CleanCorrupt
from iclutils.interp.graph import all_heads
from iclutils.interp.hooks import head_masks, logits_at, put_heads, run_with_hooks
from iclutils.interp.readout import log_prob
from iclutils.models import get_act_name, load, logits
from iclutils.tasks import topics
from iclutils.tasks.prompts import class_logits
from iclutils.tasks.repeated import repeated_tokens

TURNS = 3


def compare(name, fast, plain, tolerance, share=1.0):
    """Time both in turns and print the ratio; ``share`` is the part of the work that ``plain``
    does. The gap is relative to the largest value of the plain way."""
    quick, slow = [], []
    ours, theirs = fast(), plain()  # not counted: caches fill
    for _ in range(TURNS):
        for way, seconds in ((fast, quick), (plain, slow)):
            start = time.process_time()
            way()
            seconds.append(time.process_time() - start)
    gap = float((ours[: len(theirs)] - theirs).abs().max() / theirs.abs().max())
    if not gap <= tolerance:
        raise SystemExit(f"{name}: the two ways differ by {gap:.1e} of the largest value")
    ratio = statistics.median(slow) / share / statistics.median(quick)
    print(f"{name:<40} {ratio:7.1f} times faster; {gap:.0e} apart", flush=True)


def prefixes():
    """Time ridge at every prefix of 1024 contexts, and scikit-learn's fit for each prefix of 16."""
    draw = torch.Generator().manual_seed(0)
    xs = torch.randn(1024, 40, 8, generator=draw, dtype=torch.float64)
    ys = torch.randn(1024, 40, generator=draw, dtype=torch.float64)

    def fits():
        answers = np.zeros((16, 40))
        for row, (x, y) in enumerate(zip(xs[:16].numpy(), ys[:16].numpy(), strict=True)):
            for n in range(1, 40):
                fit = Ridge(alpha=0.1, fit_intercept=False).fit(x[:n], y[:n])
                answers[row, n] = fit.predict(x[n][None])[0]
        return torch.from_numpy(answers)

    compare("ridge at every prefix", lambda: ridge(xs, ys, 0.1), fits, 1e-8, 16 / 1024)


def six_layers():
    """Load a random GPT-2 of six layers."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config(n_layer=6)).save_pretrained(folder)
        return load(folder)


def heads():
    """Set each head of a GPT-2 to zero: in a pass that begins at its layer, and in a whole pass."""
    model = six_layers()
    tokens = repeated_tokens(model, 1, 30, torch.Generator().manual_seed(0)).tokens
    entries = torch.arange(31, 60)
    task = CleanCorrupt(tokens, tokens, entries[None], tokens[:, entries + 1])

    def hooked():
        without, whole = [], log_prob(logits(model, tokens), tokens)[0, entries].mean()
        for node in all_heads(model):

            def drop(z, hook, head=node.head):
                return z.index_fill(2, torch.tensor([head]), 0.0)

            scores, _ = run_with_hooks(model, tokens, [(get_act_name("z", node.layer), drop)])
            without.append(log_prob(scores, tokens)[0, entries].mean())
        return whole - torch.stack(without)

    def swept():
        return patching.ablate(model, task, [[node] for node in all_heads(model)], "zero")[:, 0]

    compare("each head removed", swept, hooked, 1e-5)


def sets_of_heads():
    """Remove sets of heads of a GPT-2 and controls for each prompt, all together, and in a pass of
    their own."""
    model, draw = six_layers(), torch.Generator().manual_seed(0)
    tokens = torch.randint(50_000, (24, 20), generator=draw)
    at, answer = torch.full((24, 1), 19), torch.randint(50_000, (24, 2), generator=draw)
    task = CleanCorrupt(tokens, tokens, at, answer[:, :1], choices=answer)
    sets = [[(layer, head) for head in range(4)] for layer in range(2, 6)]
    sets += [removal.controls_by_row(each, 12, 24, draw) for each in sets]
    mean = removal.mean_over([removal.head_means(model, tokens[:4])], "four prompts")

    def alone():
        masks = [head_masks(model, heads, 24) for heads in sets]
        hooks = [put_heads(each, mean.by_layer) for each in masks]
        logits = [logits_at(model, tokens, at, each)[:, 0] for each in hooks]
        return torch.stack([removal.outcome(task, each).margin for each in logits])

    def together():
        return removal.without(model, task, sets, mean).margin

    compare("sets of heads removed", together, alone, 1e-4)


def label_words():
    """Time saliency of a batch, and the paper's way: ones that require a gradient, with the
    gradients of all parameters, one prompt at a time."""
    model, prompts = load("anchors-3"), topics.sample(16, torch.Generator().manual_seed(0))

    names = [get_act_name("pattern", layer) for layer in range(model.cfg.n_layers)]

    def placeholder():
        rows = []
        model.requires_grad_(True)
        for row in range(len(prompts)):
            one, ones = prompts[row : row + 1], []

            def multiply(pattern, hook, ones=ones):
                ones.append(torch.ones_like(pattern, requires_grad=True))
                return pattern * ones[-1]

            hooks = [(name, multiply) for name in names]
            scores = model.run_with_hooks(one.tokens, fwd_hooks=hooks)[:, int(one.target[0])]
            functional.cross_entropy(class_logits(one, scores), one.gold).backward()
            found = torch.stack([factor.grad[0].sum(0).abs() for factor in ones])
            missing = prompts.tokens.shape[1] - found.shape[-1]  # padding, which a row leaves out
            rows.append(functional.pad(found, (0, missing, 0, missing)))
            model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
        return torch.stack(rows)

    compare("saliency of label words", lambda: saliency(model, prompts), placeholder, 1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = {each.__name__: each for each in (prefixes, heads, sets_of_heads, label_words)}
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        sys.exit(f"{__doc__}\nThere is no benchmark {unknown[0]!r}, only {', '.join(known)}.")
    for name in sys.argv[1:] or known:
        known[name]()
