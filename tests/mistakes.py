"""Typical mistakes in exercises: code in place of the stub, and a part of what the test says."""

MISTAKES: dict[str, tuple[str, str]] = {
    "01-ex-even": (
        """
def even_score():
    return (1 + 1 / 2 + 1 / 3) / 3
""",
        "Leave out row 0",
    ),
    "01-ex-entries": (
        """
def known_entries(tokens):
    return [3, 4, 5]
""",
        "Entry 3 asks what follows r_3",
    ),
    "01-ex-score": (
        """
def near_copy(net, length=30):
    doubled = repeated_tokens(net, 32, length, book.generator("near copy"))
    _, stored = cached(net, doubled.tokens, lambda name: name.endswith("hook_pattern"))
    every = [stored["pattern", layer] for layer in range(net.cfg.n_layers)]
    return torch.stack([pattern.amax((0, 2, 3)) for pattern in every])
""",
        "An untrained model should stay below 0.1",
    ),
    "01-ex-none": (
        """
from iclutils.interp.hooks import ablate_heads, run_with_hooks

def gain_without(net, cut_heads):
    doubled = repeated_tokens(net, 64, L, book.generator("once"), distinct=True)
    hooks = ablate_heads(net, doubled.tokens, cut_heads, "mean", doubled.tokens)
    logits = [run_with_hooks(net, doubled.tokens, given)[0] for given in (hooks, [])]
    after, before = (readout.log_prob(x, doubled.tokens) for x in logits)
    return (after - before).mean(1)
""",
        "is there one copy only",
    ),
    "02-ex-rows": (
        """
def cut_rows():
    return [0.0, 0.0, 0.0, 0.4], [0.0, 0.0, 0.0, 0.4]
""",
        "is divided by its sum",
    ),
    "02-ex-edges": (
        """
def edge_counts(label_positions, target):
    into = sum(label_positions)
    return [into, len(label_positions), target**2 - into]
""",
        "is not the number of the others",
    ),
    "02-ex-shots": (
        """
def kept_without(net, p, further, number):
    at, layers = p.label_pos, range(sizes.layers)
    changed = isolation.isolated(net, p, layers, [at for _ in layers])
    return label_loyalty(changed, answers(net, p)).float().mean().item()
""",
        "With one of four isolated",
    ),
    "03-ex-zero": (
        """
def distance_to_zero(n, dim):
    return 1 - (n / dim).clamp(max=1)
""",
        "With no pairs least squares answers 0 as well.",
    ),
    "03-ex-penalty": (
        """
def posterior_mean(x, y, noise, prior):
    return x * y / (x**2 + noise**2)
""",
        "with the penalty sigma² / tau²",
    ),
    "03-ex-own": (
        """
def mine(xs, ys):
    return ys.mean(1, keepdim=True).expand_as(ys)

def leaks(learner):
    changed = learner(xs[:4], ys[:4] + 1) - learner(xs[:4], ys[:4])
    return changed.abs().max().item()
""",
        "Your learner sees the label it predicts.",
    ),
    "04-ex-scale": (
        """
def factor_of_out():
    return 3
""",
        "The answers are now 9.00 times what they were.",
    ),
    "04-ex-one": (
        """
def exact_rate(x1, y1):
    return 1 / x1**2

def at_twice_the_rate(x1, y1):
    return [2 * k * y1 for k in range(5)]
""",
        "What is left of the label after the first?",
    ),
    "04-ex-longer": (
        """
def losses_at(n):
    drawn = isotropic.sample(2000, n + 1, book.generator("longer", n))
    rates = descent.best_step(d, n, 1 / 12, 1 / 80).rate, best.rate
    tried = [book.lsa("lsa-1"), *(descent.predictor([rate]) for rate in rates)]
    return [loss(p, drawn.xs, drawn.ys).mean().item() for p in tried]
""",
        "They should be equal.",
    ),
    "04-ex-stack": (
        """
def with_layer_norm(plain):
    return lsa.LinearSelfAttention.from_layers(
        lsa.Shape(10, 10, layers=5), [plain.layer(number) for number in range(5)]
    )
""",
        "Your network has no LayerNorm.",
    ),
    "05-ex-two": (
        """
def start_step_alone():
    return 1.0, 15 / 4, 1.0
""",
        "should add up to what the head says, 4.00, and not to 4.75.",
    ),
    "05-ex-gauss": (
        """
def gaussian(queries, keys, values):
    return (-torch.cdist(queries, keys).square() / 2).softmax(-1) @ values
""",
        "look at the scale of the exponent",
    ),
    "05-ex-untrained": (
        """
def without_training():
    query, shown, answer, choices = copying_prompts(book.load("induction-3"))
    hits = ablation.predict(query, answer, choices).is_correct
    return 1e-6, 1e-6, hits.float().mean().item()
""",
        "is this step 0?",
    ),
    "06-ex-sign": (
        """
def guessed_sign():
    return 1

def measured_interaction():
    groups = [found.previous], [graph.Node("mlp", 0)]
    return mean_se(interactions.interactions(guide, task, groups)[1][0, 1].cpu())
""",
        "and you guessed 1.",
    ),
    "06-ex-corruption": (
        """
def strongest_edge(some):
    first = task[slice(0, 16)]  # not what is asked about
    told, misled = clean_corrupt.baselines(guide, first)
    each = patching.path_patching(guide, first).mean(-1).cpu()
    share = each.max() / (told - misled).mean().cpu()
    return circuit.rank_edges(each, structure)[0], share.item()
""",
        "should pass it",
    ),
    "06-ex-turn": (
        """
def turn(layer, some):
    return torch.eye(guide.cfg.d_head) * 2
""",
        "It is no rotation",
    ),
    "06-ex-weak": (
        """
def onsets(kind, strengths):
    seen = [flagged(kind, strength=s) for s in strengths]
    rows = [f.kinds[:, place[kind]] for f in seen], [f.wrong for f in seen]
    return [next(s for s, x in zip(strengths, row) if x.any()) for row in rows]
""",
        "should be flagged before",
    ),
    "07-ex-chance": (
        """
def shared_by_chance():
    return 8 * 7 / 18, 8 * 7 / 270
""",
        "add up what each layer shares by chance",
    ),
    "07-ex-common": (
        """
def expected_share():
    return 8 / (8 + 1)

def changes_of(prompts, draw):
    return torch.ones(64) + torch.randn(prompts, 64, generator=draw)
""",
        "you expect 0.89",
    ),
    "07-ex-own": (
        """
def shows_the_answer(here):
    return here.shows == here.shows[:, :1]
""",
        "is it the right",
    ),
    "07-ex-blank": (
        """
def share_and_gap(net, here):
    m = marks.measure(net, here, sizes.layer, steps=1)
    return (m.dual.sum((1, 2)) / m.clean).mean().item(), m.clean.mean().item()
""",
        "The gap is the margin clean less corrupt",
    ),
}
