"""How much faster the sweeps are than the straightforward loop, on a GPT-2-small shape.

Both ways run in one process on the same random weights and tokens; their results must agree to
1e-5 nats or the benchmark stops. Next to the measured ratio stands the bound: the multiply-adds
of the loop divided by those that no exact method can avoid. The naive loop is what the seed note
does, one hooked full forward pass per patch; ``--every`` times only every n-th of its patches
(interleaved with nothing else) and scales up, while the fast way is always timed whole. Times are
CPU seconds of all threads, so that a busy machine does not matter.

    python benchmarks/sweeps.py                 # a few minutes on 2 cores
    python benchmarks/sweeps.py --every 10      # quicker, still checks the sampled patches
"""

import statistics
from functools import partial

import torch
from common import gpt2_small, options, timed
from tqdm.auto import tqdm

from iclutils.interp import patching
from iclutils.interp.hooks import run_with_hooks
from iclutils.interp.readout import log_prob
from iclutils.models import cached, get_act_name
from iclutils.tasks.repeated import repeated_tokens

LENGTH = 50
TOLERANCE = 1e-5


def loop(model, tokens, hooks, entries):
    """Log p at ``entries`` and seconds for one hooked full forward pass per hook."""

    def patched(hook):
        scores, _ = run_with_hooks(model, tokens, [hook])
        return log_prob(scores, tokens)[0, entries]

    found = [timed(partial(patched, hook)) for hook in tqdm(hooks, desc="naive loop")]
    return [value for value, _ in found], [taken for _, taken in found]


def position_hooks(model, tokens):
    """The seed note's patch at every layer and position, in the sweep's order."""
    names = [get_act_name("mlp_out", layer) for layer in range(model.cfg.n_layers)]
    _, cache = cached(model, tokens, names)

    def patch(name, p):
        def replace(value, hook):
            value = value.clone()
            value[:, p] = cache[name][:, p - LENGTH]
            return value

        return name, replace

    return [patch(name, p) for name in names for p in range(LENGTH, 2 * LENGTH)]


def head_hooks(model):
    """Zero ablation of every head."""

    def drop(layer, head):
        def replace(z, hook):
            z = z.clone()
            z[:, :, head] = 0
            return z

        return get_act_name("z", layer), replace

    heads = range(model.cfg.n_heads)
    return [drop(layer, head) for layer in range(model.cfg.n_layers) for head in heads]


def bound(model, sweep):
    """Multiply-adds of the loop over those that must be redone (matrix products with weights).

    Per position a block costs 4 d^2 + 2 d d_mlp and the unembedding d V. A patch at (layer,
    position) leaves the later positions of the later layers, and the scored predictions.
    """
    cfg = model.cfg
    size = 2 * LENGTH + 1
    block = 4 * cfg.d_model**2 + 2 * cfg.d_model * cfg.d_mlp
    readout = cfg.d_model * cfg.d_vocab
    patches = cfg.n_layers * (LENGTH if sweep == "positions" else cfg.n_heads)
    naive = patches * size * (cfg.n_layers * block + readout)
    needed = 0
    for layer in range(cfg.n_layers):
        later = cfg.n_layers - 1 - layer
        if sweep == "positions":
            for p in range(LENGTH, 2 * LENGTH):
                needed += (2 * LENGTH - p) * later * block
                needed += (2 * LENGTH - p if later else 1) * readout
        else:
            mlp = 2 * cfg.d_model * cfg.d_mlp
            whole, scored = 2 * LENGTH, LENGTH - 1
            rows = whole if later else scored
            inner = max(later - 1, 0) * whole * block
            last = (2 * cfg.d_model**2 * whole + (block - 2 * cfg.d_model**2) * scored) * bool(
                later
            )
            needed += cfg.n_heads * (rows * mlp + inner + last + scored * readout)
    return naive / needed


def compare(name, fast, model, tokens, hooks, entries, every, repeats):
    """Run both ways, check that they agree, print the ratio and the bound."""
    changes = fast().flatten(0, 1)  # burn-in
    seconds = [timed(fast)[1] for _ in range(repeats)]
    clean, _ = run_with_hooks(model, tokens, [])
    base = log_prob(clean, tokens)[0, entries]
    loop(model, tokens, hooks[:3], entries)  # burn-in
    values, each = loop(model, tokens, hooks[::every], entries)
    gap = (torch.stack(values) - base - changes[::every]).abs().max().item()
    if gap > TOLERANCE:
        raise SystemExit(f"{name}: the two ways differ by {gap:.1e} nats, more than {TOLERANCE}")
    naive, quick = statistics.mean(each) * len(hooks), statistics.median(seconds)
    print(
        f"{name}: loop {naive:.1f} CPU s ({len(values)} of {len(hooks)} patches timed), "
        f"sweep {quick:.1f} s (median of {repeats}, {min(seconds):.1f}..{max(seconds):.1f}): "
        f"{naive / quick:.1f} times faster; bound by multiply-adds {bound(model, name):.1f}; "
        f"largest difference {gap:.0e} nats"
    )


def main():
    """Run both comparisons."""
    given = options(
        __doc__,
        every=(1, "time every n-th patch of the loop"),
        repeats=(3, "repetitions of the fast way"),
    )
    model = gpt2_small()
    task = repeated_tokens(model, 1, LENGTH, torch.Generator().manual_seed(0))
    note = torch.arange(LENGTH, 2 * LENGTH)
    clean = torch.arange(LENGTH + 1, 2 * LENGTH)
    common = {"model": model, "tokens": task.tokens, "every": given.every, "repeats": given.repeats}
    compare(
        "positions",
        lambda: patching.mlp_position_sweep(model, task.tokens, note, note - LENGTH, note),
        hooks=position_hooks(model, task.tokens),
        entries=note,
        **common,
    )
    compare(
        "heads",
        lambda: patching.head_ablation_sweep(model, task.tokens, clean),
        hooks=head_hooks(model),
        entries=clean,
        **common,
    )


if __name__ == "__main__":
    main()
