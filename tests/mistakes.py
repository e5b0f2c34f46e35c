"""Typical mistakes in exercises: code in place of the stub, and a part of what the test says."""

MISTAKES = {
    "01-ex-even": ("even_score = lambda: (1 + 1 / 2 + 1 / 3) / 3", "Leave out row 0"),
    "02-ex-edges": (
        """def edge_counts(label_positions, target):
    into = sum(label_positions)
    return [into, len(label_positions), target**2 - into]""",
        "is not the number of rest",
    ),
    "03-ex-pair": (
        "ridge_slope = lambda x, y, penalty: y / (x + penalty)",
        "0.29, not 0.67.",
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
        "They should add up to 4, not 4.75.",
    ),
    "06-ex-turn": (
        "turn = lambda layer, some: torch.eye(guide.cfg.d_head) * 2",
        "It is no rotation",
    ),
    "07-ex-chance": (
        "shared_by_chance = lambda: (56 / 270, 56 / 270)",
        "Add up what each shares",
    ),
}
