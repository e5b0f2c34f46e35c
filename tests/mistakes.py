"""Typical mistakes in exercises: code in place of the stub, and a part of what the test says."""

MISTAKES = {
    "01-ex-even": ("even_score = lambda: (1 + 1 / 2 + 1 / 3) / 3", "Leave out row 0"),
    "01-ex-entries": ("known_entries = lambda tokens: [3, 4, 5]", "Entry 3 asks what follows r_3"),
    "02-ex-rows": ("cut_rows = lambda: [[0.0, 0.0, 0.0, 0.4]] * 2", "is divided by its sum"),
    "02-ex-edges": (
        """def edge_counts(label_positions, target):
    into = sum(label_positions)
    return [into, len(label_positions), target**2 - into]""",
        "is not the number of the others",
    ),
    "03-ex-penalty": (
        "posterior_mean = lambda x, y, noise, prior: x * y / (x**2 + noise**2)",
        "with the penalty sigma² / tau²",
    ),
    "03-ex-own": (
        """mine = lambda xs, ys: ys.mean(1, keepdim=True).expand_as(ys)

def leaks(learner):
    changed = learner(xs[:4], ys[:4] + 1) - learner(xs[:4], ys[:4])
    return changed.abs().max().item()""",
        "Your learner sees the label it predicts.",
    ),
    "04-ex-stack": (
        """def with_layer_norm(plain):
    return lsa.LinearSelfAttention.from_layers(
        lsa.Shape(10, 10, layers=5), [plain.layer(number) for number in range(5)]
    )""",
        "Your network has no LayerNorm.",
    ),
    "05-ex-two": (
        "start_step_alone = lambda: (1.0, 15 / 4, 1.0)",
        "should add up to what the head says, 4.00, and not to 4.75.",
    ),
    "05-ex-gauss": (
        """def gaussian(queries, keys, values):
    return (-torch.cdist(queries, keys).square() / 2).softmax(-1) @ values""",
        "look at the scale of the exponent",
    ),
    "06-ex-sign": (
        """guessed_sign = lambda: 1

def measured_interaction():
    groups = [guide_pair.previous], [graph.Node("mlp", 0)]
    return mean_se(interactions.interactions(guide, task, groups)[1][0, 1].cpu())""",
        "and you guessed 1.",
    ),
    "06-ex-turn": (
        "turn = lambda layer, some: torch.eye(guide.cfg.d_head) * 2",
        "It is no rotation",
    ),
    "07-ex-chance": (
        "shared_by_chance = lambda: (8 * 7 / 18, 8 * 7 / 270)",
        "add up what each layer shares by chance",
    ),
    "07-ex-common": (
        """expected_share = lambda: 8 / (8 + 1)

def changes_of(prompts, draw):
    return torch.ones(64) + torch.randn(prompts, 64, generator=draw)""",
        "you expect 0.89",
    ),
}
